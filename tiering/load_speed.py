"""``LoadMeter``: how fast this tier loads, measured on the Moves that really happened (design: deciding to load).

Loads of one route (source and destination level) overlap: several reader threads, copies in batches. What a request waits for is
therefore measured over a whole burst, from when its first Move was issued to when its last one had ended.
"""

from __future__ import annotations

from typing import Final

from kvtier.policies.speed_models import LoadModel, LoadSpeed
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, level_of
from kvtier.tiering.ledger.moves import Move
from kvtier.types import TransferMode

MAX_BURST: Final = 64
"""Moves after which a burst that does not end counts as one: a tier under steady load must learn, too."""

DEBUGGED: Final = TransferMode.POSIX_DEBUG_FALLBACK.value

DEFAULTS: Final = {(SECONDARY, PRIMARY): LoadSpeed(20e-6, 1e-10), (NVME, PRIMARY): LoadSpeed(200e-6, 5e-10),
                   (NVME, SECONDARY): LoadSpeed(200e-6, 5e-10)}
"""Before the first load: 10 GB/s from host memory and 2 GB/s from a drive, which ordinary machines reach."""


class RouteMeter:
    """Loads of one route.

    Attributes:
        model: what they have taught.
        outstanding_bytes: issued and not known to have ended.
        num_bursts: observed so far, forgotten ones included.
        estimated_seconds, measured_seconds: of all observed bursts: what the model had said before each, and what it was.
    """

    def __init__(self, default: LoadSpeed) -> None:
        self.model = LoadModel(default)
        self.outstanding_bytes = 0
        self.num_bursts = 0
        self.estimated_seconds = 0.0
        self.measured_seconds = 0.0
        self._outstanding = 0
        self._began = 0.0
        self._last_end = 0.0
        self._num_bytes = 0
        self._num_moves = 0
        self._is_whole = True

    def issued(self, num_bytes: int, now: float) -> None:
        if self._outstanding == 0:
            self._began = now
        self._outstanding += 1
        self.outstanding_bytes += num_bytes

    def ended(self, num_bytes: int, at: float, is_good: bool) -> None:
        self._outstanding -= 1
        self.outstanding_bytes -= num_bytes
        self._last_end = max(self._last_end, at)
        self._num_bytes += num_bytes
        self._num_moves += 1
        if not is_good:
            self._is_whole = False  # how long a failure takes says nothing about loading
        if self._outstanding == 0 or self._num_moves >= MAX_BURST:
            self._close()

    def _close(self) -> None:
        seconds = self._last_end - self._began
        if self._is_whole and seconds > 0.0:
            self.estimated_seconds += self.model.speed().seconds(self._num_bytes)
            self.measured_seconds += seconds
            self.num_bursts += 1
            self.model.observe(self._num_bytes, seconds)
        self._began = self._last_end
        self._num_bytes = 0
        self._num_moves = 0
        self._is_whole = True


class LoadMeter:
    """All routes upwards. Called under the ledger's lock; times are those of ``time.perf_counter``.

    Args:
        block_bytes: by group.
    """

    def __init__(self, block_bytes: list[int]) -> None:
        self.block_bytes = block_bytes
        self.routes = {route: RouteMeter(default) for route, default in DEFAULTS.items()}

    def issued(self, move: Move, now: float) -> None:
        """A Move is about to be handed to the transfers. Those within a level and downwards are passed over."""
        route = self._route(move)
        if route is not None:
            route.issued(self.block_bytes[move.group], now)

    def ended(self, move: Move, at: float, is_good: bool) -> None:
        """A Move has ended at this moment."""
        route = self._route(move)
        if route is not None:
            route.ended(self.block_bytes[move.group], at, is_good)

    def _route(self, move: Move) -> RouteMeter | None:
        source, destination = level_of(move.source), level_of(move.destination)
        if source <= destination or move.num_tokens or move.mode == DEBUGGED:
            return None  # part of a block, or on a way that nobody takes for its speed
        return self.routes[source, destination]

    def waiting_seconds(self, level: int) -> float:
        """How long a load from this level stands behind those that are on their way from there already."""
        seconds = 0.0
        for (source, _destination), route in self.routes.items():
            if source == level and route.outstanding_bytes:
                seconds += route.outstanding_bytes * route.model.speed().seconds_per_byte
        return seconds
