"""``Turn``: one thread at a time in a ledger, and a ledger that was left half changed is never asked again (design: ledger rules, "Lock").

An exception can land between any two lines: KeyboardInterrupt comes out of a signal handler, MemoryError out of anything. Where it lands in
the middle of a change and the process goes on, the ledger's queues and counters contradict each other from then on. Undoing a change would
take a log of all its steps; so the tier is *broken* instead, which costs next to nothing. The same exception can also land where
the turn is given back. The lock then stays with a thread that has no use for it, and who waits for it finds that out.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Final, Generic, Protocol, TypeVar

from kvtier.errors import KVTierError
from kvtier.io.running import runs

LedgerT_co = TypeVar("LedgerT_co", covariant=True)

LOOK_SECONDS: Final = 1.0
"""Whoever waits for a turn looks so often whether anybody has it at all. No turn is ended by that: a slow one has its frame."""


class Tier(Protocol[LedgerT_co]):
    """Whose ledger it is."""

    _broken: str

    def _begin(self) -> LedgerT_co:
        """A turn begins. KVTierError refuses it: nothing has changed then."""

    def _end(self) -> None:
        """It ends; the lock is still held."""

    def _submit(self) -> None:
        """It has ended; no lock is held."""

    def _tears(self, error: BaseException) -> bool:
        """Whether an exception that leaves a turn may have landed in the middle of a change. The lock is still held."""

    def _break(self, what: str) -> None:
        """That is what has happened. May be called again."""

    def _instead(self) -> LedgerT_co:
        """What a broken tier has for a turn."""


class Turn(Generic[LedgerT_co]):
    """The ledger, for a ``with`` statement, which is not to be nested."""

    def __init__(self, tier: Tier[LedgerT_co]) -> None:
        self._tier = tier
        self.lock = threading.RLock()
        self._inside: FrameType | None = None  # where the turn was taken

    def __enter__(self) -> LedgerT_co:
        tier, frame = self._tier, sys._getframe(1)
        try:
            if not (self.lock.acquire(False) or self.take()) or tier._broken:
                return tier._instead()
            if self._inside is not None:  # of this thread: it was cut short, or this comes out of a signal handler
                tier._break("one call was made in the middle of another one of the same thread, or behind one that was cut short")
                return tier._instead()
            self._inside = frame
            return tier._begin()
        except BaseException as error:
            if self._inside is frame:
                if not isinstance(error, KVTierError):  # ends of transfers may have been taken and not told
                    tier._break(f"{type(error).__name__} at the beginning of a call")
                self._inside = None
            self.give_back()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        tier = self._tier
        if tier._broken:
            self.give_back()
            return
        try:
            if error is not None and tier._tears(error):
                tier._break(f"{type(error).__name__} in the middle of a call")
            else:
                tier._end()
            self._inside = None
        except BaseException as failure:
            tier._break(f"{type(failure).__name__} at the end of a call")
            raise
        finally:
            self.lock.release()
        if not tier._broken:
            tier._submit()

    def take(self) -> bool:
        """The lock alone, until :meth:`give_back`. False where the tier is broken: it guards nothing any more."""
        while not self._tier._broken:
            if self.lock.acquire(True, LOOK_SECONDS):
                return True
            if self._is_left_behind():
                self._tier._break("a call was cut short and has kept the ledger's lock")
        return False

    def give_back(self) -> None:
        """Harmless where this thread does not have it."""
        with suppress(RuntimeError):
            self.lock.release()

    def _is_left_behind(self) -> bool:
        """Whether the function that took the turn runs no more, and the turn is still taken."""
        inside = self._inside
        return inside is not None and not runs(inside) and self._inside is inside
