"""Attach SGLang: its hierarchical cache keeps pages in a kvtier tier of host memory and NVMe (design: two ways to attach).

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "kvtier", "module_path": "kvtier.tiering.attach.sglang",
        "class_name": "TieredHiCache", "interface_v1": 1, "secondary": "64GiB", "nvme": "500GiB", "nvme_directory": "/mnt/nvme/kv",
        "model": "name@revision:digest"}'

docs/attach/sglang.md has the rest. Each scheduler process of SGLang (one for each tensor-parallel rank) makes a :class:`TieredHiCache` with
a store of its own, because ranks write and fetch their parts at times of their own; SGLang takes the shortest answer of all ranks.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch

from kvtier.errors import ConfigError, KVTierError
from kvtier.io.rank_directories import prepare_rank_directory
from kvtier.pools.page_layout import PageGroup, PageLayout
from kvtier.pools.rate import parse_rate
from kvtier.pools.sizing import SizeKind, parse_sizes
from kvtier.tiering.attach.engine_settings import identity, read_settings
from kvtier.tiering.attach.sglang_interface import STORAGE_MODULE, base_class, check_base
from kvtier.tiering.attach.sglang_pages import HostPages, as_bytes
from kvtier.tiering.config import TierConfig
from kvtier.tiering.tier_store import TierStore

_log = logging.getLogger(__name__)
_numbers = itertools.count()
Answer = TypeVar("Answer")

ORIGIN: Final = "hicache-storage-backend-extra-config"
SGLANG_KEYS: Final = ("backend_name", "module_path", "class_name", "interface_v1", "prefetch_threshold", "prefetch_timeout_base",
                      "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys", "tp_lcm_size")
"""What SGLang reads itself, as far as it leaves it in."""
KV_POOL: Final = "kv"

HiCacheStorage: Any = base_class()


class TieredHiCache(HiCacheStorage):
    """SGLang's storage interface over a ``TierStore``.

    Args:
        storage_config: SGLang's ``HiCacheStorageConfig``.
        kwargs: whatever else SGLang's factory passes; not used.

    Raises:
        ConfigError: a misspelt or unusable setting, or an arrangement of ranks that is not supported. Once the pool is registered nothing
            but :meth:`clear` raises any more: what fails is a miss.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        self._settings = read_settings(storage_config.extra_config or {}, ORIGIN, SGLANG_KEYS)
        self._config = storage_config
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            raise ConfigError(f"is_mla_model with tp_size={storage_config.tp_size}: SGLang writes the pages of such a model on one rank, "
                              "and the others would find nothing; run it with --enable-dp-attention and as many data-parallel as "
                              "tensor-parallel ranks, or without this backend")
        if getattr(storage_config, "dcp_size", 1) > 1 or getattr(storage_config, "should_split_heads", False):
            raise ConfigError("decode context parallel, or heads split by tp_lcm_size: not supported by this backend; leave them out")
        if not (storage_config.extra_config or {}).get("interface_v1"):
            _log.warning('%s: without "interface_v1": 1 SGLang copies each page once more on its way', ORIGIN)
        self._model = identity(self._settings, storage_config.model_name, ORIGIN)
        self._pages: HostPages | None = None
        self._store: TierStore | None = None
        self._extra_pools: list[str] = []
        self._said: set[str] = set()
        self._said_lock = threading.Lock()

    # -- pools -----------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang's host pool: the store is opened for pages like its own.

        Raises:
            ConfigError: a pool that is not supported; too little host memory or shared memory; a folder that is in use, or was made by
                another model, layout, page size or number of ranks.
        """
        super().register_mem_pool_host(mem_pool_host)
        pages = HostPages(mem_pool_host)
        if self._store is not None:
            self._store.close()
            self._store = None
        tier = self._tier()
        layout = PageLayout([PageGroup(pages.page_bytes, name=KV_POOL)])
        store = TierStore(layout, tier, model=self._model, engine_id=f"sglang-{os.getpid()}-{next(_numbers)}",
                          fingerprint=self._fingerprint(pages, mem_pool_host), read_timeout=self._settings.lookup_timeout)
        # In this order: whoever has the new store must not have the old pool's pages.
        self._pages = pages
        self._store = store
        way = "by the pool's own methods" if pages.pieces is None else f"in place, in {len(pages.pieces)} pieces"
        _log.info("kvtier: rank %d of %d keeps pages of %d tokens, %d bytes: %d in host memory, nvme=%s in %s; pages are copied %s",
                  self._rank, self._num_ranks, pages.page_size, pages.page_bytes, store.index.plan.host_slots[0], tier.nvme,
                  tier.nvme_directory, way)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Further pools of hybrid models: see :meth:`on_host_pools_registered`."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != KV_POOL:
            self._extra_pools.append(str(host_pool_name))

    def on_host_pools_registered(self) -> None:
        """Raise ConfigError, which fails the attachment, where a model has pools beside its keys and values: SGLang would fetch these
        without the others' bytes."""
        if self._extra_pools:
            raise ConfigError(f"host pools {', '.join(self._extra_pools)}: hybrid models keep part of their cache in pools that this "
                              "backend does not store; run such a model without it")

    # -- the interface that pages travel by without a copy of SGLang's -----------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages from the first on are there, in host memory or on NVMe; what lies on NVMe begins to be read."""
        return self._guarded("exists", 0, lambda store, pages: store.count(_names(keys)))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Fill pages of the host pool; ``host_indices`` has one index for each token. True for those that are filled, all from the first
        on: their bytes have been verified."""
        def get(store: TierStore, pages: HostPages) -> list[bool]:
            rows = pages.rows(host_indices, len(keys))
            if rows is None:
                return self._refuse_indices(keys, pages)
            count = pages.fetch(rows, lambda tensors, places: store.read(_names(keys), tensors, places))
            return [position < count for position in range(len(keys))]
        return self._guarded("get", [False] * len(keys), get)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Keep pages of the host pool. True for those that the tier has now."""
        def put(store: TierStore, pages: HostPages) -> list[bool]:
            rows = pages.rows(host_indices, len(keys))
            if rows is None:
                return self._refuse_indices(keys, pages)
            stored = pages.put(rows, lambda tensors, places: store.write(_names(keys), tensors, places))
            if not all(stored):
                self._say(f"{stored.count(False)} of {len(keys)} pages were not stored: host memory is full, or smaller than one batch")
            return stored
        return self._guarded("set", [False] * len(keys), put)

    # -- the older interface: flat pages ---------------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """One page, into ``target_location`` (a contiguous host tensor of a page's size) or a new flat tensor; None if it is not there."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[torch.Tensor | None]:
        """Pages up to the first that is not there, as of :meth:`get`; None for the others."""
        def get(store: TierStore, pages: HostPages) -> list[torch.Tensor | None]:
            targets = [torch.empty(pages.page_bytes // pages.dtype.itemsize, dtype=pages.dtype) for _ in keys] \
                if target_locations is None else list(target_locations)
            found: list[torch.Tensor | None] = []
            for key, target in zip(keys, targets, strict=True):
                page = self._flat(target, pages)
                if page is None or not store.read(_names([key]), [page], [0]):
                    break
                found.append(target)
            return found + [None] * (len(keys) - len(found))
        return self._guarded("get", [None] * len(keys), get)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Keep one page: ``value``, or else ``target_location``, is a contiguous host tensor of a page's size."""
        return self.batch_set([key], [value if value is not None else target_location])

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """Keep pages, as of :meth:`set`; whether all of them are kept now."""
        def put(store: TierStore, pages: HostPages) -> bool:
            given = list(values if values is not None else target_locations or [])
            num_resets = store.num_resets
            flat = [self._flat(value, pages) for value in given]
            if len(given) != len(keys) or any(page is None for page in flat):
                return False
            for key, page in zip(keys, flat, strict=True):
                assert page is not None
                if not store.write(_names([key]), [page], [0], num_resets=num_resets)[0]:
                    return False
            return True
        return self._guarded("set", False, put)

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    # -- hybrid models: nothing is there -----------------------------------------------------------------------------------

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """No page: pools beside keys and values are not stored."""
        return importlib.import_module(STORAGE_MODULE).PoolTransferResult.empty()

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """No page."""
        return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """No page."""
        return self.batch_get_v2(transfers)

    # -- the whole -------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything, on NVMe too. SGLang answers the user with whether that went well, so here nothing is a miss.

        Raises:
            KVTierError: there is nothing to clear yet, or any more.
            TransferError: what lies on NVMe could not be forgotten, and may be found after a restart: clear again.
        """
        store = self._store
        if store is None:
            raise KVTierError("nothing was cleared: no pool is registered, so no store is open; what lies on NVMe is still there")
        store.reset()

    def get_stats(self) -> Any:
        """Nothing: SGLang wants its own record of bandwidths here. The tier's figures are ``statistics()``."""
        return None

    def statistics(self) -> Any:
        """The tier's ``TierStats``; None before the pool is registered or after :meth:`close`."""
        return self._guarded("statistics", None, lambda store, pages: store.index.stats())

    def close(self) -> None:
        """Write out what is only in host memory, as far as time allows, and let go of files and memory. May be called again."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    # -- inside ----------------------------------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        config = self._config
        stage = config.pp_rank * getattr(config, "attn_cp_size", 1) + getattr(config, "attn_cp_rank", 0)
        return int(stage * config.tp_size + config.tp_rank)

    @property
    def _num_ranks(self) -> int:
        return int(self._config.pp_size * getattr(self._config, "attn_cp_size", 1) * self._config.tp_size)

    def _tier(self) -> TierConfig:
        """This rank's part: sizes in bytes and rates divided by the ranks, a folder of its own below the one that was given. Free space is
        of the file system, which all ranks share: each leaves the whole of it."""
        tier = self._settings.tier
        changes: dict[str, Any] = {name: self._part(getattr(tier, name), name) for name in ("secondary", "nvme")}
        for name in ("nvme_write_bandwidth", "nvme_scrub_bandwidth"):
            if (rate := getattr(tier, name)) is not None:
                changes[name] = f"{max(int(parse_rate(rate, name)) // self._num_ranks, 1)}B/s"
        if tier.nvme_directory is not None:
            root = tier.nvme_directory / f"replica-{getattr(self._config, 'dp_rank', 0)}"
            root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            changes["nvme_directory"] = prepare_rank_directory(root, self._rank, self._num_ranks)
        return tier.model_copy(update=changes)

    def _part(self, given: Any, name: str) -> str:
        sizes = parse_sizes(given, name)
        if len(sizes) != 1:
            raise ConfigError(f"{name}={given!r} ({ORIGIN}): SGLang's pages are one group; give one size, not a list")
        if sizes[0].kind is SizeKind.BYTES:
            return f"{int(sizes[0].amount) // self._num_ranks}B"
        return sizes[0].text

    def _fingerprint(self, pages: HostPages, pool: Any) -> str:
        """What a page's bytes depend on and SGLang's hashes do not contain."""
        config = self._config
        return json.dumps({"engine": "sglang", "model_name": config.model_name, "page_size": pages.page_size, "dtype": str(pages.dtype),
                           # SGLang keeps every kind of 8-bit and 4-bit numbers as uint8; the device's pool knows which it is.
                           "kv_dtype": str(getattr(getattr(pool, "device_pool", None), "dtype", None)),
                           "layout": str(getattr(pool, "layout", "")), "format": str(getattr(pool, "storage_format_tag", None)),
                           "pool": type(pool).__name__, "layers": [getattr(pool, "start_layer", None), getattr(pool, "end_layer", None)],
                           "tp": [config.tp_rank, config.tp_size], "pp": [config.pp_rank, config.pp_size],
                           "cp": [getattr(config, "attn_cp_rank", 0), getattr(config, "attn_cp_size", 1)],
                           "is_mla": bool(config.is_mla_model)}, sort_keys=True)

    def _flat(self, page: Any, pages: HostPages) -> torch.Tensor | None:
        """A page given as a tensor, as ``[1, bytes]``; None where it is none of the pool's size."""
        if (isinstance(page, torch.Tensor) and page.device.type == "cpu" and page.is_contiguous()
                and page.numel() * page.element_size() == pages.page_bytes):
            return as_bytes(page).reshape(1, -1)
        self._say(f"a page given as {type(page).__name__} is not a contiguous host tensor of {pages.page_bytes} bytes; it is a miss")
        return None

    def _refuse_indices(self, keys: Sequence[str], pages: HostPages) -> list[bool]:
        self._say(f"host indices that do not name {len(keys)} whole pages of {pages.page_size} tokens; they are misses")
        return [False] * len(keys)

    def _guarded(self, name: str, otherwise: Answer, ask: Callable[[TierStore, HostPages], Answer]) -> Answer:
        """SGLang's threads must not see an exception: what fails is a miss."""
        store, pages = self._store, self._pages
        if store is None or pages is None:
            return otherwise
        try:
            return ask(store, pages)
        except Exception as error:
            self._say(f"{name}: {type(error).__name__}: {error}")
            return otherwise

    def _say(self, text: str) -> None:
        """Each text once, and no more than a hundred: the same trouble returns with every batch."""
        with self._said_lock:
            if text in self._said or len(self._said) >= 100:
                return
            self._said.add(text)
        _log.warning("kvtier: %s", text)


def _names(keys: Sequence[str]) -> list[bytes]:
    """Keys of the tier: SGLang's hash chains are text of any length."""
    return [hashlib.sha256(key.encode()).digest() for key in keys]


check_base(TieredHiCache, HiCacheStorage)
