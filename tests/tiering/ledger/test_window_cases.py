"""Known answers for sliding windows and several groups, at the ledger's own door, bytes included (4 tokens per block, window 8)."""

from __future__ import annotations

import pytest
from group_run import GroupRun, window

from kvtier.errors import CapacityError
from kvtier.pools.pool_index import PRIMARY
from kvtier.pools.sequence_blocks import blocks_per_sequence
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.events import Created, Stored
from kvtier.tiering.ledger.group import WINDOW, GroupSpec
from kvtier.tiering.ledger.invariants import verify
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.scheduling import WhatIf, num_schedulable_blocks
from kvtier.tiering.ledger.sequence import ActiveSequence

A = range(1000, 1011)


def with_a(primary: int) -> tuple[GroupRun, ActiveSequence]:
    """11 tokens, stored, and one more: the twelfth no longer reads the first block."""
    run = GroupRun(window(8, primary))
    sequence = run.add(A)
    run.store(sequence)
    run.append(sequence, 1011)
    return run, sequence


def all_ids(run: GroupRun, sequence: ActiveSequence, beam: int = 0) -> list[int]:
    """By position; those that have left the window too."""
    row = sequence.rows[0]
    departed = row.departed_ids[beam] if row.departed_ids else []
    return departed + run.ids(sequence, 0, beam)[len(departed):]


# -- I: sliding windows ------------------------------------------------------------------------------------------------


def test_case_I1_a_block_out_of_the_window_is_found_again_after_the_release() -> None:
    run, sequence = with_a(8)
    assert run.ids(sequence)[0] < 0
    run.release(sequence)
    again = run.add(range(1000, 1004))
    assert again.prepopulated == 3
    run.drop(again)
    assert run.free() == 8


def test_case_I2_a_block_out_of_the_window_is_found_while_its_sequence_goes_on() -> None:
    run, sequence = with_a(10)
    run.append(sequence, 1012)
    run.store(sequence)
    assert run.add(range(1000, 1004)).prepopulated == 3
    run.finish()


def test_case_I3_a_block_out_of_the_window_is_free_to_be_taken() -> None:
    run, sequence = with_a(4)
    assert run.free() == 2
    other = run.add(range(2000, 2008))
    assert run.ids(other) == [3, 0], "an empty block first, then the one that nobody reads"
    run.release(sequence, other)
    assert run.free() == 4
    assert run.add(range(2000, 2008)).prepopulated > 0
    run.finish()


def test_case_I7_a_what_if_passes_over_what_has_left_the_window() -> None:
    run, sequence = with_a(5)
    what_if = WhatIf(1)
    assert what_if.remove(run.ledger, sequence) == 2
    assert num_schedulable_blocks(run.ledger, what_if, 0) == 5
    assert run.free() == 3, "the real counts are untouched"
    run.drop(sequence)
    assert run.free() == 5


def test_case_I9_what_is_stored_and_pinned_outlives_its_sequence() -> None:
    run = GroupRun(window(8, 6))
    first = run.add(A)
    run.store(first)
    run.drop(first)
    again = run.add(A)
    assert run.compute(again)
    lease = run.ledger.store_and_pin(again.id)
    assert len({block.id for block in lease.rows[0]}) == 3
    run.drop(again)
    assert run.free() == 3
    run.ledger.release_lease(lease)
    run.settle()
    assert run.free() == 6


def test_case_I12_a_window_smaller_than_a_block() -> None:
    run = GroupRun(window(3, 16), enable_block_reuse=False)
    sequence = run.add([1, 2])
    assert all_ids(run, sequence) == [0]
    for num_tokens, expected in ((4, [0]), (5, [0, 1]), (7, [0, 1]), (9, [0, 1, 2])):
        run.append(sequence, *range(sequence.num_tokens, num_tokens))
        assert all_ids(run, sequence) == expected, num_tokens
    run.release(sequence)
    assert run.free() == 16


def test_case_I15_a_shared_head_with_two_suffixes() -> None:
    run = GroupRun(window(8, 12))
    head = [1, 2, 3, 4, 5, 6]
    run.serve([*head, 10, 11, 12])
    run.serve([*head, 20, 21, 22])
    for _ in range(2):
        assert run.serve([*head, 10, 11, 12]) > 0
    assert run.free() == 12
    run.finish()


# -- H: events of several groups ---------------------------------------------------------------------------------------


def test_case_H5_created_ascends_and_stored_descends_with_the_window() -> None:
    run = GroupRun(window(12, 4, 2), window(16, 8, 2))
    assert [(group, data.num_blocks_per_level) for group, data in run.events() if isinstance(data, Created)] == [(0, (4, 2)), (1, (8, 2))]
    sequence = run.add(range(8))
    run.store(sequence)
    assert [(group, len(data.blocks)) for group, data in run.events() if isinstance(data, Stored)] == [(1, 1), (0, 1)]
    run.finish()


# -- J: accounting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "sinks", "size", "blocks"), [
    (512, 0, 1024, 8), (513, 0, 1024, 9), (512, 0, 256, 5), (512, 0, 257, 6), (512, 64, 1024, 8), (513, 64, 1024, 9), (512, 64, 256, 5),
    (512, 64, 257, 6), (512, 65, 1024, 9), (513, 65, 1024, 9), (512, 65, 256, 6), (512, 65, 257, 6),
])
def test_case_J1_blocks_of_one_beam(num_tokens: int, sinks: int, size: int, blocks: int) -> None:
    assert blocks_per_sequence(num_tokens, sinks, size, 64) == blocks


def ledger_of(primary: int, tokens_per_block: int, size: int, chunk: int = 0, reuse: bool = True) -> Ledger:
    return Ledger([GroupSpec((primary, 0, 0), WINDOW, window=size)], tokens_per_block,
                  LedgerRules(chunk_size=chunk, enable_block_reuse=reuse))


def test_case_J2_remaining_blocks_with_a_window_and_prefill_in_one_chunk() -> None:
    ledger = ledger_of(40, 64, 128, 16384)
    assert capacity.remaining_blocks_to_completion(ledger, Request(1, range(1024), max_new_tokens=128)) == 18


@pytest.mark.parametrize(("prompt", "blocks"), [(136, 9), (512, 32), (1024, 64)])
def test_case_J3_the_whole_prompt_has_blocks_before_anything_leaves_the_window(prompt: int, blocks: int) -> None:
    ledger = ledger_of(80, 16, 512)
    assert capacity.needed_blocks_one_step(ledger, Request(1, range(prompt), max_new_tokens=1), False) == blocks


@pytest.mark.parametrize(("prompt", "generated", "draft", "two_steps", "blocks"), [
    (512, 0, 0, False, 1), (512, 8, 0, False, 0), (518, 0, 0, False, 0), (512, 16, 0, False, 1), (128, 15, 0, False, 0),
    (128, 15, 0, True, 1), (302, 0, 3, False, 1), (298, 0, 3, False, 0),
])
def test_case_J3_a_generating_sequence(prompt: int, generated: int, draft: int, two_steps: bool, blocks: int) -> None:
    ledger = ledger_of(80, 16, 512)
    [sequence] = ledger.add_sequences([Request(1, range(prompt), max_new_tokens=1000, num_draft_tokens=draft)])
    for token in range(generated):
        ledger.append_step([1], [[token]])
    assert capacity.needed_blocks_one_step(ledger, sequence, two_steps) == blocks


LENGTHS = [(128, 128), (256, 128), (500, 100), (5250, 500), (5000, 500), (500, 5000), (2048, 2048), (2049, 2048), (2047, 2048),
           (1025, 1023), (2047, 32), (1988, 32)]


def fill_and_complete(tokens_per_block: int, size: int, prompt: int, output: int, in_parallel: bool, chunk: int) -> None:
    """Admit while free blocks cover what remains to completion; then generate everything, side by side or one after the other."""
    primary = 12000 // tokens_per_block
    ledger = ledger_of(primary, tokens_per_block, size, chunk)
    active: list[ActiveSequence] = []
    promised = 0
    for number in range(3):
        request = Request(number, range(number * 7, number * 7 + prompt), max_new_tokens=output)
        promised += capacity.remaining_blocks_to_completion(ledger, request)
        if promised > primary:
            break
        active.extend(ledger.add_sequences([request]))
    assert active
    if in_parallel:
        ids = [sequence.id for sequence in active]
        for token in range(output):
            ledger.append_step(ids, [[token]] * len(ids))
    for sequence in active:
        while sequence.num_tokens < prompt + output:
            ledger.append_step([sequence.id], [[sequence.num_tokens]])
        ledger.remove_sequence(sequence.id, True)
    verify(ledger)
    assert ledger.allocators[0].queues.num_free(PRIMARY) == primary


@pytest.mark.parametrize("chunk", [0, 16384])
@pytest.mark.parametrize("in_parallel", [True, False])
@pytest.mark.parametrize(("tokens_per_block", "size", "lengths"), [
    (1, 128, (128, 128)), (64, 128, (256, 128)), (64, 128, (500, 100)), (64, 2048, (5250, 500)), (64, 4096, (5000, 500)),
    (64, 128, (500, 5000)), (64, 2048, (2048, 2048)), (64, 2048, (2049, 2048)), (64, 2048, (2047, 2048)), (64, 128, (1025, 1023)),
    (1, 2048, (2047, 32)), (64, 2048, (1988, 32)),
])
def test_case_J5_what_was_admitted_by_remaining_blocks_completes(tokens_per_block: int, size: int, lengths: tuple[int, int],
                                                                 in_parallel: bool, chunk: int) -> None:
    fill_and_complete(tokens_per_block, size, *lengths, in_parallel, chunk)


@pytest.mark.slow
@pytest.mark.parametrize("in_parallel", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("size", [128, 2048, 4096])
@pytest.mark.parametrize("tokens_per_block", [1, 64])
def test_case_J5_in_full(tokens_per_block: int, size: int, lengths: tuple[int, int], in_parallel: bool) -> None:
    fill_and_complete(tokens_per_block, size, *lengths, in_parallel, 0)


def test_a_sequence_that_only_just_fits_generates_within_its_window_for_ever() -> None:
    run = GroupRun(window(8, 3), enable_block_reuse=False)
    sequence = run.add(range(8))
    run.append(sequence, *range(8, 60))
    assert run.free() <= 1
    with pytest.raises(CapacityError):
        run.ledger.add_sequences([Request(1, range(8))])
    run.finish()
