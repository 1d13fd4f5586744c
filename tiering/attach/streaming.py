"""asyncio in front of a serving loop: answers and streams of tokens for any number of tasks, with cancellation anywhere.

One thread of our own steps the loop, so the event loop never waits for the model. Tasks and thread meet in two places only: an inbox of
orders to the thread (submit, cancel, stop), and for each request a mailbox that the thread fills. Filling never waits: a mailbox holds
at most ``max_new_tokens`` numbers, so a consumer that stops reading costs that much memory and nobody's time.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from kvtier.errors import KVTierError, RequestError, TransferError
from kvtier.tiering.attach.sampling import GREEDY, Sampling
from kvtier.tiering.attach.serving_sequence import Answer
from kvtier.tiering.ledger.request import Request

if TYPE_CHECKING:
    from kvtier.tiering.attach.serving_loop import ServingLoop

_IDLE_SECONDS: Final = 0.05  # between two looks at an idle cache, whose finished transfers and expiries refresh() books


class _Mailbox:
    """What the thread has for one request. Read and written in the event loop only; the thread schedules the writing."""

    def __init__(self, request: Request, sampling: Sampling, encoder_tokens: Sequence[int] | None) -> None:
        self.request = request
        self.sampling = sampling
        self.encoder_tokens = encoder_tokens
        self.event_loop = asyncio.get_running_loop()
        self.tokens: deque[int] = deque()
        self.answer: Answer | None = None      # when complete
        self.error: KVTierError | None = None
        self.news = asyncio.Event()
        self.growing: Answer | None = None     # the thread's own: the answer as it grows, and how much of it has been handed on
        self.num_sent = 0

    async def until_news(self) -> None:
        await self.news.wait()
        self.news.clear()

    def post(self, deliver: Callable[[], None]) -> None:
        """From the thread: let the event loop book something and wake the reader."""
        def run() -> None:
            deliver()
            self.news.set()
        try:
            self.event_loop.call_soon_threadsafe(run)
        except RuntimeError:
            pass  # the event loop is closed: nobody reads any more


class AsyncServing:
    """Serve a loop from asyncio tasks.

    ::

        async with AsyncServing(loop) as serving:
            answer = await serving.generate(Request(1, tokens, max_new_tokens=20))
            async for token in serving.stream(Request(2, tokens, max_new_tokens=20), Sampling(temperature=0.8)):
                ...

    Cancelling a task at any point, closing a stream or leaving it takes its request off the cache; the others go on. Leaving the ``async
    with`` block ends what is still in flight, with an error for whoever waits for it. The loop is closed then.

    Args:
        loop: nobody else may step it or submit to it from now on.
        close_timeout: seconds to wait for the step that is under way when closing.
    """

    def __init__(self, loop: ServingLoop, *, close_timeout: float = 60.0) -> None:
        self._loop = loop
        self._close_timeout = close_timeout
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._boxes: dict[int, _Mailbox] = {}  # the thread's own: those being answered
        self._stopping = False
        self._door = threading.Lock()  # nothing is put into the inbox behind the thread's last look into it
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="kvtier-serving", daemon=True)
        self._has_started = False

    async def __aenter__(self) -> AsyncServing:
        self._thread.start()
        self._has_started = True
        return self

    async def __aexit__(self, *_details: object) -> None:
        self._stopping = True
        self._inbox.put(lambda: None)
        stopped = await asyncio.shield(asyncio.to_thread(self._join))
        if not stopped:
            raise TransferError(f"serving: the step under way did not end within {self._close_timeout:.0f} s; what is in flight is dropped "
                                "when it does")

    async def generate(self, request: Request, sampling: Sampling = GREEDY, encoder_tokens: Sequence[int] | None = None) -> Answer:
        """The whole answer. Arguments: see ``ServingLoop.submit``.

        Raises:
            RequestError: see ``ServingLoop.submit``; or this object is not open.
            KVTierError: why the request ended early, for example a CapacityError for a prompt longer than the pool.
        """
        box = self._open(request, sampling, encoder_tokens)
        try:
            while box.answer is None:
                if box.error is not None:
                    raise box.error
                await box.until_news()
            return box.answer
        finally:
            self._leave(box)

    async def stream(self, request: Request, sampling: Sampling = GREEDY,
                     encoder_tokens: Sequence[int] | None = None) -> AsyncIterator[int]:
        """Tokens as they are sampled; with several beams, the best beam's at the end. Raises as :meth:`generate`, behind the tokens that
        there are."""
        box = self._open(request, sampling, encoder_tokens)
        try:
            while True:
                while box.tokens:
                    yield box.tokens.popleft()
                if box.error is not None:
                    raise box.error
                if box.answer is not None:
                    return
                await box.until_news()
        finally:
            self._leave(box)

    # -- in the event loop -----------------------------------------------------------------------------------------------

    def _open(self, request: Request, sampling: Sampling, encoder_tokens: Sequence[int] | None) -> _Mailbox:
        box = _Mailbox(request, sampling, encoder_tokens)
        with self._door:
            if self._stopping or not self._has_started:
                raise RequestError(f"request {request.id}: this AsyncServing is not open; use it in `async with`, and ask inside of that "
                                   "block")
            self._inbox.put(lambda: self._submit(box))
        return box

    def _leave(self, box: _Mailbox) -> None:
        if box.answer is None and box.error is None:
            self._inbox.put(lambda: self._cancel(box))

    def _join(self) -> bool:
        self._thread.join(self._close_timeout)
        return not self._thread.is_alive()

    # -- in the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self._read_inbox(wait=not self._loop.num_requests)
                if self._loop.num_requests:
                    self._loop.step()
                    self._hand_on()
                else:
                    self._loop.cache.refresh()
        except BaseException as error:  # the engine failed: everybody is told, nobody waits for ever
            self._failure = error
        finally:
            try:
                self._loop.close()
            finally:
                with self._door:
                    self._stopping = True
                self._end_all()

    def _read_inbox(self, wait: bool) -> None:
        try:
            self._inbox.get(timeout=_IDLE_SECONDS)() if wait else self._inbox.get_nowait()()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            pass

    def _submit(self, box: _Mailbox) -> None:
        try:
            if self._stopping:
                raise self._closed_error(box)
            box.growing = self._loop.submit(box.request, box.sampling, box.encoder_tokens)
        except KVTierError as error:
            _fail(box, error)
        except Exception as error:  # what one caller passed must not end the serving of the others
            refused = RequestError(f"request {box.request.id}: cannot be submitted ({error!r}); see the arguments of ServingLoop.submit")
            refused.__cause__ = error
            _fail(box, refused)
        else:
            self._boxes[box.request.id] = box

    def _cancel(self, box: _Mailbox) -> None:
        if self._boxes.get(box.request.id) is box:  # not a later request of the same id
            del self._boxes[box.request.id]
            self._loop.cancel(box.request.id)

    def _hand_on(self) -> None:
        for box in list(self._boxes.values()):
            answer = box.growing
            assert answer is not None
            new = answer.tokens[box.num_sent:]
            box.num_sent += len(new)
            if answer.is_complete:
                del self._boxes[box.request.id]
                _finish(box, new, answer)
            elif new:
                _deliver(box, new)

    def _end_all(self) -> None:
        for box in self._boxes.values():
            _fail(box, self._closed_error(box))
        self._boxes.clear()
        self._read_inbox(wait=False)  # what was asked meanwhile

    def _closed_error(self, box: _Mailbox) -> KVTierError:
        if self._failure is None:
            return RequestError(f"request {box.request.id}: the AsyncServing was closed before the answer was complete")
        error = KVTierError(f"request {box.request.id}: serving has ended because the engine failed: {self._failure!r}; open another one")
        error.__cause__ = self._failure
        return error


def _deliver(box: _Mailbox, tokens: list[int]) -> None:
    box.post(lambda: box.tokens.extend(tokens))


def _finish(box: _Mailbox, tokens: list[int], answer: Answer) -> None:
    def run() -> None:
        box.tokens.extend(tokens)
        box.error = answer.error
        if answer.error is None:
            box.answer = answer
    box.post(run)


def _fail(box: _Mailbox, error: KVTierError) -> None:
    def run() -> None:
        box.error = error
    box.post(run)
