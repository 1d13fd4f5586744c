"""Rules of sliding windows and of several groups of layers (4 tokens per block): what leaves, what stays, what is found again."""

from __future__ import annotations

from typing import Any

import pytest
from group_run import GroupRun, full, window

from kvtier.errors import ConfigError, RequestError
from kvtier.policies.retention import RetentionConfig, TokenRange
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.sequence import ActiveSequence


def prompt(num_blocks: int, start: int = 1000) -> list[int]:
    """Full blocks and one token more, which is never stored. Block ``i`` starts with token ``start + 4 * i``."""
    return list(range(start, start + 4 * num_blocks + 1))


def placeholders(run: GroupRun, sequence: ActiveSequence, group: int = 0) -> list[int]:
    return [position for position, block_id in enumerate(run.ids(sequence, group)) if block_id < 0]


# -- leaving the window ------------------------------------------------------------------------------------------------


def test_a_block_that_leaves_the_window_becomes_a_placeholder_and_stays_reusable() -> None:
    run = GroupRun(window(8, 16))
    sequence = run.add(prompt(3))
    run.store(sequence)
    [head, *_rest] = run.ids(sequence)
    run.append(sequence, 1, 2, 3)
    assert placeholders(run, sequence) == [0, 1]
    assert run.ledger.block(head).ref_count == 0
    assert run.ledger.block(head).node is not None
    assert run.reuse(prompt(1)) == 4
    run.finish()


def test_what_leaves_the_window_is_stored_before_though_nobody_asked_for_it() -> None:
    run = GroupRun(window(8, 16))
    sequence = run.add(prompt(3))
    run.append(sequence, 1, 2, 3)
    assert placeholders(run, sequence) == [0, 1]
    assert run.free() == 16 - 2
    run.release(sequence)
    assert run.reuse(prompt(1)) == 4
    assert run.reuse(prompt(3)) == 12
    assert run.reuse([*prompt(3), 1, 2, 3]) == 15
    run.finish()


def test_a_long_answer_behind_a_window_is_reusable_as_a_whole_without_store_context() -> None:
    run = GroupRun(window(8, 24), full(24))
    sequence = run.add(prompt(2))
    answer = list(range(30))
    run.append(sequence, *answer)
    assert len(placeholders(run, sequence)) == 7
    run.release(sequence)
    whole = [*prompt(2), *answer]
    assert run.reuse(whole) == 38
    for num_tokens in range(4, 38, 4):
        assert run.reuse(whole[:num_tokens + 1]) == num_tokens, "each block of the window group is there, not only the last ones"
    run.finish()


def test_an_append_counts_what_comes_before_it_as_computed_when_it_stores() -> None:
    """An engine that never calls mark_computed: the first append says that the whole prompt has been computed."""
    run = GroupRun(window(8, 16))
    sequence = run.add(prompt(4))
    run.driver._write(sequence, 0, 17)
    run.driver.append_step([sequence.id], [[1]])
    run.check()
    assert capacity.match(run.ledger, run.request(prompt(4))).reusable_blocks == 4
    run.drop(sequence)
    run.finish()


@pytest.mark.parametrize(("keywords", "rules"), [({"skip_write": True}, {}), ({}, {"enable_block_reuse": False})])
def test_a_block_that_leaves_the_window_and_may_not_be_stored_is_given_back_empty(keywords: dict[str, Any], rules: dict[str, Any]) -> None:
    run = GroupRun(window(8, 16), **rules)
    sequence = run.add(prompt(3), **keywords)
    run.append(sequence, 1, 2, 3)
    assert placeholders(run, sequence) == [0, 1]
    assert run.free() == 16 - 2
    assert not any(block.has_content for block in run.ledger.allocators[0].blocks)
    run.release(sequence)
    assert run.reuse(prompt(3)) == 0
    run.finish()


def test_the_whole_prompt_has_blocks_until_the_first_token_is_generated() -> None:
    run = GroupRun(window(8, 16))
    sequence = run.add(prompt(6))
    assert placeholders(run, sequence) == []
    assert run.compute(sequence)
    run.append(sequence, 1)
    assert placeholders(run, sequence) == [0, 1, 2, 3]
    run.finish()


def test_several_tokens_at_once_keep_what_the_first_of_them_reads() -> None:
    run = GroupRun(window(8, 16))
    sequence = run.add(prompt(2))
    run.append(sequence, range(8))
    assert placeholders(run, sequence) == []
    run.append(sequence, 1)
    assert placeholders(run, sequence) == [0, 1]
    run.finish()


def test_each_group_has_its_own_window() -> None:
    run = GroupRun(window(4, 16), window(8, 16), full(16))
    sequence = run.add(prompt(3))
    run.append(sequence, 1, 2, 3)
    assert [placeholders(run, sequence, group) for group in range(3)] == [[0, 1, 2], [0, 1], []]
    run.finish()


def test_a_shared_block_that_leaves_one_sequences_window_stays_with_the_other() -> None:
    run = GroupRun(window(8, 16))
    run.serve(prompt(2))
    one, two = run.add_all(run.request(prompt(2)), run.request(prompt(2)))
    head = run.ledger.block(run.ids(one)[0])
    assert head.ref_count == 2
    run.append(one, 1, 2, 3)
    assert (placeholders(run, one), placeholders(run, two)) == ([0], [])
    assert head.ref_count == 1
    run.append(two, 1, 2, 3)
    assert head.ref_count == 0
    run.finish()


def test_a_block_that_leaves_keeps_its_priority_and_loses_its_duration() -> None:
    run = GroupRun(window(8, 16))
    sequence = run.add(prompt(3), retention=RetentionConfig([TokenRange(0, None, 80, 5.0)]))
    run.store(sequence)
    head = run.ledger.block(run.ids(sequence)[0])
    run.append(sequence, 1, 2, 3)
    run.ledger.refresh(100.0)
    run.check()
    assert head.priority == 80
    run.finish()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_batch_may_use_the_blocks_that_leave_the_windows_of_the_same_batch(order: tuple[int, int]) -> None:
    run = GroupRun(window(6, 5), enable_block_reuse=False)
    grows = run.add(range(8))  # its next token starts a block
    leaves = run.add(range(100, 109))  # its next token leaves a block behind, and needs none
    assert run.free() == 0
    both = [grows, leaves]
    run.append_all([both[i] for i in order], [[1], [2]])
    assert (placeholders(run, grows), placeholders(run, leaves)) == ([], [0])
    assert run.free() == 0
    run.finish()


# -- sinks -------------------------------------------------------------------------------------------------------------


def test_sinks_stay_when_the_window_moves_on() -> None:
    run = GroupRun(window(12, 16, sinks=4))
    sequence = run.add(prompt(4))
    run.append(sequence, *range(20))
    assert placeholders(run, sequence) == list(range(1, 7))
    assert run.ids(sequence)[0] >= 0
    run.finish()


def test_sinks_that_do_not_fill_their_last_block_push_the_rest_to_the_next_one() -> None:
    run = GroupRun(window(12, 16, sinks=5))
    sequence = run.add(range(6))
    assert len(run.ids(sequence)) == 3, "five sinks in two blocks, and the sixth token behind them"
    run.append(sequence, *range(30))
    assert run.ids(sequence)[0] >= 0
    assert run.ids(sequence)[1] >= 0
    assert placeholders(run, sequence)[0] == 2
    run.finish()


def test_the_bubble_behind_sinks_turns_reuse_off() -> None:
    run = GroupRun(window(12, 16, sinks=5), full(16))
    run.serve(prompt(3))
    assert run.reuse(prompt(3)) == 0
    assert run.ledger.tree.num_nodes() == 0
    run.finish()


def test_sinks_that_fill_their_blocks_are_reused() -> None:
    run = GroupRun(window(12, 16, sinks=4))
    run.serve(prompt(6))
    again = run.add(prompt(6))
    assert again.prepopulated == 24
    assert placeholders(run, again) == [1, 2, 3], "the sinks, and eight tokens"
    run.finish()


def test_a_prefix_without_its_sinks_is_no_prefix() -> None:
    run = GroupRun(window(12, 16, sinks=4))
    run.serve(prompt(6))
    run.evict(0, 1000)
    assert run.reuse(prompt(6)) == 0
    run.finish()


@pytest.mark.parametrize("sinks", [8, 9])
def test_a_window_holds_more_than_its_sinks(sinks: int) -> None:
    with pytest.raises(ConfigError, match="fewer than the window"):
        window(8, 4, sinks=sinks)


# -- what is found again -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("missing", "expected"), [
    ((1000,), 20),             # the five blocks end 20 tokens in, and read from token 12 on
    ((1000, 1004, 1008), 20),
    ((1012,), 12),             # inside: down to 12, which reads from token 4 on
    ((1016,), 16),
    ((1000, 1016), 16),
    ((1004, 1016), 16),
    ((1008, 1016), 4 + 4),     # 16 reads block 2, 12 ends with it, 8 is whole
])
def test_the_longest_prefix_whose_holes_nobody_reads_any_more_is_reused(missing: tuple[int, ...], expected: int) -> None:
    run = GroupRun(window(8, 16))
    run.serve(prompt(5))
    run.evict(0, *missing)
    assert run.reuse(prompt(5)) == expected
    run.finish()


def test_only_the_blocks_inside_the_window_are_held_again() -> None:
    run = GroupRun(window(8, 16))
    run.serve(prompt(5))
    again = run.add(prompt(5))
    assert placeholders(run, again) == [0, 1, 2]
    assert run.free() == 16 - 3
    run.release(again)
    assert run.reuse(prompt(5)) == 20
    run.finish()


def test_a_block_that_somebody_took_does_not_end_a_prefix_that_no_longer_reads_it() -> None:
    run = GroupRun(window(8, 6))
    sequence = run.add(prompt(4))
    run.store(sequence)
    head = run.ids(sequence)[0]
    run.append(sequence, 1)
    run.release(sequence)
    other = run.add([1, 2, 3, 4, 5])
    assert head in run.ids(other)
    run.drop(other)
    assert run.reuse(prompt(4)) == 16
    assert run.reuse(prompt(1)) == 0
    run.finish()


@pytest.mark.parametrize(("group", "missing", "expected"), [(1, 1008, 8), (1, 1000, 0), (0, 1000, 16), (0, 1012, 12), (0, 1008, 8)])
def test_the_group_that_has_least_decides(group: int, missing: int, expected: int) -> None:
    run = GroupRun(window(8, 16), full(16))
    run.serve(prompt(4))
    run.evict(group, missing)
    again = run.add(prompt(4))
    assert again.prepopulated == expected
    assert capacity.match(run.ledger, run.request(prompt(4))).reusable_tokens == expected
    run.finish()


def test_two_groups_may_cut_each_other_down_in_turns() -> None:
    """Window 8 cuts to 16 because of its last block, full attention to 12, and window 4 lacks what ends there."""
    run = GroupRun(window(4, 16), window(8, 16), full(16))
    run.serve(prompt(5))
    run.evict(1, 1016)
    run.evict(2, 1012)
    run.evict(0, 1008)
    assert run.reuse(prompt(5)) == 8
    run.finish()


def test_a_hole_is_filled_by_the_next_request_that_computes_it() -> None:
    run = GroupRun(window(8, 16), full(16))
    run.serve(prompt(4))
    run.evict(1, 1004)
    assert run.serve(prompt(4)) == 4
    assert run.reuse(prompt(4)) == 16
    run.finish()


def test_what_is_evicted_outside_of_the_window_leaves_a_hole_for_the_group_alone() -> None:
    run = GroupRun(window(8, 16), full(16))
    sequence = run.add(prompt(3))
    run.append(sequence, 1, 2, 3, 4)
    run.release(sequence)
    run.evict(0, 1000)
    assert run.reuse(prompt(1)) == 0
    assert run.reuse([*prompt(3), 1, 2, 3, 9]) == 16
    run.finish()


def test_where_nothing_but_placeholders_would_be_stored_the_tree_stays_as_it_is() -> None:
    run = GroupRun(window(3, 16))
    sequence = run.add(range(12))
    assert run.compute(sequence, 11)
    run.append(sequence, 12)
    assert placeholders(run, sequence) == [0, 1]
    run.driver.store_context(sequence.id)
    run.check()
    run.finish()


def test_every_group_stores_its_part_of_a_partial_tail() -> None:
    run = GroupRun(window(8, 16), full(16))
    run.serve(range(1000, 1011))
    assert run.reuse(range(1000, 1011)) == 10
    run.finish()


# -- partial matches in several groups -----------------------------------------------------------------------------------


def test_a_partial_match_needs_its_block_in_every_group() -> None:
    run = GroupRun(window(8, 16), full(16))
    run.serve(prompt(2))
    run.evict(0, 1004)
    assert run.reuse([*prompt(2)[:6], 9, 9]) == 4
    run.finish()


def test_a_free_leaf_is_taken_over_in_every_group() -> None:
    run = GroupRun(window(8, 16), full(16))
    run.serve(prompt(2))
    again = run.add([*prompt(2)[:6], 9, 9, 9])
    assert again.prepopulated == 6
    assert [run.ids(again, group)[1] for group in (0, 1)] == [1, 1]
    run.finish()


def test_a_block_that_is_held_in_one_group_is_copied_in_all() -> None:
    run = GroupRun(window(4, 16), full(16))
    holder = run.add(prompt(2))
    run.store(holder)
    run.append(holder, 1, 2, 3)  # the first group has left both blocks behind, the second holds them
    assert [len(placeholders(run, holder, group)) for group in (0, 1)] == [2, 0]
    again = run.add([*prompt(2)[:6], 9, 9, 9])
    assert again.prepopulated == 6
    for group in (0, 1):
        assert run.ids(again, group)[1] != 1
    assert run.compute(again)
    run.finish()


def test_what_one_group_stored_behind_a_block_makes_it_no_leaf_for_the_others() -> None:
    run = GroupRun(window(4, 16), full(16))
    run.serve(prompt(3))
    run.evict(0, 1008)  # now only full attention has something behind block 1
    again = run.add([*prompt(2)[:6], 9, 9, 9])
    assert again.prepopulated == 6
    assert run.ids(again, 0)[1] != 1, "copied"
    run.drop(again)
    run.evict(1, 1008)
    again = run.add([*prompt(2)[:6], 9, 9, 9])
    assert run.ids(again, 0)[1] == 1, "taken over"
    run.finish()


# -- rewind --------------------------------------------------------------------------------------------------------------


def test_drafts_of_the_last_step_can_always_be_taken_back() -> None:
    run = GroupRun(window(8, 16), full(16))
    sequence = run.add(prompt(3))
    for step in range(6):
        run.append(sequence, range(step, step + 5))
        run.rewind(sequence, 4)
    run.finish()


def test_a_rewind_past_a_window_that_has_moved_on_is_refused_and_says_how_far_it_may_go() -> None:
    run = GroupRun(window(8, 16), full(16))
    sequence = run.add(prompt(3))
    run.append(sequence, *range(10))  # 23 tokens: the newest reads from token 15 on
    error = run.refused(RequestError, lambda: run.ledger.rewind(sequence.id, 5))
    assert "at most 4 tokens" in str(error)
    run.rewind(sequence, 4)
    run.append(sequence, *range(10))
    run.finish()


def test_a_rewind_to_where_a_window_of_one_token_holds_nothing_goes_on() -> None:
    run = GroupRun(window(1, 16), full(16))
    sequence = run.add(range(6))
    run.append(sequence, 1, 2, 3)
    run.rewind(sequence, 1)
    run.append(sequence, 4, 5)
    run.finish()
