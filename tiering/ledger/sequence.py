"""``ActiveSequence``: what the ledger keeps of one request while the engine works on it."""

from __future__ import annotations

from typing import Final

from kvtier.errors import RequestError
from kvtier.pools.pool_index import NUM_LEVELS
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.draft_tree import DraftTree
from kvtier.tiering.ledger.key import Namespace, TokenKeys
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.ledger.request import INT32_MAX, INT32_MIN, Request
from kvtier.tiering.ledger.unconfirmed import Unconfirmed

NOTHING_LEFT: Final[list[Unconfirmed]] = []  # shared, never changed
NO_COPIES: Final[list[tuple[int, Move]]] = []


class SequenceRow:
    """One group's part of a sequence.

    Attributes:
        blocks: handles in prompt order, of beam 0; the group's placeholder where a position has none (out of the window, no snapshot).
        other_beams: the same for beams 1 and up; empty with one beam. A handle that several beams hold is referenced by each.
        departed_ids: by beam, ids of the blocks behind the sinks that have left the window.
        scratch_begin, scratch_end: positions of the chunk being computed that will be out of the window when it is.
        is_settled: everything that was copied into its blocks has arrived.
        left_behind: blocks that left the window before they had.
        state_copies: copies that a running state has started as since everything had: (tokens it had read, the Move).
    """

    def __init__(self, group: int) -> None:
        self.group = group
        self.blocks: list[Block] = []
        self.other_beams: list[list[Block]] = []
        self.departed_ids: list[list[int]] = []
        self.scratch_begin = 0
        self.scratch_end = 0
        self.is_settled = False
        self.left_behind: list[Unconfirmed] = NOTHING_LEFT
        self.state_copies: list[tuple[int, Move]] = NO_COPIES

    @property
    def num_departed(self) -> int:
        """Positions behind the sinks that have left the window."""
        return len(self.departed_ids[0]) if self.departed_ids else 0

    def note_state_copy(self, num_tokens: int, move: Move) -> None:
        """A running state that has read this many tokens is being copied into one of the row's blocks, and goes on there."""
        self.is_settled = False
        self.state_copies = [*self.state_copies, (num_tokens, move)]

    def note_arrival(self) -> None:
        """Everything copied into the row's blocks has arrived."""
        self.is_settled = True
        self.state_copies = NO_COPIES

    def beam(self, number: int) -> list[Block]:
        """Handles of one beam."""
        return self.blocks if number == 0 else self.other_beams[number - 1]


class ActiveSequence:
    """One sequence.

    Attributes:
        rows: its handles, by group.
        computed: leading tokens whose keys and values are there.
        covered: with chunked prefill, leading tokens that the window groups have, or had, blocks for.
        prepopulated: leading tokens promised by reuse; ``valid`` is what is left of them after failed reads.
        num_prefix_blocks: leading blocks that came from reuse, the partially matched one included.
        num_stored: no block from this position on was ever stored by this sequence.
        origin_levels: level on which each of these was found.
        must_report: ``valid`` shrank and the engine has not been told yet.
        must_cut: window rows that are filled chunk by chunk are to be cut back when the engine is told.
        must_preempt: a failed block could not be replaced; the engine has to remove this sequence.
        delivered: its hits have been counted.
        external_tokens: tokens behind the reused ones that somebody else has announced.
        left_tokens: tokens that were found on lower levels and are computed again, because that is faster.
        drafts: proposed tokens that are not part of the sequence; its rows reach to the last of them.
    """

    def __init__(self, request: Request, keys: TokenKeys, namespace: Namespace, order: int, num_groups: int) -> None:
        self.request = request
        self.id: int = request.id  # what the ledger asks for often; attributes of a request cost more
        self.beam_width: int = request.beam_width
        self.num_prompt_tokens: int = request.num_tokens
        self.keys = keys
        self.namespace = namespace
        self.order = order  # ascending with admission: pre-emption names the newest first
        self.rows: list[SequenceRow] = [SequenceRow(group) for group in range(num_groups)]
        self.computed = 0
        self.covered = 0
        self.prepopulated = 0
        self.valid = 0
        self.num_prefix_blocks = 0
        self.num_stored = 0
        self.origin_levels: list[int] = []
        self.must_report = False
        self.must_preempt = False
        self.must_cut = False
        self.delivered = False
        self.external_tokens = 0
        self.left_tokens = 0
        self.drafts: DraftTree | None = None
        self.total_blocks = 0
        self.new_blocks = 0
        self.reused_blocks = 0
        self.missed_blocks = 0

    @property
    def blocks(self) -> list[Block]:
        """Handles of the first group and beam: all there are for most models."""
        return self.rows[0].blocks

    @property
    def num_tokens(self) -> int:
        return self.keys.num_tokens

    def hits(self) -> tuple[list[int], list[int]]:
        """Tokens and blocks that reuse has brought, by the level they were found on."""
        tokens = [0] * NUM_LEVELS
        blocks = [0] * NUM_LEVELS
        tokens_per_block = self.keys.tokens_per_block
        left = self.valid
        for level in self.origin_levels:
            if left <= 0:
                break
            tokens[level] += min(left, tokens_per_block)
            blocks[level] += 1
            left -= tokens_per_block
        return tokens, blocks

    def storable_tokens(self) -> int:
        """What may enter the tree: what was computed, and never the newest token. Of beams, what they share: the prompt's full blocks."""
        storable = min(self.computed, self.keys.num_tokens - 1)
        if self.beam_width > 1:
            num_tokens = self.num_prompt_tokens
            return min(storable, num_tokens - num_tokens % self.keys.tokens_per_block)
        return storable


class Lease:
    """Blocks held on behalf of one request until released.

    Attributes:
        rows: the pinned handles by group, in prompt order.
        lost_ids: by group, those whose content was lost since. They stay held, and nobody writes into them.
    """

    def __init__(self, lease_id: int, request_id: int, rows: list[list[Block]]) -> None:
        self.lease_id = lease_id
        self.request_id = request_id
        self.rows = rows
        self.lost_ids: list[set[int]] = [set() for _ in rows]

    def note_lost(self, ids: list[set[int]]) -> None:
        """The content of these blocks, by group, is lost."""
        for row, lost, now in zip(self.rows, self.lost_ids, ids, strict=True):
            if now:
                lost.update([block.id for block in row if block.id in now])


def check_token(request_id: int, token: int) -> None:
    """Raise RequestError unless a sampled token fits int32."""
    if isinstance(token, bool) or not isinstance(token, int) or not INT32_MIN <= token <= INT32_MAX:
        raise RequestError(f"request {request_id}: token {token!r}; a token id is a whole number within int32")


def require_no_drafts(sequence: ActiveSequence, verb: str) -> None:
    """Raise RequestError while drafts stand where the sequence would change."""
    if sequence.drafts is not None:
        raise RequestError(f"request {sequence.id}: {verb}() while {sequence.drafts.num_drafts} drafts are pending; call accept_drafts() "
                           "or drop_drafts() first")
