"""What SGLang 0.5.23 has around a storage backend, in small: its interface as published, host pools of its layouts, and the part of its
cache controller that calls the backend. Written from the names and shapes of the release; nothing here is SGLang's code."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

VERSION = "0.5.23"
BATCH = 128
"""Pages in one call of the controller."""

PUBLISHED: dict[str, tuple[str, ...]] = {
    "register_mem_pool_host": ("mem_pool_host",),
    "register_mem_host_pool_v2": ("host_pool", "host_pool_name"),
    "on_host_pools_registered": (),
    "batch_exists_v2": ("keys", "pool_transfers=", "extra_info="),
    "batch_get_v2": ("transfers", "extra_info="),
    "batch_set_v2": ("transfers", "extra_info="),
    "batch_get_v1": ("keys", "host_indices", "extra_info="),
    "batch_set_v1": ("keys", "host_indices", "extra_info="),
    "get": ("key", "target_location=", "target_sizes="),
    "batch_get": ("keys", "target_locations=", "target_sizes="),
    "set": ("key", "value=", "target_location=", "target_sizes="),
    "batch_set": ("keys", "values=", "target_locations=", "target_sizes="),
    "exists": ("key",),
    "batch_exists": ("keys", "extra_info="),
    "clear": (),
    "get_stats": (),
}
"""The methods of ``HiCacheStorage`` and their parameters behind ``self``; those with a default end in "="."""
ABSTRACT = ("get", "batch_get", "set", "batch_set", "exists")


@dataclass
class StorageConfig:
    """``HiCacheStorageConfig``."""

    extra_config: dict[str, Any] | None = None
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = True
    model_name: str | None = "a-model"
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None


class HostPool:
    """A host pool: ``[2, ...]`` keys and values, or MLA's one part, in one of SGLang's layouts."""

    storage_format_tag: str | None = None
    shared_allocation_domain: object | None = None

    def __init__(self, layout: str = "page_first", pages: int = 32, page_size: int = 4, layers: int = 3, is_mla: bool = False,
                 dtype: torch.dtype = torch.bfloat16, seed: int | None = None, device_dtype: torch.dtype | None = None) -> None:
        self.device_pool = SimpleNamespace(dtype=device_dtype or dtype)  # which 8-bit numbers: in the pools they are uint8
        self.layout, self.page_size, self.page_num, self.size, self.dtype = layout, page_size, pages, pages * page_size, dtype
        self.start_layer, self.end_layer, self.is_mla = 0, layers, is_mla
        heads, dim = (1, 24) if is_mla else (2, 8)
        shapes = {"layer_first": (layers, self.size, heads, dim), "page_first": (self.size, layers, heads, dim),
                  "page_first_direct": (pages, layers, page_size, heads, dim), "page_head": (pages, heads, page_size, layers, dim)}
        shape = shapes[layout] if is_mla else (2, *shapes[layout])
        self.kv_buffer = torch.zeros(shape, dtype=dtype)
        if seed is not None:
            self.kv_buffer.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))

    def _page(self, index: int) -> torch.Tensor:
        number = index // self.page_size
        if self.layout == "layer_first":
            return self.kv_buffer[..., index:index + self.page_size, :, :]
        if self.layout == "page_first":
            return self.kv_buffer[..., index:index + self.page_size, :, :, :]
        return self.kv_buffer[..., number:number + 1, :, :, :, :]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self._page(index)
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self._page(0)).flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self._page(index)
        page.copy_(data_page.reshape(page.shape))

    def indices(self, pages: list[int]) -> torch.Tensor:
        """Host indices, one for each token."""
        return torch.cat([torch.arange(page * self.page_size, (page + 1) * self.page_size) for page in pages])


@dataclass
class Controller:
    """Attaches a backend, backs pages up and fetches them, as SGLang's controller does it: batch by batch, up to the first failure."""

    backend: Any
    pool: HostPool
    config: StorageConfig
    is_zero_copy: bool = field(init=False)

    def __post_init__(self) -> None:
        self.backend.register_mem_pool_host(self.pool)
        self.backend.register_mem_host_pool_v2(self.pool, "kv")
        self.backend.on_host_pools_registered()
        self.is_zero_copy = bool((self.config.extra_config or {}).get("interface_v1", 0))

    def hits(self, keys: list[str]) -> int:
        count = 0
        for start in range(0, len(keys), BATCH):
            batch = keys[start:start + BATCH]
            found = self.backend.batch_exists(batch, None)
            count += found
            if found < len(batch):
                break
        return count

    def backup(self, keys: list[str], pages: list[int]) -> int:
        """How many pages were kept for certain."""
        if self.config.is_mla_model and self.config.tp_rank != 0:
            return 0
        count = 0
        for start in range(0, len(keys), BATCH):
            batch, indices = keys[start:start + BATCH], self.pool.indices(pages[start:start + BATCH])
            if self.is_zero_copy:
                is_good = all(self.backend.batch_set_v1(batch, indices, None))
            else:
                is_good = self.backend.batch_set(batch, [self.pool.get_data_page(page * self.pool.page_size)
                                                         for page in pages[start:start + BATCH]])
            if not is_good:
                break
            count += len(batch)
        return count

    def fetch(self, keys: list[str], pages: list[int]) -> int:
        """How many pages, from the first on, have been filled."""
        count = 0
        for start in range(0, len(keys), BATCH):
            batch, rows = keys[start:start + BATCH], pages[start:start + BATCH]
            if self.is_zero_copy:
                results = self.backend.batch_get_v1(batch, self.pool.indices(rows), None)
                found = results.index(False) if False in results else len(results)
            else:
                data = self.backend.batch_get(batch, [self.pool.get_dummy_flat_data_page() for _ in batch])
                found = 0
                for row, page in zip(rows, data or [], strict=False):
                    if page is None:
                        break
                    self.pool.set_from_flat_data_page(row * self.pool.page_size, page)
                    found += 1
            count += found
            if found < len(batch):
                break
        return count


def chain(count: int, prompt: int = 0) -> list[str]:
    """Keys as SGLang makes them: a chain of SHA-256 in hex."""
    keys, last = [], f"prompt {prompt}"
    for _ in range(count):
        last = hashlib.sha256(last.encode()).hexdigest()
        keys.append(last)
    return keys


def same_pages(left: HostPool, lefts: list[int], right: HostPool, rights: list[int]) -> bool:
    """Whether these pages hold the same bytes."""
    return all(torch.equal(left.get_data_page(one * left.page_size), right.get_data_page(other * right.page_size))
               for one, other in zip(lefts, rights, strict=True))


def nvme(folder: Path, **more: Any) -> dict[str, Any]:
    """Settings of a backend with an NVMe level in this folder."""
    return {"nvme": "64 blocks", "nvme_directory": str(folder), "nvme_free_space_reserve": "1MiB", "model": "m@1:0"} | more
