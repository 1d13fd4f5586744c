"""``Prefetching``: raising a prompt's blocks NVMe → secondary → primary ahead of its request, within a bandwidth budget.

A prefetch holds nothing. Its blocks stay cached content that any request may match and, when nothing else is left, take the place of;
so an admission never waits for one, and never fails because of one. Reads are ordinary Moves: a request that comes meanwhile finds its
blocks where they are going to be, and its copies stand behind the reads under way. Nothing is read twice.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, Final

from kvtier.errors import KVTierError
from kvtier.io.threads import start_thread
from kvtier.pools.layout import KVLayout
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, level_of
from kvtier.tiering import arguments
from kvtier.tiering.config import TierConfig
from kvtier.tiering.core import TierCore
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.raising import StoredBlock, is_unused, raise_to_primary, raise_to_secondary, stored_prefix, use_ahead
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.planning import as_request

_log = logging.getLogger(__name__)

BURST_SECONDS: Final = 0.02
"""What the budget of so much time may be spent at once."""

LOOK_UP: Final = 0.05
"""Seconds between two looks, should nobody wake the thread."""

KEPT_SECONDS: Final = 30.0
"""How long what was raised is not given up for another prefetch."""

MOST_AT_ONCE: Final = 16
"""Blocks begun while the ledger's lock is held once: whoever waits for it waits for no more."""

PAUSE: Final = 0.001  # seconds in which others get the lock


class PrefetchState(enum.Enum):
    """How far a prefetch has got."""

    RUNNING = "running"
    FINISHED = "finished"      #: everything that was there to raise, and for which there was room, is where it was to go
    OVERTAKEN = "overtaken"    #: its request came; what was left is that request's to load
    CANCELLED = "cancelled"    #: by ``cancel``, a reset or the end of the cache


class Prefetch:
    """A prompt being raised. Look at it, ``await`` it, ``wait`` for it or forget it.

    Attributes:
        num_blocks: stored blocks that the prompt would reuse, of all groups.
        read_blocks: those whose read from NVMe was begun; ``raised_blocks``: those copied to the primary level.
        lost_blocks: those that were gone when they should have arrived, as a rule because they could not be read. They are misses now.
    """

    def __init__(self, owner: Prefetching, request: Request, blocks: list[StoredBlock]) -> None:
        self.num_blocks = len(blocks)
        self.read_blocks = 0
        self.raised_blocks = 0
        self.lost_blocks = 0
        self._owner = owner
        self._request = request
        self._future: Future[PrefetchState] = Future()
        self._blocks = blocks
        self._to_read = deque(blocks)
        self._rising: deque[StoredBlock] = deque()  # on their way to the secondary level or there, in prompt order
        self._num_tokens = (blocks[-1].position + 1) * owner.layout.tokens_per_block if blocks else 0

    @property
    def state(self) -> PrefetchState:
        return self._future.result() if self._future.done() else PrefetchState.RUNNING

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def cancel(self) -> None:
        """Begin no more reads or copies for it. What is under way ends by itself. No effect on one that is over."""
        self._owner._end_prefetch(self, PrefetchState.CANCELLED)

    def wait(self, timeout: float | None = None) -> PrefetchState:
        """How it ended. TimeoutError after ``timeout`` seconds; it goes on."""
        try:
            return self._future.result(None if timeout is None else arguments.seconds("timeout", timeout))
        except FutureTimeoutError:
            raise TimeoutError(f"prefetch: not over after {timeout} s; wait again, or cancel() it") from None

    def __await__(self) -> Generator[Any, None, PrefetchState]:
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    def __repr__(self) -> str:
        return (f"Prefetch({self.state.value}, num_blocks={self.num_blocks}, read_blocks={self.read_blocks}, "
                f"raised_blocks={self.raised_blocks}, lost_blocks={self.lost_blocks})")

    def _is_overtaken_by(self, request: Request) -> bool:
        mine = self._request
        num_bytes = 4 * self._num_tokens
        return (request.token_bytes[:num_bytes] == mine.token_bytes[:num_bytes] and request.lora_id == mine.lora_id
                and request.cache_salt == mine.cache_salt and request.encoder_digest == mine.encoder_digest)


class Budget:
    """Bytes that may be moved now: a rate, and a little that can be saved up."""

    def __init__(self, bytes_per_second: float, now: float) -> None:
        self.bytes_per_second = bytes_per_second
        self._left = 0.0
        self._last = now

    def allows(self, now: float) -> bool:
        """Whether something may be begun. The last one may be larger than what is left, and is paid off before the next."""
        earned = max(now - self._last, 0.0) * self.bytes_per_second
        self._left = min(self._left + earned, max(BURST_SECONDS * self.bytes_per_second, 1.0))
        self._last = now
        return self._left > 0.0

    def spend(self, num_bytes: int) -> None:
        self._left -= num_bytes


class KeptBlocks:
    """Blocks of one group that prefetches under way raise, or that were raised a moment ago."""

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self._wanted: dict[int, int] = {}  # how many prefetches are going to raise it, or have
        self._until: dict[int, float] = {}
        self._queue: deque[tuple[float, int]] = deque()

    def want(self, block_id: int) -> None:
        """It belongs to what a prefetch raises."""
        self.ids.add(block_id)
        self._wanted[block_id] = self._wanted.get(block_id, 0) + 1

    def want_no_more(self, block_id: int) -> None:
        """That prefetch is over."""
        self._wanted[block_id] -= 1
        if not self._wanted[block_id]:
            del self._wanted[block_id]
            if block_id not in self._until:
                self.ids.discard(block_id)

    def add(self, block_id: int, until: float) -> None:
        self.ids.add(block_id)
        self._until[block_id] = until
        self._queue.append((until, block_id))

    def forget_older(self, now: float) -> None:
        while self._queue and self._queue[0][0] <= now:
            until, block_id = self._queue.popleft()
            if self._until.get(block_id) == until:  # otherwise it was raised again since
                del self._until[block_id]
                if block_id not in self._wanted:
                    self.ids.discard(block_id)


class Prefetching(TierCore):
    """Prefetches, and the thread that carries them on between the engine's calls."""

    def __init__(self, layout: KVLayout, config: TierConfig, device: str = "cpu", model: str | None = None) -> None:
        super().__init__(layout, config, device, model)
        self._prefetches: list[Prefetch] = []
        self._kept = [KeptBlocks() for _ in layout.groups]
        self._reading: list[StoredBlock] = []  # begun and not known to have ended
        self._budget = Budget(config.prefetch_bytes_per_second, self._clock())
        # One reader at least is left to requests, where there are several.
        self._prefetch_depth = max(config.read_threads - 1, 1)
        self._prefetch_wake = threading.Event()
        self._prefetch_thread: threading.Thread | None = None

    def prefetch(self, tokens: Request | object, lora_id: int | None = None, cache_salt: str | None = None, **namespace: Any) -> Prefetch:
        """Raise what is stored of a prompt towards the primary level, before its request comes. ``tokens`` as in :meth:`match`.

        Takes no more than ``prefetch_bandwidth``; reads of requests come first. Content of higher priority, in use, of a prompt that is
        being raised (this one, too), or raised a moment ago is not given up for it; where there is no room otherwise, blocks stay where
        they are. The request itself ends it, as do :meth:`reset` and :meth:`close`. What cannot be read is a miss, as for a request.

        RequestError for what is no prompt.
        """
        request = as_request(tokens, lora_id=lora_id, cache_salt=cache_salt, **namespace)
        with self.locked() as ledger:
            if self._prefetch_thread is None:
                self._prefetch_thread = start_thread(self._run_prefetches, "kvtier-prefetch")
                self.transfers.add_listener(self._prefetch_wake.set)
            blocks = stored_prefix(ledger, request) if self._budget.bytes_per_second else []
            use_ahead(ledger, blocks)
            for stored in blocks:
                self._kept[stored.group].want(stored.block.id)
            started = Prefetch(self, request, blocks)
            self._prefetched.asked += 1
            self._prefetches.append(started)
            self._carry_on(ledger)
        self._prefetch_wake.set()
        return started

    def refresh(self) -> None:
        super().refresh()
        if self._prefetches:
            with self.locked() as ledger:
                self._carry_on(ledger)

    def reset(self, timeout: float = 60.0) -> None:
        self._cancel_prefetches()
        super().reset(timeout)

    def close(self, timeout: float = 10) -> None:
        self._cancel_prefetches()
        super().close(timeout)
        self._cancel_prefetches()  # one that another thread began meanwhile: nobody would ever end it
        self._prefetch_wake.set()  # the thread sees that the cache is closed
        thread = self._prefetch_thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    refresh.__doc__ = TierCore.refresh.__doc__
    reset.__doc__ = TierCore.reset.__doc__
    close.__doc__ = TierCore.close.__doc__

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _overtake_prefetches(self, requests: Sequence[Request]) -> None:
        """These requests were admitted. Called with the lock held."""
        for prefetch in list(self._prefetches):
            if any(prefetch._is_overtaken_by(request) for request in requests):
                self._end_prefetch(prefetch, PrefetchState.OVERTAKEN)

    def _cancel_prefetches(self) -> None:
        for prefetch in list(self._prefetches):
            self._end_prefetch(prefetch, PrefetchState.CANCELLED)

    def _end_prefetch(self, prefetch: Prefetch, state: PrefetchState) -> None:
        is_taken = self.turn.take()
        try:
            if prefetch.is_done:
                return
            with suppress(ValueError):
                self._prefetches.remove(prefetch)
            setattr(self._prefetched, state.value, getattr(self._prefetched, state.value) + 1)
            prefetch._to_read.clear()
            prefetch._rising.clear()
            for stored in prefetch._blocks:
                self._kept[stored.group].want_no_more(stored.block.id)
            prefetch._blocks = []
            prefetch._future.set_result(state)
        finally:
            if is_taken:
                self.turn.give_back()

    def _run_prefetches(self) -> None:
        while True:
            try:
                with self.locked() as ledger:
                    is_more = self._carry_on(ledger)
                    is_idle = not self._prefetches
            except Exception as error:
                if not (self._closed and isinstance(error, KVTierError)):
                    # A bug of ours. Whoever waits for a prefetch must not wait for ever, and serving goes on without them.
                    _log.exception("the prefetch thread ended; blocks are raised by refresh() only")
                    self._cancel_prefetches()
                return
            self._prefetch_wake.wait(PAUSE if is_more else None if is_idle else LOOK_UP)
            self._prefetch_wake.clear()

    def _carry_on(self, ledger: Ledger) -> bool:
        """Begin what may be begun now, the oldest prefetch first. Returns whether it stopped only to let others have the lock: then there
        may be more to begin at once."""
        now = self._clock()
        for kept in self._kept:
            kept.forget_older(now)
        self._reading = [stored for stored in self._reading
                         if stored.block.ref_count == 0 and ledger.allocators[stored.group].is_busy(stored.block)]
        left = MOST_AT_ONCE
        for prefetch in list(self._prefetches):
            left = self._read_more(ledger, prefetch, now, self._raise_more(ledger, prefetch, now, left))
            if not prefetch._to_read and not prefetch._rising:
                self._end_prefetch(prefetch, PrefetchState.FINISHED)
            if left <= 0:
                return True
        return False

    def _read_more(self, ledger: Ledger, prefetch: Prefetch, now: float, left: int) -> int:
        """Begin at most ``left`` reads; returns how many more may be begun."""
        while prefetch._to_read and left > 0:
            stored = prefetch._to_read[0]
            level = level_of(stored.block.index)
            if not is_unused(ledger, stored) or level == PRIMARY:  # there, or somebody else's
                prefetch._to_read.popleft()
                continue
            if level == SECONDARY:
                prefetch._rising.append(prefetch._to_read.popleft())
                continue
            if (self._load_meter.routes[NVME, PRIMARY].outstanding_bytes  # a request waits for these reads: they come first
                    or len(self._reading) >= self._prefetch_depth or not self._budget.allows(now)):
                break
            if not raise_to_secondary(ledger, stored, self._kept[stored.group].ids):
                if not self._reading and not prefetch._rising:  # otherwise those may make room when they have arrived and gone on
                    prefetch._to_read.clear()  # what lies behind is of no use without it
                break
            self._began(stored, now)
            left -= 1
            self._reading.append(stored)
            prefetch.read_blocks += 1
            self._prefetched.read_blocks += 1
            prefetch._rising.append(prefetch._to_read.popleft())
        return left

    def _raise_more(self, ledger: Ledger, prefetch: Prefetch, now: float, left: int) -> int:
        """Begin at most ``left`` copies; returns how many more may be begun."""
        while prefetch._rising and left > 0:
            stored = prefetch._rising[0]
            block = stored.block
            if block.ref_count == 0 and ledger.allocators[stored.group].is_busy(block):
                break  # still being read
            if block.node is None:
                prefetch.lost_blocks += 1
                self._prefetched.lost_blocks += 1
                prefetch._to_read.clear()  # what lies behind is of no use without it
            if not is_unused(ledger, stored) or level_of(block.index) != SECONDARY:
                prefetch._rising.popleft()
                continue
            if not self._budget.allows(now):
                break
            if raise_to_primary(ledger, stored, self._kept[stored.group].ids):
                self._began(stored, now)
                left -= 1
                prefetch.raised_blocks += 1
                self._prefetched.raised_blocks += 1
            prefetch._rising.popleft()
        return left

    def _began(self, stored: StoredBlock, now: float) -> None:
        num_bytes = self.layout.groups[stored.group].block_bytes
        self._budget.spend(num_bytes)
        self._prefetched.bytes += num_bytes
        self._kept[stored.group].add(stored.block.id, now + KEPT_SECONDS)
