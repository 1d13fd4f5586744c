"""Rules of ``KeyLedger``, one at a time."""

from __future__ import annotations

import pytest

from kvtier.pools.pool_index import NVME, SECONDARY, level_of, slot_of
from kvtier.tiering.ledger.key_events import KeyEventLog
from kvtier.tiering.ledger.key_finding import HIT, MISS, PENDING, RETRY
from kvtier.tiering.ledger.key_invariants import verify_keys
from kvtier.tiering.ledger.key_ledger import KeyLedger
from kvtier.tiering.ledger.keyed_level import engine_key, file_key
from kvtier.tiering.ledger.moves import Discard, Move, WarmRow
from kvtier.tiering.ledger.rules import TierRules

KEYS = [b"%c" % letter for letter in range(ord("a"), ord("a") + 20)]


def new(host: int = 4, nvme: int = 0, *, write_ahead_share: float = 0.0, **more: float) -> KeyLedger:
    return KeyLedger([(host, nvme)], TierRules(write_ahead_share=write_ahead_share), **more)  # type: ignore[arg-type]


def store(ledger: KeyLedger, keys: list[bytes], request: str = "writer", priority: int = 35) -> list[bytes]:
    """The keys that were stored."""
    job, _known = ledger.plan_store(ledger.request(request), 0, keys, priority)
    if job is None:
        return []
    ledger.complete(job, None, set())
    return job.keys


def states(ledger: KeyLedger, keys: list[bytes], request: str = "reader") -> list[int]:
    return [ledger.state(ledger.request(request), 0, key) for key in keys]


def carry_out(ledger: KeyLedger, failed: bool = False) -> list[Move]:
    """End all Moves that were decided on."""
    moves = [record for record in ledger.moves.take() if isinstance(record, Move)]
    for move in moves:
        ledger.finish(move, failed, True)
    verify_keys(ledger)
    return moves


def on_nvme(ledger: KeyLedger, keys: list[bytes]) -> None:
    ledger.adopt_store([WarmRow(0, slot, key) for slot, key in enumerate(keys)], [])


# -- what is given up first --------------------------------------------------------------------------------------------------


def test_a_finished_prompt_is_given_up_from_its_tail() -> None:
    ledger = new(4)
    store(ledger, KEYS[:2])
    store(ledger, KEYS[2:4])  # the same request computes on
    ledger.end_request("writer")
    store(ledger, KEYS[10:13], "other")
    assert states(ledger, KEYS[:4]) == [HIT, MISS, MISS, MISS]


def test_what_was_loaded_is_used_and_given_up_after_what_was_not() -> None:
    ledger = new(4)
    store(ledger, KEYS[:2], "one")
    store(ledger, KEYS[2:4], "two")
    for name in ("one", "two"):
        ledger.end_request(name)
    reader = ledger.request("reader")
    assert ledger.lookup(reader, 0, KEYS[:2]).num_hits == 2
    job = ledger.plan_load(reader, 0, KEYS[:2])
    assert job is not None
    ledger.complete(job, None, set())
    ledger.end_request("reader")
    store(ledger, KEYS[10:12], "other")
    assert states(ledger, KEYS[:4], "last") == [HIT, HIT, MISS, MISS]


def test_leased_and_loading_blocks_are_never_given_up() -> None:
    ledger = new(4)
    store(ledger, KEYS[:4])
    assert states(ledger, KEYS[:2]) == [HIT, HIT]
    assert store(ledger, KEYS[10:14], "other") == KEYS[10:12]
    job = ledger.plan_load(ledger.request("reader"), 0, KEYS[:1])
    assert job is not None
    assert store(ledger, KEYS[14:18], "third") == KEYS[14:17], "the lease that was not used has ended"
    assert states(ledger, KEYS[:2], "last") == [HIT, MISS]
    verify_keys(ledger)


def test_higher_priority_wanted_again_raises_a_block() -> None:
    ledger = new(4)
    store(ledger, KEYS[:4])
    store(ledger, KEYS[:2], "second", 70)
    assert store(ledger, KEYS[10:13], "third", 60) == KEYS[10:12]


def test_a_priority_falls_back_when_its_time_is_over() -> None:
    ledger = new(2)
    request = ledger.request("writer")
    request.duration = 10.0
    store(ledger, KEYS[:2], "writer", 80)
    assert store(ledger, KEYS[2:4], "other", 50) == []
    ledger.set_time(11.0)
    ledger.refresh(False)
    assert store(ledger, KEYS[2:4], "other", 50) == KEYS[2:4]


# -- NVMe --------------------------------------------------------------------------------------------------------------------


def test_cold_blocks_are_written_ahead_and_evicting_them_then_costs_no_write() -> None:
    ledger = new(4, 4, write_ahead_share=0.5)
    store(ledger, KEYS[:4])
    ledger.end_request("writer")
    ledger.refresh(True)
    written = carry_out(ledger)
    assert [engine_key(move.key) for move in written] == [KEYS[3], KEYS[2]]
    store(ledger, KEYS[10:12], "other")
    assert not [record for record in ledger.moves.take() if isinstance(record, Move)]
    assert [level_of(ledger.allocators[0].warm[key].index) for key in KEYS[:4]] == [SECONDARY, SECONDARY, NVME, NVME]


def test_what_has_not_earned_nvme_is_not_written() -> None:
    ledger = new(4, 4, write_ahead_share=1.0)
    ledger.rules.secondary_offload_min_priority = 0
    store(ledger, KEYS[:2], "low", 34)
    private = ledger.request("private")
    private.use_nvme = False
    store(ledger, KEYS[2:4], "private")
    ledger.refresh(True)
    assert not ledger.write_everything_out() or not carry_out(ledger)


def test_the_first_lookup_queues_all_reads_and_an_end_takes_back_those_not_begun() -> None:
    ledger = new(8, 8, reads_at_once=2)
    on_nvme(ledger, KEYS[:6])
    answer = ledger.lookup(ledger.request("reader"), 0, KEYS[:7])
    assert (answer.num_hits, answer.state, ledger.reads_in_flight, ledger.num_wanted) == (0, RETRY, 2, 4)
    ledger.end_request("reader")
    carry_out(ledger)
    assert ledger.reads_in_flight == 0
    assert ledger.promoted_blocks == 2
    assert ledger.num_leases() == 0


def test_a_read_that_fails_is_a_miss_and_its_slot_is_never_used_again() -> None:
    ledger = new(4, 2)
    on_nvme(ledger, KEYS[:2])
    reader = ledger.request("reader")
    ledger.lookup(reader, 0, KEYS[:2])
    carry_out(ledger, failed=True)
    assert ledger.lookup(reader, 0, KEYS[:2]).state == MISS
    assert ledger.allocators[0].quarantined == {0, 1}
    assert ledger.allocators[0].queues.num_free(SECONDARY) == 4


def test_two_requests_share_one_read() -> None:
    ledger = new(4, 4)
    on_nvme(ledger, KEYS[:2])
    for name in ("one", "two"):
        assert ledger.lookup(ledger.request(name), 0, KEYS[:2]).state == RETRY
    assert len(carry_out(ledger)) == 2
    for name in ("one", "two"):
        assert ledger.lookup(ledger.request(name), 0, KEYS[:2]).num_hits == 2


def test_its_own_leases_leave_a_shorter_hit_and_no_waiting() -> None:
    ledger = new(3, 8)
    on_nvme(ledger, KEYS[:8])
    reader = ledger.request("reader")
    ledger.lookup(reader, 0, KEYS[:8])
    carry_out(ledger)
    answer = ledger.lookup(reader, 0, KEYS[:8])
    assert (answer.num_hits, answer.state) == (3, MISS)
    assert reader.deadline == 0.0


def test_what_others_hold_is_waited_for_until_the_deadline() -> None:
    ledger = new(2, 4, lookup_timeout=5.0)
    on_nvme(ledger, KEYS[:2])
    store(ledger, KEYS[10:12])
    assert states(ledger, KEYS[10:12], "holder") == [HIT, HIT]
    reader = ledger.request("reader")
    assert ledger.lookup(reader, 0, KEYS[:2]).state == RETRY
    ledger.set_time(4.9)
    assert ledger.lookup(reader, 0, KEYS[:2]).state == RETRY
    ledger.set_time(5.0)
    assert ledger.lookup(reader, 0, KEYS[:2]).state == MISS
    assert ledger.num_leases() == 2
    ledger.end_request("holder")
    assert not carry_out(ledger), "nobody wants them any more"
    ledger.plan_store(reader, 0, KEYS[:2], 35)
    assert ledger.lookup(reader, 0, KEYS[:2]).state == RETRY, "a request that has gone on may wait again"


def test_a_prefetch_takes_no_slot_of_more_worth_or_used_since() -> None:
    ledger = new(4, 8)
    on_nvme(ledger, KEYS[:6])
    store(ledger, [KEYS[10]], "high", 80)
    assert ledger.prefetch(0, KEYS[:6]) == 6
    assert len(carry_out(ledger)) == 3
    assert states(ledger, KEYS[:4]) == [HIT, HIT, HIT, RETRY]
    assert states(ledger, [KEYS[10]], "other") == [HIT]


def test_an_nvme_slot_is_discarded_when_its_block_is_forgotten() -> None:
    ledger = new(4, 4)
    on_nvme(ledger, KEYS[:2])
    ledger.reset()
    assert sorted(record.slot for record in ledger.moves.take() if isinstance(record, Discard)) == [0, 1]


# -- jobs --------------------------------------------------------------------------------------------------------------------


def test_a_pending_block_that_fails_is_a_miss_for_those_who_wait_for_it() -> None:
    ledger = new()
    job, _known = ledger.plan_store(ledger.request("writer"), 0, KEYS[:2], 35)
    assert job is not None
    assert states(ledger, KEYS[:2]) == [PENDING, PENDING]
    ledger.complete(job, [True, False], set())
    assert states(ledger, KEYS[:2]) == [HIT, MISS]
    assert ledger.num_leases() == 1
    verify_keys(ledger)


def test_a_job_given_up_keeps_its_slots_out_of_use_until_it_is_certain_to_have_ended() -> None:
    ledger = new(2, job_timeout=10.0)
    job, _known = ledger.plan_store(ledger.request("writer"), 0, KEYS[:2], 35)
    assert job is not None
    ledger.set_time(10.0)
    ledger.refresh(False)
    assert store(ledger, KEYS[2:4], "other") == []
    assert states(ledger, KEYS[:1]) == [MISS]
    assert ledger.release_abandoned(job.number)
    assert not ledger.release_abandoned(job.number)
    assert store(ledger, KEYS[2:4], "other") == KEYS[2:4]


def test_a_load_reported_too_early_pins_its_slots_until_it_has_ended() -> None:
    ledger = new(2)
    store(ledger, KEYS[:2])
    job = ledger.plan_load(ledger.request("reader"), 0, KEYS[:2])
    assert job is not None
    ledger.complete(job, None, set(), is_over=False)
    assert store(ledger, KEYS[2:4], "other") == []
    assert states(ledger, KEYS[:2], "third") == [MISS, MISS], "no room to lease them in; they are not lost"
    ledger.release_abandoned(job.number)
    assert states(ledger, KEYS[:2], "third") == [HIT, HIT]


def test_a_load_takes_only_what_is_there_up_to_the_first_gap() -> None:
    ledger = new()
    store(ledger, [KEYS[0], KEYS[2]])
    job = ledger.plan_load(ledger.request("reader"), 0, KEYS[:3])
    assert job is not None
    assert job.keys == KEYS[:1]
    assert ledger.plan_load(ledger.request("other"), 0, KEYS[1:]) is None


# -- names and events --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [b"x", b"x" * 24, bytes(24), bytes(32), b"\0" * 31 + b"\x20", b"k" * 32, b"y" * 31 + b"\x18"])
def test_a_key_can_be_told_from_its_name_in_a_file(key: bytes) -> None:
    assert len(file_key(key)) == 32
    assert engine_key(file_key(key)) == key


def test_short_keys_of_different_lengths_have_different_names() -> None:
    names = {file_key(bytes(length)) for length in range(1, 25)}
    assert len(names) == 24


def test_events_join_neighbours_of_one_kind_and_show_a_gap_where_some_were_dropped() -> None:
    log = KeyEventLog(2)
    for number in range(4):
        log.stored(number % 2, 1, b"%d" % number)
        log.stored(number % 2, 1, b"%d!" % number)
    events = log.flush()
    assert [(event.event_id, event.group, event.level, event.keys, event.is_removed) for event in events] == [
        (2, 0, 1, (b"2", b"2!"), False), (3, 1, 1, (b"3", b"3!"), False)]
    assert log.dropped == 2
    assert log.flush() == []
    log.removed(1, 2, b"x")
    assert "removed" in repr(log.flush()[0])
    for number in range(5000):
        log.stored(0, 1, b"%d" % number)
    assert [len(event.keys) for event in log.flush()] == [4096, 904]
    quiet = KeyEventLog(0)
    quiet.stored(0, 1, b"x")
    assert quiet.flush() == []


def test_slots_of_a_job_stay_the_same_while_it_runs() -> None:
    ledger = new(4, 4)
    job, _known = ledger.plan_store(ledger.request("writer"), 0, KEYS[:3], 35)
    assert job is not None
    before = [slot_of(block.index) for block in job.blocks]
    store(ledger, KEYS[5:6], "other")
    ledger.reset()
    assert [slot_of(block.index) for block in job.blocks] == before
