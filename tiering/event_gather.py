"""``EventGather``: the events of all data-parallel ranks in one stream at rank 0 (design: events).

Each other rank sends what has come, at most once per ``period``, and a sign of life when nothing has. Rank 0 merges; ids stay those
of each rank, so that a gap shows per rank. Leaving is agreed: a rank leaves when rank 0 has confirmed its last event, rank 0 when
every other rank has left or is lost. All of it is bounded in time.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from kvtier.errors import ConfigError, RequestError, TransferError
from kvtier.io.threads import start_thread
from kvtier.tiering import arguments
from kvtier.tiering.event_codec import decode_events, encode_events
from kvtier.tiering.event_stream import EventBuffer, EventStream
from kvtier.tiering.event_transport import GatherTransport
from kvtier.tiering.ledger.events import Event

logger = logging.getLogger(__name__)

EVENTS_PER_MESSAGE: Final = 64
SIGNS_OF_LIFE: Final = 5  # within the time after which a rank counts as silent
EVENTS, ALIVE, LAST, CONFIRMED = b"E", b"A", b"L", b"C"  # first byte of a message


@dataclass(frozen=True)
class RankedEvent:
    """An event of one rank. ``event.event_id`` ascends by one within each rank."""

    rank: int
    event: Event


class RankState(enum.Enum):
    """What rank 0 knows of a rank."""

    ACTIVE = "active"
    SILENT = "silent"  #: no message for a while; active again with the next one
    LEFT = "left"      #: it has said that nothing more comes
    LOST = "lost"      #: its way has ended without that


@dataclass(frozen=True)
class RankReport:
    """One rank as seen from rank 0. ``unreadable``: messages that were none; ``problem``: the last thing that was wrong."""

    rank: int
    state: RankState
    events: int
    unreadable: int
    problem: str | None


class _Rank:
    """What rank 0 notes about a rank; only the receiving thread changes it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.state = RankState.ACTIVE
        self.events = 0
        self.unreadable = 0
        self.problem: str | None = None
        self.heard_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        return self.state in (RankState.LEFT, RankState.LOST)


class EventGather:
    """One per rank, beside its cache: ``EventGather(cache.events(), transport)``. Close it before its cache, on every rank.

    Args:
        stream: the rank's own events; the gather is its only reader and closes it.
        transport: connects the ranks; closed with the gather.
        period: seconds; events are sent at most this often.
        silent_after: seconds without a message after which rank 0 reports a rank as silent.

    At rank 0, ``poll``, ``events`` and ``ranks`` give the merged events and what became of each rank; at most the stream's
    ``max_size`` times the number of ranks wait to be read. Rank 0 need not be the one that has most to tell.

    Raises:
        ConfigError: a thread cannot be started. The stream may be closed then; the transport is the caller's to close.
    """

    def __init__(self, stream: EventStream[Event], transport: GatherTransport, period: float = 0.005, silent_after: float = 10.0) -> None:
        self.rank = transport.rank
        self._stream = stream
        self._transport = transport
        self._period = arguments.positive_number("period", period)
        self._silent_after = arguments.positive_number("silent_after", silent_after)
        self._merged: EventBuffer[RankedEvent] = EventBuffer(stream.max_size * transport.num_ranks, "gathered events")
        self._ranks = [_Rank(rank) for rank in range(transport.num_ranks)]
        self._stopping = threading.Event()
        self._close_lock = threading.Lock()
        self._agreed: bool | None = None
        self._has_failed = False  # rank 0 could not be told everything
        self._forwarding = start_thread(self._forward, "kvtier-gather-send")
        try:
            self._receiving = start_thread(self._receive, "kvtier-gather-receive") if self.rank == 0 else None
        except ConfigError:
            self._stopping.set()
            stream.close()
            self._forwarding.join(1.0)
            raise

    # -- reading, at rank 0 ------------------------------------------------------------------------------------------------

    def poll(self, timeout: float = 0.0) -> list[RankedEvent]:
        """Gathered events, oldest first for each rank; waits up to ``timeout`` seconds for the first."""
        self._require_rank_0("poll")
        return self._merged.take(timeout)

    def events(self) -> EventStream[RankedEvent]:
        """One more reader of the gathered events; see ``KVCacheManager.events``."""
        self._require_rank_0("events")
        return self._merged.stream()

    @property
    def dropped(self) -> int:
        """Gathered events that went before they were read."""
        return self._merged.dropped

    @property
    def ranks(self) -> tuple[RankReport, ...]:
        """What became of each rank so far."""
        self._require_rank_0("ranks")
        return tuple([RankReport(rank.rank, rank.state, rank.events, rank.unreadable, rank.problem) for rank in self._ranks])

    # -- the end -----------------------------------------------------------------------------------------------------------

    def close(self, timeout: float = 10.0) -> bool:
        """Send what is left and leave, together with the other ranks. Bounded by ``timeout`` and a second for threads.

        True when everything sent has arrived: at rank 0, every rank has left; elsewhere, rank 0 has confirmed. What was
        gathered can still be polled.
        """
        deadline = time.monotonic() + arguments.seconds("timeout", timeout)
        with self._close_lock:
            if self._agreed is None:
                self._stopping.set()
                self._stream.close()
                self._forwarding.join(_left(deadline))
                self._agreed = self._others_have_left(deadline) if self.rank == 0 else self._is_confirmed(deadline)
                self._transport.close()
                self._forwarding.join(1.0)
                self._merged.close()
            return self._agreed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _others_have_left(self, deadline: float) -> bool:
        assert self._receiving is not None
        self._receiving.join(_left(deadline))
        missing = [rank.rank for rank in self._ranks[1:] if rank.state is not RankState.LEFT]
        if missing:
            logger.warning("event gather: rank 0 leaves, ranks %s have not said that they are done; their last events may be missing",
                           missing)
        return not missing

    def _is_confirmed(self, deadline: float) -> bool:
        while not (self._forwarding.is_alive() or self._has_failed):  # otherwise the last message has not been sent
            try:
                arrived = self._transport.receive(_left(deadline))
            except TransferError:  # somebody else has closed the transport
                break
            for _rank, message in arrived:
                if message is None or message == CONFIRMED:
                    return message is not None
            if time.monotonic() >= deadline:
                break
        logger.warning("event gather: rank 0 has not confirmed the last events of rank %d in time", self.rank)
        return False

    # -- each rank's own events ----------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        """Sleeps until events come, hands them on, then lets ``period`` pass, so that those that come meanwhile travel together."""
        try:
            while not self._stream.is_over:
                self._hand_on(self._stream.poll(self._silent_after / SIGNS_OF_LIFE))
                self._stopping.wait(self._period)
            self._hand_on(self._stream.poll())
            if self.rank != 0:
                self._transport.send(0, LAST)
        except TransferError as error:
            self._has_failed = True
            if not self._stopping.is_set():
                logger.warning("event gather: %s; events of rank %d are gathered no more", error, self.rank)
        finally:
            self._stream.close()  # nobody reads it any more: it must hold nothing back

    def _hand_on(self, events: list[Event]) -> None:
        if self.rank == 0:
            self._merge(self._ranks[0], events)
        elif not events:
            self._transport.send(0, ALIVE)
        else:
            for start in range(0, len(events), EVENTS_PER_MESSAGE):
                self._transport.send(0, EVENTS + encode_events(events[start:start + EVENTS_PER_MESSAGE]))

    # -- rank 0 --------------------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        while not all(rank.is_over for rank in self._ranks[1:]):
            try:
                arrived = self._transport.receive(self._silent_after / SIGNS_OF_LIFE)
            except TransferError as error:
                if self._agreed is None:
                    self._lose_all(str(error))
                return
            if self._agreed is not None:
                return  # we have left without waiting any longer
            for sender, message in arrived:
                self._take(self._ranks[sender], message)
            self._note_silence()

    def _take(self, rank: _Rank, message: bytes | None) -> None:
        if rank.is_over:
            return
        if message is None:
            rank.problem = "its connection ended before it said that it was done"
            logger.warning("event gather: rank %d is lost; the other ranks' events go on", rank.rank)
            rank.state = RankState.LOST
            return
        rank.heard_at = time.monotonic()
        if rank.state is RankState.SILENT:
            rank.state = RankState.ACTIVE
            logger.info("event gather: rank %d is heard again", rank.rank)
        if message[:1] == EVENTS:
            try:
                self._merge(rank, decode_events(message[1:]))
            except TransferError as error:
                self._note_unreadable(rank, str(error))
        elif message == LAST:
            rank.state = RankState.LEFT
            try:
                self._transport.send(rank.rank, CONFIRMED)
            except TransferError:
                pass  # it did not wait
        elif message != ALIVE:
            self._note_unreadable(rank, f"a message of {len(message)} bytes that starts with {message[:8]!r}")

    def _lose_all(self, problem: str) -> None:
        """Nothing arrives from anybody any more, though this gather is still open."""
        logger.warning("event gather: %s", problem)
        for rank in self._ranks[1:]:
            if not rank.is_over:
                rank.problem = problem
                rank.state = RankState.LOST

    def _merge(self, rank: _Rank, events: list[Event]) -> None:
        rank.events += len(events)
        if events:
            self._merged.put([RankedEvent(rank.rank, event) for event in events])

    def _note_unreadable(self, rank: _Rank, problem: str) -> None:
        rank.unreadable += 1
        rank.problem = problem
        if rank.unreadable == 1:
            logger.warning("event gather: rank %d sent what cannot be read: %s", rank.rank, problem)

    def _note_silence(self) -> None:
        oldest = time.monotonic() - self._silent_after
        for rank in self._ranks[1:]:
            if rank.state is RankState.ACTIVE and rank.heard_at < oldest:
                rank.problem = f"nothing heard for {self._silent_after} s"
                logger.warning("event gather: rank %d: nothing heard for %s s", rank.rank, self._silent_after)
                rank.state = RankState.SILENT

    def _require_rank_0(self, what: str) -> None:
        if self.rank != 0:
            raise RequestError(f"{what} at rank {self.rank}: events are gathered at rank 0; read them there")


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
