"""How long a request's retention lasts on the ledger: levels by name, durations, and moments (4 tokens per block)."""

from __future__ import annotations

import pytest
from group_run import GroupRun, full, window
from hand_run import HandRun, level

from kvtier.errors import RequestError
from kvtier.policies.retention import RetentionConfig, RetentionLevel, TokenRange
from kvtier.pools.pool_index import PRIMARY, SECONDARY

START = 1_000_000.0  # wall clock when the clock of releases reads 0


def until(moment: float | None, priority: int | str = 80) -> RetentionConfig:
    return RetentionConfig([TokenRange(0, None, priority, expires_at=moment)])


def at_wall_clock(run: GroupRun) -> GroupRun:
    for allocator in run.ledger.allocators:
        allocator.wall_clock_offset = START
    return run


def priorities(run: GroupRun, group: int = 0) -> list[int]:
    return [block.priority for block in run.ledger.allocators[group].blocks if block.node is not None]


def test_a_block_falls_at_its_moment_whenever_it_was_released() -> None:
    run = at_wall_clock(GroupRun(full(16), window(8, 16)))
    run.ledger.refresh(90.0)
    run.serve(range(9), retention=until(START + 100.0))
    run.ledger.refresh(99.0)
    assert (priorities(run, 0), priorities(run, 1)) == ([80, 80], [80, 80])
    run.ledger.refresh(100.0)
    run.check()
    assert (priorities(run, 0), priorities(run, 1)) == ([35, 35], [35, 35])


def test_using_a_block_again_moves_a_duration_and_no_moment() -> None:
    for retention, falls in ((until(START + 100.0), True), (RetentionConfig([TokenRange(0, None, 80, duration_seconds=100.0)]), False)):
        run = at_wall_clock(GroupRun(full(16)))
        run.serve(range(9), retention=retention)
        run.ledger.refresh(60.0)
        run.drop(run.add(range(9), retention=retention))
        run.ledger.refresh(110.0)
        assert (priorities(run) == [35, 35]) is falls


def test_a_moment_stays_when_a_request_without_a_wish_uses_the_block_and_goes_when_one_has_another() -> None:
    for retention, expected in ((None, 35), (RetentionConfig([TokenRange(0, None, 60)]), 60), (until(START + 300.0, 60), 60)):
        run = at_wall_clock(GroupRun(full(16)))
        run.serve(range(9), retention=until(START + 100.0))
        run.drop(run.add(range(9), retention=retention))
        run.ledger.refresh(100.0)
        run.check()
        assert priorities(run) == [expected] * 2


def test_a_block_that_leaves_the_window_keeps_its_moment() -> None:
    run = at_wall_clock(GroupRun(window(8, 16)))
    sequence = run.add(range(9), retention=until(START + 100.0))
    run.store(sequence)
    run.append(sequence, *range(12))
    run.ledger.refresh(100.0)
    assert priorities(run) == [35] * 4, "two of the prompt, and two that were generated and stored as they left the window"
    run.finish()


def test_a_moment_that_has_passed_ends_with_the_next_refresh() -> None:
    run = at_wall_clock(GroupRun(full(16)))
    run.ledger.refresh(50.0)
    run.serve(range(9), retention=until(START - 100.0))
    assert priorities(run) == [80, 80]
    run.ledger.refresh(50.0)
    assert priorities(run) == [35, 35]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_partial_match_takes_the_moment_over(in_place: bool) -> None:
    run = at_wall_clock(GroupRun(full(16)))
    run.serve(range(5 if in_place else 9), retention=until(START + 100.0))
    run.serve([0, 1, 50, 51, 52])
    run.ledger.refresh(100.0)
    assert set(priorities(run)) == {35}


def test_a_moment_reaches_the_rows_of_nvme_like_a_duration_does() -> None:
    for retention, expiry in ((until(START + 100.0), START + 100.0),
                              (RetentionConfig([TokenRange(0, None, 80, duration_seconds=30.0)]), START + 30.0)):
        run = HandRun(6, 2, 4)
        run.ledger.allocators[0].wall_clock_offset = START
        [block] = run.serve("a", retention=retention)
        run.offload(block)
        run.settle()
        run.ledger.write_everything_out()
        run.settle()
        assert [pair for slot, pair in run.tier.row_retention.items() if slot in run.tier.rows] == [(80, expiry)]
        run.refresh(100.0)
        assert block.priority == 35
        run.finish()


# -- levels by name --------------------------------------------------------------------------------------------------------


def test_low_goes_first_is_never_offloaded_and_high_goes_last() -> None:
    run = HandRun(4, 4)
    [low] = run.serve("a", retention=RetentionConfig([TokenRange(0, None, "LOW")]))
    [high] = run.serve("b", retention=RetentionConfig([TokenRange(0, None, RetentionLevel.HIGH)]))
    [medium] = run.serve("c", retention=RetentionConfig([TokenRange(0, None, "MEDIUM")]))
    first = run.add([1] * 8)
    assert low.node is None
    assert [level(block) for block in (medium, high)] == [PRIMARY, PRIMARY]
    assert run.content(SECONDARY) == []
    run.add([2])
    assert (level(medium), level(high)) == (SECONDARY, PRIMARY)
    run.remove(first, store=False)
    run.finish()


def test_a_blocks_priority_may_be_set_by_name() -> None:
    run = HandRun(4)
    [block] = run.serve("a")
    run.ledger.set_priority(block.id, "HIGH")
    assert block.priority == RetentionLevel.HIGH
    run.refused(RequestError, lambda: run.ledger.set_priority(block.id, "TOP"))
    run.finish()
