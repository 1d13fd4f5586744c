"""GPUDirect Storage as the manager sees it: required or not at all, auto aloud, and every byte right whichever way it came.

There is no GPU here. Reasons and refusals are real; where the direct way carries blocks, host memory stands for the device's and
a double for KvikIO, whose own code runs in ``tests/io/test_gds_kvikio.py``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "io"))  # importlib mode puts no folder there

from kvikio_double import KvikioDouble
from toy_engine import OTHER, PROMPT, MakeCache, ToyEngine, tokens_of

from kvtier import ConfigError, KVCacheManager, KVLayout, Level, Request, RetentionConfig, TierConfig, TransferMode
from kvtier.io import gds_probe
from kvtier.io.device import open_device
from kvtier.io.gds import GdsPath
from kvtier.io.gds_driver import GdsUnavailable
from kvtier.io.gds_probe import NvmePath
from kvtier.io.nvme_store import NvmeStore
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.nvme_geometry import NvmeGeometry
from kvtier.pools.pool_index import NVME, PRIMARY, pool_index
from kvtier.pools.primary import PrimaryPool
from kvtier.tiering import core, direct_path
from kvtier.tiering.direct_path import open_direct_path
from kvtier.tiering.direct_writes import WRITE_ROWS
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.transfer import TransferManager

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")

WISH = RetentionConfig(transfer_mode=TransferMode.GDS)


@pytest.fixture
def kvikio() -> KvikioDouble:
    return KvikioDouble()


@pytest.fixture
def directly(monkeypatch: pytest.MonkeyPatch, kvikio: KvikioDouble) -> None:
    """Caches made in this test have the direct way, through host memory and a double of KvikIO."""

    def open_on_host(config: TierConfig, device: str, store: NvmeStore | None, staging_blocks: int) -> tuple[NvmePath, GdsPath | None]:
        if store is None:
            return gds_probe.NO_NVME, None
        paths, geometries = zip(*store.slabs(), strict=True)
        return NvmePath("gds"), GdsPath.of_host(kvikio, paths, geometries, staging_blocks + WRITE_ROWS, 4096)

    monkeypatch.setattr(core, "open_direct_path", open_on_host)


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING and text in record.getMessage()]


def store_on_nvme(make_cache: MakeCache, *prompts: list[int]) -> None:
    """What a run before this one has left in the directory."""
    cache = make_cache(8, 8, 16)
    engine = ToyEngine(cache)
    for number, prompt in enumerate(prompts):
        engine.serve(Request(number, prompt))
    assert cache.flush()
    cache.close()


# -- required, auto, off -----------------------------------------------------------------------------------------------------


def test_required_fails_at_start_with_the_reason_and_has_touched_nothing(make_cache: MakeCache, store_directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"gds='required': device='cpu' .*Set gds='auto'"):
        make_cache(8, 4, 16, gds="required")
    assert not store_directory.exists()


def test_required_without_files_is_refused(make_cache: MakeCache) -> None:
    with pytest.raises(ConfigError, match="without an NVMe level"):
        make_cache(8, 4, gds="required")


@pytest.mark.parametrize(("gds", "reason"), [("auto", "device='cpu'"), ("off", "gds='off'")])
def test_on_a_cpu_the_way_is_posix_and_says_why(make_cache: MakeCache, gds: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        cache = make_cache(8, 4, 16, gds=gds)
    stats = cache.stats().gds
    assert (stats.path, stats.read_blocks, stats.written_blocks, stats.detours) == ("posix", 0, 0, 0)
    assert reason in stats.reason
    assert warnings_of(caplog, "GPUDirect") == [], "nobody expects a GPU there"
    assert make_cache(8, 4).stats().gds.path == "none"


@pytest.fixture
def open_store(tmp_path: Path) -> NvmeStore:
    return NvmeStore.open(tmp_path / "store", '{"model": "x"}', [NvmeGeometry(8192, 4)], free_space_reserve=0)


@pytest.mark.parametrize("gds", ["auto", "required"])
@pytest.mark.parametrize(("where", "reason"), [
    ("obstacle", "tmpfs has no GPUDirect"), ("try_directory", "reads back differently"), ("open_gds", "memory_register failed")])
def test_every_reason_against_it_is_a_refusal_or_a_loud_fallback(
        open_store: NvmeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gds: Any, where: str,
        reason: str) -> None:
    asked: list[str] = []

    def answer(name: str) -> Callable[..., str | None]:
        def call(*_arguments: object) -> str | None:
            asked.append(name)
            return reason if name == where else None
        return call

    def refuse(*_arguments: object) -> GdsPath:
        asked.append("open_gds")
        raise GdsUnavailable(reason)

    monkeypatch.setattr(gds_probe, "obstacle", answer("obstacle"))
    monkeypatch.setattr(gds_probe, "try_directory", answer("try_directory"))
    monkeypatch.setattr(direct_path, "_open", refuse)
    config = TierConfig(gds=gds)
    if gds == "required":
        with pytest.raises(ConfigError, match=f"gds='required': {reason}"):
            open_direct_path(config, "cuda:0", open_store, 4)
    else:
        with caplog.at_level(logging.WARNING):
            path, opened = open_direct_path(config, "cuda:0", open_store, 4)
        assert (path, opened) == (NvmePath("posix", reason), None)
        assert len(warnings_of(caplog, reason)) == 1
    order = ["obstacle", "try_directory", "open_gds"]
    assert asked == order[:order.index(where) + 1], "KvikIO is not touched before another process has come back from it"
    open_store.close(1.0)


@pytest.mark.parametrize("value", ["1000 bytes", "0 bytes", "3 blocks", "10%", "1MB"])
def test_a_task_size_is_whole_pages(value: str) -> None:
    with pytest.raises(ConfigError, match="gds_task_size"):
        TierConfig(gds_task_size=value)


# -- bytes -------------------------------------------------------------------------------------------------------------------


def test_blocks_come_from_nvme_without_the_host_and_are_right(make_cache: MakeCache, kvikio: KvikioDouble,
                                                              request: pytest.FixtureRequest) -> None:
    store_on_nvme(make_cache, PROMPT, OTHER)
    request.getfixturevalue("directly")
    cache = make_cache(8, 8, 16)
    engine = ToyEngine(cache)
    assert engine.serve(Request(1, PROMPT), answer=3) == 12
    assert engine.serve(Request(2, OTHER, retention=WISH)) == 12
    stats = cache.stats()
    assert (stats.gds.path, stats.gds.reason, stats.gds.read_blocks, stats.gds.detours) == ("gds", "", 6, 0)
    assert stats.onboard_blocks[Level.NVME, Level.PRIMARY] == 6
    assert stats.fallbacks == 0
    assert {verb for verb, _size, _offset in kvikio.calls} == {"pread"}
    cache.verify()
    cache.close()
    assert all(file.closed for file in kvikio.files)


@pytest.mark.usefixtures("directly")
def test_a_directory_filled_with_the_direct_way_in_use_is_read_without_it(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    store_on_nvme(make_cache, PROMPT)
    monkeypatch.undo()
    cache = make_cache(8, 8, 16)
    assert ToyEngine(cache).serve(Request(1, PROMPT)) == 12
    assert cache.stats().gds.path == "posix"


def test_what_kvikio_refuses_arrives_all_the_same(make_cache: MakeCache, kvikio: KvikioDouble, request: pytest.FixtureRequest,
                                                  caplog: pytest.LogCaptureFixture) -> None:
    store_on_nvme(make_cache, PROMPT)
    request.getfixturevalue("directly")
    kvikio.error = RuntimeError("cuFile error: 5030")
    cache = make_cache(8, 8, 16)
    assert ToyEngine(cache).serve(Request(1, PROMPT)) == 12
    assert cache.stats().gds.detours == 3
    assert len(warnings_of(caplog, "cuFile error: 5030")) == 1


def test_a_direct_read_with_wrong_bytes_is_a_miss(make_cache: MakeCache, kvikio: KvikioDouble, request: pytest.FixtureRequest) -> None:
    store_on_nvme(make_cache, PROMPT)
    request.getfixturevalue("directly")
    kvikio.reads_nothing = True
    cache = make_cache(8, 8, 16)
    engine = ToyEngine(cache)
    assert engine.serve(Request(1, PROMPT)) == 0
    stats = cache.stats()
    assert (stats.checksum_failures, stats.quarantined, stats.leases) == (3, 3, 0)
    kvikio.reads_nothing = False
    assert engine.serve(Request(2, PROMPT)) == 12, "computed again and found on the upper level"
    cache.verify()


@pytest.mark.usefixtures("directly")
def test_under_load_every_byte_is_right_with_the_direct_way(make_cache: MakeCache) -> None:
    cache = make_cache(10, 4, 32, write_ahead_share=1.0)
    engine = ToyEngine(cache)
    for turn in range(4):
        for user in range(6):
            engine.serve(Request(turn * 10 + user, tokens_of(user, 13 + 4 * turn)))
            cache.flush()
    stats = cache.stats()
    assert stats.gds.read_blocks > 0
    assert stats.gds.read_blocks == stats.onboard_blocks[Level.NVME, Level.PRIMARY]
    assert (stats.gds.detours, stats.lost, stats.checksum_failures) == (0, 0, 0)
    cache.verify()


# -- a request's wish --------------------------------------------------------------------------------------------------------


def test_a_wish_that_cannot_be_fulfilled_is_served_counted_and_said_once(make_cache: MakeCache, caplog: pytest.LogCaptureFixture) -> None:
    store_on_nvme(make_cache, PROMPT, OTHER)
    cache = make_cache(8, 8, 16)
    engine = ToyEngine(cache)
    assert engine.serve(Request(1, PROMPT, retention=WISH)) == 12
    assert cache.stats().fallbacks == 3
    assert engine.serve(Request(2, OTHER, retention=WISH)) == 12
    assert cache.stats().fallbacks == 6
    assert len(warnings_of(caplog, "TransferMode.GDS")) == 1
    assert engine.serve(Request(3, PROMPT, retention=WISH)) == 12
    assert cache.stats().fallbacks == 6, "nothing came from NVMe"
    assert cache.stats().leases == 0


# -- NVMe below the device, and nothing between ------------------------------------------------------------------------------


@pytest.fixture
def make_bare(make_cache: MakeCache, directly: None, monkeypatch: pytest.MonkeyPatch) -> MakeCache:
    """``make_bare(primary, nvme, ...)``: caches without a secondary level."""
    monkeypatch.setattr(core, "require_possible", lambda *_arguments: None)
    return lambda primary, nvme, **settings: make_cache(primary, 0, nvme, gds="required", **settings)


def test_nvme_without_a_secondary_level_wants_the_direct_way(make_cache: MakeCache) -> None:
    for gds in ("auto", "off"):
        with pytest.raises(ConfigError, match=r"needs GPUDirect Storage; set .*gds=\"required\""):
            make_cache(8, 0, 16, gds=gds)


def test_blocks_go_down_to_nvme_and_come_back_right_also_after_a_restart(make_bare: MakeCache) -> None:
    cache = make_bare(8, 32, write_ahead_share=1.0)
    engine = ToyEngine(cache)
    for user in range(6):
        engine.serve(Request(user, tokens_of(user, 13)))
        assert cache.flush()
        cache.verify()
    assert [engine.serve(Request(10 + user, tokens_of(user, 13))) for user in range(6)] == [12] * 6
    stats = cache.stats()
    assert stats.gds.written_blocks == 18
    assert stats.gds.read_blocks == stats.onboard_blocks[Level.NVME, Level.PRIMARY] >= 10
    assert stats.offload_blocks[Level.PRIMARY, Level.NVME] == 18, "each block once: what comes back keeps its copy"
    assert (stats.dropped, stats.lost, stats.gds.detours) == (0, 0, 0)
    cache.flush()
    cache.close()
    assert ToyEngine(make_bare(8, 32)).serve(Request(1, tokens_of(5, 13))) == 12


def test_refresh_writes_the_coldest_share_ahead_and_then_rests(make_bare: MakeCache) -> None:
    cache = make_bare(16, 16, write_ahead_share=0.5)
    engine = ToyEngine(cache)
    for user in range(4):
        engine.serve(Request(user, tokens_of(user, 13)))
    for _ in range(20):
        cache.refresh()
        assert cache.transfers.idle(10.0)
    assert cache.stats().gds.written_blocks == 8
    cache.verify()


def test_an_nvme_level_smaller_than_the_primary_one_is_not_written_for_ever(make_bare: MakeCache) -> None:
    cache = make_bare(16, 4, write_ahead_share=1.0)
    engine = ToyEngine(cache)
    for user in range(5):
        engine.serve(Request(user, tokens_of(user, 13)))
    for _ in range(20):
        cache.refresh()
        assert cache.transfers.idle(10.0)
    assert cache.stats().gds.written_blocks <= 4
    assert cache.flush()
    cache.verify()


def test_a_prompt_is_served_from_a_block_that_is_just_being_written(make_bare: MakeCache, kvikio: KvikioDouble) -> None:
    cache = make_bare(12, 16, write_ahead_share=1.0)
    engine = ToyEngine(cache)
    for turn in range(30):
        engine.serve(Request(turn, tokens_of(turn % 3, 13)))  # refresh starts writes, and the next prompt does not wait for them
    assert cache.flush()
    stats = cache.stats()
    assert (stats.lost, stats.gds.written_blocks) == (0, 9)
    assert stats.hit_tokens.primary == 27 * 12
    cache.verify()


def test_priorities_too_low_for_nvme_never_get_there(make_bare: MakeCache) -> None:
    cache = make_bare(16, 16, write_ahead_share=1.0, secondary_offload_min_priority=0, nvme_offload_min_priority=50)
    engine = ToyEngine(cache)
    engine.serve(Request(1, PROMPT))
    assert cache.flush()
    assert cache.stats().gds.written_blocks == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_on_two_levels_reads_only_right_bytes(make_bare: MakeCache, seed: int) -> None:
    cache = make_bare(14, 24, write_ahead_share=0.5)
    engine = ToyEngine(cache)
    generator = np.random.default_rng(seed)
    requests = [Request(number, tokens_of(int(generator.integers(6)), int(generator.integers(5, 21)))) for number in range(40)]
    for start in range(0, 40, 4):
        engine.run(requests[start:start + 4], answer=2)
        cache.refresh()
        if start % 8:  # otherwise the next requests come while blocks are being written
            assert cache.transfers.idle(10.0)
    stats = cache.stats()
    assert (stats.leases, stats.sequences, stats.lost, stats.checksum_failures) == (0, 0, 0, 0)
    assert min(stats.gds.written_blocks, stats.gds.read_blocks) > 0
    cache.verify()


# -- from the device to NVMe -------------------------------------------------------------------------------------------------


class DirectRig:
    """A transfer manager with the direct way both ways, over a real store: no secondary level, as with a GPU and an NVMe drive alone."""

    def __init__(self, directory: Path, kvikio: KvikioDouble, num_blocks: int = 12) -> None:
        self.group = KVLayout.uniform(num_layers=2, num_kv_heads=3, head_dim=8, dtype="float32", tokens_per_block=4).groups[0]
        self.store = NvmeStore.open(directory, '{"model": "x"}', [NvmeGeometry(self.group.block_bytes, num_blocks)], free_space_reserve=0)
        paths, geometries = zip(*self.store.slabs(), strict=True)
        self.gds = GdsPath.of_host(kvikio, paths, geometries, 2 + WRITE_ROWS, 4096)
        self.primary = PrimaryPool(self.group, num_blocks, "cpu")
        self.transfers = TransferManager(open_device("cpu"), [GroupPools(self.group, self.primary, None)], self.store, staging_blocks=2,
                                         gds=self.gds)
        self._number = 0

    def move(self, source: int, destination: int, key: bytes) -> Move:
        self._number += 1
        return Move(self._number, 0, self._number, pool_index(*divmod(source, 100)), 0, pool_index(*divmod(destination, 100)),
                    self._number, 0, key)

    def run(self, moves: list[Move]) -> list[Exception | None]:
        self.transfers.issue(moves)
        assert self.transfers.idle(30.0)
        return [result.error for result in sorted(self.transfers.drain(), key=lambda result: result.move.number)]

    def close(self) -> None:
        assert self.transfers.close(10.0)
        self.gds.close()
        self.store.close(5.0)


@pytest.fixture
def rig(tmp_path: Path, kvikio: KvikioDouble) -> Any:
    made = DirectRig(tmp_path / "store", kvikio)
    yield made
    made.close()


def place(level: int, slot: int) -> int:
    return level * 100 + slot


def key(number: int) -> bytes:
    return bytes([number]) * 32


def test_primary_blocks_reach_nvme_and_come_back_without_a_secondary_level(rig: DirectRig, kvikio: KvikioDouble) -> None:
    content = np.random.default_rng(5).integers(0, 256, rig.primary.rows.shape, dtype=np.uint8)
    rig.primary.rows.numpy()[:] = content
    writes = [rig.move(place(PRIMARY, slot), place(NVME, 11 - slot), key(slot)) for slot in range(12)]
    assert rig.run(writes) == [None] * 12  # more than there are rows
    rig.primary.rows.zero_()
    reads = [rig.move(place(NVME, 11 - slot), place(PRIMARY, slot), key(slot)) for slot in range(12)]
    assert rig.run(reads) == [None] * 12
    assert np.array_equal(rig.primary.rows.numpy(), content)
    stats = rig.store.stats()
    assert (stats.gds_written_blocks, stats.gds_read_blocks, stats.gds_detours) == (12, 12, 0)
    assert {verb for verb, _size, _offset in kvikio.calls} == {"pread", "pwrite"}


def test_a_write_takes_the_bytes_as_they_were_when_it_was_issued_before_the_next_writer(rig: DirectRig) -> None:
    """A write of slot 0, and at once a copy of slot 1 over slot 0."""
    rows = rig.primary.rows.numpy()
    rows[0], rows[1] = 7, 9
    assert rig.run([rig.move(place(PRIMARY, 0), place(NVME, 0), key(0)), rig.move(place(PRIMARY, 1), place(PRIMARY, 0), b""),
                    rig.move(place(NVME, 0), place(PRIMARY, 2), key(0))]) == [None] * 3
    assert (rows[2] == 7).all()
    assert (rows[0] == 9).all()


def test_a_disk_that_is_full_costs_the_stores_and_nothing_else(rig: DirectRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(rig.store), "accepts_writes", property(lambda store: False))
    rig.primary.rows[3] = 5
    errors = rig.run([rig.move(place(PRIMARY, 3), place(NVME, 0), key(0)), rig.move(place(PRIMARY, 3), place(PRIMARY, 4), b"")])
    assert "not stored" in str(errors[0])
    assert errors[1] is None
    assert (rig.primary.rows[4] == 5).all()


def test_rows_come_back_after_writes_that_fail(rig: DirectRig, kvikio: KvikioDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.store, "write_blocks", lambda items: [OSError("no")] * len(items))
    for _ in range(3):
        errors = rig.run([rig.move(place(PRIMARY, slot), place(NVME, slot), key(slot)) for slot in range(WRITE_ROWS)])
        assert all("no" in str(error) for error in errors)
    monkeypatch.undo()
    assert rig.run([rig.move(place(PRIMARY, slot), place(NVME, slot), key(slot)) for slot in range(12)]) == [None] * 12


def test_an_error_that_nobody_expects_fails_its_writes_and_not_the_next_ones(rig: DirectRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(items: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(rig.store, "write_blocks", broken)
    errors = rig.run([rig.move(place(PRIMARY, slot), place(NVME, slot), key(slot)) for slot in range(6)])
    assert [str(error) for error in errors] == ["a bug"] * 6
    monkeypatch.undo()
    assert rig.run([rig.move(place(PRIMARY, slot), place(NVME, slot), key(slot)) for slot in range(12)]) == [None] * 12


def test_copies_that_cannot_be_enqueued_cost_no_row(rig: DirectRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object) -> None:
        raise RuntimeError("an error of the device's library")

    monkeypatch.setattr(rig.transfers._offload, "submit", broken)
    errors = rig.run([rig.move(place(PRIMARY, slot), place(NVME, slot), key(slot)) for slot in range(2 * WRITE_ROWS)])
    assert [str(error) for error in errors] == ["an error of the device's library"] * 2 * WRITE_ROWS
    monkeypatch.undo()
    assert rig.run([rig.move(place(PRIMARY, slot), place(NVME, slot), key(slot)) for slot in range(12)]) == [None] * 12


def test_a_cache_closes_the_direct_way_last_and_only_once(make_cache: MakeCache, directly: None, kvikio: KvikioDouble) -> None:
    cache: KVCacheManager = make_cache(8, 4, 16)
    cache.close()
    cache.close()
    assert [file.closed for file in kvikio.files] == [True]
