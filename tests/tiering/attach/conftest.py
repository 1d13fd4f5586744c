"""A tiny random model, and a scripted cache: block tables over a real primary pool, no reuse, every answer of the test's choosing.

The scripted cache lets the rules of the serving loop be tested one by one (a read that never comes, a read that turned out
bad, a full pool); what the loop does with the real manager is tested in test_attached_serving.py.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvtier.errors import CapacityError
from kvtier.kernels import OffsetTable
from kvtier.pools.layout import KVLayout
from kvtier.pools.primary import PrimaryPool
from kvtier.tiering.attach.transformers import layout_of
from kvtier.tiering.ledger.request import Request

TOKENS_PER_BLOCK = 4


@pytest.fixture(scope="session")
def tiny_model() -> PreTrainedModel:
    torch.manual_seed(0)
    # Weights large enough that attention decides the result: with the default 0.02 a wrong page changes no digit that counts.
    config = LlamaConfig(vocab_size=199, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                         initializer_range=0.4)
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None  # type: ignore[union-attr]  # answers have the length that was asked for
    return model


@pytest.fixture
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 199, (length,), generator=generator).tolist() for length in (37, 5, 64, 1, 50)]


@pytest.fixture(scope="session")
def generated(tiny_model: PreTrainedModel) -> Callable[..., list[int]]:
    """What transformers itself generates, greedily, with its own attention and cache. (A copy: the model is attached.)"""
    model = copy.deepcopy(tiny_model)

    def run(prompt: Sequence[int], new_tokens: int) -> list[int]:
        output = model.generate(torch.tensor([list(prompt)]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                                max_new_tokens=new_tokens, do_sample=False)
        return output[0, len(prompt):].tolist()  # type: ignore[no-any-return]
    return run


class ScriptedCache:
    """The calls of KVCacheManager that the serving loop makes, without reuse."""

    def __init__(self, layout: KVLayout, num_blocks: int, max_batch_size: int = 8, max_seq_len: int = 256) -> None:
        group = layout.groups[0]
        self.layout = layout
        self.config = SimpleNamespace(max_batch_size=max_batch_size, max_seq_len=max_seq_len)
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
            self.calls.append(("add", request.id, request.num_tokens, request.skip_read))
        return [SimpleNamespace(prepopulated_tokens=0 if r.skip_read else self.promised.get(r.id, 0)) for r in requests]

    def is_ready(self, request_id: int) -> bool:
        return request_id not in self.never_ready

    def wait_ready(self, request_id: int, layer: int | None = None, timeout: float | None = None) -> int:
        assert timeout is not None, "every wait of the loop has a bound"
        if request_id in self.never_ready:
            raise TimeoutError
        self.must_report.discard(request_id)
        return self.valid.get(request_id, self.promised.get(request_id, 0))

    @contextlib.contextmanager
    def step(self, engine_stream: object, ids: Sequence[int]) -> Iterator[list[int]]:
        yield [request_id for request_id in ids if request_id not in self.must_report]

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

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(primary=SimpleNamespace(max_blocks=self.primary.num_blocks))


@pytest.fixture
def scripted_cache(tiny_model: PreTrainedModel) -> Callable[..., ScriptedCache]:
    layout = layout_of(tiny_model.config, dtype=tiny_model.dtype, tokens_per_block=TOKENS_PER_BLOCK)
    return lambda num_blocks=128, **options: ScriptedCache(layout, num_blocks, **options)
