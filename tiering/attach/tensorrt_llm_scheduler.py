"""``TieredScheduler``: the scheduler's side of the TensorRT-LLM connector, on rank 0 (design: two ways to attach).

A prefix is promised only when all its blocks are verified bytes in host memory, pinned by a job: what TensorRT-LLM is told it need not
compute, nobody can take away again. Which blocks are to be stored follows from what TensorRT-LLM says has been computed. How jobs ended
is read in shared memory; TensorRT-LLM has no channel for it.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier.errors import ConfigError
from kvtier.tiering.attach.rank_facts import collect_facts
from kvtier.tiering.attach.tensorrt_llm_interface import base_classes
from kvtier.tiering.attach.tensorrt_llm_plan import KeyChain, Part, StepPlan, namespace_of
from kvtier.tiering.attach.tensorrt_llm_settings import JOB_SECONDS, arrange
from kvtier.tiering.tier_index import TierIndex
from kvtier.tiering.tier_messages import LoadPlan
from kvtier.tiering.tier_pulse import TierPulse

_log = logging.getLogger(__name__)

START_SECONDS: Final = 120.0
"""How long the start waits for the ranks to have registered their caches."""
_DEFAULT_PRIORITY: Final = 35
_LOOK_AGAIN: Final = 0.001  # seconds

_Base: Any = base_classes()[0]


@dataclass
class _Sequence:
    """What is known of one request.

    Attributes:
        namespace: what besides tokens its keys contain.
        chain: its keys.
        num_resets: the tier's when the request came: what is computed of it is of weights that a later reset has forgotten.
        is_kept: its blocks are stored.
        position: tokens that it had been spared when its pages were taken, as far as TensorRT-LLM said so.
        first: the block that ``loads`` begin with.
        loads: one pinned plan for each group, until they are handed to the workers.
        tokens, pages, priorities: as reported so far; pages by group, -1 where there is none.
    """

    namespace: bytes
    chain: KeyChain
    num_resets: int
    is_kept: bool = True
    position: int = 0
    first: int = 0
    loads: list[LoadPlan] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)


class TieredScheduler(_Base):
    """TensorRT-LLM's ``KvCacheConnectorScheduler`` over a ``TierIndex``.

    Args:
        llm_args: TensorRT-LLM's.

    Raises:
        ConfigError: a misspelt or unusable setting in TRTLLM_KVTIER, or an arrangement that is not supported.
    """

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._arrangement = arrange(llm_args)
        self._width = self._arrangement.tokens_per_block
        self.index: TierIndex | None = None
        self._num_groups = 1
        self._pulse: TierPulse | None = None
        self._sequences: dict[int, _Sequence] = {}
        self._jobs: dict[int, tuple[int, bool]] = {}  # handed to the workers: whose, and whether it is a store
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._said: set[str] = set()

    # -- start and end ---------------------------------------------------------------------------------------------------

    def wait_for_initialization(self) -> None:
        """Wait until all ranks have registered their caches, and open the tier.

        Raises:
            ConfigError: a rank has not, or has other pages than rank 0; a folder that is in use, or was made by another model, block size
                or number of ranks; too little shared memory.
        """
        deadline = time.monotonic() + START_SECONDS
        while not self._open():
            if time.monotonic() > deadline:
                collect_facts(self._arrangement.engine_id, self._arrangement.ranks)  # says which ranks are missing
            time.sleep(0.05)

    def close(self, timeout: float = 10.0) -> None:
        """Write out what is only in host memory, as far as time allows, and let go of everything. May be called again."""
        with self._lock:
            index, self.index = self.index, None
        if index is not None:
            atexit.unregister(self.close)
            if self._pulse is not None:
                self._pulse.close(1.0)
            index.flush(timeout / 2)
            index.close(timeout / 2)

    def reset(self, timeout: float = 60.0) -> None:
        """Forget everything on all levels, because the weights have changed. TensorRT-LLM has no call for it: whoever changes them calls
        this on rank 0, after TensorRT-LLM's own blocks were forgotten. What requests under way have been promised is still loaded, and
        nothing that is computed of them is stored any more.

        Raises:
            TransferError: as of ``TierIndex.reset``.
        """
        index = self.index
        if index is not None:
            index.reset(timeout)

    # -- what TensorRT-LLM asks ------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens behind ``num_computed_tokens`` the tier has, in whole blocks, and that they are loaded before the forward pass
        (never in the background). At least one token of the prompt is left to be computed."""
        try:
            with self._lock:
                return self._match(request, num_computed_tokens), False
        except Exception as error:
            self._say("lookup", error)
            self._forget_loads(request.request_id)
            return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Pages are reported again with the step's output. Here the whole request is seen for the first time: if there is more to its
        blocks than the lookup was shown (images without hashes), none of them is stored."""
        with self._lock:
            sequence = self._sequences.get(request.request_id)
            if sequence is None:
                return
            try:
                is_same = namespace_of(request) == sequence.namespace
            except Exception as error:
                self._say("request", error)
                is_same = False
            if not is_same:
                sequence.is_kept = False
            position = getattr(request, "context_current_position", 0)
            sequence.position = position if isinstance(position, int) else 0

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids_by_layer_group: list[list[int]]) -> None:
        """Likewise, for a cache of several layer groups."""
        self.update_state_after_alloc(request, [])

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """The step's loads and stores."""
        with self._lock:
            fresh: list[list[int]] = [[] for _ in range(self._num_groups)]
            loads: list[Part] = []
            for data in scheduler_output.new_requests:
                sequence = self._report(data, True, fresh)
                if sequence is not None:
                    loads += self._load_parts(data.request_id, sequence)
            for data in scheduler_output.cached_requests:
                self._report(data, False, fresh)
            stores: list[Part] = []
            for is_new, reported in ((True, scheduler_output.new_requests), (False, scheduler_output.cached_requests)):
                for data in reported:
                    try:
                        self._store(data, is_new, stores)
                    except Exception as error:  # costs hits
                        self._say("store", error)
            if self._pulse is not None:
                self._pulse.hurry()
            return StepPlan(next(self._numbers), tuple(map(tuple, fresh)), tuple(loads), tuple(stores))

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """The request has ended, however. Whether its pages are still being copied: TensorRT-LLM keeps them until all workers have said
        that they are not."""
        with self._lock:
            request_id = request.request_id
            self._forget_loads(request_id)
            self._sequences.pop(request_id, None)
            try:
                self._settle()
                if self.index is not None:
                    self.index.end_request(str(request_id))
            except Exception as error:
                self._say("end of a request", error)
            return any(owner == request_id and is_store for owner, is_store in self._jobs.values())

    def request_finished_by_layer_group(self, request: Any, cache_block_ids_by_layer_group: list[list[int]]) -> bool:
        """Likewise, for a cache of several layer groups."""
        return self.request_finished(request, [])

    # -- loading ---------------------------------------------------------------------------------------------------------

    def _match(self, request: Any, num_computed: int) -> int:
        if self.index is None and not self._open():
            return 0
        index = self.index
        assert index is not None
        self._settle()
        request_id = request.request_id
        self._forget_loads(request_id)
        self._sequences.pop(request_id, None)
        namespace = namespace_of(request)
        if namespace is None:
            return 0
        use_nvme = getattr(request, "lora_task_id", None) is None or self._arrangement.trusted_lora_ids
        sequence = self._sequences[request_id] = _Sequence(namespace, KeyChain(namespace, self._width), index.num_resets)
        name = str(request_id)
        index.end_request(name)
        index.begin_request(name, use_nvme=use_nvme)
        tokens = list(request.get_tokens(0))
        first, rest = divmod(num_computed, self._width)
        length = min(len(tokens), getattr(request, "prompt_len", len(tokens)))  # of a request that is replayed: with its answer so far
        last = (length - 1) // self._width  # the last token is always computed: somebody has to say what follows it
        if rest or last <= first:
            return 0
        keys = sequence.chain.keys(tokens, last)[first:]
        deadline = time.monotonic() + self._arrangement.settings.lookup_timeout
        while True:
            found = [index.lookup(name, keys, group) for group in range(self._num_groups)]
            if all(answer.is_final for answer in found) or time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_AGAIN)
            self._settle()  # a store may be what it waits for
        hits = min(answer.num_hits for answer in found)
        if not hits:
            return 0
        sequence.first = first
        for group in range(self._num_groups):
            sequence.loads.append(index.plan_load(name, keys[:hits], group))
        if any(len(plan.keys) != hits for plan in sequence.loads):
            self._forget_loads(request_id)
            return 0
        return hits * self._width

    def _load_parts(self, request_id: int, sequence: _Sequence) -> list[Part]:
        """Hand the pinned plans over, as far as there are pages: what has none is computed, or is out of its window."""
        parts = []
        for plan in sequence.loads:
            pages = sequence.pages[plan.group][sequence.first:sequence.first + len(plan.slots)]
            chosen = [(page, slot) for page, slot in zip(pages, plan.slots, strict=False) if page >= 0]
            if chosen:
                places, slots = zip(*chosen, strict=True)
                parts.append(Part(request_id, plan.job_id, plan.group, places, slots))
                self._jobs[plan.job_id] = (request_id, False)
            elif self.index is not None:
                self.index.cancel_job(plan.job_id)
        sequence.loads = []
        return parts

    def _forget_loads(self, request_id: int) -> None:
        """No worker was told of these, and none will be."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and self.index is not None:
            for plan in sequence.loads:
                try:
                    if plan.job_id >= 0:
                        self.index.cancel_job(plan.job_id)
                except Exception as error:  # its deadline ends it
                    self._say("cancelled load", error)
            sequence.loads = []

    # -- storing ---------------------------------------------------------------------------------------------------------

    def _report(self, data: Any, is_new: bool, fresh: list[list[int]]) -> _Sequence | None:
        """Note tokens and pages that have come since the last step. Pages of requests that are not kept are noted as fresh, too."""
        by_group: Sequence[Sequence[int]] = getattr(data, "new_block_ids_by_layer_group", None) or [data.new_block_ids]
        for pages, known in zip(by_group, fresh, strict=False):
            known.extend(page for page in pages if page >= 0)
        sequence = self._sequences.get(data.request_id)
        if sequence is None:
            return None
        if is_new:  # also when it is replayed on other pages
            sequence.tokens, sequence.pages, sequence.priorities = [], [[] for _ in range(self._num_groups)], []
        sequence.tokens.extend(data.new_tokens)
        for own, pages in zip(sequence.pages, by_group, strict=False):
            own.extend(pages)
        priorities = getattr(data, "priorities", None) or [_DEFAULT_PRIORITY] * max(map(len, by_group))
        sequence.priorities.extend(_DEFAULT_PRIORITY if priority is None else min(max(int(priority), 0), 100) for priority in priorities)
        return sequence

    def _store(self, data: Any, is_new: bool, parts: list[Part]) -> None:
        """Store the blocks that this step's forward pass fills. In a request's first step all pages have just been reported, and those
        before are stored, too; later a page that was reported once may have left its window, and belong to somebody else.

        In a first step TensorRT-LLM reports the position without what was loaded, of which it may have used less than was promised. The
        position that the request had when its pages were taken says more; either is at most the true one.
        """
        sequence, index = self._sequences.get(data.request_id), self.index
        if sequence is None or index is None or not sequence.is_kept or sequence.num_resets != index.num_resets:
            return
        position = max(data.computed_position, sequence.position if is_new else 0)
        computed = min(position + data.num_scheduled_tokens, len(sequence.tokens))
        count = min(computed // self._width, *map(len, sequence.pages), len(sequence.priorities))
        start = 0 if is_new else position // self._width
        if count <= start:
            return
        keys = sequence.chain.keys(sequence.tokens, count)
        for priority, ordinals in itertools.groupby(range(start, count), key=lambda ordinal: sequence.priorities[ordinal]):
            run = list(ordinals)
            for group, pages in enumerate(sequence.pages):
                live = [ordinal for ordinal in run if pages[ordinal] >= 0]
                plan = index.plan_store(str(data.request_id), [keys[ordinal] for ordinal in live], group, priority)
                if plan.keys and sequence.num_resets != index.num_resets:  # another thread has reset it just now
                    index.cancel_job(plan.job_id)
                    return
                if plan.keys:
                    self._jobs[plan.job_id] = (data.request_id, True)
                    chosen = tuple(pages[live[place]] for place in plan.positions)
                    parts.append(Part(data.request_id, plan.job_id, group, chosen, plan.slots))

    # -- the tier --------------------------------------------------------------------------------------------------------

    def _open(self) -> bool:
        """Open the index as soon as all ranks have left their facts; whether it is open."""
        if self.index is not None:
            return True
        arrangement = self._arrangement
        try:
            facts = collect_facts(arrangement.engine_id, arrangement.ranks)
        except ConfigError as error:
            if "have not registered" in str(error):
                return False
            raise
        if (facts.model, facts.identity.get("model_name")) != (arrangement.model, arrangement.model_name):
            raise ConfigError(f"engine_id={arrangement.engine_id!r}: ranks of another engine, with model {facts.model!r} of "
                              f"{facts.identity.get('model_name')!r}, have registered their pages under this name; give each engine on "
                              "the machine an engine_id of its own, and start them again")
        self._num_groups = len(facts.page_bytes)
        self.index = TierIndex(facts.layout(1, arrangement.ranks), arrangement.settings.tier, model=facts.model or None,
                               engine_id=arrangement.engine_id, fingerprint=facts.fingerprint(),
                               lookup_timeout=arrangement.settings.lookup_timeout, job_timeout=JOB_SECONDS)
        self._pulse = TierPulse(self._beat, "kvtier-trtllm")
        atexit.register(self.close)
        return True

    def _beat(self) -> bool:
        with self._lock:
            if self.index is None:
                return False
            self._settle()
            self.index.poll()
            return self.index.has_work or bool(self._jobs)

    def _settle(self) -> None:
        """Report the jobs that all ranks have ended, as shared memory says."""
        if self.index is None:
            return
        for job_id in list(self._jobs):
            if self.index.wait([job_id], 0.0):
                self.index.complete(job_id)
                del self._jobs[job_id]

    def _say(self, what: str, error: Exception) -> None:
        """Once for each text: the same trouble returns in every step."""
        text = f"{what}: {type(error).__name__}: {error}"
        if text not in self._said and len(self._said) < 100:
            self._said.add(text)
            _log.warning("kvtier: %s", text)
