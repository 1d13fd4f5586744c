"""SGLang's storage interface over a tier: compared with the interface as published, and driven as SGLang's cache controller drives it.

Where SGLang is installed, its abstract class is what the adapter is compared with, too.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.errors import ConfigError, KVTierError, TransferError
from kvtier.io.store_directory import StoreDirectory
from kvtier.tiering.attach.sglang import TieredHiCache
from kvtier.tiering.attach.sglang_interface import WithoutSGLang, check_base
from kvtier.tiering.attach.sglang_pages import HostPages
from kvtier.tiering.ledger.keyed_level import KeyedLevel

sys.path.append(str(Path(__file__).parent))
from sglang_double import ABSTRACT, PUBLISHED, VERSION, Controller, HostPool, StorageConfig

LAYOUTS = [("layer_first", False), ("page_first", False), ("page_first_direct", False), ("page_head", False),
           ("layer_first", True), ("page_first", True), ("page_first_direct", True)]


def chain(count: int, prompt: int = 0) -> list[str]:
    """Keys as SGLang makes them: a chain of SHA-256 in hex."""
    keys, last = [], f"prompt {prompt}"
    for _ in range(count):
        last = hashlib.sha256(last.encode()).hexdigest()
        keys.append(last)
    return keys


def nvme(folder: Path, **more: Any) -> dict[str, Any]:
    return {"nvme": "64 blocks", "nvme_directory": str(folder), "nvme_free_space_reserve": "1MiB", "model": "m@1:0"} | more


@pytest.fixture
def attach() -> Iterator[Callable[..., Controller]]:
    """Attaches backends to pools; at the end nothing is leased or under way, and every invariant stands."""
    attached: list[Controller] = []

    def attach(pool: HostPool | None = None, interface_v1: int = 1, secondary: str = "32 blocks", rank: int = 0, ranks: int = 1,
               is_mla: bool = False, **settings: Any) -> Controller:
        extra = {"backend_name": "kvtier", "module_path": "kvtier.tiering.attach.sglang", "class_name": "TieredHiCache",
                 "secondary": secondary} | settings | ({"interface_v1": 1} if interface_v1 else {})
        config = StorageConfig(extra, tp_rank=rank, tp_size=ranks, is_mla_model=is_mla)
        controller = Controller(TieredHiCache(config, {}), pool or HostPool(seed=1), config)
        attached.append(controller)
        return controller

    yield attach
    for controller in attached:
        store = controller.backend._store
        if store is not None:
            store.index.verify()
            stats = store.index.stats()
            assert (stats.leases, stats.jobs, stats.requests) == (0, 0, 0)
        controller.backend.close()
        controller.backend.close()


def same_pages(left: HostPool, lefts: list[int], right: HostPool, rights: list[int]) -> bool:
    return all(torch.equal(left.get_data_page(one * left.page_size), right.get_data_page(other * right.page_size))
               for one, other in zip(lefts, rights, strict=True))


# -- the interface as published ----------------------------------------------------------------------------------------------


def parameters(method: Any) -> tuple[str, ...]:
    found = list(inspect.signature(method).parameters.values())[1:]
    return tuple(parameter.name + ("=" if parameter.default is not parameter.empty else "") for parameter in found)


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_method_takes_what_sglang_passes(name: str) -> None:
    ours = getattr(TieredHiCache, name)
    assert parameters(ours) == PUBLISHED[name], f"of SGLang {VERSION}"


def test_every_abstract_method_is_ours() -> None:
    assert all(name in vars(TieredHiCache) for name in ABSTRACT)
    assert not getattr(TieredHiCache, "__abstractmethods__", ())


def test_another_interface_is_refused_with_the_method_named() -> None:
    class Newer(WithoutSGLang):
        def batch_exists(self, keys: list[str], tenant: str, extra_info: Any = None) -> int:
            return 0

    with pytest.raises(ConfigError, match=r"Newer\.batch_exists"):
        check_base(TieredHiCache, Newer)


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_the_installed_abstract_class_is_the_published_one() -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
    assert issubclass(TieredHiCache, HiCacheStorage)
    assert {name: parameters(getattr(HiCacheStorage, name)) for name in PUBLISHED} == PUBLISHED
    assert set(ABSTRACT) == HiCacheStorage.__abstractmethods__


# -- pages -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "is_mla"), LAYOUTS)
def test_the_pieces_of_a_page_in_their_order_are_the_flat_page(layout: str, is_mla: bool) -> None:
    pool = HostPool(layout, is_mla=is_mla, seed=3)
    pages = HostPages(pool)
    assert pages.pieces is not None
    for row in (0, 1, 17, 31):
        flat = torch.cat([piece[row] for piece in pages.pieces])
        assert torch.equal(flat, pool.get_data_page(row * pool.page_size).view(torch.uint8))


@pytest.mark.parametrize("is_v1", [1, 0])
@pytest.mark.parametrize(("layout", "is_mla"), LAYOUTS)
def test_pages_of_every_layout_come_back_byte_by_byte(attach: Callable[..., Controller], layout: str, is_mla: bool, is_v1: int) -> None:
    source = HostPool(layout, is_mla=is_mla, seed=1)
    controller = attach(source, interface_v1=is_v1)
    before = source.kv_buffer.clone()
    assert controller.backup(chain(6), [9, 2, 3, 4, 30, 0]) == 6
    assert controller.hits(chain(8)) == 6
    assert controller.fetch(chain(6), [20, 21, 22, 10, 12, 14]) == 6
    original = HostPool(layout, is_mla=is_mla)
    original.kv_buffer = before
    assert same_pages(source, [20, 21, 22, 10, 12, 14], original, [9, 2, 3, 4, 30, 0])
    assert same_pages(source, [1, 5, 31], original, [1, 5, 31]), "other pages are as they were"


@pytest.mark.parametrize("kind", ["moving", "no views"])
def test_pools_whose_pages_follow_no_rule_are_copied_by_their_own_methods(attach: Callable[..., Controller], kind: str) -> None:
    class Pool(HostPool):
        shared_allocation_domain = object() if kind == "moving" else None

        def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
            return super().get_data_page(index, flat).clone()

    pool = Pool(seed=5)
    controller = attach(pool)
    assert controller.backend._pages.pieces is None
    controller.backup(chain(3), [0, 1, 2])
    assert controller.fetch(chain(3), [7, 6, 5]) == 3
    assert same_pages(pool, [7, 6, 5], pool, [0, 1, 2])


def test_both_interfaces_see_the_same_bytes(attach: Callable[..., Controller]) -> None:
    controller = attach()
    controller.backup(chain(2), [0, 1])
    flat = controller.backend.get(chain(2)[1])
    assert torch.equal(flat, controller.pool.get_data_page(controller.pool.page_size))
    assert controller.backend.set("another", flat)
    assert controller.backend.exists("another")
    controller.backend.batch_get_v1(["another"], controller.pool.indices([8]))
    assert same_pages(controller.pool, [8], controller.pool, [1])


def test_more_pages_than_a_batch_and_than_host_memory_come_back_from_nvme(attach: Callable[..., Controller], tmp_path: Path) -> None:
    settings = nvme(tmp_path / "kv", nvme="400 blocks")
    source = HostPool(pages=300, seed=2)
    first = attach(source, secondary="320 blocks", **settings)
    assert first.backup(chain(300), list(range(300))) == 300
    first.backend.close()
    target = HostPool(pages=300)
    second = attach(target, secondary="40 blocks", **settings)
    assert second.hits(chain(300)) == 300
    assert second.fetch(chain(300), list(range(300))) == 300
    assert torch.equal(target.kv_buffer, source.kv_buffer)


# -- what is a miss ----------------------------------------------------------------------------------------------------------


def test_a_gap_ends_the_prefix_and_results_say_so_page_by_page(attach: Callable[..., Controller]) -> None:
    controller = attach()
    keys = chain(4)
    controller.backup([keys[0], keys[1], keys[3]], [0, 1, 3])
    assert controller.backend.batch_exists(keys) == 2
    assert controller.backend.batch_get_v1(keys, controller.pool.indices([8, 9, 10, 11])) == [True, True, False, False]
    assert [page is not None for page in controller.backend.batch_get(keys)] == [True, True, False, False]
    assert controller.backend.batch_exists([]) == 0


def test_a_flipped_bit_on_nvme_is_a_miss_and_what_was_filled_is_right(attach: Callable[..., Controller], tmp_path: Path) -> None:
    source = HostPool(seed=2)
    first = attach(source, **nvme(tmp_path / "kv"))
    first.backup(chain(8), list(range(8)))
    first.backend.close()
    target = HostPool()
    second = attach(target, faults="nvme.read.bit_flip*1", read_threads=1, **nvme(tmp_path / "kv"))
    found = second.fetch(chain(8), list(range(8)))
    assert found < 8
    assert same_pages(target, list(range(found)), source, list(range(found)))
    assert second.backend.statistics().checksum_failures == 1


def test_a_read_that_hangs_is_a_miss_after_lookup_timeout(attach: Callable[..., Controller], tmp_path: Path) -> None:
    first = attach(**nvme(tmp_path / "kv"))
    first.backup(chain(2), [0, 1])
    first.backend.close()
    second = attach(HostPool(), faults="nvme.read.hang:2s", lookup_timeout=0.2, **nvme(tmp_path / "kv"))
    assert second.fetch(chain(2), [0, 1]) == 0


def settle(controller: Controller) -> None:
    """Until nothing is under way any more, here and on the drive."""
    deadline = time.monotonic() + 30
    while controller.backend._store.index.has_work and time.monotonic() < deadline:
        time.sleep(0.002)


def test_a_full_drive_costs_misses_and_no_exception(attach: Callable[..., Controller], tmp_path: Path) -> None:
    controller = attach(secondary="8 blocks", faults="nvme.write.enospc", **nvme(tmp_path / "kv"))
    for prompt in range(4):
        controller.backup(chain(6, prompt), list(range(6)))
        settle(controller)  # host slots that are being written to the drive are busy: the next backup would find less room
    assert controller.fetch(chain(6, 3), list(range(10, 16))) == 6
    assert same_pages(controller.pool, list(range(10, 16)), controller.pool, list(range(6)))


def test_a_full_host_level_says_so_once_and_keeps_the_front(attach: Callable[..., Controller], caplog: pytest.LogCaptureFixture) -> None:
    controller = attach(secondary="4 blocks")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert controller.backend.batch_set_v1(chain(6), controller.pool.indices(list(range(6)))) == [True] * 4 + [False] * 2
    assert caplog.text.count("were not stored") == 1
    assert controller.hits(chain(6)) == 4


@pytest.mark.parametrize("indices", [torch.arange(8), torch.arange(2, 14), torch.arange(128, 140),
                                     torch.tensor([0, 1, 2, 3, 9, 8, 7, 6] + [4] * 4), torch.tensor([0, 1, 2, 3, 4, 9, 9, 7] + [8] * 4)])
def test_indices_that_name_no_whole_pages_are_misses(attach: Callable[..., Controller], indices: torch.Tensor) -> None:
    controller = attach()
    assert controller.backend.batch_set_v1(chain(3), indices) == [False] * 3
    assert controller.backend.batch_get_v1(chain(3), indices) == [False] * 3
    assert controller.hits(chain(3)) == 0


@pytest.mark.parametrize("page", [None, 17, torch.zeros(5), torch.zeros(192, dtype=torch.bfloat16)[::2], "text"])
def test_flat_pages_of_a_wrong_size_or_kind_are_misses(attach: Callable[..., Controller], page: Any) -> None:
    controller = attach()
    controller.backup(chain(1), [0])
    assert controller.backend.set("key", page) is False
    if page is not None:
        assert controller.backend.get(chain(1)[0], page) is None
        assert controller.backend.batch_set(chain(1), [page]) is False


def test_before_a_pool_is_registered_and_after_closing_everything_is_a_miss(attach: Callable[..., Controller]) -> None:
    backend = TieredHiCache(StorageConfig({"secondary": "8 blocks", "interface_v1": 1}))
    for _ in range(2):
        assert (backend.batch_exists(chain(1)), backend.exists("key"), backend.get("key")) == (0, False, None)
        assert backend.batch_set_v1(chain(1), torch.arange(4)) == [False]
        assert backend.batch_get_v1(chain(1), torch.arange(4)) == [False]
        assert backend.statistics() is None
        with pytest.raises(KVTierError, match="nothing was cleared"):
            backend.clear()
        backend.close()


def test_no_exception_reaches_sglang(attach: Callable[..., Controller], monkeypatch: pytest.MonkeyPatch) -> None:
    controller = attach()

    def broken(*arguments: Any, **others: Any) -> Any:
        raise RuntimeError("a bug of ours")

    for name in ("count", "read", "write"):
        monkeypatch.setattr(controller.backend._store, name, broken)
    assert controller.hits(chain(2)) == controller.fetch(chain(2), [0, 1]) == controller.backup(chain(2), [0, 1]) == 0
    assert controller.backend.get("key", torch.zeros(192, dtype=torch.bfloat16)) is None


def full_disk(*_given: Any) -> None:
    raise OSError(errno.ENOSPC, "no space left")


def cut_short(*_given: Any) -> None:
    raise KeyboardInterrupt


def test_a_clear_that_failed_says_so_and_is_made_good_by_the_next_one(attach: Callable[..., Controller], tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang catches what a backend's ``clear`` raises, and answers its user with it."""
    first = attach(**nvme(tmp_path / "kv"))
    first.backup(chain(4), [0, 1, 2, 3])
    settle(first)
    with monkeypatch.context() as patch:
        patch.setattr(StoreDirectory, "start_generation", full_disk)
        with pytest.raises(TransferError, match="could not be written down"):
            first.backend.clear()
    assert first.hits(chain(4)) == 0
    first.backend.clear()
    first.backend.close()
    assert attach(**nvme(tmp_path / "kv")).hits(chain(4)) == 0


@pytest.mark.parametrize("is_lasting", [False, True])
def test_a_clear_that_failed_or_was_cut_short_is_made_again_when_the_backend_is_closed(
        attach: Callable[..., Controller], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
        is_lasting: bool) -> None:
    first = attach(**nvme(tmp_path / "kv"))
    first.backup(chain(4), [0, 1, 2, 3])
    settle(first)
    with monkeypatch.context() as patch:
        patch.setattr(KeyedLevel, "forget", cut_short)
        with pytest.raises(KeyboardInterrupt):
            first.backend.clear()
    with monkeypatch.context() as patch:
        if is_lasting:
            patch.setattr(StoreDirectory, "start_generation", full_disk)
        first.backend.close()
    assert ("kvtier store clear" in caplog.text) == is_lasting
    again = attach(**nvme(tmp_path / "kv"))
    assert is_lasting or again.hits(chain(4)) == 0


def test_clear_forgets_what_is_on_nvme_too(attach: Callable[..., Controller], tmp_path: Path) -> None:
    first = attach(**nvme(tmp_path / "kv"))
    first.backup(chain(4), [0, 1, 2, 3])
    first.backend.clear()
    assert first.hits(chain(4)) == 0
    first.backend.close()
    assert attach(**nvme(tmp_path / "kv")).hits(chain(4)) == 0


def test_flat_pages_that_a_clear_overtakes_are_not_stored_behind_it(attach: Callable[..., Controller],
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    controller = attach(interface_v1=0)
    store, calls = controller.backend._store, []
    known = store.write

    def cleared_after_the_first(*given: Any, **more: Any) -> Any:
        answer = known(*given, **more)
        calls.append(answer)
        if len(calls) == 1:
            controller.backend.clear()
        return answer

    monkeypatch.setattr(store, "write", cleared_after_the_first)
    assert controller.backup(chain(4), [0, 1, 2, 3]) == 0
    assert [controller.backend.exists(name) for name in chain(4)] == [False] * 4


def test_a_new_pool_is_never_served_with_the_pages_of_the_one_before(attach: Callable[..., Controller],
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's threads may call while another pool is registered."""
    controller = attach()
    backend, second = controller.backend, HostPool(seed=2)
    seen: list[tuple[bool, bool]] = []
    known = TieredHiCache.__setattr__

    def look(self: Any, name: str, value: Any) -> None:
        known(self, name, value)
        if self is backend and self._store is not None:
            seen.append((self._store is first, self._pages is pages))

    first, pages = backend._store, backend._pages
    monkeypatch.setattr(TieredHiCache, "__setattr__", look)
    backend.register_mem_pool_host(second)
    assert seen
    assert all(is_first or not is_old for is_first, is_old in seen)


def test_pools_of_hybrid_models_fail_the_attachment(attach: Callable[..., Controller]) -> None:
    backend = attach().backend
    backend.register_mem_host_pool_v2(HostPool(), "mamba")
    with pytest.raises(ConfigError, match="mamba"):
        backend.on_host_pools_registered()
    transfer = SimpleNamespace(name="mamba", keys=["a", "b"])
    assert backend.batch_set_v2([transfer]) == backend.batch_get_v2([transfer]) == {"mamba": [False, False]}


# -- ranks and names ---------------------------------------------------------------------------------------------------------


def test_each_rank_has_its_own_bytes_under_the_same_keys(attach: Callable[..., Controller], tmp_path: Path) -> None:
    for life in range(2):
        pools = [HostPool(seed=10 + rank) for rank in range(2)]
        ranks = [attach(pool, rank=rank, ranks=2, **nvme(tmp_path / "kv")) for rank, pool in enumerate(pools)]
        if not life:
            assert [controller.backup(chain(3), [0, 1, 2]) for controller in ranks] == [3, 3]
        assert min(controller.hits(chain(3)) for controller in ranks) == 3
        for controller in ranks:
            assert controller.fetch(chain(3), [8, 9, 10]) == 3
            assert same_pages(controller.pool, [8, 9, 10], controller.pool, [0, 1, 2])
            controller.backend.close()


def test_sizes_in_bytes_are_of_all_ranks_together(attach: Callable[..., Controller]) -> None:
    one = attach(secondary="1MiB").backend._store.index.plan.host_slots[0]
    two = attach(secondary="1MiB", rank=1, ranks=2).backend._store.index.plan.host_slots[0]
    assert one == 2 * two


def test_rates_are_of_all_ranks_together_and_free_space_is_of_the_file_system(attach: Callable[..., Controller], tmp_path: Path) -> None:
    rates = {"nvme_write_bandwidth": "8MiB/s", "nvme_scrub_bandwidth": "1MiB/s", "nvme_free_space_reserve": "3MiB"}
    configs = [attach(rank=rank, ranks=4, **nvme(tmp_path / "kv", **rates)).backend._store.index.config for rank in range(4)]
    assert sum(config.nvme_write_bytes_per_second for config in configs) == 8 << 20
    assert sum(config.nvme_scrub_bytes_per_second for config in configs) == 1 << 20
    assert {config.nvme_free_space_reserve_bytes for config in configs} == {3 << 20}, "each rank leaves it on the file system of all"


def test_a_rate_of_fewer_bytes_than_ranks_is_still_a_rate(attach: Callable[..., Controller], tmp_path: Path) -> None:
    store = attach(rank=1, ranks=2, **nvme(tmp_path / "kv", nvme_write_bandwidth="1B/s")).backend._store
    assert store.index.config.nvme_write_bytes_per_second == 1.0


@pytest.mark.parametrize("change", [
    {"pool": {"page_size": 8}}, {"pool": {"dtype": torch.float16}}, {"pool": {"device_dtype": torch.float8_e5m2}},
    {"pool": {"layout": "layer_first"}}, {"model": "m@2:0"}])
def test_a_folder_of_another_page_size_dtype_layout_or_model_is_refused(attach: Callable[..., Controller], tmp_path: Path,
                                                                        change: dict[str, Any]) -> None:
    attach(**nvme(tmp_path / "kv")).backend.close()
    pool = HostPool(**change.get("pool", {}))
    with pytest.raises(ConfigError, match="kv"):
        attach(pool, **nvme(tmp_path / "kv") | {key: value for key, value in change.items() if key != "pool"})


def test_another_number_of_ranks_does_not_take_the_folder(attach: Callable[..., Controller], tmp_path: Path) -> None:
    attach(**nvme(tmp_path / "kv")).backend.close()
    with pytest.raises(ConfigError, match="rank"):
        attach(rank=0, ranks=2, **nvme(tmp_path / "kv"))


def test_mla_pages_of_several_ranks_are_refused_before_anything_is_opened() -> None:
    with pytest.raises(ConfigError, match="enable-dp-attention"):
        TieredHiCache(StorageConfig({"secondary": "8 blocks"}, tp_size=2, is_mla_model=True))


@pytest.mark.parametrize(("extra", "named"), [
    ({"secondry": "8 blocks"}, "did you mean 'secondary'"), ({"secondary": "8 blocks", "primary": "4 blocks"}, "has no meaning here"),
    ({}, "no host memory"), ({"secondary": "8"}, "unit"), ({"secondary": "50%"}, "different amounts"),
    ({"secondary": ["8 blocks", "4 blocks"]}, "one group"), ({"secondary": "1 B"}, "too little"),
    ({"secondary": "8 blocks", "lookup_timeout": 0}, "lookup_timeout"), ({"secondary": "8 blocks", "model": 7}, "model=7"),
    ({"secondary": "8 blocks", "nvme": "8 blocks", "nvme_directory": "/nowhere/at/all"}, "nothing says which weights")])
def test_a_misspelt_or_unusable_setting_fails_the_attachment(attach: Callable[..., Controller], extra: dict[str, Any], named: str) -> None:
    config = StorageConfig(extra)
    with pytest.raises(ConfigError, match=named):
        Controller(TieredHiCache(config, {}), HostPool(), config)


def test_a_model_that_is_a_folder_is_known_by_its_weights(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"weights")
    config = StorageConfig({"secondary": "8 blocks", "nvme": "8 blocks", "nvme_directory": str(tmp_path / "kv")},
                           model_name=str(tmp_path / "weights"))
    assert TieredHiCache(config)._model.startswith("weights@local:")


def test_without_interface_v1_a_warning_says_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        TieredHiCache(StorageConfig({"secondary": "8 blocks"}))
    assert "interface_v1" in caplog.text
