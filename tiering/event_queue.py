"""The queue between the ledger's events and whoever reads them (design: events)."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.tiering.event_stream import EventBuffer
from kvtier.tiering.ledger.events import Event


class EventQueue(EventBuffer[Event]):
    """Holds the newest ``max_size`` events. Ids of dropped ones are gone, so that a reader sees the gap."""

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self._next_id = 0

    def put(self, batch: Sequence[Event], lost_before: int = 0) -> None:
        """Add a batch of the ledger. Over the limit the oldest queued events go first."""
        if batch:
            lost = batch[0].event_id - self._next_id  # the ledger keeps no more than we do between two batches
            self._next_id = batch[-1].event_id + 1
            super().put(batch, lost_before + lost)
