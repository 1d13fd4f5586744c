"""Resets that fail, hang or come at a bad moment, and starts that fail: a clear error, and nothing half done."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
from gate import Gate
from toy_engine import OTHER, PATIENCE, PROMPT, MakeCache, ToyEngine, WarmCache, wait_until

from kvtier import ConfigError, Request, TransferError
from kvtier.io.faults import FaultOperation
from kvtier.tiering import locked_tier

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")

READ = FaultOperation.READ


def test_reset_that_cannot_be_done_in_time_forgets_nothing(warm_cache: WarmCache) -> None:
    gate = Gate(READ)
    cache = warm_cache(gate=gate)
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT))
    engine.remove(1)
    with pytest.raises(TransferError, match="nothing was forgotten"):
        cache.reset(timeout=0.05)
    assert cache.match(OTHER).reusable_blocks == 3
    gate.open()
    cache.reset()
    assert cache.match(OTHER).reusable_blocks == 0


def test_a_reset_whose_drive_hangs_ends_in_time_and_nothing_is_stored_before_it_is_over(make_cache: MakeCache,
                                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked_tier, "LEAST_CLEARING", 0.1)
    cache = make_cache(8, 4, 40, write_ahead_share=1.0)
    engine = ToyEngine(cache)
    engine.serve(Request(1, PROMPT))
    assert cache.flush()
    assert cache.store is not None
    returns, clear = threading.Event(), cache.store.clear

    def hang() -> None:
        returns.wait(PATIENCE)
        clear()

    monkeypatch.setattr(cache.store, "clear", hang)
    for _ in range(2):
        with pytest.raises(TransferError, match=r"reset: .* did not end within 0\.2 s"):
            cache.reset(timeout=0.2)
    assert engine.serve(Request(2, PROMPT)) == 0
    assert not cache.flush(timeout=0.1)
    assert cache.stats().nvme.evictable_blocks + cache.stats().nvme.backing_blocks == 0
    returns.set()
    wait_until(cache.flush)
    assert cache.stats().nvme.evictable_blocks + cache.stats().nvme.backing_blocks > 0
    engine.serve(Request(3, OTHER))
    cache.verify()


def test_a_reset_that_fails_says_so(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise TransferError("could not be written down")

    cache = make_cache(8, 4, 16)
    monkeypatch.setattr(cache.store, "clear", refuse)
    with pytest.raises(TransferError, match="could not be written down"):
        cache.reset()
    monkeypatch.undo()
    cache.reset()


def test_a_start_that_gets_too_few_threads_fails_and_leaves_none_behind(make_cache: MakeCache, tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever thread is refused: an error that says what to do, no thread goes on, and the next start finds the directory free."""
    true_start, left = threading.Thread.start, 0

    def start(thread: threading.Thread) -> None:
        nonlocal left
        if left == 0:
            raise RuntimeError("can't start new thread")
        left -= 1
        true_start(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    before = set(threading.enumerate())
    for granted in range(20):
        left = granted
        with contextlib.suppress(ConfigError):
            cache = make_cache(8, 4, 16, request_directory_root=tmp_path / "requests", nvme_scrub_bandwidth="1MiB/s")
            break
        wait_until(lambda: set(threading.enumerate()) <= before)
    assert granted > 6  # two streams, a debugged request's, readers, a writer, those that watch
    left = 100
    ToyEngine(cache).serve(Request(1, PROMPT))
    cache.verify()
