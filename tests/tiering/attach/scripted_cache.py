"""A scripted cache: block tables over a real primary pool, no reuse, every answer of the test's choosing.

It lets the rules of the serving loop be tested one by one (a read that never comes, a read that turned out bad, a full pool); what the
loop does with the real manager is tested in test_attached_serving.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence
from types import SimpleNamespace

import torch

from kvtier.errors import CapacityError
from kvtier.kernels import OffsetTable
from kvtier.pools.layout import KVLayout
from kvtier.pools.primary import PrimaryPool
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.step import Step
from kvtier.types import Level


class ScriptedCache:
    """The calls of KVCacheManager that the serving loop makes, without reuse."""

    def __init__(self, layout: KVLayout, num_blocks: int, max_batch_size: int = 8, max_seq_len: int = 256) -> None:
        group = layout.groups[0]
        self.layout = layout
        self.config = SimpleNamespace(max_batch_size=max_batch_size, max_seq_len=max_seq_len, chunk_size=None)
        self.primary = PrimaryPool(group, num_blocks, "cpu")
        self.primary.tensor.fill_(float("nan"))  # whatever attention reads must have been written before
        self._tokens_per_block = layout.tokens_per_block
        self._table = OffsetTable(max_rows=max_batch_size, max_blocks=max_seq_len // layout.tokens_per_block,
                                  num_layers=group.num_layers, kv_factor=2, num_blocks=num_blocks)
        self.free = list(range(num_blocks))
        self.slots: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.promised: dict[int, int] = {}      # request id -> tokens promised by add_sequences
        self.valid: dict[int, int] = {}         # request id -> tokens really there
        self.never_ready: set[int] = set()
        self.must_report: set[int] = set()      # left out of steps until wait_ready has been asked
        self.calls: list[tuple[object, ...]] = []
        self.longest: dict[int, int] = {}       # request id -> tokens at its end
        self.removed_in_thought: set[int] = set()
        self.layers: list[int] = []             # waited for, one by one
        self.lose: dict[int, list[int]] = {}    # layer -> ids that lose blocks when it is waited for
        self.has_reuse = False                  # whether waiting for another request's prefix gains anything

    def _grow(self, request_id: int, length: int) -> None:
        slots = self.slots[request_id]
        needed = -(-length // self._tokens_per_block) - len(slots)
        if needed > len(self.free):
            total = self.primary.num_blocks
            newest_first = [] if needed + len(slots) > total else list(reversed(self.slots))
            raise CapacityError("full", needed=needed, available=len(self.free), preempt=newest_first[:1])
        slots += [self.free.pop() for _ in range(needed)]
        self.lengths[request_id] = length

    def add_sequences(self, requests: Sequence[Request]) -> list[SimpleNamespace]:
        done: list[int] = []
        try:
            for request in requests:
                self.slots[request.id] = []
                done.append(request.id)
                self._grow(request.id, request.num_tokens)
        except CapacityError:
            for request_id in done:
                self.free += self.slots.pop(request_id)
            raise
        for request in requests:
            self.longest[request.id] = request.num_tokens + request.max_new_tokens
            self.calls.append(("add", request.id, request.num_tokens, request.skip_read))
        return [SimpleNamespace(prepopulated_tokens=0 if r.skip_read else self.promised.get(r.id, 0)) for r in requests]

    def is_ready(self, request_id: int, layer: int | None = None) -> bool:
        return request_id not in self.never_ready

    def wait_ready(self, request_id: int, layer: int | None = None, timeout: float | None = None) -> int:
        assert timeout is not None, "every wait of the loop has a bound"
        if request_id in self.never_ready:
            raise TimeoutError
        self.must_report.discard(request_id)
        return self.valid.get(request_id, self.promised.get(request_id, 0))

    @contextlib.contextmanager
    def step(self, engine_stream: object, ids: Sequence[int], layer: int | None = None) -> Iterator[Step]:
        yield Step([request_id for request_id in ids if request_id not in self.must_report], [0], [[]], self.wait_layer)

    def wait_layer(self, step: Step, layer: int) -> list[int]:
        self.layers.append(layer)
        step.lost += [request_id for request_id in self.lose.pop(layer, []) if request_id in step]
        self.must_report |= set(step.lost)
        return step.lost

    def block_table(self, ids: Sequence[int], group: int = 0) -> torch.Tensor:
        return self._table.fill([self.slots[request_id] for request_id in ids])

    def mark_computed(self, request_id: int, num_tokens: int) -> None:
        self.calls.append(("computed", request_id, num_tokens))

    def append_tokens(self, request_id: int, tokens: Sequence[int]) -> None:
        self._grow(request_id, self.lengths[request_id] + len(tokens))
        self.calls.append(("append", request_id, *tokens))

    def append_step(self, ids: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        assert all(len(appended) == 1 for appended in tokens)
        before = {request_id: (len(self.slots[request_id]), self.lengths[request_id]) for request_id in ids}
        try:
            for request_id in ids:
                self._grow(request_id, self.lengths[request_id] + 1)
        except CapacityError:
            for request_id, (num_slots, length) in before.items():
                self.free += self.slots[request_id][num_slots:]
                del self.slots[request_id][num_slots:]
                self.lengths[request_id] = length
            raise

    def store_context(self, request_id: int) -> None:
        self.calls.append(("store_context", request_id))

    def remove_sequence(self, request_id: int, store: bool) -> None:
        self.free += self.slots.pop(request_id)
        self.calls.append(("remove", request_id, store))

    def report_prefill(self, tokens: int | range, seconds: float) -> None:
        assert tokens if isinstance(tokens, int) else len(tokens)
        assert seconds >= 0

    def refresh(self) -> None:
        self.calls.append(("refresh",))

    # -- what a scheduler asks -------------------------------------------------------------------------------------------

    def pool(self, group: int = 0) -> SimpleNamespace:
        return SimpleNamespace(primary=self.primary)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._tokens_per_block)

    def num_free_blocks(self, level: Level, group: int = 0) -> int:
        return len(self.free)

    def needed_blocks_one_step(self, request: int | Request, two_steps: bool = False, group: int = 0) -> int:
        if isinstance(request, Request):
            return self._blocks(request.num_tokens)
        return self._blocks(self.lengths[request] + 1) - len(self.slots[request])

    def remaining_blocks_to_completion(self, request: int | Request, group: int = 0) -> int:
        if isinstance(request, Request):
            return self._blocks(request.num_tokens + request.max_new_tokens)
        return self._blocks(self.longest[request]) - len(self.slots[request])

    def request_block_budget(self, request_id: int, group: int = 0) -> int:
        return self._blocks(self.longest[request_id])

    def start_scheduling(self) -> None:
        self.removed_in_thought.clear()

    def scheduling_remove_sequence(self, request_id: int, group: int = 0) -> None:
        self.removed_in_thought.add(request_id)

    def num_schedulable_blocks(self, group: int = 0) -> int:
        return len(self.free) + sum(len(self.slots[request_id]) for request_id in self.removed_in_thought)

    def match(self, request: Request) -> SimpleNamespace:
        return SimpleNamespace(first_new_key=request.token_bytes[:4 * self._tokens_per_block])

    def beneficial_to_skip(self, request: Request, contributed_keys: Container[object]) -> bool:
        return self.has_reuse and request.token_bytes[:4 * self._tokens_per_block] in contributed_keys

    def fit_token_budget(self, request_id: int, chunk_tokens: int, token_budget: int) -> int:
        return min(chunk_tokens, token_budget)
