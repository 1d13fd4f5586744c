"""Drafts that branch: proposed behind a sequence's newest token, verified in one step, one path accepted (design: sequences).

What is drafted is not part of the sequence: its length, what counts as computed and what may be stored stay as they are. Only its rows
grow, so that block tables reach the drafts. While drafts are pending the sequence can neither be appended to nor rewound. A failed
Move drops the drafts when the engine is told of it: they attended to what is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.errors import RequestError
from kvtier.pools.pool_index import PRIMARY
from kvtier.tiering.ledger.decoding import (
    decode_retention,
    leave_windows,
    make_writable,
    num_tail_copies,
    require_blocks_for_all,
    require_reported,
)
from kvtier.tiering.ledger.draft_tree import DraftTree
from kvtier.tiering.ledger.group import CROSS
from kvtier.tiering.ledger.keeping import use_path_of
from kvtier.tiering.ledger.room import NOTHING_WANTED, require_room
from kvtier.tiering.ledger.sequence import ActiveSequence, check_token, require_no_drafts
from kvtier.tiering.ledger.state import LedgerState


def propose_drafts(state: LedgerState, request_id: Any, tokens: Any, parents: Any) -> None:
    """Give each draft a place behind the sequence's tokens: draft ``i`` gets place ``num_tokens + i``.

    The block that the first of them goes into is made writable as for an append: copied when it is shared, out of the tree when it is
    stored. Nothing leaves a window.

    Args:
        tokens: token ids of the drafts, at least one.
        parents: for each draft the one that it continues, which comes before it; -1 for the sequence's newest token.

    Raises:
        RequestError: lists that describe no tree, drafts that are pending already, several beams, a group with a running state.
        CapacityError: too few free primary blocks; nothing has changed.
    """
    sequence = state.sequence(request_id)
    require_reported(sequence)
    require_no_drafts(sequence, "propose_drafts")
    require_blocks_for_all(state, sequence, "propose_drafts")
    if sequence.beam_width > 1:
        raise RequestError(f"request {request_id}: drafts for {sequence.beam_width} beams; beams already are the alternatives, "
                           "propose drafts with beam_width=1")
    if state.has_recurrent:
        raise RequestError(f"request {request_id}: drafts, and this layout keeps a running state, which cannot be taken back from a "
                           "rejected draft; verify drafts with layers that have none")
    tree = _tree(sequence, tokens, parents)
    end = sequence.num_tokens + tree.num_drafts
    needed = [0] * len(state.groups)
    is_short = False
    for row in sequence.rows:
        geometry = state.geometries[row.group]
        if geometry.kind == CROSS:
            continue
        needed[row.group] = geometry.num_blocks(end) - len(row.blocks) + num_tail_copies(state, sequence, row.group)
        if needed[row.group] > state.allocators[row.group].queues.num_free(PRIMARY):
            is_short = True
    if is_short:
        require_room(state, needed, NOTHING_WANTED, f"{tree.num_drafts} drafts of request {request_id}", {request_id: needed})
    priority, duration = decode_retention(sequence)
    use_path_of(state.moves, sequence.request)
    for row in sequence.rows:
        geometry = state.geometries[row.group]
        if geometry.kind == CROSS:
            continue
        blocks = row.blocks
        if geometry.num_blocks(sequence.num_tokens + 1) <= len(blocks):  # the first draft goes into a block that there is already
            make_writable(state, row, 0, len(blocks) - 1)
        missing = geometry.num_blocks(end) - len(blocks)
        if missing > 0:
            blocks.extend(state.allocators[row.group].take_many(missing, priority, duration))
    state.moves.use_default_path()
    sequence.drafts = tree


def _tree(sequence: ActiveSequence, tokens: Sequence[object], parents: Sequence[object]) -> DraftTree:
    request_id = sequence.id
    if not tokens or len(tokens) != len(parents):
        raise RequestError(f"request {request_id}: {len(tokens)} drafts with {len(parents)} parents; pass at least one draft, and one "
                           "parent for each")
    checked: list[int] = []
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError(f"request {request_id}: token {token!r}; a token id is a whole number within int32")
        check_token(request_id, token)
        checked.append(token)
    continued: list[int] = []
    for number, parent in enumerate(parents):
        if isinstance(parent, bool) or not isinstance(parent, int) or not -1 <= parent < number:
            raise RequestError(f"request {request_id}: parents[{number}]={parent!r}; a draft continues one with a lower number, or the "
                               "sequence's newest token, -1")
        continued.append(parent)
    return DraftTree(sequence.num_tokens, checked, continued)


def pending_drafts(state: LedgerState, request_id: Any) -> DraftTree:
    """The drafts that were proposed and neither accepted nor dropped.

    Raises:
        RequestError: there are none, or a read failed and the sequence has not been told yet.
        UnknownRequest: no such sequence.
    """
    sequence = state.sequence(request_id)
    require_reported(sequence)
    tree = sequence.drafts
    if tree is None:
        raise RequestError(f"request {request_id}: no drafts are pending; propose_drafts() comes first (a failed read drops them)")
    return tree


def accepted_path(request_id: Any, tree: DraftTree, nodes: Any) -> list[int]:
    """``nodes`` as a list, when they lead from a root downwards without a gap. RequestError otherwise."""
    path: list[int] = []
    before = -1
    for node in nodes:
        if isinstance(node, bool) or not isinstance(node, int) or not 0 <= node < tree.num_drafts:
            raise RequestError(f"request {request_id}: node {node!r}; there are drafts 0 to {tree.num_drafts - 1}")
        if tree.parents[node] != before:
            begins = "a path begins with a draft whose parent is -1" if before < 0 else f"the next on this path has the parent {before}"
            raise RequestError(f"request {request_id}: node {node} has the parent {tree.parents[node]}; {begins}")
        path.append(node)
        before = node
    return path


def accept_drafts(state: LedgerState, request_id: Any, nodes: Any) -> list[tuple[int, int]]:
    """A step has verified the drafts: those on the path ``nodes`` become the sequence's next tokens, the others are forgotten.

    That step has computed the newest token and all drafts, so everything there is now counts as computed (and still the newest token
    is never stored). Blocks behind the last token are given back. With an empty path every draft was rejected.

    Returns:
        Token moves (source place, destination place), to be carried out in this order in every group but cross-attention ones, before
        anybody reads the new tokens or takes the blocks that were given back.

    Raises:
        RequestError: no drafts are pending, or ``nodes`` is no path from a root downwards. Nothing has changed.
    """
    tree = pending_drafts(state, request_id)
    path = accepted_path(request_id, tree, nodes)
    sequence = state.sequence(request_id)
    if path and state.has_window:
        leave_windows(state, sequence)  # as an append: what the first of them no longer read, so that they themselves stay
    for node in path:
        sequence.keys.append(tree.tokens[node])
    sequence.computed = sequence.num_tokens
    sequence.covered = sequence.num_tokens
    _end(state, sequence)
    return tree.moves_of(path)


def drop_drafts(state: LedgerState, request_id: Any) -> None:
    """Forget drafts that no step has verified, if there are any; what counts as computed stays. Gives their blocks back."""
    sequence = state.sequence(request_id)
    if sequence.drafts is not None:
        _end(state, sequence)


def drop_lost_drafts(state: LedgerState, sequence: ActiveSequence) -> None:
    """The engine hears that a Move into the sequence's blocks failed. Not when it failed: a step may have been writing the drafts."""
    if sequence.drafts is not None and sequence.must_report:
        _end(state, sequence)


def _end(state: LedgerState, sequence: ActiveSequence) -> None:
    """No drafts are pending any more: the rows end with the sequence's tokens again."""
    sequence.drafts = None
    for row in sequence.rows:
        geometry = state.geometries[row.group]
        if geometry.kind == CROSS:
            continue
        blocks = row.blocks
        count = geometry.num_blocks(sequence.num_tokens)
        while len(blocks) > count:
            state.allocators[row.group].release(blocks.pop())
