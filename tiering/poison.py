"""``Poison``: blocks that an engine has not written yet hold a pattern that shows (design: transfer rules). A debug switch.

A slot that is handed out still holds somebody else's keys and values, which look like good ones. An engine or a kernel that reads
what nobody wrote, and a copy that takes a block too early, then give answers that are only slightly wrong. With this they are not.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from kvtier.pools.group_pools import GroupPools
from kvtier.pools.pool_index import slot_of
from kvtier.tiering.ledger.group import FULL, WINDOW, GroupGeometry
from kvtier.tiering.ledger.sequence import ActiveSequence

PATTERN: Final = 0x7B
"""Large and finite in every dtype that holds keys and values (1.3e36 in float32 and bfloat16): a kernel may multiply what it masks by 0."""


class Poison:
    """Fills what a sequence was given and has not computed, once for each time that a slot is handed out.

    Args:
        pools, geometries: by group number.

    Attributes:
        lock: held from :meth:`unwritten` to the end of :meth:`fill`, but not by those who only want the ledger: a fill takes long. Another
            step that looks in between would find nothing left to fill, and let its engine write. Taken before the ledger's lock.
    """

    def __init__(self, pools: Sequence[GroupPools], geometries: Sequence[GroupGeometry]) -> None:
        self._pools = pools
        self._geometries = geometries
        self._seen: dict[tuple[int, int], int] = {}  # by group and slot: the generation that was looked at
        self.lock = threading.Lock()

    def unwritten(self, sequence: ActiveSequence) -> list[tuple[int, list[int]]]:
        """The sequence's new blocks behind what is computed, or is loaded by the engine itself: groups and slots, each once. The ledger's
        lock is held."""
        found: list[tuple[int, list[int]]] = []
        for row in sequence.rows:
            geometry = self._geometries[row.group]
            if geometry.kind not in (FULL, WINDOW):  # running states and an encoder's output are written by rules of their own
                continue
            written = geometry.num_blocks(max(sequence.computed, sequence.prepopulated + sequence.external_tokens))
            slots: list[int] = []
            for beam in range(len(row.other_beams) + 1):
                for position, block in enumerate(row.beam(beam)):
                    if block.id < 0:
                        continue
                    slot = int(slot_of(block.index))
                    if self._seen.get((row.group, slot)) == block.generation:
                        continue
                    self._seen[row.group, slot] = block.generation
                    if position >= written:
                        slots.append(slot)
            if slots:
                found.append((row.group, slots))
        return found

    def fill(self, unwritten: Sequence[tuple[int, list[int]]]) -> None:
        """Fill them: nobody else's, because their sequences are in a step. The caller has ordered the engine behind whatever still used
        their slots."""
        for group, slots in unwritten:
            for section in self._pools[group].primary.sections:
                section.rows[slots] = PATTERN
