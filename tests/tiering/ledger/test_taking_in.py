"""Tokens that another instance has computed: what is read of them is there, what is not is never stored (4 tokens per block)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from group_run import GroupRun, cross, full, interpreted, window
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import RequestError, UnknownRequest
from kvtier.tiering.ledger.group import GroupGeometry, GroupSpec
from kvtier.tiering.ledger.invariants import verify
from kvtier.tiering.ledger.sequence import ActiveSequence
from kvtier.tiering.ledger.taking_in import mark_taken_in, needed_positions


def take_in(run: GroupRun, sequence: ActiveSequence, num_tokens: int) -> None:
    """Fill what :func:`needed_positions` names and nothing else, and say so."""
    ledger, driver = run.ledger, run.driver
    first = sequence.computed // ledger.tokens_per_block
    for row in sequence.rows:
        needed = set(needed_positions(ledger.geometries[row.group], first, num_tokens))
        for position in range(sequence.computed, num_tokens):
            number, offset = driver._place(row.group, position)
            if number in needed:
                driver._write_cell(sequence, row, 0, number, offset, position)
    mark_taken_in(ledger, sequence.id, num_tokens)
    verify(ledger)
    driver.check_sequence(sequence.id)
    run.settle()


def groups_of(kind: str) -> list[GroupSpec]:
    return {"full": [full(24, 8)], "window": [window(8, 24, 8)], "both": [window(5, 24, 8), full(24, 8)],
            "sinks": [window(8, 24, 8, sinks=4), window(12, 24, 8), full(24, 8)]}[kind]


@pytest.mark.parametrize("kind", ["full", "window", "both", "sinks"])
@pytest.mark.parametrize("num_tokens", [1, 4, 7, 8, 13, 20])
def test_what_was_taken_in_is_read_and_found_again_as_if_it_had_been_computed(kind: str, num_tokens: int) -> None:
    run = GroupRun(*groups_of(kind))
    prompt = list(range(100, 121))
    sequence = run.add(prompt)
    take_in(run, sequence, num_tokens)
    assert sequence.computed == num_tokens
    run.append(sequence, *range(1, 8))
    run.release(sequence)
    assert run.reuse([*prompt, *range(1, 9)]) == 27
    run.finish()


@pytest.mark.parametrize("kind", ["window", "sinks"])
def test_what_lies_before_the_window_is_let_go_and_never_stored(kind: str) -> None:
    run = GroupRun(*groups_of(kind))
    prompt = list(range(100, 121))
    free = run.free()
    sequence = run.add(prompt)
    take_in(run, sequence, 20)
    [row, *_others] = sequence.rows
    gone = [position for position, block in enumerate(row.blocks) if block.id < 0]
    assert gone == ([0, 1, 2] if kind == "window" else [1, 2, 3])
    assert run.free() == free - 3
    run.store(sequence)
    stored = [block for block in run.ledger.allocators[0].blocks if block.node is not None]
    assert len(stored) == 2, "the blocks that were filled"
    run.finish()


def test_behind_a_reused_prefix_only_the_rest_is_taken_in() -> None:
    run = GroupRun(*groups_of("sinks"))
    prompt = list(range(100, 121))
    run.serve(prompt[:9])
    sequence = run.add(prompt)
    assert sequence.prepopulated == 8
    take_in(run, sequence, 20)
    run.append(sequence, 1)
    run.release(sequence)
    run.finish()


@pytest.mark.parametrize("num_tokens", [-1, 7, 21, 22, True, None, 12.0])
@interpreted
def test_numbers_of_tokens_that_cannot_be_are_refused(num_tokens: Any) -> None:
    run = GroupRun(*groups_of("both"))
    run.serve(list(range(100, 109)))
    sequence = run.add(list(range(100, 121)))
    assert sequence.computed == 8
    run.refused(RequestError, lambda: mark_taken_in(run.ledger, sequence.id, num_tokens))
    with pytest.raises(UnknownRequest):
        mark_taken_in(run.ledger, 5, 8)
    run.finish()


def test_chunked_windows_take_nothing_in() -> None:
    run = GroupRun(window(8, 24), chunk_size=8)
    sequence = run.add(list(range(100, 121)))
    found = run.refused(RequestError, lambda: mark_taken_in(run.ledger, sequence.id, 8))
    assert "leave chunk_size out" in str(found)
    run.finish()


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 2), st.integers(0, 10))
def test_needed_are_the_blocks_that_the_next_token_reads(num_tokens: int, size: int, sink_blocks: int, first: int) -> None:
    sinks = 4 * sink_blocks
    if sinks >= size:
        return
    geometry = GroupGeometry(window(size, 4, sinks=sinks), 4)
    seen = {token // 4 for token in range(num_tokens) if token < sinks or token > num_tokens - (size - sinks)}
    if num_tokens % 4:
        seen.add(num_tokens // 4)  # it is about to be written
    assert needed_positions(geometry, first, num_tokens) == sorted(position for position in seen if position >= first)
    assert needed_positions(GroupGeometry(full(4), 4), first, num_tokens) == list(range(first, -(-num_tokens // 4)))


def ids(blocks: Iterable[Any]) -> list[int]:
    return [block.id for block in blocks]


def test_an_encoders_blocks_are_not_touched() -> None:
    run = GroupRun(full(24), cross(8))
    sequence = run.add(list(range(100, 121)), encoder_length=6, encoder_digest=b"\1" * 32)
    before = ids(sequence.rows[1].blocks)
    take_in(run, sequence, 8)
    assert ids(sequence.rows[1].blocks) == before
