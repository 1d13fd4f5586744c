"""A small serving loop over a ``KVCacheManager``: chunked prefill, batched decode, prefix reuse, pre-emption.

It knows no engine: anything with the two calls of :class:`PagedModel` can be served, such as
:class:`kvtier.tiering.attach.transformers.AttachedModel`. Who runs and how much of a prompt a step computes is decided in
``scheduler.py``; how tokens are chosen, in ``sampling.py`` and ``beam_search.py``; ``streaming.py`` serves asyncio from it.

One step admits what may start, looks which promised blocks have arrived, runs one decode batch and the planned pieces of prompts,
reports to the cache what was computed and sampled, and calls ``refresh()``. Admission comes first and waits for nothing: the copies
and reads of the requests that will run in the next step go on while the model computes this one.

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

import torch

from kvtier.errors import CapacityError, ConfigError, KVTierError, RequestError
from kvtier.tiering.attach.beam_search import BeamSearch
from kvtier.tiering.attach.claims import claim, release
from kvtier.tiering.attach.sampling import GREEDY, Sampling, draw, greedy
from kvtier.tiering.attach.scheduler import AdmissionName, ChunkingName, Scheduler
from kvtier.tiering.attach.serving_sequence import Answer, PagedModel, ServedSequence
from kvtier.tiering.attach.serving_step import Sampled, compute_step, reads_layer_by_layer
from kvtier.tiering.ledger.request import Request

if TYPE_CHECKING:
    from kvtier.tiering.manager import KVCacheManager

_NAP_SECONDS: Final = 0.02  # the longest single wait; the loop looks around in between
_DEFAULT_CHUNK: Final = 256


class ServingLoop:
    """Serve requests through one cache and one model. Not thread-safe: one thread steps it.

    Args:
        cache: the manager whose pool the model is attached to. One loop at a time: a second one is refused.
        model: computes prompts and tokens.
        chunk_size: longest piece of a prompt computed in one forward, in tokens; None: the cache's, or 256.
        max_batch_size: most sequences in flight.
        admission, chunking, token_budget, chunk_unit, wait_for_shared_prefix: see
            :class:`~kvtier.tiering.attach.scheduler.Scheduler`.
        stop_tokens: token ids that end an answer.
        load_timeout: seconds to wait for promised blocks; after that the request is computed without reuse.
        room_timeout: seconds that a request may wait for room while nothing else runs, before it fails.
        engine_stream: the stream the model computes on; None on a CPU.
        clock: monotonic seconds.

    Raises:
        ConfigError: a chunk size or batch size below 1, a batch that the cache's block table cannot hold, an unknown policy, or a cache
            that another loop serves.
    """

    def __init__(self, cache: KVCacheManager, model: PagedModel, *, chunk_size: int | None = None, max_batch_size: int = 8,
                 admission: AdmissionName = "max_utilization", chunking: ChunkingName = "first_come_first_served",
                 token_budget: int | None = None, chunk_unit: int | None = None, wait_for_shared_prefix: bool = True,
                 stop_tokens: Iterable[int] = (), load_timeout: float = 30.0, room_timeout: float = 30.0,
                 engine_stream: object = None, clock: Callable[[], float] = time.perf_counter) -> None:
        if max_batch_size < 1:
            raise ConfigError(f"max_batch_size={max_batch_size}: must be at least 1")
        if max_batch_size > cache.config.max_batch_size:
            raise ConfigError(f"max_batch_size={max_batch_size}: the cache was made for {cache.config.max_batch_size}; "
                              "lower it, or raise max_batch_size in TierConfig")
        if chunk_size is None:
            chunk_size = cache.config.chunk_size or _DEFAULT_CHUNK
        self.scheduler = Scheduler(cache, admission=admission, chunking=chunking, chunk_size=chunk_size, token_budget=token_budget,
                                   chunk_unit=chunk_unit, wait_for_shared_prefix=wait_for_shared_prefix)
        self.cache = cache
        self.model = model
        self.max_batch_size = max_batch_size
        self.stop_tokens = frozenset(stop_tokens)
        self.load_timeout = load_timeout
        self.room_timeout = room_timeout
        self.engine_stream = engine_stream
        self.clock = clock
        self._first_layer = 0 if reads_layer_by_layer(model) else None  # with it a sequence may begin; None: with all of them
        self._waiting: deque[ServedSequence] = deque()
        self._active: dict[int, ServedSequence] = {}  # in order of admission
        self._ended: list[Answer] = []
        self._blocked_since: float | None = None  # nobody fits although nothing runs
        claim(cache, "this cache", "a serving loop", "close() that loop first")
        self._is_open = True

    def __enter__(self) -> ServingLoop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Drop every request still in flight; the cache holds nothing for them afterwards. May be called again."""
        self._waiting.clear()
        try:
            for sequence in list(self._active.values()):
                self._remove(sequence, store=False)
        finally:
            if self._is_open:
                self._is_open = False
                release(self.cache)

    @property
    def num_requests(self) -> int:
        """Requests submitted and not answered yet."""
        return len(self._waiting) + len(self._active)

    def submit(self, request: Request, sampling: Sampling = GREEDY, encoder_tokens: Sequence[int] | None = None) -> Answer:
        """Queue a request; its ``max_new_tokens`` is the length of the longest answer.

        ``encoder_tokens``: what the encoder of a model that has one reads, as many as the request's ``encoder_length``.

        Returns:
            The answer as it grows, step by step; :meth:`step` returns the same object when it is complete.

        Raises:
            RequestError: ``max_new_tokens`` below 1, more tokens in all than ``max_seq_len``, a token that the model does
                not know, several beams with a temperature, other encoder tokens than the request says, a request of this id that is
                still being answered, or a closed loop.
        """
        if not self._is_open:
            raise RequestError(f"request {request.id}: this loop is closed; make another one")
        if request.max_new_tokens < 1:
            raise RequestError(f"request {request.id}: max_new_tokens={request.max_new_tokens}; ask for at least 1")
        longest, limit = request.num_tokens + request.max_new_tokens, self.cache.config.max_seq_len
        if longest > limit:
            raise RequestError(f"request {request.id}: {request.num_tokens} tokens and {request.max_new_tokens} new ones are "
                               f"{longest}; max_seq_len is {limit}, raise it in TierConfig or ask for less")
        if request.id in self._active or any(sequence.id == request.id for sequence in self._waiting):
            raise RequestError(f"request {request.id} is still being answered; give each request in flight its own id")
        if request.beam_width > 1 and not sampling.is_greedy:
            raise RequestError(f"request {request.id}: temperature={sampling.temperature} with beam_width={request.beam_width}; beam "
                               "search takes the best tokens: leave the temperature out, or use one beam")
        num_encoder_tokens = 0 if encoder_tokens is None else len(encoder_tokens)
        if num_encoder_tokens != request.encoder_length:
            raise RequestError(f"request {request.id}: {num_encoder_tokens} encoder_tokens with encoder_length={request.encoder_length}; "
                               "pass what the encoder reads, and its length in the request")
        sequence = ServedSequence.of(request, self.clock(), sampling, self.stop_tokens)
        self._check_tokens(request.id, "tokens", sequence.tokens)
        if encoder_tokens is not None and num_encoder_tokens:  # a tensor has no truth value
            sequence.encoder_tokens = [int(token) for token in encoder_tokens]
            self._check_tokens(request.id, "encoder_tokens", sequence.encoder_tokens)
        self._waiting.append(sequence)
        return sequence.answer

    def _check_tokens(self, request_id: int, name: str, tokens: Sequence[int]) -> None:
        size = self.model.vocabulary_size
        if not 0 <= min(tokens) <= max(tokens) < size:
            position = next(index for index, token in enumerate(tokens) if not 0 <= token < size)
            raise RequestError(f"request {request_id}: {name}[{position}]={tokens[position]}; the model knows token ids 0 to {size - 1}")

    def cancel(self, request_id: int) -> bool:
        """Stop answering a request. What it has computed stays in the cache for others; its blocks are free at once.

        Returns:
            False when it is not being answered, for example because it is complete.
        """
        sequence = self._active.get(request_id)
        if sequence is not None:
            self._remove(sequence, store=True)
            return True
        waiting = next((sequence for sequence in self._waiting if sequence.id == request_id), None)
        if waiting is not None:
            self._waiting.remove(waiting)
        return waiting is not None

    def run(self, requests: Iterable[Request] = ()) -> dict[int, Answer]:
        """Submit these requests, step until everything is answered, and return the answers by request id.

        RequestError as :meth:`submit`; none of these requests is queued then.
        """
        submitted: list[int] = []
        try:
            for request in requests:
                self.submit(request)
                submitted.append(request.id)
        except RequestError:
            for request_id in submitted:
                self.cancel(request_id)
            raise
        answers: dict[int, Answer] = {}
        while self.num_requests:
            answers.update((answer.request_id, answer) for answer in self.step())
        return answers

    def step(self) -> list[Answer]:
        """One engine step. Returns the answers that are complete. Never waits longer than a moment for anything.

        An error of the model passes through. Nothing of its forward pass counts as computed, so another step computes it again.
        """
        self._admit()
        self._confirm_loads()
        paused = self._resume_paused()
        running = [sequence for sequence in self._active.values() if not sequence.loading and sequence.id not in paused]
        if running:
            self._compute(running)
        elif (not self._active and self._waiting) or 0 < len(paused) < len(self._active):
            time.sleep(_NAP_SECONDS)  # nobody fits yet: file operations hold some blocks; or some are paused and the others are loading
        self.cache.refresh()
        ended, self._ended = self._ended, []
        return ended

    # -- starting --------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        if not self._waiting:
            return
        active = self._active.values()
        candidates = self.scheduler.admit(self._waiting, active, self.max_batch_size - len(active))
        if not candidates and not active:
            self._refuse_if_hopeless(self._waiting[0])
        while candidates:
            try:
                # Together: the cache claims what all of them match before it evicts anything for one of them.
                admissions = self.cache.add_sequences([sequence.request for sequence in candidates])
            except (CapacityError, RequestError) as error:
                last = candidates.pop()
                if not candidates and (isinstance(error, RequestError) or (not active and self._has_waited_enough())):
                    self._waiting.remove(last)
                    self._end(last, error)
                continue
            self._blocked_since = None
            for sequence, admission in zip(candidates, admissions, strict=True):
                self._waiting.remove(sequence)
                sequence.start_loading(self.clock(), self.load_timeout)
                sequence.reused = sequence.computed = admission.prepopulated_tokens
                self._active[sequence.id] = sequence
            return

    def _refuse_if_hopeless(self, sequence: ServedSequence) -> None:
        """End a request that has no room although nothing runs: at once if it never will, else when it has waited long enough."""
        error = self.scheduler.shortage(sequence.request)
        if error is not None and (self.scheduler.never_fits(sequence.request) or self._has_waited_enough()):
            self._waiting.remove(sequence)
            self._end(sequence, error)

    def _has_waited_enough(self) -> bool:
        """Whether file operations have held the blocks that somebody waits for longer than ``room_timeout``."""
        now = self.clock()
        if self._blocked_since is None:
            self._blocked_since = now
        if now - self._blocked_since < self.room_timeout:
            return False
        self._blocked_since = None
        return True

    def _confirm_loads(self) -> None:
        """Let those run whose promised blocks have arrived. When nobody can run, wait a moment for the first."""
        for sequence in [sequence for sequence in self._active.values() if sequence.loading]:
            if self.cache.is_ready(sequence.id, layer=self._first_layer):
                self._confirm(sequence)
        late = [sequence for sequence in self._active.values() if sequence.loading]
        if late and len(late) == len(self._active):
            self._confirm(late[0])
        for sequence in late:
            if sequence.loading and sequence.id in self._active and self.clock() >= sequence.load_deadline:
                self._requeue(sequence, store=False, skip_read=True)

    def _confirm(self, sequence: ServedSequence) -> None:
        try:
            valid = self.cache.wait_ready(sequence.id, layer=self._first_layer, timeout=_NAP_SECONDS)
        except TimeoutError:
            return
        except CapacityError:
            # A read failed and the pool has no blocks to compute its part again: back to the queue until it has.
            self._preempt(sequence)
            return
        sequence.confirm(valid)
        if sequence.is_broken:
            self._requeue(sequence, store=False, skip_read=False)

    def _resume_paused(self) -> frozenset[int]:
        """Let those go on that wait for the blocks of their next prompt chunk. Returns who still waits.

        When all wait, nobody will free any blocks: the newest one makes room. One that runs alone waits for leases and file operations, for
        ``room_timeout`` at most.
        """
        if self.cache.config.chunk_size is None:
            return frozenset()
        paused = [sequence for sequence in self._active.values() if not sequence.loading and self.cache.is_paused(sequence.id)]
        if not paused:
            self._blocked_since = None if self._active else self._blocked_since
            return frozenset()
        with self.cache.step(self.engine_stream, ids=[sequence.id for sequence in paused]):
            pass  # a step that names them tries again
        paused = [sequence for sequence in paused if self.cache.is_paused(sequence.id)]
        if len(paused) < len(self._active) or not paused:
            self._blocked_since = None
        elif len(paused) > 1:
            self._preempt(paused[-1])
        elif self._has_waited_enough():
            self._remove(paused[0], store=True)
            self._end(paused[0], CapacityError(f"request {paused[0].id}: no primary blocks for its next prompt chunk came free within "
                                               f"{self.room_timeout} s, though nothing else runs; end leases that hold blocks, or enlarge "
                                               "primary"))
        else:
            time.sleep(_NAP_SECONDS)
        return frozenset(sequence.id for sequence in paused)

    # -- one step of those that run --------------------------------------------------------------------------------------

    def _compute(self, running: Sequence[ServedSequence]) -> None:
        decoding = [sequence for sequence in running if sequence.decodes]
        chunks = self.scheduler.chunks([sequence for sequence in running if not sequence.decodes],
                                       sum(len(sequence.newest) for sequence in decoding))
        appending = [*decoding, *(sequence for sequence, count in chunks if sequence.computed + count == len(sequence.tokens))]
        for victim in self.scheduler.policy.victims([sequence for sequence in appending if sequence.ends_for_certain],
                                                    [sequence for sequence in appending if not sequence.ends_for_certain],
                                                    self._active.values()):
            self._preempt(victim)
        decoding = [sequence for sequence in decoding if sequence.id in self._active]
        chunks = [(sequence, count) for sequence, count in chunks if sequence.id in self._active]
        outcome = compute_step(self.cache, self.model, decoding, chunks, self.engine_stream, self.clock)
        for sequence in outcome.left_out:  # some of its blocks turned out bad: ask again how many tokens are there
            sequence.start_loading(self.clock(), self.load_timeout)
        self._take(outcome.sampled)

    def _take(self, sampled: Sequence[Sampled]) -> None:
        """Choose the next tokens, end the requests that are complete, and append to the others."""
        now = self.clock()
        plain = [(sequence, logits[0]) for sequence, logits in sampled if sequence.beams is None]
        best = zip(*greedy(torch.stack([logits for _, logits in plain])), strict=True) if plain else ()
        complete: list[ServedSequence] = []
        going_on: list[ServedSequence] = []
        for (sequence, logits), (token, gap) in zip(plain, best, strict=True):
            if sequence.generator is None:
                sequence.take(token, gap, now)
            else:
                try:
                    token = draw(logits, sequence.sampling, sequence.generator)
                except RuntimeError as error:  # logits that are no numbers end this request, not those of its batch
                    self._remove(sequence, store=False)
                    self._end(sequence, RequestError(f"request {sequence.id}: no token can be drawn from the model's logits ({error}); "
                                                     "look at the model's dtype and weights"))
                    continue
                sequence.take(token, None, now)
            is_last = len(sequence.answer.tokens) >= sequence.max_new_tokens or sequence.tokens[-1] in self.stop_tokens
            (complete if is_last else going_on).append(sequence)
        for sequence, logits in sampled:
            if sequence.beams is not None:
                is_last = self._advance_beams(sequence, sequence.beams, logits, now)
                (complete if is_last else going_on).append(sequence)
        for sequence in complete:  # before the others are appended to: their blocks make room
            self._complete(sequence)
        self._append(going_on)

    def _advance_beams(self, sequence: ServedSequence, beams: BeamSearch, logits: torch.Tensor, now: float) -> bool:
        """One more token for each beam. True when the search is over."""
        if not beams.length:
            sequence.answer.first_token_seconds = now - sequence.arrived
        sequence.computed = sequence.num_tokens
        parents = beams.advance(logits)
        if not beams.is_done:
            self.cache.reorder_beams(sequence.id, parents)
        return beams.is_done

    def _complete(self, sequence: ServedSequence) -> None:
        if sequence.beams is None:
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
                self.cache.append_step([sequence.id for sequence in sequences], [sequence.newest for sequence in sequences])
                return
            except CapacityError as error:
                victims = [self._active[request_id] for request_id in error.preempt if request_id in self._active]
                for victim in victims:
                    self._preempt(victim)
                if not victims:  # nobody to pre-empt: the longest sequence has outgrown the pool
                    longest = max(sequences, key=lambda sequence: sequence.num_tokens)
                    reason = self.scheduler.outgrowth(longest, error)
                    self._remove(longest, store=True)
                    self._end(longest, reason)
            sequences = [sequence for sequence in sequences if sequence.id in self._active]

    # -- leaving ---------------------------------------------------------------------------------------------------------

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
        answer = sequence.answer
        if sequence.beams is not None:
            answer.beams = list(sequence.beams.answers())
            answer.tokens = list(answer.beams[0].tokens) if answer.beams else []
        answer.error = error
        answer.seconds = self.clock() - sequence.arrived
        answer.is_complete = True
        self._ended.append(answer)
