"""Writes to NVMe that hang: those behind them fail, their slots are free, the blocks are served from memory, and later they are stored."""

from __future__ import annotations

import pytest
from gate import Gate
from toy_engine import MakeCache, ToyEngine, tokens_of, wait_until

from kvtier import Request
from kvtier.io.faults import FaultOperation
from kvtier.tiering import hang_watch, write_lane

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")


def test_writes_behind_one_that_hangs_fail_and_nothing_waits_for_it(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_lane, "MAX_WRITE_BATCH", 1)  # the others wait behind the first
    monkeypatch.setattr(hang_watch, "HANG_SECONDS", 0.05)  # of the one write that is begun: it waits for the gate
    gate = Gate(FaultOperation.WRITE)
    cache = make_cache(8, 8, 40, write_ahead_share=0.0, faults=gate)
    engine = ToyEngine(cache)
    engine.serve(Request(1, tokens_of(1, 13)))
    engine.serve(Request(2, tokens_of(2, 13)))
    assert not cache.flush(timeout=0.0)  # three blocks of each

    def is_all_handed_back() -> bool:
        cache.refresh()  # also has the rows of what was not written deleted: these deletions are given up, too
        return cache.stats().transfer_failures == 5 and cache.transfers._outstanding == 1

    wait_until(is_all_handed_back)
    assert gate.arrived == 1
    assert cache.transfers.writes_hang
    assert cache.stats().nvme.free_blocks == 39, "all but the slot that is being written"
    assert not cache.flush(timeout=0.0), "and no more is tried meanwhile"
    assert cache.transfers._outstanding == 1
    assert cache.match(tokens_of(1, 13)).reusable_blocks == 3
    ToyEngine(cache).serve(Request(3, tokens_of(1, 13)))

    monkeypatch.undo()
    gate.open()
    wait_until(lambda: not cache.transfers.writes_hang)
    assert cache.flush()
    assert cache.stats().transfer_failures == 5
    cache.verify()
    cache.close()
    cache = make_cache(8, 8, 40)
    for user in (1, 2):
        assert cache.match(tokens_of(user, 13)).reusable_blocks == 3
        ToyEngine(cache).serve(Request(user, tokens_of(user, 13)))
