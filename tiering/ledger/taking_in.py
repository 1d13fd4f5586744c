"""Tokens that another instance has computed: their blocks were filled from outside, as far as anybody will read them."""

from __future__ import annotations

from typing import Any

from kvtier.errors import RequestError, UnknownRequest
from kvtier.tiering.ledger.decoding import depart, require_reported
from kvtier.tiering.ledger.group import WINDOW, GroupGeometry
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.sequence import ActiveSequence


def needed_positions(geometry: GroupGeometry, first: int, num_tokens: int) -> list[int]:
    """Block positions from ``first`` on that must hold what the first ``num_tokens`` tokens left there, so that the next one can be
    computed: of a window its sinks and what it still reads."""
    total = geometry.num_blocks(num_tokens)
    if geometry.kind != WINDOW:
        return list(range(first, total))
    sinks = min(geometry.num_sink_blocks, total)
    behind = geometry.num_sink_blocks + geometry.num_departed(num_tokens + 1)
    return list(range(first, sinks)) + list(range(max(first, behind), total))


def require_same(ledger: Ledger, sequence: ActiveSequence) -> None:
    """For who looks at a sequence several times, without the lock between: raise UnknownRequest when it has been removed since, also when
    another one has its number now."""
    if ledger.sequence(sequence.id) is not sequence:
        raise UnknownRequest(f"request {sequence.id}: removed meanwhile, another sequence has its number now; try again with that one")


def mark_taken_in(ledger: Ledger, request_id: Any, num_tokens: Any) -> None:
    """The first ``num_tokens`` prompt tokens have their keys and values in the pool now, where :func:`needed_positions` says.

    What lies before the windows may hold anything: it goes at once, before these tokens count as computed, so that it is never stored.

    Raises:
        UnknownRequest, RequestError: as ``Ledger.mark_computed``; the prompt is computed in chunks, or has no token left to compute.
    """
    sequence = ledger.sequence(request_id)
    require_reported(sequence)
    if ledger.is_chunked:
        raise RequestError(f"request {request_id}: tokens taken in where windows get their blocks chunk by chunk; leave chunk_size out")
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not sequence.computed <= num_tokens < sequence.num_tokens:
        raise RequestError(f"request {request_id}: {num_tokens!r} tokens taken in; {sequence.computed} are computed already, and of its "
                           f"{sequence.num_tokens} tokens the last one is left to compute")
    for row in sequence.rows:
        geometry = ledger.geometries[row.group]
        if geometry.kind == WINDOW:
            depart(ledger, row, min(geometry.num_departed(num_tokens + 1), len(row.blocks) - geometry.num_sink_blocks))
    ledger.mark_computed(request_id, num_tokens)
