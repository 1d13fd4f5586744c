"""SGLang's storage interface over a tier: whatever fails is a miss, and what was cleared is gone."""

from __future__ import annotations

import errno
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.errors import ConfigError, KVTierError, TransferError
from kvtier.io.store_directory import StoreDirectory
from kvtier.tiering.attach.sglang import TieredHiCache
from kvtier.tiering.ledger.keyed_level import KeyedLevel

sys.path.append(str(Path(__file__).parent))
from sglang_double import Controller, HostPool, StorageConfig, chain, nvme, same_pages


def settle(controller: Controller) -> None:
    """Until nothing is under way any more, here and on the drive."""
    deadline = time.monotonic() + 30
    while controller.backend._store.index.has_work and time.monotonic() < deadline:
        time.sleep(0.002)


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
