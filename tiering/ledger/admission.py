"""Planning a batch of new sequences: what each one reuses, and what it needs (design: two phases, all or nothing).

Planning changes nothing. It resolves who may keep a partially matched block when several requests of the batch want it: a full
match beats a partial one, and among partial ones the last reuses in place while the others copy.
"""

from __future__ import annotations

from kvtier.pools.pool_index import NVME, PRIMARY, level_of
from kvtier.tiering.ledger.allocator import BlockAllocator
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.key import Namespace, TokenKeys
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.tree import ReuseTree, Walk


class AdmissionPlan:
    """What one request of a batch will get.

    ``matches`` are full blocks from the tree in prompt order. ``partial`` shares its first ``partial_tokens`` tokens with the
    prompt's next block; it is taken over (``in_place``) or copied.
    """

    def __init__(self, request: Request, keys: TokenKeys, namespace: Namespace) -> None:
        self.request = request
        self.keys = keys
        self.namespace = namespace
        self.num_blocks = (keys.num_tokens + keys.tokens_per_block - 1) // keys.tokens_per_block
        self.matches: list[Block] = []
        self.partial: Block | None = None
        self.partial_tokens = 0
        self.in_place = False

    @property
    def prepopulated(self) -> int:
        return len(self.matches) * self.keys.tokens_per_block + self.partial_tokens

    def give_up_partial(self) -> None:
        self.partial = None
        self.partial_tokens = 0
        self.in_place = False


def present_prefix(walk: Walk, group: int) -> list[Block]:
    """The handles along a walk up to the first hole."""
    found: list[Block] = []
    for node, count in zip(walk.nodes, walk.counts, strict=True):
        values = node.values[group]
        if node.present[group] == node.length and count == node.length:
            found.extend([value for value in values if value is not None])
            continue
        for position in range(count):
            value = values[position]
            if value is None:
                return found
            found.append(value)
    return found


class BatchPlanner:
    """Plans the requests of one batch in order."""

    def __init__(self, tree: ReuseTree, allocator: BlockAllocator, partial_reuse: bool, copy_on_partial_reuse: bool) -> None:
        self.tree = tree
        self.allocator = allocator
        self.group = allocator.group
        self.partial_reuse = partial_reuse
        self.copy_on_partial_reuse = copy_on_partial_reuse
        self.plans: list[AdmissionPlan] = []
        self._fully_matched: set[int] = set()
        self._in_place: dict[int, AdmissionPlan] = {}

    def plan(self, plan: AdmissionPlan) -> None:
        """Match one request. Its last prompt token is never matched: somebody has to compute the first logits."""
        self.plans.append(plan)
        root = self.tree.find_root(plan.namespace)
        if root is None or plan.request.skip_read:
            return
        usable = plan.keys.num_tokens - 1
        walk = self.tree.walk(root, plan.keys, usable)
        plan.matches = present_prefix(walk, self.group)
        for block in plan.matches:
            self._fully_matched.add(block.id)
            if self._in_place:
                self._bump(block)
        if self.partial_reuse and len(plan.matches) == walk.num_blocks:
            self._match_partial(plan, walk, usable)

    def needed_primary(self) -> int:
        """Primary handles that carrying the plans out takes: new blocks, copies, promotions."""
        needed = 0
        promoted: set[int] = set()
        for plan in self.plans:
            needed += plan.num_blocks - len(plan.matches)
            for block in plan.matches:
                if level_of(block.index) != PRIMARY and block.id not in promoted:
                    promoted.add(block.id)
                    needed += 1
            # Taking over a primary block costs nothing; a lower one is promoted into the handle counted above.
            if plan.in_place and plan.partial is not None and level_of(plan.partial.index) == PRIMARY:
                needed -= 1
        return needed

    def protected(self) -> set[int]:
        """Ids of the blocks that the plans hold on to: none of them can be taken."""
        held: set[int] = set()
        for plan in self.plans:
            for block in plan.matches:
                held.add(block.id)
            if plan.partial is not None:
                held.add(plan.partial.id)
        return held

    def give_up_copies(self) -> None:
        """Reuse no block by copying it. The source of a copy takes a place beside the copy, so that in a small pool a request
        might otherwise never fit although it would without that reuse."""
        for plan in self.plans:
            if plan.partial is not None and not plan.in_place:
                plan.give_up_partial()

    def _match_partial(self, plan: AdmissionPlan, walk: Walk, usable: int) -> None:
        for shared, node, position in self.tree.partial_places(walk, plan.keys, usable):
            block = node.values[self.group][position]
            if block is None:
                continue
            level = level_of(block.index)
            if level == NVME or (level == PRIMARY and self.allocator.is_busy(block)):
                # A file read for part of a block costs as much as for all of it. And a copy that waits for a read under way would
                # hold its new slot, and whoever gets that next, behind the file.
                continue
            must_copy = block.ref_count > 0 or not node.is_leaf(position) or block.id in self._fully_matched
            if must_copy and not self.copy_on_partial_reuse:
                continue
            if not must_copy:
                self._bump(block)
                self._in_place[block.id] = plan
                plan.in_place = True
            plan.partial = block
            plan.partial_tokens = shared
            return

    def _bump(self, block: Block) -> None:
        """Somebody with a better claim wants the block: whoever meant to take it over copies it instead."""
        earlier = self._in_place.pop(block.id, None)
        if earlier is not None:
            earlier.in_place = False
            if not self.copy_on_partial_reuse:
                earlier.give_up_partial()
