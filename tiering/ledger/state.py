"""``LedgerState``: what the parts of the ledger share (design: one ledger, three levels; one tree for all groups)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.errors import UnknownRequest
from kvtier.policies.eviction import eviction_queues
from kvtier.policies.use_history import UseHistory
from kvtier.pools.pool_index import NUM_LEVELS
from kvtier.tiering.ledger.allocator import BlockAllocator
from kvtier.tiering.ledger.chunks import scratch_budgets
from kvtier.tiering.ledger.events import EventLog
from kvtier.tiering.ledger.group import CROSS, FULL, RECURRENT, WINDOW, GroupGeometry, GroupSpec, checked_group
from kvtier.tiering.ledger.key import Namespace, TokenKeys
from kvtier.tiering.ledger.moves import MoveLog
from kvtier.tiering.ledger.node import Walk
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.sequence import ActiveSequence, Lease
from kvtier.tiering.ledger.stats import LedgerCounters
from kvtier.tiering.ledger.tree import ReuseTree


class Followed:
    """A prompt followed through the tree as far as it may be reused: good until the tree's nodes change. ``walk`` is None where
    nothing of its namespace is stored."""

    def __init__(self, request: Request, keys: TokenKeys, namespace: Namespace, walk: Walk | None, version: int) -> None:
        self.request = request
        self.keys = keys
        self.namespace = namespace
        self.walk = walk
        self.version = version


class LedgerState:
    """Groups, tree, sequences and what governs them.

    Attributes:
        geometries, allocators: by group.
        prefix_groups: groups that a reused prefix must be present in: all but cross-attention.
        leading_group: the group whose handle stands for a place in the tree: a full-attention one if there is any, never a
            cross-attention one beside others.
        is_single: one full-attention group, the common case.
        has_window: some layers attend to the last tokens only.
        is_chunked: prompts are computed chunk by chunk, and window groups take their blocks so.
        scratch_budgets, scratch_used: by group, blocks for chunks that leave the window again at once, and how many are taken.
        paused: sequences that wait for their next chunk's blocks, longest wait first.
        has_recurrent: some layers keep a running state, which can be found again at snapshots only.
        has_cross: some layers attend to an encoder's output.
        reuse, partial_reuse: whether anything stored is ever matched, and whether the first tokens of a block are.
    """

    def __init__(self, groups: Sequence[GroupSpec], tokens_per_block: int, rules: LedgerRules) -> None:
        self.groups = list(groups)
        self.tokens_per_block = tokens_per_block
        self.rules = rules
        self.counters = LedgerCounters()
        self.moves = MoveLog()
        self.events = EventLog(rules.max_events, len(self.groups))
        self.tree = ReuseTree(len(self.groups), tokens_per_block)
        self.geometries = [GroupGeometry(group, tokens_per_block) for group in self.groups]
        self.allocators = [BlockAllocator(number, group.num_blocks, tokens_per_block, eviction_queues(rules.policy, NUM_LEVELS), self.tree,
                                          self.moves, self.events, self.counters, rules)
                           for number, group in enumerate(self.groups)]
        self.sequences: dict[int, ActiveSequence] = {}
        self.leases: dict[int, Lease] = {}
        self.prefix_groups = [number for number, group in enumerate(self.groups) if group.kind != CROSS]
        full = [number for number, group in enumerate(self.groups) if group.kind == FULL]
        self.leading_group = [*full, *self.prefix_groups, 0][0]
        self.is_single = len(self.groups) == 1 and self.groups[0].kind == FULL
        self.has_window = any(group.kind == WINDOW for group in self.groups)
        self.is_chunked = self.has_window and rules.chunk_size > 0
        self.scratch_budgets = scratch_budgets(self.geometries, rules)
        self.scratch_used = [0] * len(self.groups)
        self.paused: dict[int, ActiveSequence] = {}
        self.has_recurrent = any(group.kind == RECURRENT for group in self.groups)
        self.has_cross = any(group.kind == CROSS for group in self.groups)
        # The bubble moves tokens to other places inside their blocks than in a group without it: no common blocks to find again.
        self.reuse = rules.enable_block_reuse and all(geometry.bubble == 0 for geometry in self.geometries)
        self.history: UseHistory | None = None  # where the policy has one
        self._followed: Followed | None = None
        self.partial_reuse = self.reuse and rules.enable_partial_reuse and not self.has_recurrent

    def check_group(self, group: Any) -> int:
        """The number of a group. RequestError unless the layout has it."""
        return checked_group(group, len(self.groups))

    def follow(self, request: Request, num_tokens: int) -> Followed:
        """Follow a prompt's first ``num_tokens`` tokens. A scheduler asks about a request several times before it admits it: the last
        one asked about is remembered."""
        last = self._followed
        if last is not None and last.request is request and last.version == self.tree.version:
            return last
        keys = TokenKeys(request, self.tokens_per_block)
        namespace = Namespace(self.rules.namespace_seed, request)
        root = self.tree.find_root(namespace)
        walk = None if root is None else self.tree.walk(root, keys, num_tokens)
        self._followed = Followed(request, keys, namespace, walk, self.tree.version)
        return self._followed

    def forget_followed(self) -> None:
        """A sequence takes the keys over, and they will grow with it."""
        self._followed = None

    def has_warm(self) -> bool:
        """Whether a store directory held blocks at the start that nobody has matched yet."""
        for allocator in self.allocators:  # noqa: SIM110 (asked for every prompt; a generator costs more than the loop)
            if allocator.warm:
                return True
        return False

    def sequence(self, request_id: Any) -> ActiveSequence:
        """Raises UnknownRequest."""
        sequence = self.sequences.get(request_id) if isinstance(request_id, int) else None
        if sequence is None:
            raise UnknownRequest(f"request {request_id!r}: no active sequence has this id (active: {len(self.sequences)})")
        return sequence
