"""A Move carries the transfer mode and directory of the request on whose behalf it was decided; the tier's own carry none."""

from __future__ import annotations

from group_run import GroupRun, full, recurrent, window

from kvtier.policies.retention import RetentionConfig
from kvtier.types import TransferMode

DRAM = ("dram", "")
GDS = RetentionConfig(transfer_mode=TransferMode.GDS)
FILES = RetentionConfig(transfer_mode=TransferMode.POSIX_DEBUG_FALLBACK, directory="/kept/here")
PLAIN = RetentionConfig()


def paths(run: GroupRun, since: int) -> set[tuple[str, str]]:
    """Of the Moves since then; and what comes next is on nobody's behalf."""
    assert (run.ledger.moves.mode, run.ledger.moves.directory) == DRAM
    return {(move.mode, move.directory) for move in run.moves[since:]}


def test_what_a_request_brings_up_and_pushes_down_goes_its_way() -> None:
    run = GroupRun(full(4, 8))
    run.serve(range(16))
    assert paths(run, 0) == set()
    for retention, expected in ((GDS, ("gds", "")), (FILES, ("posix_debug_fallback", "/kept/here")), (PLAIN, DRAM), (None, DRAM)):
        before = len(run.moves)
        run.serve(range(100, 116), retention=retention)
        assert paths(run, before) == {expected}
        before = len(run.moves)
        run.serve(range(16), retention=retention)
        assert paths(run, before) == {expected}
    run.finish()


def test_each_request_of_a_batch_goes_its_own_way() -> None:
    run = GroupRun(full(12, 8), window(8, 12, 8))
    for start in (0, 100, 200):
        run.serve(range(start, start + 9))
    for block in run.ledger.allocators[0].blocks[:12]:
        if block.has_content:
            run.ledger.offload(block.id)
    run.settle()
    before = len(run.moves)
    requests = [run.request(range(start, start + 9), retention=retention) for start, retention in ((0, GDS), (100, None), (200, FILES))]
    ids = [{block.id for block in sequence.rows[0].blocks} for sequence in run.add_all(*requests)]
    modes = [{move.mode for move in run.moves[before:] if move.group == 0 and move.block_id in held} for held in ids]
    assert modes == [{"gds"}, {"dram"}, {"posix_debug_fallback"}]
    assert paths(run, before) == {DRAM, ("gds", ""), ("posix_debug_fallback", "/kept/here")}
    run.finish()


def test_each_sequence_of_a_step_goes_its_own_way() -> None:
    run = GroupRun(full(16), recurrent(8, 16))
    sequences = [run.add(range(start, start + 6), retention=retention) for start, retention in ((0, GDS), (100, None), (200, FILES))]
    for sequence in sequences:
        assert run.compute(sequence)
    leases = [run.ledger.pin(sequence.id) for sequence in sequences]
    tails = [{sequence.rows[group].blocks[-1].index for group in (0, 1)} for sequence in sequences]
    before = len(run.moves)
    run.append_all(sequences, [[7]] * 3)  # pinned tails are copied before they are written
    assert [{(move.group, move.mode) for move in run.moves[before:] if move.source in tail} for tail in tails] == [
        {(0, mode), (1, mode)} for mode in ("gds", "dram", "posix_debug_fallback")]
    assert len(run.moves) == before + 6
    for lease in leases:
        run.ledger.release_lease(lease)
    run.finish()


def test_a_rewound_block_is_replaced_on_its_sequences_behalf() -> None:
    run = GroupRun(full(16))
    sequence = run.add(range(6), retention=GDS)
    run.append(sequence, 1, 2, 3, 4)
    lease = run.ledger.pin(sequence.id)
    before = len(run.moves)
    run.rewind(sequence, 3)
    assert len(run.moves) == before + 1
    assert paths(run, before) == {("gds", "")}
    run.ledger.release_lease(lease)
    run.finish()


def test_a_state_is_copied_again_on_its_sequences_behalf() -> None:
    run = GroupRun(recurrent(8, 24), full(24))
    sequence = run.add(range(8), retention=GDS)
    run.append(sequence, *range(8))
    before = len(run.moves)
    run.fails = lambda _move: len(run.moves) == before + 1
    run.append(sequence, 8)  # the state behind 16 tokens is kept, its copy fails, and the one behind 8 is copied
    assert sequence.must_report
    assert len(run.moves) == before + 2
    assert paths(run, before) == {("gds", "")}
    run.finish()


def test_what_the_tier_does_by_itself_goes_through_host_memory() -> None:
    run = GroupRun(full(8, 4, 16), secondary_offload_min_priority=30, write_ahead_share=1.0)
    run.serve(range(16), retention=GDS)
    run.serve(range(100, 124), retention=FILES)
    before = len(run.moves)
    run.ledger.refresh(1.0)
    run.settle()
    assert len(run.moves) > before, "written ahead"
    assert paths(run, before) == {DRAM}
    before = len(run.moves)
    block = next(block for block in run.ledger.allocators[0].blocks if block.has_content and block.index & 3 == 1)
    run.ledger.onboard(block.id)
    run.ledger.write_everything_out()
    run.settle()
    assert paths(run, before) == {DRAM}
    run.finish()
