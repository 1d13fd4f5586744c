"""``TieredWorker``: the side of the TensorRT-LLM connector beside the pages of one rank (design: two ways to attach).

Loads have ended before the forward pass is enqueued: a block is copied whole, with all its layers, so there is nothing to be gained from
waiting layer by layer, and TensorRT-LLM has no way to be told of a failure once it runs. Stores go on behind it; before a page gets another
owner, the copies that read it have ended.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Sequence
from typing import IO, Any, Final

import torch

from kvtier.errors import ConfigError, KVTierError, TransferError
from kvtier.tiering.attach.rank_facts import Facts, leave_facts
from kvtier.tiering.attach.tensorrt_llm_interface import base_classes, process_rank
from kvtier.tiering.attach.tensorrt_llm_plan import Part, StepPlan
from kvtier.tiering.attach.tensorrt_llm_settings import JOB_SECONDS, arrange
from kvtier.tiering.tier_plan import TierPlan
from kvtier.tiering.tier_worker import LOAD_ATTEMPTS, TierWorker

_log = logging.getLogger(__name__)

WAIT_SECONDS: Final = 30.0
"""Longest wait for copies between memories: longer means that something is stuck."""

_Base: Any = base_classes()[1]


class TieredWorker(_Base):
    """TensorRT-LLM's ``KvCacheConnectorWorker`` over a ``TierWorker``.

    Args:
        llm_args: TensorRT-LLM's.

    Raises:
        ConfigError: a misspelt or unusable setting in TRTLLM_KVTIER, or an arrangement that is not supported.
    """

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._arrangement = arrange(llm_args)
        self._rank = process_rank()
        self._kv_dtype = str(getattr(getattr(llm_args, "kv_cache_config", None), "dtype", "auto"))
        self.worker: TierWorker | None = None
        self._facts: IO[str] | None = None
        self._last_plan = -1
        self._unsaved: tuple[Part, ...] = ()
        self._stores: dict[int, tuple[int, float]] = {}  # job: whose, and when it is given up
        self._finished: set[int] = set()
        self._refusal_said = False

    # -- caches ----------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """The cache as one tensor ``[num_blocks, ...]``, each block's bytes contiguous.

        Raises:
            ConfigError: another tensor; too little shared memory (named per rank and in total).
        """
        self._register([[_rows(kv_cache_tensor)]], {"dtype": str(kv_cache_tensor.dtype), "shape": str(list(kv_cache_tensor.shape[1:]))})

    def register_kv_cache_layout(self, layout: Any) -> None:
        """The cache as byte ranges of layer groups; errors as of :meth:`register_kv_caches`."""
        if layout.tokens_per_block != self._arrangement.tokens_per_block:
            raise ConfigError(f"the cache has {layout.tokens_per_block} tokens in a block, and kv_cache_config.tokens_per_block is "
                              f"{self._arrangement.tokens_per_block}; set the same")
        groups = sorted(layout.groups, key=lambda group: int(group.layer_group_id))
        if [group.layer_group_id for group in groups] != list(range(len(groups))):
            raise ConfigError(f"layer groups {[group.layer_group_id for group in groups]}: are not numbered from 0 on")
        tensors = [[region.as_tensor() for region in (*group.regions, *getattr(group, "replicated_regions", ()))] for group in groups]
        self._register(tensors, {"dtype": str(getattr(layout, "dtype", "")), "shape": str([
            [list(group.layer_ids), group.window_size, [str(region.buffers) for region in group.regions]] for group in groups])})

    def close(self, timeout: float = 10.0) -> None:
        """End all copies and let go of the arena. May be called again."""
        worker, self.worker = self.worker, None
        if worker is not None:
            atexit.unregister(self.close)
            worker.close(timeout)
        if self._facts is not None:
            self._facts.close()
            self._facts = None

    # -- steps -----------------------------------------------------------------------------------------------------------

    def start_load_kv(self, stream: Any) -> None:
        """Bring the step's blocks into their pages. Returns when they are there.

        Raises:
            TransferError: a copy has failed several times or does not end. Its pages hold garbage that TensorRT-LLM takes for computed, and
                there is no way to say so: the engine has to stop.
        """
        plan, worker = self.get_connector_meta(), self.worker
        if not isinstance(plan, StepPlan) or plan.number == self._last_plan:
            return
        self._last_plan = plan.number
        if worker is None:
            if plan.loads:  # promised: without them the pages hold garbage
                raise TransferError("the connector of this rank is closed, and TensorRT-LLM counts on blocks that it was to load")
            return
        self._fail(self._unsaved)  # of a forward pass that never ended
        self._unsaved = plan.stores
        self._before_overwrite(worker, plan.fresh)
        for part in plan.loads:
            worker.submit_load(part.job_id, part.group, part.pages, part.slots, after_stream=stream)
        loads = {part.job_id for part in plan.loads}
        if loads and not worker.wait(loads, WAIT_SECONDS):
            raise TransferError(f"copies into TensorRT-LLM's pages do not end within {WAIT_SECONDS} s; the device or the host is stuck")
        self._report(worker)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing: all layers are there since :meth:`start_load_kv`."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: blocks are copied whole, see :meth:`wait_for_save`."""

    def wait_for_save(self, stream: Any) -> None:
        """Begin the step's stores behind the forward pass. Returns at once."""
        parts, self._unsaved = self._unsaved, ()
        worker = self.worker
        if worker is None:  # closed: nothing waits for these any more
            return
        for place, part in enumerate(parts):
            try:
                worker.submit_store(part.job_id, part.group, part.pages, part.slots, after_stream=stream)
            except KVTierError as error:
                if not self._refusal_said:
                    self._refusal_said = True
                    _log.warning("a store is left out, its blocks will be computed again: %s", error)
                self._fail(parts[place:place + 1])
                continue
            self._stores[part.job_id] = (part.request_id, time.monotonic() + JOB_SECONDS)

    def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> tuple[list[int], list[int]]:
        """Requests that have ended and whose pages no copy reads any more; TensorRT-LLM may give the pages to others. Nothing is ever
        loaded in the background: what is said to be is done."""
        self._finished.update(finished_gen_req_ids)
        worker = self.worker
        if worker is None:  # closed: copies have ended, or are not served
            self._stores.clear()
        else:
            self._report(worker)
        now = time.monotonic()
        late = [job for job, (_owner, deadline) in self._stores.items() if now > deadline]
        if late and worker is not None:
            _log.warning("%d stores do not end and are given up; their blocks will be computed again", len(late))
            worker.abort(late, 0.0)
            for job in late:
                del self._stores[job]
        busy = {owner for owner, _deadline in self._stores.values()}
        ended = sorted(self._finished - busy)
        self._finished.difference_update(ended)
        return ended, list(started_loading_req_ids)

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _register(self, tensors: list[list[torch.Tensor]], identity: dict[str, str]) -> None:
        if self.worker is not None:
            raise ConfigError("the cache is registered already; one connector serves one cache")
        arrangement = self._arrangement
        identity |= {"engine": "tensorrt-llm", "model_name": arrangement.model_name, "kv_cache_dtype": self._kv_dtype,
                     "tokens_per_block": str(arrangement.tokens_per_block), "tensor_parallel": str(arrangement.ranks)}
        facts = Facts(tuple(tuple(rows.shape[1] for rows in group) for group in tensors), (False,) * len(tensors), identity,
                      arrangement.model)
        plan = TierPlan.of(facts.layout(1, arrangement.ranks), arrangement.settings.tier, arrangement.engine_id)
        self.worker = TierWorker(plan, str(tensors[0][0].device), self._rank, tensors, faults=arrangement.settings.tier.faults)
        self._facts = leave_facts(arrangement.engine_id, self._rank, facts)
        atexit.register(self.close)

    def _before_overwrite(self, worker: TierWorker, fresh: Sequence[Sequence[int]]) -> None:
        """Pages that get another owner now may still be read by stores."""
        if not self._stores:
            return
        for group, pages in enumerate(fresh):
            if pages and not worker.before_overwrite(pages, WAIT_SECONDS, group):
                _log.warning("stores do not end, and TensorRT-LLM needs their pages; they are given up")
                worker.abort(list(self._stores), 0.0)
                self._stores.clear()
                return

    def _fail(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if self.worker is not None:
                self.worker.fail_store(part.job_id, part.group, part.slots)

    def _report(self, worker: TierWorker) -> None:
        """Note what has ended. Of the worker that the caller began with: one that is closed meanwhile ends its loads with an error."""
        for result in worker.poll():
            self._stores.pop(result.job_id, None)
            if not result.is_store and result.error is not None:
                raise TransferError(f"a copy from host memory to TensorRT-LLM's pages has failed {LOAD_ATTEMPTS} times ({result.error}); "
                                    "the pages hold garbage and TensorRT-LLM has no way to be told, so the engine has to stop")


def _rows(cache: torch.Tensor) -> torch.Tensor:
    """A cache ``[num_blocks, ...]`` as uint8 ``[num_blocks, bytes]``, the same memory."""
    if cache.dim() < 2 or not cache.shape[0] or not cache[0].is_contiguous():
        raise ConfigError(f"KV cache tensor {cache.dtype} {list(cache.shape)}, strides {cache.stride()}: pass [num_blocks, ...] with each "
                          "block's bytes contiguous")
    return cache.as_strided((cache.shape[0], cache[0].numel()), (cache.stride(0), 1)).view(torch.uint8)
