"""What TensorRT-LLM has around a KV cache connector, in small: the interface as published, and an engine that drives the scheduler's and
the workers' side step by step. Written from the names and shapes of the published source; nothing here is TensorRT-LLM's code.

The engine's "model" writes, for each token, bytes that depend on all tokens before it, on the rank and on the layer group; and whatever it
computes first checks that all before it is right on its pages. So a wrong byte from the tier fails where a wrong token would come."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

SOURCE = "tensorrt_llm/_torch/pyexecutor/connectors/kv_cache_connector.py at 035ab91c"
SCHEDULER: dict[str, tuple[str, ...]] = {
    "__init__": ("llm_args",),
    "build_connector_meta": ("scheduler_output",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "request_finished": ("request", "cache_block_ids"),
    "request_finished_by_layer_group": ("request", "cache_block_ids_by_layer_group"),
    "update_state_after_alloc": ("request", "block_ids"),
    "update_state_after_alloc_by_layer_group": ("request", "block_ids_by_layer_group"),
    "wait_for_initialization": (),
}
WORKER: dict[str, tuple[str, ...]] = {
    "__init__": ("llm_args",),
    "bind_connector_meta": ("metadata",),
    "get_connector_meta": (),
    "register_kv_caches": ("kv_cache_tensor",),
    "register_kv_cache_layout": ("layout",),
    "start_load_kv": ("stream",),
    "wait_for_layer_load": ("layer_idx", "stream"),
    "save_kv_layer": ("layer_idx", "stream"),
    "wait_for_save": ("stream",),
    "get_finished": ("finished_gen_req_ids", "started_loading_req_ids"),
}
"""Methods and their parameters behind ``self``."""

TOKENS = 4  # per block
PROMPT = list(range(100, 130))  # seven full blocks and two tokens
WIDTH = 8   # bytes that a token takes in one layer


@dataclass
class RequestData:
    """As published."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    """As published."""

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)
    attention_dp_rank: int | None = None


@dataclass
class Region:
    """A byte range of each page: here, a tensor."""

    rows: torch.Tensor
    buffers: tuple[str, ...] = ()

    def as_tensor(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return self.rows.view(dtype)


def llm_args(ranks: int = 1, **more: Any) -> SimpleNamespace:
    cache = SimpleNamespace(tokens_per_block=TOKENS, enable_block_reuse=True, dtype="auto")
    return SimpleNamespace(**{"model": "a-model", "tensor_parallel_size": ranks, "pipeline_parallel_size": 1,
                              "context_parallel_size": 1, "enable_attention_dp": False, "kv_cache_config": cache} | more)


class Request:
    """What the connector sees of an ``LlmRequest``, and what the engine knows of it."""

    def __init__(self, number: int, prompt: Sequence[int], new_tokens: int, priorities: int | None = None, **more: Any) -> None:
        self.request_id = number
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.new_tokens = new_tokens
        self.priority = priorities
        self.lora_task_id = self.cache_salt = self.multimodal_hashes = None
        self.__dict__.update(more)
        self.position = 0                       # computed, or taken from the connector
        self.matched = self.on_device = 0
        self.pages: list[list[int]] = []
        self.reported = [0, 0]                  # tokens and pages
        self.is_known = False
        self.digests: list[bytes] = []

    def get_tokens(self, beam: int) -> list[int]:
        return list(self.tokens)

    @property
    def context_current_position(self) -> int:
        return self.position

    @property
    def prompt_len(self) -> int:
        return self.prompt_length

    @property
    def namespace(self) -> str:
        return repr((self.lora_task_id, self.cache_salt, self.multimodal_hashes))


class Engine:
    """An executor with one connector.

    Args:
        connector: (scheduler class, worker class).
        set_rank: makes the next worker believe that it is this rank.
        ranks, groups: how many; with several layer groups, or ``is_v2``, the cache is registered as a layout.
        num_pages: of each group.
        window: of the last group, in blocks; pages that have left it are given to others at once.
        chunk: tokens of a prompt in one step.
    """

    def __init__(self, connector: tuple[Any, Any], set_rank: Callable[[int], None], ranks: int = 1, groups: int = 1, num_pages: int = 40,
                 window: int | None = None, chunk: int = 10**6, is_v2: bool = False, arguments: Any = None) -> None:
        arguments = arguments or llm_args(ranks)
        self.window, self.chunk, self.is_grouped = window, chunk, is_v2 or groups > 1
        self.caches = [[torch.zeros(num_pages, 2, 2, TOKENS * WIDTH, dtype=torch.int8) for _ in range(groups)] for _ in range(ranks)]
        self.free = [list(range(num_pages)) for _ in range(groups)]
        self.scheduler = connector[0](arguments)
        self.workers = []
        for rank in range(ranks):
            set_rank(rank)
            self.workers.append(connector[1](arguments))
        for worker, caches in zip(self.workers, self.caches, strict=True):
            if self.is_grouped:
                described = [SimpleNamespace(layer_group_id=number, layer_ids=(2 * number, 2 * number + 1), window_size=None,
                                             replicated_regions=(), regions=self._regions(cache)) for number, cache in enumerate(caches)]
                worker.register_kv_cache_layout(SimpleNamespace(tokens_per_block=TOKENS, groups=tuple(described), dtype="int8"))
            else:
                worker.register_kv_caches(caches[0])
        self.scheduler.wait_for_initialization()
        self.active: list[Request] = []
        self.saving: dict[int, Request] = {}
        self.told: list[set[int]] = [set() for _ in self.workers]
        self._saved: dict[int, set[int]] = {}
        self.computed = 0
        self.between: Callable[[], None] = lambda: None
        self.view: Callable[[Request], Any] = lambda request: request  # what the C++ side shows of a request

    # -- requests --------------------------------------------------------------------------------------------------------

    def add(self, request: Request, on_device: int = 0) -> int:
        """Admit a request; ``on_device`` tokens are taken for matched in the device's cache. Returns the connector's offer."""
        matched, is_async = self.scheduler.get_num_new_matched_tokens(self.view(request), on_device)
        assert not is_async
        assert on_device + matched < request.prompt_length, "a token must be left to be computed"
        request.pages = [[] for _ in self.free]
        self._grow(request, request.prompt_length)
        request.matched, request.position = matched, on_device + matched
        request.on_device = on_device  # taken for written long ago; here, where no copy can still read these pages for somebody else
        if self.is_grouped:
            self.scheduler.update_state_after_alloc_by_layer_group(request, [list(pages) for pages in request.pages])
        else:
            self.scheduler.update_state_after_alloc(request, list(request.pages[0]))
        request.reported, request.is_known = [0, 0], False
        self.active.append(request)
        return int(matched)

    def preempt(self, request: Request) -> None:
        """Its pages go to others at once, and it will come as a new one, whose prompt includes the answer so far."""
        self.active.remove(request)
        request.new_tokens -= len(request.tokens) - request.prompt_length
        request.prompt_length = len(request.tokens)
        self._free(request)

    def cancel(self, request: Request) -> None:
        self.active.remove(request)
        self._finish(request)

    def step(self) -> None:
        """One iteration of the executor's loop."""
        output = SchedulerOutput()
        work: list[tuple[Request, int]] = []
        for request in self.active:
            if request.position < request.prompt_length:
                count = min(request.prompt_length - request.position, self.chunk)
                computed = request.position - (0 if request.is_known else request.matched)
            else:
                count, computed = 1, len(request.tokens) - 1
                self._grow(request, len(request.tokens))
            new_pages = [pages[request.reported[1]:] for pages in request.pages]
            data = RequestData(request.request_id, request.tokens[request.reported[0]:], [] if len(new_pages) > 1 else new_pages[0],
                               computed, count, priorities=None if request.priority is None else [request.priority] * len(new_pages[0]),
                               cache_salt=request.cache_salt, new_block_ids_by_layer_group=new_pages if self.is_grouped else [])
            (output.cached_requests if request.is_known else output.new_requests).append(data)
            request.reported, request.is_known = [len(request.tokens), len(request.pages[0])], True
            work.append((request, count))
        meta = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
        for worker in self.workers:
            worker.bind_connector_meta(meta)
            worker.start_load_kv(None)
        self.between()
        for worker in self.workers:
            for layer in range(2):
                worker.wait_for_layer_load(layer, None)
        for request, _count in work:
            for position in range(request.on_device):
                self._write(request, position)
            request.on_device = 0
        for request, count in work:
            self._check(request, request.position)
            for position in range(request.position, request.position + count):
                self._write(request, position)
            self.computed += count
            request.position += count
        for worker in self.workers:
            for layer in range(2):
                worker.save_kv_layer(layer, None)
            worker.wait_for_save(None)
        for request, _count in work:
            if request.position >= request.prompt_length:
                if len(request.tokens) - request.prompt_length >= request.new_tokens:
                    self.active.remove(request)
                    self._finish(request)
                else:
                    request.tokens.append(7000 + len(request.tokens))
            self._leave_window(request)
        self.collect()

    def idle(self) -> None:
        """An iteration without anything to compute: an old plan may stay bound."""
        for worker in self.workers:
            worker.start_load_kv(None)
            worker.wait_for_save(None)
        self.collect()

    def collect(self) -> None:
        """Pages of requests whose copies all workers have ended become free."""
        for told, worker in zip(self.told, self.workers, strict=True):
            saved, loaded = worker.get_finished([number for number in self.saving if number not in told], [])
            assert loaded == []
            told.update(self.saving)
            self._saved.setdefault(id(worker), set()).update(saved)
        for number in list(self.saving):
            if all(number in self._saved[id(worker)] for worker in self.workers):
                self._free(self.saving.pop(number))

    def run(self, *requests: Request, on_device: int = 0) -> list[int]:
        """Serve requests to their end. Returns the offers."""
        offers = [self.add(request, on_device) for request in requests]
        while self.active:
            self.step()
        self.settle()
        return offers

    def settle(self) -> None:
        """Until no pages are kept back and no job is under way."""
        deadline = time.monotonic() + 20.0
        while self.saving or self.scheduler._jobs:
            self.idle()
            time.sleep(0.002)
            assert time.monotonic() < deadline

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    # -- pages -----------------------------------------------------------------------------------------------------------

    @staticmethod
    def _regions(cache: torch.Tensor) -> tuple[Region, ...]:
        """One region for each of the two layers."""
        rows = cache.view(torch.uint8).flatten(1)
        half = rows.shape[1] // 2
        return Region(rows[:, :half]), Region(rows[:, half:])

    def _grow(self, request: Request, length: int) -> None:
        for free, pages in zip(self.free, request.pages, strict=True):
            while len(pages) * TOKENS < length:
                pages.append(free.pop(0))

    def _leave_window(self, request: Request) -> None:
        if self.window is not None and request.pages:
            pages = request.pages[-1]
            for ordinal in range(max(0, request.position // TOKENS - self.window)):
                if pages[ordinal] >= 0:
                    self.free[-1].insert(0, pages[ordinal])
                    pages[ordinal] = -1

    def _finish(self, request: Request) -> None:
        if self.is_grouped:
            is_saving = self.scheduler.request_finished_by_layer_group(request, [list(pages) for pages in request.pages])
        else:
            is_saving = self.scheduler.request_finished(request, list(request.pages[0]))
        if is_saving:
            self.saving[request.request_id] = request
        else:
            self._free(request)

    def _free(self, request: Request) -> None:
        for free, pages in zip(self.free, request.pages, strict=True):
            free[:0] = [page for page in pages if page >= 0]  # given to others next
        request.pages = []

    # -- the model -------------------------------------------------------------------------------------------------------

    def _bytes(self, request: Request, position: int, rank: int, group: int) -> torch.Tensor:
        digests = request.digests
        while len(digests) <= position:  # of all tokens up to there
            last = digests[-1] if digests else request.namespace.encode()
            digests.append(hashlib.sha256(last + b"/%d" % request.tokens[len(digests)]).digest())
        seed = hashlib.sha256(digests[position] + b"/%d/%d" % (rank, group)).digest()
        return torch.frombuffer(bytearray(seed), dtype=torch.int8).reshape(2, 2, WIDTH)

    def _place(self, request: Request, position: int, rank: int, group: int) -> torch.Tensor | None:
        page = request.pages[group][position // TOKENS]
        start = position % TOKENS * WIDTH
        return None if page < 0 else self.caches[rank][group][page, :, :, start:start + WIDTH]

    def _write(self, request: Request, position: int) -> None:
        for rank, caches in enumerate(self.caches):
            for group in range(len(caches)):
                place = self._place(request, position, rank, group)
                if place is not None:
                    place.copy_(self._bytes(request, position, rank, group))

    def _check(self, request: Request, length: int) -> None:
        for rank, caches in enumerate(self.caches):
            for group in range(len(caches)):
                for position in range(length):
                    place = self._place(request, position, rank, group)
                    assert place is None or torch.equal(place, self._bytes(request, position, rank, group)), \
                        f"request {request.request_id}: wrong bytes of token {position} on rank {rank}, group {group}"


def nvme(folder: Path, **more: Any) -> dict[str, Any]:
    return {"nvme": "64 blocks", "nvme_directory": str(folder), "nvme_free_space_reserve": "1MiB", "model": "m@1:0"} | more
