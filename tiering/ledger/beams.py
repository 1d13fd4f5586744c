"""Beams that change places: after a step of beam search each beam continues one of the old ones (design: sequences).

Nothing is copied here. Beams that continue the same parent share all its blocks; the unfilled last one is copied when the first of
them writes into it (copy on divergence).
"""

from __future__ import annotations

from typing import Any

from kvtier.errors import RequestError
from kvtier.tiering.ledger.state import LedgerState


def reorder_beams(state: LedgerState, request_id: Any, parents: Any) -> None:
    """Let beam ``i`` continue the blocks of beam ``parents[i]``.

    Raises:
        RequestError: not one parent for each beam, or a parent that does not exist.
    """
    sequence = state.sequence(request_id)
    width = sequence.beam_width
    if len(parents) != width:
        raise RequestError(f"request {request_id}: {len(parents)} parents for {width} beams; name one parent for each beam")
    for parent in parents:
        if isinstance(parent, bool) or not isinstance(parent, int) or not 0 <= parent < width:
            raise RequestError(f"request {request_id}: parent {parent!r}; this sequence has beams 0..{width - 1}")
    if sequence.num_tokens == sequence.num_prompt_tokens:
        return  # all beams are the prompt still
    for row in sequence.rows:
        old = [row.beam(beam) for beam in range(len(row.other_beams) + 1)]
        new = [list(old[parent]) if old else [] for parent in parents]
        for blocks in new:
            for block in blocks:
                if block.id >= 0:
                    block.ref_count += 1
        for blocks in old:  # only now: what is kept must not be free in between
            state.allocators[row.group].release_many(blocks)
        row.blocks[:] = new[0]
        row.other_beams = new[1:]
        if row.departed_ids:
            row.departed_ids = [list(row.departed_ids[parent]) for parent in parents]
