"""Batches over several groups: who keeps a block that several requests want, who must wait for whom (two phases, all or nothing)."""

from __future__ import annotations

import pytest
from group_run import GroupRun, full, recurrent, window

from kvtier.pools.pool_index import SECONDARY, level_of
from kvtier.tiering.ledger.request import Request

GROUPS = 2


def seeded(num_tokens: int, *groups: object, **rules: object) -> GroupRun:
    run = GroupRun(*(groups or (window(8, 16), full(16))), **rules)  # type: ignore[arg-type]
    run.serve(range(num_tokens))
    return run


def batch(run: GroupRun, *prompts: list[int]) -> list[int]:
    return [sequence.prepopulated for sequence in run.add_all(*[run.request(prompt, id=number) for number, prompt in enumerate(prompts)])]


def at(run: GroupRun, request_id: int, position: int) -> list[int]:
    """The block ids of one position, by group."""
    return [run.ids(run.ledger.sequence(request_id), group)[position] for group in range(GROUPS)]


def test_case_F1_of_two_partial_matches_the_last_keeps_the_block_of_every_group() -> None:
    run = seeded(7)
    assert batch(run, [0, 1, 2, 3, 4, 10], [0, 1, 2, 3, 4, 20]) == [5, 5]
    assert at(run, 1, 1) == [1, 1]
    assert 1 not in at(run, 0, 1)
    assert {move.group for move in run.moves} == {0, 1}
    for sequence in list(run.ledger.sequences.values()):
        run.release(sequence)
    run.finish()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_case_F3_a_full_match_beats_a_partial_one_in_every_group(order: tuple[int, int]) -> None:
    run = seeded(9)
    prompts = [[*range(7), 10], list(range(9))]
    assert batch(run, *[prompts[i] for i in order]) == [[7, 8][i] for i in order]
    partial, whole = order.index(0), order.index(1)
    assert at(run, whole, 1) == [1, 1]
    assert 1 not in at(run, partial, 1)
    run.finish()


def test_case_F6_the_source_of_two_copies_is_free_after_the_second() -> None:
    run = seeded(8)
    run.serve([0, 1, 2, 3, 10, 11, 12, 13])
    assert batch(run, [0, 1, 2, 50], [0, 1, 60, 70]) == [3, 2]
    for group in range(GROUPS):
        source = run.ledger.block(0, group)
        assert source.ref_count == 0
        assert source.node is not None
        assert run.free(group) == 16 - 2
    run.finish()


def test_a_source_is_not_given_away_before_the_last_copy_was_planned() -> None:
    run = GroupRun(window(8, 5), full(5))
    run.serve(range(9))
    assert batch(run, [0, 1, 50], [0, 1, 60], [0, 1, 70]) == [2, 2, 2]
    run.finish()


def test_copies_are_given_up_where_their_source_takes_the_place_of_what_is_needed() -> None:
    """Group 0 has three blocks: two for the request and one that would be the source."""
    run = GroupRun(window(8, 2), full(16))
    run.serve([0, 1, 2, 3, 4])
    assert batch(run, [0, 1, 50, 51, 52]) == [2]
    run.finish()
    run = GroupRun(window(8, 2), full(16))
    run.serve([0, 1, 2, 3, 4, 5])  # the block has something behind it: it would have to be copied
    assert batch(run, [0, 1, 50, 51, 52]) == [0]
    run.finish()


def test_a_block_that_leads_to_a_whole_match_of_a_small_window_only_is_not_taken_over() -> None:
    run = GroupRun(window(4, 16), window(8, 16))
    run.serve(range(13))
    assert batch(run, range(13), [0, 1, 2, 3, 4, 5, 60]) == [12, 6]  # type: ignore[arg-type]
    assert 1 not in at(run, 1, 1)
    run.finish()


def test_nothing_matched_is_evicted_by_another_group_or_request_of_the_batch() -> None:
    run = GroupRun(window(8, 6, 6), full(6, 6))
    run.serve(range(9))
    run.serve(range(50, 59))
    for group in range(GROUPS):
        for block in run.ledger.allocators[group].blocks:
            if block.node is not None:
                run.ledger.offload(block.id, group)
    run.settle()
    assert batch(run, list(range(9)), list(range(50, 59))) == [8, 8]
    run.finish()


def test_a_match_counts_for_the_slowest_level_of_its_groups() -> None:
    run = GroupRun(window(8, 8, 8), full(8, 8))
    run.serve(range(9))
    run.ledger.offload(1, 0)
    run.settle()
    assert level_of(run.ledger.block(1, 0).index) == SECONDARY
    sequence = run.add(range(9))
    assert sequence.origin_levels == [0, 1]
    assert run.compute(sequence)
    assert run.ledger.counters.hit_tokens == [4, 4, 0]
    run.finish()


def test_two_requests_resume_from_one_snapshot_in_one_batch() -> None:
    run = GroupRun(recurrent(8, 16), full(16))
    run.serve(range(17))
    assert batch(run, [*range(16), 50], [*range(16), 60, 61, 62, 63, 64]) == [16, 16]
    for number in range(2):
        run.append(run.ledger.sequence(number), *range(9))
    run.finish()


def test_a_batch_that_does_not_fit_in_one_group_admits_nobody() -> None:
    run = GroupRun(window(8, 16), full(5))
    run.serve(range(9))
    requests = [run.request(range(9)), run.request(range(20, 30)), run.request(range(40, 50))]
    error = run.no_room(lambda: run.ledger.add_sequences(requests))
    assert "group 1" in str(error)
    assert run.ledger.sequences == {}
    run.add_all(*requests[:1])
    run.finish()


# -- whom to pre-empt when several groups are short ------------------------------------------------------------------------


def test_the_group_that_misses_most_is_named_and_the_end_of_the_named_requests_is_enough_for_all() -> None:
    run = GroupRun(window(8, 12), full(9))
    for number in range(3):
        run.add(range(number * 20, number * 20 + 9), id=number)
    assert (run.free(0), run.free(1)) == (3, 0)
    request = Request(9, range(100, 117))
    error = run.no_room(lambda: run.ledger.add_sequences([request]))
    assert "group 1" in str(error)
    assert (error.needed, error.available) == (5, 0)
    assert error.preempt == (2, 1)
    run.drop(run.ledger.sequence(2))
    run.no_room(lambda: run.ledger.add_sequences([request]))
    run.drop(run.ledger.sequence(1))
    run.add_all(request)
    run.finish()


def test_who_holds_much_in_the_wrong_group_is_no_help() -> None:
    """Sequence 2 has left most of its blocks of group 0 behind: only the end of sequence 1 helps there."""
    run = GroupRun(window(4, 8), full(24))
    run.add(range(20), id=1)
    second = run.add(range(100, 109), id=2)
    run.append(second, *range(8))
    assert run.free(0) == 8 - 5 - 1 - (1 if len(run.real_ids(second, 0)) > 1 else 0)
    error = run.no_room(lambda: run.ledger.add_sequences([Request(9, range(200, 220))]))
    assert "group 0" in str(error)
    assert error.preempt == (2, 1)
    run.drop(*list(run.ledger.sequences.values()))
    run.add_all(Request(9, range(200, 220)))
    run.finish()


def test_what_can_never_fit_in_one_group_names_nobody() -> None:
    run = GroupRun(window(8, 3), full(24))
    run.add([1], id=1)
    error = run.no_room(lambda: run.ledger.add_sequences([Request(9, range(20))]))
    assert "group 0" in str(error)
    assert "enlarge primary" in str(error)
    assert error.preempt == ()
    run.finish()
