"""A small serving loop over a ``KVCacheManager``: chunked prefill, batched decode, prefix reuse, pre-emption.

It knows no engine: anything with the two calls of :class:`PagedModel` can be served, such as
:class:`kvtier.tiering.attach.transformers.AttachedModel`. Decoding is greedy.

One step admits what fits, looks which promised blocks have arrived, runs one decode batch and at most one chunk's worth
of prompt, reports to the cache what was computed and sampled, and calls ``refresh()``.

Prompt chunks end at absolute multiples of the chunk size; the first chunk behind a reused prefix is shortened to the
next multiple. So a prompt is cut at the same places with and without reuse, and in float32 gives the same tokens. (Full
chunks counted from the resume point were seen to change bfloat16 answers.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final

from kvtier.errors import CapacityError, ConfigError, KVTierError, RequestError
from kvtier.tiering.attach.serving_sequence import Answer, PagedModel, ServedSequence, greedy
from kvtier.tiering.ledger.request import Request

if TYPE_CHECKING:
    from kvtier.tiering.manager import KVCacheManager

_NAP_SECONDS: Final = 0.02  # the longest single wait; the loop looks around in between


class ServingLoop:
    """Serve requests through one cache and one model. Not thread-safe: one thread steps it.

    Args:
        cache: the manager whose pool the model is attached to.
        model: computes prompts and tokens.
        chunk_size: longest piece of a prompt computed in one forward, in tokens.
        max_batch_size: most sequences in flight.
        stop_tokens: token ids that end an answer.
        load_timeout: seconds to wait for promised blocks; after that the request is computed without reuse.
        room_timeout: seconds that a request may wait for room while nothing else runs, before it fails.
        engine_stream: the stream the model computes on; None on a CPU.
        clock: monotonic seconds.

    Raises:
        ConfigError: a chunk size or batch size below 1, or a batch that the cache's block table cannot hold.
    """

    def __init__(self, cache: KVCacheManager, model: PagedModel, *, chunk_size: int = 256, max_batch_size: int = 8,
                 stop_tokens: Iterable[int] = (), load_timeout: float = 30.0, room_timeout: float = 30.0,
                 engine_stream: object = None, clock: Callable[[], float] = time.perf_counter) -> None:
        for name, value in (("chunk_size", chunk_size), ("max_batch_size", max_batch_size)):
            if value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        if max_batch_size > cache.config.max_batch_size:
            raise ConfigError(f"max_batch_size={max_batch_size}: the cache was made for {cache.config.max_batch_size}; "
                              "lower it, or raise max_batch_size in TierConfig")
        self.cache = cache
        self.model = model
        self.chunk_size = chunk_size
        self.max_batch_size = max_batch_size
        self.stop_tokens = frozenset(stop_tokens)
        self.load_timeout = load_timeout
        self.room_timeout = room_timeout
        self.engine_stream = engine_stream
        self.clock = clock
        self._waiting: deque[ServedSequence] = deque()
        self._active: dict[int, ServedSequence] = {}  # in order of admission
        self._ended: list[Answer] = []
        self._blocked_since: float | None = None  # nobody fits although nothing runs

    def __enter__(self) -> ServingLoop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Drop every request still in flight; the cache holds nothing for them afterwards. May be called again."""
        for sequence in list(self._active.values()):
            self._remove(sequence, store=False)
        self._waiting.clear()

    @property
    def num_requests(self) -> int:
        """Requests submitted and not answered yet."""
        return len(self._waiting) + len(self._active)

    def submit(self, request: Request) -> None:
        """Queue a request; its ``max_new_tokens`` is the length of the longest answer.

        Raises:
            RequestError: ``max_new_tokens`` below 1, more tokens in all than ``max_seq_len``, a token that the model does
                not know, or a request of this id is still being answered.
        """
        if request.max_new_tokens < 1:
            raise RequestError(f"request {request.id}: max_new_tokens={request.max_new_tokens}; ask for at least 1")
        longest, limit = request.num_tokens + request.max_new_tokens, self.cache.config.max_seq_len
        if longest > limit:
            raise RequestError(f"request {request.id}: {request.num_tokens} tokens and {request.max_new_tokens} new ones are "
                               f"{longest}; max_seq_len is {limit}, raise it in TierConfig or ask for less")
        if request.id in self._active or any(sequence.id == request.id for sequence in self._waiting):
            raise RequestError(f"request {request.id} is still being answered; give each request in flight its own id")
        sequence = ServedSequence.of(request, self.clock())
        size = self.model.vocabulary_size
        if not 0 <= min(sequence.tokens) <= max(sequence.tokens) < size:
            position = next(index for index, token in enumerate(sequence.tokens) if not 0 <= token < size)
            raise RequestError(f"request {request.id}: tokens[{position}]={sequence.tokens[position]}; the model knows token "
                               f"ids 0 to {size - 1}")
        self._waiting.append(sequence)

    def run(self, requests: Iterable[Request] = ()) -> dict[int, Answer]:
        """Submit these requests, step until everything is answered, and return the answers by request id."""
        for request in requests:
            self.submit(request)
        answers: dict[int, Answer] = {}
        while self.num_requests:
            answers.update((answer.request_id, answer) for answer in self.step())
        return answers

    def step(self) -> list[Answer]:
        """One engine step. Returns the answers that are complete. Never waits longer than a moment for anything."""
        self._admit()
        self._confirm_loads()
        running = [sequence for sequence in self._active.values() if not sequence.loading]
        if running:
            self._forward(running)
        elif not self._active and self._waiting:
            time.sleep(_NAP_SECONDS)  # nobody fits yet: file operations still hold some blocks
        self.cache.refresh()
        ended, self._ended = self._ended, []
        return ended

    def _admit(self) -> None:
        room = self.max_batch_size - len(self._active)
        candidates = [self._waiting[index] for index in range(min(room, len(self._waiting)))]
        while candidates:
            try:
                # Together: the cache claims what all of them match before it evicts anything for one of them.
                admissions = self.cache.add_sequences([sequence.request for sequence in candidates])
            except (CapacityError, RequestError) as error:
                if len(candidates) > 1:
                    candidates.pop()
                elif isinstance(error, CapacityError) and self._may_fit_later(candidates[0]):
                    return
                else:
                    self._end(self._waiting.popleft(), error)
                    candidates = [self._waiting[0]] if self._waiting else []
                continue
            self._blocked_since = None
            for sequence, admission in zip(candidates, admissions, strict=True):
                self._waiting.popleft()
                sequence.start_loading(self.clock(), self.load_timeout)
                sequence.reused = sequence.computed = admission.prepopulated_tokens
                self._active[sequence.id] = sequence
            return

    def _may_fit_later(self, sequence: ServedSequence) -> bool:
        """Whether a request can expect room: from requests that end, or from file operations that still hold blocks."""
        blocks = -(-len(sequence.tokens) // self.cache.layout.tokens_per_block)
        if blocks > self.cache.stats().primary.max_blocks:
            return False
        if self._active:
            return True
        now = self.clock()
        if self._blocked_since is None:
            self._blocked_since = now
        if now - self._blocked_since < self.room_timeout:
            return True
        self._blocked_since = None
        return False

    def _confirm_loads(self) -> None:
        """Let those run whose promised blocks have arrived. When nobody can run, wait a moment for the first."""
        for sequence in [sequence for sequence in self._active.values() if sequence.loading]:
            if self.cache.is_ready(sequence.id):
                self._confirm(sequence)
        late = [sequence for sequence in self._active.values() if sequence.loading]
        if late and len(late) == len(self._active):
            self._confirm(late[0])
        for sequence in late:
            if sequence.loading and sequence.id in self._active and self.clock() >= sequence.load_deadline:
                self._requeue(sequence, store=False, skip_read=True)

    def _confirm(self, sequence: ServedSequence) -> None:
        try:
            valid = self.cache.wait_ready(sequence.id, timeout=_NAP_SECONDS)
        except TimeoutError:
            return
        except CapacityError:
            # A read failed and the pool has no blocks to compute its part again: back to the queue until it has.
            self._preempt(sequence)
            return
        sequence.confirm(valid)

    def _forward(self, running: Sequence[ServedSequence]) -> None:
        """One decode batch and up to one chunk's worth of prompt, for those running sequences that are ready."""
        decoding = [sequence for sequence in running if sequence.decodes]
        filling = [sequence for sequence in running if not sequence.decodes]
        sampled: list[tuple[ServedSequence, int, float]] = []
        chunks: list[ServedSequence] = []
        ids = [sequence.id for sequence in (*decoding, *filling)]
        with self.cache.step(self.engine_stream, ids=ids) as ready_ids:
            ready = frozenset(ready_ids)
            for sequence in running:
                if sequence.id not in ready:  # some of its blocks turned out bad: ask again how many tokens are there
                    sequence.start_loading(self.clock(), self.load_timeout)
            decoding = [sequence for sequence in decoding if sequence.id in ready]
            filling = [sequence for sequence in filling if sequence.id in ready]
            if ready:
                table = self.cache.block_table([sequence.id for sequence in (*decoding, *filling)])
            if decoding:
                logits = self.model.decode([sequence.tokens[-1] for sequence in decoding],
                                           [sequence.computed for sequence in decoding], table[:len(decoding)])
                sampled += zip(decoding, *greedy(logits), strict=True)
            budget = self.chunk_size
            for row, sequence in enumerate(filling, start=len(decoding)):
                start, end = sequence.computed, sequence.chunk_end(self.chunk_size)
                if end - start > budget:
                    break  # never cut a chunk shorter for the budget: where chunks end decides how results are rounded
                budget -= end - start
                began = self.clock()
                logits = self.model.prefill(sequence.tokens[start:end], start, table[row])
                if end == len(sequence.tokens):
                    sampled += zip([sequence], *greedy(logits[None]), strict=True)
                if (seconds := self.clock() - began) > 0.0:
                    self.cache.report_prefill(range(start, end), seconds)
                sequence.computed = end
                chunks.append(sequence)
        for sequence in chunks:
            self.cache.mark_computed(sequence.id, sequence.computed)
            if sequence.computed == len(sequence.tokens) and not sequence.prompt_is_stored:
                sequence.prompt_is_stored = True
                self.cache.store_context(sequence.id)
        self._take(sampled)

    def _take(self, sampled: Sequence[tuple[ServedSequence, int, float]]) -> None:
        now = self.clock()
        going_on: list[ServedSequence] = []
        for sequence, token, gap in sampled:
            sequence.take(token, gap, now)
            if len(sequence.answer.tokens) >= sequence.max_new_tokens or token in self.stop_tokens:
                self._complete(sequence)  # before the others are appended to: its blocks make room for theirs
            else:
                going_on.append(sequence)
        self._append(going_on)

    def _complete(self, sequence: ServedSequence) -> None:
        try:
            # With its last token in place, the token before counts as computed and is stored too.
            self.cache.append_tokens(sequence.id, [sequence.tokens[-1]])
        except CapacityError:
            pass  # not worth a pre-emption: one token less is stored
        self._remove(sequence, store=True)
        self._end(sequence, None)

    def _append(self, sequences: list[ServedSequence]) -> None:
        """Give the sampled tokens to the cache, pre-empting whom it names until there is room for all that stay."""
        while sequences:
            try:
                self.cache.append_step([sequence.id for sequence in sequences],
                                       [[sequence.tokens[-1]] for sequence in sequences])
                return
            except CapacityError as error:
                victims = [self._active[request_id] for request_id in error.preempt if request_id in self._active]
                for victim in victims:
                    self._preempt(victim)
                if not victims:  # nobody to pre-empt: the longest sequence has outgrown the pool
                    longest = max(sequences, key=lambda sequence: len(sequence.tokens))
                    self._remove(longest, store=True)
                    self._end(longest, error)
            sequences = [sequence for sequence in sequences if sequence.id in self._active]

    def _preempt(self, sequence: ServedSequence) -> None:
        """Take a request off the pool, keeping what it computed, and queue it first to go on later."""
        sequence.answer.preemptions += 1
        self._requeue(sequence, store=True, skip_read=False)

    def _requeue(self, sequence: ServedSequence, *, store: bool, skip_read: bool) -> None:
        self._remove(sequence, store=store)
        sequence.interrupt(skip_read=skip_read)
        self._waiting.appendleft(sequence)

    def _remove(self, sequence: ServedSequence, *, store: bool) -> None:
        del self._active[sequence.id]
        self.cache.remove_sequence(sequence.id, store=store)

    def _end(self, sequence: ServedSequence, error: KVTierError | None) -> None:
        sequence.answer.error = error
        sequence.answer.seconds = self.clock() - sequence.arrived
        self._ended.append(sequence.answer)
