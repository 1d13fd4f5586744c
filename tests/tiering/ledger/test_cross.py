"""Rules of cross-attention: written once, shared by all beams, never stored; and the encoder's input as part of every key."""

from __future__ import annotations

import hashlib

import pytest
from group_run import GroupRun, cross, full, recurrent, window

from kvtier.errors import RequestError
from kvtier.tiering.ledger import capacity, scheduling
from kvtier.tiering.ledger.key import Namespace

SOUND = hashlib.sha256(b"a sound").digest()
OTHER = hashlib.sha256(b"another sound").digest()


def test_the_encoders_blocks_are_there_from_the_start_and_never_grow() -> None:
    run = GroupRun(full(24), cross(8))
    sequence = run.add(range(6), encoder_length=9)
    before = run.ids(sequence, 1)
    assert len(before) == 3
    run.append(sequence, *range(20))
    assert run.ids(sequence, 1) == before
    assert run.free(1) == 8 - 3
    run.release(sequence)
    assert run.free(1) == 8
    run.finish()


def test_the_encoders_blocks_are_neither_stored_nor_reused() -> None:
    run = GroupRun(full(24), cross(8))
    for _ in range(2):
        run.serve(range(9), encoder_length=9, encoder_digest=SOUND)
    assert all(block.node is None for block in run.ledger.allocators[1].blocks)
    sequence = run.add(range(9), encoder_length=9, encoder_digest=SOUND)
    assert sequence.prepopulated == 8, "what the decoder stored is reused; the encoder runs again"
    assert run.free(1) == 8 - 3
    run.finish()


def test_the_same_prompt_behind_another_encoder_input_is_another_prompt() -> None:
    run = GroupRun(full(24), cross(8))
    run.serve(range(9), encoder_length=9, encoder_digest=SOUND)
    assert run.reuse(range(9), encoder_length=9, encoder_digest=OTHER) == 0
    assert capacity.match(run.ledger, run.request(range(9), encoder_length=9, encoder_digest=OTHER)).reusable_blocks == 0
    assert run.reuse(range(9), encoder_length=9, encoder_digest=SOUND) == 8
    seeds = {Namespace(b"", run.request(range(9), encoder_length=9, encoder_digest=digest)).chain_seed for digest in (SOUND, OTHER)}
    assert len(seeds | {Namespace(b"", run.request(range(9), encoder_length=9)).chain_seed}) == 3
    run.finish()


@pytest.mark.parametrize("decoder", [full(24), window(8, 24), recurrent(8, 24)])
def test_without_a_digest_of_the_encoders_input_nothing_is_matched_or_stored(decoder: object) -> None:
    run = GroupRun(decoder, cross(8))  # type: ignore[arg-type]
    run.serve(range(9), 1, 2, 3, encoder_length=9)
    assert run.ledger.tree.num_nodes() == 0
    run.serve(range(9), encoder_length=9, encoder_digest=SOUND)
    assert run.reuse(range(9), encoder_length=9) == 0
    run.finish()


def test_all_beams_read_the_same_encoder_blocks() -> None:
    run = GroupRun(full(24), cross(8))
    sequence = run.add(range(6), encoder_length=9, beam_width=3)
    run.append(sequence, (1, 2, 3))
    run.reorder(sequence, (1, 1, 0))
    run.append(sequence, (1, 2, 3))
    assert len({tuple(run.ids(sequence, 1, beam)) for beam in range(3)}) == 1
    assert run.free(1) == 8 - 3
    assert run.ledger.block(run.ids(sequence, 1)[0], 1).ref_count == 3
    run.finish()


def test_a_rewind_leaves_the_encoders_blocks_alone() -> None:
    run = GroupRun(full(24), cross(8))
    sequence = run.add(range(6), encoder_length=9)
    run.append(sequence, 1, 2, 3, 4)
    run.rewind(sequence, 4)
    assert len(run.ids(sequence, 1)) == 3
    run.append(sequence, 1)
    run.finish()


def test_a_pin_holds_the_encoders_blocks_too() -> None:
    run = GroupRun(full(24), cross(8))
    sequence = run.add(range(6), encoder_length=9, beam_width=2)
    lease = run.ledger.pin(sequence.id)
    run.drop(sequence)
    assert (run.free(0), run.free(1)) == (24 - 3, 8 - 3)
    run.ledger.release_lease(lease)
    run.finish()


def test_an_encoder_is_named_when_its_blocks_run_out() -> None:
    run = GroupRun(full(24), cross(4))
    run.add(range(6), encoder_length=9, id=1)
    error = run.no_room(lambda: run.ledger.add_sequences([run.request(range(6), encoder_length=9)]))
    assert "group 1" in str(error)
    assert (error.needed, error.available, error.preempt) == (3, 1, (1,))
    run.finish()


def test_a_partial_match_costs_the_encoders_group_nothing() -> None:
    """The second last handle of the encoder's group is free and stays so: a partial match has no block there."""
    run = GroupRun(full(24), cross(3))
    run.serve(range(7), encoder_length=12, encoder_digest=SOUND)
    assert run.reuse([*range(6), 50], encoder_length=12, encoder_digest=SOUND) == 6
    run.finish()


@pytest.mark.parametrize("kinds", ["cross first", "cross last"])
def test_the_order_of_groups_does_not_matter_for_reuse(kinds: str) -> None:
    groups = [recurrent(8, 24), cross(8)]
    run = GroupRun(*(reversed(groups) if kinds == "cross first" else groups))
    run.serve(range(20), encoder_length=3, encoder_digest=SOUND)
    assert run.reuse(range(20), encoder_length=3, encoder_digest=SOUND) == 16
    run.finish()


def test_an_encoder_is_given_exactly_where_the_layout_has_cross_attention() -> None:
    run = GroupRun(full(24), cross(8))
    run.refused(RequestError, lambda: run.ledger.add_sequences([run.request(range(6))]))
    plain = GroupRun(full(24))
    error = plain.refused(RequestError, lambda: plain.ledger.add_sequences([plain.request(range(6), encoder_length=3)]))
    assert "leave it out" in str(error)
    for digest, length in ((b"short", 3), (SOUND, 0)):
        with pytest.raises(RequestError, match="encoder_digest"):
            run.request(range(6), encoder_length=length, encoder_digest=digest)


def test_nobody_waits_for_a_block_that_is_computed_behind_another_input() -> None:
    """Decoders often begin every prompt with the same tokens: were these alone compared, everybody would wait for one request."""
    run = GroupRun(full(24), cross(8))
    computing = run.request(range(9), encoder_length=9, encoder_digest=SOUND)
    contributed = {capacity.match(run.ledger, computing).first_new_key}
    assert scheduling.beneficial_to_skip(run.ledger, run.request(range(9), encoder_length=9, encoder_digest=SOUND), contributed)
    assert not scheduling.beneficial_to_skip(run.ledger, run.request(range(9), encoder_length=9, encoder_digest=OTHER), contributed)
    run.finish()


def test_a_lost_encoder_block_takes_the_sequence_back_to_its_start() -> None:
    """Its position counts the encoder's tokens: every token of the decoder has read all of them, and the engine writes them before the
    first one."""
    run = GroupRun(full(24), cross(8))
    sequence = run.add(range(10), encoder_length=9)
    assert run.compute(sequence)
    lease = run.ledger.pin(sequence.id)
    run.fails = lambda _move: True
    run.ledger.make_writable(sequence.id, 2, 1)
    run.driver.tiers.settle(run.fails)
    run.fails = lambda _move: False
    assert (sequence.computed, sequence.must_report) == (0, True)
    run.driver.lives[sequence.id].is_encoded = False
    run.append(sequence, 1, 2, 3)
    run.ledger.release_lease(lease)
    run.finish()
