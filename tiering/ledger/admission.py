"""Planning a batch of new sequences: what each one reuses, and what it needs (design: two phases, all or nothing).

Planning changes nothing. It resolves who may keep a partially matched block when several requests of the batch want it: a full
match beats a partial one, and among partial ones the last reuses in place while the others copy.
"""

from __future__ import annotations

from kvtier.errors import RequestError
from kvtier.pools.pool_index import NVME, PRIMARY, level_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.chunks import chunk_end
from kvtier.tiering.ledger.group import CROSS, RECURRENT, WINDOW
from kvtier.tiering.ledger.key import Namespace, TokenKeys
from kvtier.tiering.ledger.node import Node, Walk
from kvtier.tiering.ledger.prefix import usable_prefix
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.state import LedgerState

Demand = tuple[list[int], list[set[int]]]
"""By group: how many primary blocks are taken, and the ids of those that must stay meanwhile."""


class AdmissionPlan:
    """What one request of a batch will get.

    Attributes:
        rows: by group, the handles of full blocks found in the tree, placeholders where the group needs none.
        num_matched: how many positions these are, the same for every group but cross-attention.
        is_primary: whether all of these are on the primary level, so that nobody need look.
        partial: by group, the handles whose first ``partial_tokens`` tokens equal the prompt's next ones; empty without any.
        in_place: whether the partially matched blocks are taken over; otherwise they are copied.
        external_tokens: tokens behind the reused ones that the engine can load from elsewhere.
        left_tokens: tokens that were found and are computed again all the same.
    """

    def __init__(self, request: Request, keys: TokenKeys, namespace: Namespace, num_groups: int) -> None:
        self.request = request
        self.keys = keys
        self.namespace = namespace
        self.rows: list[list[Block]] = [[] for _ in range(num_groups)]
        self.num_matched = 0
        self.is_primary = True
        self.partial: list[Block] = []
        self.partial_tokens = 0
        self.in_place = False
        self.external_tokens = 0
        self.left_tokens = 0

    @property
    def prepopulated(self) -> int:
        return self.num_matched * self.keys.tokens_per_block + self.partial_tokens

    def give_up_matches(self) -> None:
        self.rows = [[] for _ in self.rows]
        self.num_matched = 0
        self.is_primary = True
        self.external_tokens = 0  # announced behind what was matched

    def give_up_partial(self) -> None:
        self.partial = []
        self.partial_tokens = 0
        self.in_place = False


class BatchPlanner:
    """Plans the requests of one batch in order."""

    def __init__(self, state: LedgerState) -> None:
        self.state = state
        self.plans: list[AdmissionPlan] = []
        self._in_place: dict[int, AdmissionPlan] = {}  # by the id in the leading group, whose handle stands for its place

    def plan(self, request: Request) -> None:
        """Match one request. Its last prompt token is never matched: somebody has to compute the first logits."""
        state = self.state
        usable = most_reusable(state, request)
        followed = state.follow(request, usable)
        walk = followed.walk
        plan = AdmissionPlan(request, followed.keys, followed.namespace, len(state.groups))
        self.plans.append(plan)
        if walk is None or not may_reuse(state, request):
            return
        if walk.num_blocks:
            plan.rows = usable_prefix(state, walk)
            plan.num_matched = len(plan.rows[state.leading_group])
            for node in walk.nodes:
                for lower in node.lower:
                    if lower > 0:
                        plan.is_primary = False
            if self._in_place:
                for block in plan.rows[state.leading_group]:
                    self._bump(block)
        if state.partial_reuse and plan.num_matched == walk.num_blocks:
            self._match_partial(plan, walk, usable)

    def ask_elsewhere(self, plan: AdmissionPlan, num_new_tokens: object) -> None:
        """Note tokens that somebody else can deliver behind the reused ones; they replace a partial match of no more tokens.

        Raises:
            RequestError: not a whole number of blocks, or more than the prompt can use.
        """
        tokens_per_block = self.state.tokens_per_block
        most = most_reusable(self.state, plan.request) - plan.num_matched * tokens_per_block
        if (isinstance(num_new_tokens, bool) or not isinstance(num_new_tokens, int) or num_new_tokens < 0
                or num_new_tokens % tokens_per_block or num_new_tokens > max(most, 0)):
            raise RequestError(f"request {plan.request.id}: {num_new_tokens!r} tokens announced behind "
                               f"{plan.num_matched * tokens_per_block}; announce whole blocks of {tokens_per_block} tokens, "
                               f"at most {max(most, 0) // tokens_per_block}")
        if num_new_tokens > plan.partial_tokens:
            self._give_up_partial(plan)
            plan.external_tokens = num_new_tokens

    def keep_front(self, plan: AdmissionPlan, num_blocks: int) -> None:
        """Reuse the first ``num_blocks`` of the matched blocks only: what is behind them is computed again, because that is faster than
        loading it. Other numbers than 0 only where every group needs all blocks of a prefix."""
        if num_blocks < plan.num_matched:
            found = plan.prepopulated
            self._give_up_partial(plan)
            plan.rows = [row[:num_blocks] for row in plan.rows]
            plan.num_matched = num_blocks
            plan.left_tokens = found - plan.prepopulated

    def _give_up_partial(self, plan: AdmissionPlan) -> None:
        if plan.in_place:
            self._in_place.pop(plan.partial[self.state.leading_group].id, None)
        plan.give_up_partial()

    def needed_primary(self, group: int) -> int:
        """Primary handles of a group that carrying the plans out takes: new blocks, copies, promotions."""
        needed = 0
        promoted: set[int] = set()
        for plan in self.plans:
            needed += num_new_blocks(self.state, plan.request, group, plan.num_matched, plan.prepopulated)
            for block in plan.rows[group]:
                if block.id >= 0 and level_of(block.index) != PRIMARY and block.id not in promoted:
                    promoted.add(block.id)
                    needed += 1
            # Taking over a primary block costs nothing; a lower one is promoted into the handle counted above.
            if plan.in_place and level_of(plan.partial[group].index) == PRIMARY:
                needed -= 1
        return needed

    def most_primary(self, group: int) -> int:
        """No fewer than :meth:`needed_primary` with everything that the plans hold on to, and quickly counted."""
        needed = 0
        for plan in self.plans:
            needed += num_new_blocks(self.state, plan.request, group, plan.num_matched, plan.prepopulated) + plan.num_matched
            if plan.partial:
                needed += 1
        return needed

    def protected(self, group: int) -> set[int]:
        """Ids of the blocks of a group that the plans hold on to: none of them can be taken."""
        held: set[int] = set()
        for plan in self.plans:
            for block in plan.rows[group]:
                if block.id >= 0:
                    held.add(block.id)
            if plan.partial and plan.partial[group].id >= 0:
                held.add(plan.partial[group].id)
        return held

    def demand(self) -> Demand:
        """What the batch takes, as planned by now."""
        groups = range(len(self.state.groups))
        return [self.needed_primary(group) for group in groups], [self.protected(group) for group in groups]

    def give_up_copies(self) -> None:
        """Reuse nothing by copying it: no part of a block, and no kept state, whose copy the running state starts as. The source of a
        copy takes a place beside the copy, so that in a small pool a request might otherwise never fit although it would without
        that reuse."""
        for plan in self.plans:
            if plan.partial and not plan.in_place:
                plan.give_up_partial()
            if self.state.has_recurrent:
                plan.give_up_matches()

    def give_up_parts(self) -> None:
        """Reuse no part of a block, not even one that would be taken over in place: a first chunk that starts behind it may end a chunk
        later, and take more blocks."""
        for plan in self.plans:
            self._give_up_partial(plan)

    def _is_fully_matched(self, block: Block) -> bool:
        """Whether an earlier request of the batch holds the block as a whole."""
        position = self.plans[-1].num_matched  # the tree holds the block at one depth, where the rows of all requests have it
        for plan in self.plans[:-1]:
            row = plan.rows[self.state.leading_group]
            if len(row) > position and row[position] is block:
                return True
        return False

    def _match_partial(self, plan: AdmissionPlan, walk: Walk, usable: int) -> None:
        state = self.state
        leading = state.leading_group
        places = state.tree.partial_places(walk, plan.keys, usable)
        place = places.next_place()
        while place is not None:
            shared, node, position = place
            place = places.next_place()
            blocks = self._values(node, position)
            if not blocks or not self._may_copy(blocks):
                continue
            block = blocks[leading]
            must_copy = not node.is_leaf(position) or self._is_fully_matched(block)
            for other in blocks:
                if other.ref_count > 0:
                    must_copy = True
            if must_copy and not state.rules.copy_on_partial_reuse:
                continue
            if not must_copy:
                self._bump(block)
                self._in_place[block.id] = plan
                plan.in_place = True
            plan.partial = blocks
            plan.partial_tokens = shared
            return

    def _values(self, node: Node, position: int) -> list[Block]:
        """The place's handle in every group that needs one; empty when a group has none. The placeholder elsewhere."""
        found: list[Block] = []
        for number, allocator in enumerate(self.state.allocators):
            value = node.values[number][position]
            if number not in self.state.prefix_groups:
                value = allocator.placeholder
            if value is None:
                return []
            found.append(value)
        return found

    def _may_copy(self, blocks: list[Block]) -> bool:
        for group in range(len(blocks)):
            block = blocks[group]
            allocator = self.state.allocators[group]
            if block.id < 0:
                continue
            level = level_of(block.index)
            if level == NVME or (level == PRIMARY and allocator.is_busy(block)):
                # A file read for part of a block costs as much as for all of it. And a copy that waits for a read under way would
                # hold its new slot, and whoever gets that next, behind the file.
                return False
        return True

    def _bump(self, block: Block) -> None:
        """Somebody with a better claim wants the block: whoever meant to take it over copies it instead."""
        earlier = self._in_place.pop(block.id, None)
        if earlier is not None:
            earlier.in_place = False
            if not self.state.rules.copy_on_partial_reuse:
                earlier.give_up_partial()


def may_reuse(state: LedgerState, request: Request) -> bool:
    """Whether a request may match what is stored. What follows an encoder's output is found again only under that output's digest."""
    return state.reuse and not request.skip_read and (request.encoder_length == 0 or request.encoder_digest is not None)


def may_store(state: LedgerState, request: Request) -> bool:
    """Whether a request's blocks may enter the tree."""
    return state.reuse and not request.skip_write and (request.encoder_length == 0 or request.encoder_digest is not None)


def most_reusable(state: LedgerState, request: Request) -> int:
    """Leading prompt tokens that may be matched. Beams write into copies of an unfilled last block of their own: never into a match."""
    usable = request.num_tokens - 1
    if request.beam_width > 1:
        usable = min(usable, request.num_tokens // state.tokens_per_block * state.tokens_per_block)
    return usable


def num_new_blocks(state: LedgerState, request: Request, group: int, num_matched: int, reused: int) -> int:
    """Blocks of a group that a prompt takes at admission behind ``num_matched`` reused positions, over all beams.

    ``reused``: tokens that it does not compute. With chunked prefill a window group takes only those of the first chunk behind them.
    """
    geometry = state.geometries[group]
    if geometry.kind == CROSS:
        return geometry.num_blocks(request.encoder_length)
    num_tokens = request.num_tokens
    covered = num_tokens
    if state.is_chunked and geometry.kind == WINDOW:
        covered = chunk_end(state.rules.chunk_size, reused, num_tokens)
    total = geometry.num_blocks(covered)
    # With several beams an unfilled last block is each beam's own; everything before it is shared.
    others = request.beam_width - 1 if total == geometry.num_blocks(num_tokens) and has_private_tail(state, request, group) else 0
    if geometry.kind != RECURRENT:
        return total - num_matched + others
    needed = 0
    for position in range(num_matched, total):
        if position == total - 1 or (state.reuse and geometry.keeps_state(position, num_tokens)):
            needed += 1
    return needed + others


def has_private_tail(state: LedgerState, request: Request, group: int) -> bool:
    """Whether the prompt's last block is unfilled, so that several beams cannot share it."""
    if request.beam_width == 1:
        return False
    geometry = state.geometries[group]
    return geometry.kind != CROSS and geometry.next_place(request.num_tokens) % state.tokens_per_block != 0
