"""SGLang's storage interface over a tier: compared with the interface as published, and driven as SGLang's cache controller drives it.

Where SGLang is installed, its abstract class is what the adapter is compared with, too.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.tiering.attach.sglang import TieredHiCache
from kvtier.tiering.attach.sglang_interface import WithoutSGLang, check_base
from kvtier.tiering.attach.sglang_pages import HostPages

sys.path.append(str(Path(__file__).parent))
from sglang_double import ABSTRACT, PUBLISHED, VERSION, Controller, HostPool, chain, nvme, same_pages

LAYOUTS = [("layer_first", False), ("page_first", False), ("page_first_direct", False), ("page_head", False),
           ("layer_first", True), ("page_first", True), ("page_first_direct", True)]


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
