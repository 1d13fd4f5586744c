"""A random machine over the whole ledger, against the naive model: the ground of it. ``serving_machine`` adds what requests do.

After every step: ``verify()`` holds, what is stored in any group has the bytes it stands for, every ready sequence reads exactly what
its own tokens say in every group and beam, and a subscriber to the events knows the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from group_layouts import PRIORITIES, layouts, prompts, suffixes
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from naive_model import Driver, Subscriber, snapshot
from pretend_tier import always, never

from kvtier.errors import CapacityError, RequestError
from kvtier.pools.pool_index import NVME, PRIMARY, level_of
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.admission import AdmissionPlan
from kvtier.tiering.ledger.group import CROSS, FULL, KIND_NAMES, GroupSpec
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.moves import Move, WarmRow
from kvtier.tiering.ledger.raising import is_unused, raise_to_primary, raise_to_secondary, stored_prefix
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.truncating import truncate

failures = st.sampled_from((False, False, False, True))


def has_sequences(machine: Any) -> bool:
    return bool(machine.ledger.sequences)


class Elsewhere:
    """Somebody who has the next ``num_blocks`` blocks of every prompt."""

    def __init__(self, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.num_blocks = 0

    def num_new_matched_tokens(self, request: Request, num_matched_tokens: int) -> int:
        behind = (request.num_tokens - 1 - num_matched_tokens) // self.tokens_per_block
        return max(min(self.num_blocks, behind), 0) * self.tokens_per_block


class WorthLoading:
    """Somebody who thinks that only the first ``num_blocks`` blocks of a prefix are worth loading; None: all."""

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self.can_split = all(group.kind in (FULL, CROSS) for group in groups)
        self.num_blocks: int | None = None

    def num_blocks_to_load(self, plans: Sequence[AdmissionPlan]) -> int:
        matched = plans[-1].num_matched
        if self.num_blocks is None or self.num_blocks >= matched:
            return matched
        return self.num_blocks if self.can_split else 0


class LedgerMachine(RuleBasedStateMachine):
    """One ledger, its pretend tiers, and an engine that keeps the contract."""

    layout = "full"
    driver_type = Driver
    total_steps = 0

    @initialize(data=st.data(), tokens_per_block=st.sampled_from((2, 4)), keep_backing=st.booleans(), reuse=st.integers(0, 9),
                partial=st.booleans(), copy_on_partial=st.booleans(), chunk=st.sampled_from((0, 0, 3)),
                share=st.sampled_from((0.25, 0.5, 1.0)), events=st.sampled_from((1 << 20, 1 << 20, 0)),
                thresholds=st.sampled_from(((30, 30), (30, 31), (35, 35), (0, 0), (30, 80))),
                policy=st.sampled_from(("lru", "default", "halving", "seen-first")), stride=st.sampled_from((1, 1, 2)))
    def start(self, data: st.DataObject, tokens_per_block: int, keep_backing: bool, reuse: int, partial: bool, copy_on_partial: bool,
              chunk: int, share: float, events: int, thresholds: tuple[int, int], policy: str, stride: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.groups: list[GroupSpec] = data.draw(layouts(self.layout, tokens_per_block))
        note(str([(group.num_blocks, KIND_NAMES[group.kind], group.window, group.sinks, group.snapshot_interval) for group in self.groups]))
        self.longest = tokens_per_block * min(6, *(group.num_blocks[PRIMARY] for group in self.groups))
        self.has_cross = any(group.kind == CROSS for group in self.groups)
        self.rules_ = LedgerRules(enable_block_reuse=reuse > 0, enable_partial_reuse=partial, copy_on_partial_reuse=copy_on_partial,
                                  secondary_offload_min_priority=thresholds[0], nvme_offload_min_priority=thresholds[1],
                                  keep_backing=keep_backing, write_ahead_share=share, policy=policy, chunk_size=chunk, max_events=events,
                                  history_stride=stride)
        self.elsewhere = Elsewhere(tokens_per_block)
        self.ledger = Ledger(self.groups, tokens_per_block, self.rules_)
        self.ledger.inbound = self.elsewhere
        self.worth = WorthLoading(self.groups)
        self.ledger.loading = self.worth
        self.driver = self.driver_type(self.ledger)
        self.now = 0.0
        self.next_id = 0
        self.leases: list[Any] = []
        self.accesses: list[tuple[int, int]] = []  # (group, NVMe slot) of tools
        self.prompts: list[dict[str, Any]] = []
        self.num_steps = -1  # the look behind this call counts none

    def prompt(self, data: st.DataObject) -> dict[str, Any]:
        """A new prompt, or an earlier one cut somewhere and continued."""
        earlier = data.draw(st.integers(0, min(len(self.prompts), 6)))
        keywords = data.draw(prompts(self.has_cross, True)) if earlier == 0 else dict(self.prompts[-earlier])
        if "extra_ids" not in keywords and "multimodal" not in keywords:
            tokens = keywords["tokens"]
            if earlier:
                tokens = tokens[:len(tokens) - data.draw(st.integers(0, len(tokens)))] + data.draw(suffixes)
            keywords["tokens"] = tokens[:self.longest] if data.draw(st.integers(0, 9)) < 9 else tokens  # mostly, it fits
        self.prompts.append(keywords)
        return keywords

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.ledger.sequences)))

    # -- leases and single blocks

    @precondition(lambda self: self.ledger.sequences and len(self.leases) < 2)
    @rule(data=st.data(), store=st.booleans())
    def pin(self, data: st.DataObject, store: bool) -> None:
        request_id = self.pick(data)
        if store:
            self.driver.note_stored(request_id)
        self.leases.append(self.ledger.store_and_pin(request_id) if store else self.ledger.pin(request_id))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.ledger.release_lease(lease)
        with pytest.raises(RequestError):
            self.ledger.release_lease(lease)

    @precondition(lambda self: any(block.has_content for allocator in self.ledger.allocators for block in allocator.blocks))
    @rule(data=st.data(), verb=st.sampled_from(("set_priority", "offload", "onboard")), priority=st.sampled_from(PRIORITIES))
    def single_block(self, data: st.DataObject, verb: str, priority: int) -> None:
        group, block_id = data.draw(st.sampled_from([(allocator.group, block.id) for allocator in self.ledger.allocators
                                                     for block in allocator.blocks if block.has_content]))
        before = snapshot(self.ledger)
        try:
            if verb == "set_priority":
                self.ledger.set_priority(block_id, priority, group)
            elif verb == "offload":
                self.ledger.offload(block_id, group)
            else:
                self.ledger.onboard(block_id, group)
        except (CapacityError, RequestError):
            assert snapshot(self.ledger) == before
        self.driver.tiers.fetch()

    @precondition(lambda self: len(self.accesses) < 2 and any(tier.rows for tier in self.driver.tiers.groups))
    @rule(data=st.data())
    def begin_access(self, data: st.DataObject) -> None:
        """A tool reads what a slot on NVMe holds, whatever becomes of that meanwhile."""
        tier = data.draw(st.sampled_from([tier for tier in self.driver.tiers.groups if tier.rows]))
        slot = data.draw(st.sampled_from(sorted(tier.rows)))
        allocator = self.ledger.allocators[tier.group]
        allocator.begin_access(allocator.holders[NVME][slot])
        self.accesses.append((tier.group, slot))

    @precondition(lambda self: self.accesses)
    @rule()
    def end_accesses(self) -> None:
        for group, slot in self.accesses:
            self.ledger.allocators[group].end_access(NVME, slot)
        self.accesses = []
        self.driver.tiers.fetch()

    @precondition(lambda self: any(tier.rows for tier in self.driver.tiers.groups))
    @rule(data=st.data())
    def condemn(self, data: st.DataObject) -> None:
        """A slot that nothing reads or writes at the moment is found bad, whoever counts on it."""
        tier = data.draw(st.sampled_from([tier for tier in self.driver.tiers.groups if tier.rows]))
        slot = data.draw(st.sampled_from(sorted(tier.rows)))
        if not tier.is_used({(NVME, slot)}):
            tier.quarantine(slot)
            self.ledger.condemn(tier.group, slot)
            self.driver.tiers.fetch()

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), keep=st.integers(0, 8))
    def truncate(self, data: st.DataObject, keep: int) -> None:
        request = Request(-1, **data.draw(st.sampled_from(self.prompts)))
        truncate(self.ledger, request, keep)
        assert capacity.match(self.ledger, request).reusable_blocks <= -(-keep // self.tokens_per_block)
        self.driver.tiers.fetch()

    @rule(data=st.data())
    def match(self, data: st.DataObject) -> None:
        before = snapshot(self.ledger)
        capacity.match(self.ledger, Request(-1, **self.prompt(data)))
        assert snapshot(self.ledger) == before

    # -- time and transfers

    @rule(seconds=st.sampled_from((0.0, 0.5, 2.0)))
    def refresh(self, seconds: float) -> None:
        self.now += seconds
        self.driver.refresh(self.now)

    def decide(self, data: st.DataObject) -> Any:
        return lambda _move: data.draw(failures)

    @rule(num_blocks=st.integers(0, 2))
    def change_what_is_elsewhere(self, num_blocks: int) -> None:
        self.elsewhere.num_blocks = num_blocks

    @rule(num_blocks=st.sampled_from((None, None, 0, 1, 2)))
    def change_what_is_worth_loading(self, num_blocks: int | None) -> None:
        self.worth.num_blocks = num_blocks

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), steps=st.integers(1, 12))
    def raise_ahead(self, data: st.DataObject, steps: int) -> None:
        """Blocks go up one level at a time, whatever else is going on."""
        request = Request(-1, **data.draw(st.sampled_from(self.prompts)))
        for stored in stored_prefix(self.ledger, request)[:steps]:
            level = level_of(stored.block.index)
            if not is_unused(self.ledger, stored) or level == PRIMARY:
                continue
            before = snapshot(self.ledger)
            blocks = self.ledger.allocators[stored.group].blocks
            kept = [blocks[number] for number in data.draw(st.sets(st.integers(0, len(blocks) - 1))) if blocks[number].node is not None]
            if (raise_to_secondary if level == NVME else raise_to_primary)(self.ledger, stored, {block.id for block in kept}):
                assert level_of(stored.block.index) == level - 1
                assert all(block.node is not None for block in kept), "what is kept is not given up"
            else:
                assert snapshot(self.ledger) == before
        self.driver.tiers.fetch()

    @rule(source_is_bad=st.booleans())
    def change_the_kind_of_failing_reads(self, source_is_bad: bool) -> None:
        for tier in self.driver.tiers.groups:
            tier.condemns = always if source_is_bad else never

    @precondition(lambda self: any(tier.waiting for tier in self.driver.tiers.groups))
    @rule(data=st.data(), fails=failures)
    def carry_out_one(self, data: st.DataObject, fails: bool) -> None:
        tier = data.draw(st.sampled_from([tier for tier in self.driver.tiers.groups if tier.waiting]))
        record = data.draw(st.sampled_from(tier.runnable()))
        tier.carry_out(record, fails and isinstance(record, Move))

    @precondition(lambda self: any(tier.ended for tier in self.driver.tiers.groups))
    @rule(data=st.data())
    def report_one(self, data: st.DataObject) -> None:
        tier = data.draw(st.sampled_from([tier for tier in self.driver.tiers.groups if tier.ended]))
        tier.report(data.draw(st.integers(0, len(tier.ended) - 1)))

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.driver.tiers.settle(self.decide(data))
        if not self.accesses:  # what was forgotten of a slot that a tool uses keeps its row as long
            for tier in self.driver.tiers.groups:
                tier.check_rows()

    @rule()
    def read_events(self) -> None:
        if self.rules_.max_events:
            self.driver.events.check()

    @precondition(lambda self: self.driver.ever_stored)
    @rule()
    def reset(self) -> None:
        if self.ledger.sequences or self.ledger.leases:
            with pytest.raises(RequestError):
                self.ledger.reset()
            return
        self.end_accesses()  # what is busy is waited for
        self.ledger.reset()
        self.driver.tiers.settle()
        assert not any(tier.rows for tier in self.driver.tiers.groups), "what was stored before a reset is on no level afterwards"
        assert not self.ledger.tree.roots
        assert not any(allocator.warm for allocator in self.ledger.allocators)
        self.driver.ever_stored.clear()

    @precondition(lambda self: any(group.num_blocks[NVME] for group in self.groups))
    @rule()
    def restart(self) -> None:
        """The process ends at any point; a new one finds what the manifest names."""
        old = self.driver
        self.ledger = Ledger(self.groups, self.tokens_per_block, self.rules_)
        self.ledger.inbound = self.elsewhere
        self.ledger.loading = self.worth
        self.ledger.set_time(self.now)
        self.driver = self.driver_type(self.ledger)
        self.driver.ever_stored = old.ever_stored
        self.leases = []
        self.accesses = []
        rows: list[WarmRow] = []
        quarantined: list[tuple[int, int]] = []
        for before, tier in zip(old.tiers.groups, self.driver.tiers.groups, strict=True):
            tier.rows = dict(before.rows)
            tier.row_retention = dict(before.row_retention)
            tier.quarantined = set(before.quarantined)
            for slot in range(self.groups[tier.group].num_blocks[NVME]):
                tier.cells[NVME, slot] = before.cells[NVME, slot]
            rows.extend(WarmRow(tier.group, slot, key, *tier.row_retention[slot]) for slot, key in sorted(tier.rows.items()))
            quarantined.extend((tier.group, slot) for slot in sorted(tier.quarantined))
        self.ledger.adopt_store(rows, quarantined)
        self.driver.events = Subscriber(self.ledger)
        self.driver.tiers.fetch()

    @invariant()
    def nothing_is_broken(self) -> None:
        if hasattr(self, "driver"):
            self.num_steps += 1
            self.driver.check()
            self.driver.check_estimates()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        type(self).total_steps += self.num_steps
        self.end_accesses()
        for request_id in sorted(self.ledger.sequences):
            self.driver.remove(request_id, True)
        for lease in self.leases:
            self.ledger.release_lease(lease)
        self.driver.check_idle()
        self.driver.check_writing_ends(self.now)
        self.driver.check_idle()
        if self.rules_.max_events:
            self.driver.events.check()
        self.ledger.reset()
        self.driver.tiers.settle()
        assert not self.ledger.tree.roots
