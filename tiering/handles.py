"""What the manager hands out for a sequence: ``Admission`` when it is added, ``Lease`` when it is pinned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.group import checked_group
from kvtier.tiering.ledger.sequence import ActiveSequence
from kvtier.tiering.ledger.sequence import Lease as LedgerLease

if TYPE_CHECKING:
    from kvtier.tiering.core import TierCore


class Admission:
    """What a new sequence got. ``prepopulated_tokens`` is promised, and final once the sequence is ready.

    Blocks are counted over all groups. ``external_tokens``: tokens behind the reused ones that the inbound hook announced; the engine
    loads them and says so with ``mark_computed``. ``tokens_left_to_recompute``: found on a lower level, and not loaded because
    computing them is faster (``TierConfig.load_decision``).
    """

    def __init__(self, sequence: ActiveSequence) -> None:
        self.request_id = sequence.id
        self.prepopulated_tokens = sequence.prepopulated
        self.total_blocks = sequence.total_blocks
        self.new_blocks = sequence.new_blocks
        self.reused_blocks = sequence.reused_blocks
        self.missed_blocks = sequence.missed_blocks
        self.external_tokens = sequence.external_tokens
        self.tokens_left_to_recompute = sequence.left_tokens

    def __repr__(self) -> str:
        return f"Admission(request_id={self.request_id}, prepopulated_tokens={self.prepopulated_tokens})"


class Lease:
    """Blocks pinned for one request until :meth:`release`; also a context manager.

    ``block_ids`` are those of group 0; :meth:`block_ids_of` gives any group's, :meth:`lost_block_ids` those that failed to arrive.
    """

    def __init__(self, manager: TierCore, lease: LedgerLease) -> None:
        self._manager = manager
        self._lease = lease
        self.block_ids = [block.id for block in lease.rows[0]]

    def block_ids_of(self, group: int) -> list[int]:
        """Ids of the pinned blocks of a group, in prompt order. RequestError for a group that there is not."""
        return [block.id for block in self._row(group)]

    def lost_block_ids(self, group: int = 0) -> list[int]:
        """Those of the pinned blocks of a group that hold garbage now, in prompt order: the read or copy that was to bring them, or what
        they were computed from, has failed, or they were found bad on NVMe. They stay pinned. What is still on its way may yet fail: ask
        once the sequence is ready, or after ``flush``. RequestError for a group that there is not."""
        row = self._row(group)
        with self._manager.locked():
            lost = self._lease.lost_ids[group]
            return [block.id for block in row if block.id in lost]

    def _row(self, group: int) -> list[Block]:
        rows = self._lease.rows
        return rows[checked_group(group, len(rows))]

    def release(self) -> None:
        """Let go. RequestError when it was released before."""
        with self._manager.locked() as ledger:
            ledger.release_lease(self._lease)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_details: object) -> None:
        self.release()
