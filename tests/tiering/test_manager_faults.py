"""Every kind of fault at every operation, in a short real life: right bytes, nothing held at the end, counted, said once, and the store
that is left behind is right."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from group_engine import LAYOUTS, GroupEngine
from toy_engine import PATIENCE, MakeCache, ToyEngine, tokens_of, wait_until

from kvtier import KVCacheManager, Request, TransferError
from kvtier.io.fault_text import FAILURES
from kvtier.tiering import hang_watch, readiness

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")

OLD, NEW = range(1, 5), range(3, 9)  # users of the life before, and of the life with faults: some of them are on NVMe when it begins


@dataclass(frozen=True)
class Case:
    """One cell of the matrix.

    Attributes:
        rule: without its rate.
        counters: of ``stats()`` or of ``store.stats()``, one of which has to be above 0 at the end.
        warning: what the one warning says; None where nothing is wrong that anybody should hear of.
    """

    rule: str
    counters: tuple[str, ...] = ()
    warning: str | None = None
    suffix: str = field(default="=0.5")

    def __str__(self) -> str:
        return self.rule


def cases() -> list[Case]:
    found = [Case("nvme.read.delay", suffix="=0.5:2ms"), Case("nvme.write.delay", suffix="=0.5:2ms"),
             Case("nvme.commit.delay", suffix="=0.5:2ms"), Case("primary.copy.delay", suffix="=0.3:1ms"),
             Case("secondary.copy.delay", suffix="=0.3:1ms")]
    for word in FAILURES:
        found.append(Case(f"nvme.read.{word}", ("fallbacks",), "is quarantined"))
        found.append(Case(f"nvme.write.{word}", ("write_errors",), "no new blocks are stored for"))
        found.append(Case(f"nvme.commit.{word}", ("write_errors",), "no new blocks are stored for"))
        found += [Case(f"{level}.copy.{word}", ("fallbacks",), "copies between memories fail") for level in ("primary", "secondary")]
    found.append(Case("nvme.read.short_read", ("fallbacks",), "is quarantined"))
    found.append(Case("nvme.write.short_write", ("write_errors",), "no new blocks are stored for"))
    found.append(Case("nvme.read.bit_flip", ("checksum_failures",), "is quarantined"))
    found += [Case(f"nvme.write.{kind}", ("checksum_failures",), "is quarantined")
              for kind in ("bit_flip", "torn_write", "misdirected_write")]
    found += [Case(f"nvme.{operation}.{kind}", ("write_errors",), "was deleted while it was in use")
              for operation in ("read", "write") for kind in ("lost_file", "deleted_directory")]
    return found


def live(cache: KVCacheManager, users: Iterable[int], rounds: int = 1, patience: float = 5.0) -> None:
    """More users than memory holds, again and again: everything is pushed down to NVMe and read back."""
    engine = ToyEngine(cache)
    number = 0
    for _ in range(rounds):
        for user in users:
            number += 1
            engine.serve(Request(number, tokens_of(user, 13)), answer=user % 3)
            cache.verify()
        cache.flush(patience)
        engine.run([Request(number := number + 1, tokens_of(user, 13)) for user in users], answer=2)
    assert engine.checked_tokens > 0


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_fault_costs_time_and_never_bytes(make_cache: MakeCache, caplog: pytest.LogCaptureFixture, case: Case) -> None:
    cache = make_cache(8, 4, 40, write_ahead_share=1.0)
    live(cache, OLD)
    cache.close()
    caplog.clear()

    cache = make_cache(8, 4, 40, write_ahead_share=1.0, faults=f"{case.rule}{case.suffix}, seed=3")
    assert [text for text in warnings_of(caplog) if "faults are injected into this cache (keyword)" in text] == warnings_of(caplog)
    caplog.clear()
    live(cache, NEW, rounds=3)
    stats = cache.stats()
    assert stats.faults[case.rule] > 0
    assert (stats.leases, stats.sequences) == (0, 0)
    counted = {name: getattr(stats, name, 0) or getattr(cache.store.stats(), name, 0) for name in case.counters}
    assert all(counted.values()), counted
    cache.verify()
    cache.close()
    said = warnings_of(caplog)
    assert len(said) == (case.warning is not None), said
    assert case.warning is None or case.warning in said[0]

    caplog.clear()
    cache = make_cache(8, 4, 40)
    live(cache, {*OLD, *NEW})
    assert cache.stats().leases == 0
    cache.verify()


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_fault_costs_no_bytes_of_any_group(make_cache: MakeCache, caplog: pytest.LogCaptureFixture, case: Case, name: str) -> None:
    layout = LAYOUTS[name]

    def live_in_groups(cache: KVCacheManager, users: Iterable[int]) -> None:
        engine = GroupEngine(cache)
        for number, user in enumerate([*users, *users]):
            engine.serve(engine.request(number, tokens_of(user, 13)), answer=2)
        cache.flush(5)
        for number, user in enumerate(users):
            engine.serve(engine.request(number, tokens_of(user, 13)), chunk=5)
        assert engine.checked > 0

    cache = make_cache(12, 6, 60, layout=layout, write_ahead_share=1.0)
    live_in_groups(cache, OLD)
    cache.close()
    cache = make_cache(12, 6, 60, layout=layout, write_ahead_share=1.0, faults=f"{case.rule}{case.suffix}, seed=3")
    caplog.clear()
    live_in_groups(cache, NEW)
    stats = cache.stats()
    assert stats.faults[case.rule] > 0
    assert (stats.leases, stats.sequences) == (0, 0)
    cache.verify()
    cache.close()
    assert len(warnings_of(caplog)) <= 1
    cache = make_cache(12, 6, 60, layout=layout)
    live_in_groups(cache, {*OLD, *NEW})
    cache.verify()


# -- what hangs ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["*1", ""], ids=["one", "all"])
@pytest.mark.parametrize("place", ["nvme.read", "nvme.write", "nvme.commit"])
def test_file_operations_that_hang_are_waited_for_no_longer_than_they_may(
        make_cache: MakeCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, place: str, suffix: str) -> None:
    cache = make_cache(8, 4, 40, write_ahead_share=1.0)
    live(cache, OLD)
    cache.close()
    monkeypatch.setattr(hang_watch, "HANG_SECONDS", 1.0)  # longer than what does not hang takes, on slow drives too
    cache = make_cache(8, 4, 40, write_ahead_share=1.0, faults=f"{place}.hang{suffix}")
    caplog.clear()
    live(cache, NEW, rounds=2, patience=0.2)

    def is_given_up() -> bool:
        cache.refresh()
        if place == "nvme.read":
            return cache.stats().fallbacks > 0
        writes = cache.transfers._files._writes
        return cache.transfers.writes_hang and writes._waiting.empty()  # what is in the call stays there; nothing waits behind it

    wait_until(is_given_up)
    stats = cache.stats()
    assert (stats.leases, stats.sequences) == (0, 0)
    assert stats.faults[f"{place}.hang"] > 0
    # Nothing waits for what hangs. What does not hang, a copy of the last request's blocks, may be under way.
    wait_until(lambda: cache.stats().primary.free_blocks == stats.primary.max_blocks)
    cache.verify()
    said = warnings_of(caplog)
    assert all(" hangs; " in text for text in said), said
    assert sum(f"an NVMe {'read' if place == 'nvme.read' else 'write'} hangs" in text for text in said) == 1

    for _ in range(4):  # returns, although calls hang that have no end; it then ends them, and the commit of the next one hangs again
        cache.close(timeout=0.2)
    monkeypatch.undo()
    cache = make_cache(8, 4, 40)
    live(cache, {*OLD, *NEW})
    cache.verify()


def test_writes_that_a_rate_spreads_out_do_not_hang(make_cache: MakeCache, caplog: pytest.LogCaptureFixture,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "HANG_SECONDS", 1.0)  # less than the rate makes of the writes, and more than they take
    cache = make_cache(8, 4, 40, write_ahead_share=1.0, nvme_write_bandwidth="30KiB/s")
    ToyEngine(cache).serve(Request(1, tokens_of(1, 29)))
    ToyEngine(cache).serve(Request(2, tokens_of(2, 29)))
    assert cache.flush(timeout=20.0)
    stats = cache.stats()
    assert stats.nvme.backing_blocks + stats.nvme.evictable_blocks > 6
    assert stats.transfer_failures == 0
    assert warnings_of(caplog) == []
    cache.verify()


@pytest.mark.parametrize("level", ["primary", "secondary"])
def test_a_copy_that_hangs_holds_up_who_needs_it_and_nobody_longer_than_he_says(
        make_cache: MakeCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    cache = make_cache(8, 8, 0, faults=f"{level}.copy.hang*1")
    engine = ToyEngine(cache)
    engine.serve(Request(1, tokens_of(1, 13)))

    def hangs() -> bool:
        return cache.stats().faults[f"{level}.copy.hang"] > 0

    def go_on() -> None:
        for number in range(2, 6):
            engine.admit(Request(number, tokens_of(1 + number % 3, 13)))
            wait_until(lambda: hangs() or cache.transfers.idle(0.0))
            if hangs():  # what does not hang may take its time
                monkeypatch.setattr(readiness, "STEP_TIMEOUT", 0.1)
            engine.learn(number, timeout=0.1 if hangs() else PATIENCE)
            engine.forward([number])
            engine.remove(number)

    with pytest.raises((TimeoutError, TransferError), match=r"not ready after 0\.1 s|did not end within"):
        go_on()
    for number in list(engine.sequences):
        engine.remove(number, store=False)
    stats = cache.stats()
    assert (stats.leases, stats.sequences, stats.faults[f"{level}.copy.hang"]) == (0, 0, 1)
    cache.verify()
    caplog.clear()
    cache.close(timeout=0.2)
    assert len(warnings_of(caplog)) == 1
    cache.close()


def test_a_reset_ends_in_time_also_while_the_deletions_hang(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 40, write_ahead_share=1.0)
    live(cache, OLD)
    cache.close()
    cache = make_cache(8, 4, 40, faults="nvme.commit.hang*1")
    assert cache.match(tokens_of(OLD[0], 13)).reusable_blocks == 3
    with pytest.raises(TransferError, match="may be found again after a restart"):
        cache.reset(timeout=0.1)
    assert cache.match(tokens_of(OLD[0], 13)).reusable_blocks == 0, "not by this process"
    cache.close(timeout=0.2)
    cache.close()
    make_cache(8, 4, 40).verify()
