"""A tiny random model, what it generates by itself, and loops that serve it; small engines of TensorRT-LLM's and SGLang's kind."""

from __future__ import annotations

import copy
import json
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvtier.tiering.attach import tensorrt_llm_worker
from kvtier.tiering.attach.serving_loop import ServingLoop
from kvtier.tiering.attach.sglang import TieredHiCache
from kvtier.tiering.attach.tensorrt_llm import TieredScheduler, TieredWorker
from kvtier.tiering.attach.transformers import AttachedModel, layout_of

sys.path.append(str(Path(__file__).parent))  # importlib mode puts no folder there
from attached_loops import TOKENS_PER_BLOCK, AttachedLoops
from scripted_cache import ScriptedCache
from sglang_double import Controller, HostPool, StorageConfig
from tensorrt_double import Engine


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
    known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def run(prompt: Sequence[int], new_tokens: int) -> list[int]:
        key = (tuple(prompt), new_tokens)
        if key not in known:
            known[key] = compute(prompt, new_tokens)
        return known[key]

    def compute(prompt: Sequence[int], new_tokens: int) -> list[int]:
        output = model.generate(torch.tensor([list(prompt)]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                                max_new_tokens=new_tokens, do_sample=False)
        return output[0, len(prompt):].tolist()  # type: ignore[no-any-return]
    return run


@pytest.fixture
def scripted_cache(tiny_model: PreTrainedModel) -> Callable[..., ScriptedCache]:
    layout = layout_of(tiny_model.config, dtype=tiny_model.dtype, tokens_per_block=TOKENS_PER_BLOCK)
    return lambda num_blocks=128, **options: ScriptedCache(layout, num_blocks, **options)


@pytest.fixture
def attached_loops(tmp_path: Path) -> Iterator[AttachedLoops]:
    loops = AttachedLoops(tmp_path)
    yield loops
    loops.close()


@pytest.fixture
def serving(tiny_model: PreTrainedModel, attached_loops: AttachedLoops) -> Any:
    """Opens a manager and a loop with the tiny model; ``serving.end(loop)`` ends one early."""

    def start(model: str = "tiny@test:0", **options: Any) -> ServingLoop:
        return attached_loops.start(tiny_model, lambda cache: AttachedModel(tiny_model, cache.pool(group=0).primary), model, **{
            "primary": "40 blocks", "secondary": "20 blocks", "nvme": "200 blocks", "max_batch_size": 8, "max_seq_len": 256, **options})

    start.end = attached_loops.end  # type: ignore[attr-defined]
    return start


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Starts engines of TensorRT-LLM's kind; at the end nothing is leased or under way, every invariant stands, and every page is free."""
    engines: list[Engine] = []

    def start(secondary: str = "40 blocks", engine: dict[str, Any] | None = None, **settings: Any) -> Engine:
        given = {"secondary": secondary, "engine_id": f"trt-{uuid.uuid4().hex[:12]}"} | settings
        monkeypatch.setenv("TRTLLM_KVTIER", json.dumps(given))

        def set_rank(rank: int) -> None:
            monkeypatch.setattr(tensorrt_llm_worker, "process_rank", lambda: rank)

        started = Engine((TieredScheduler, TieredWorker), set_rank, **(engine or {}))
        engines.append(started)
        return started

    yield start
    for engine in engines:
        index = engine.scheduler.index
        if index is not None:
            engine.settle()
            index.verify()
            stats = index.stats()
            assert (stats.leases, stats.jobs, stats.requests) == (0, 0, 0)
            assert all(len(free) == engine.caches[0][0].shape[0] for free in engine.free)
        engine.close()
        engine.close()


@pytest.fixture
def attach() -> Iterator[Callable[..., Controller]]:
    """Attaches SGLang's backends to pools; at the end nothing is leased or under way, and every invariant stands."""
    attached: list[Controller] = []

    def attach(pool: HostPool | None = None, interface_v1: int = 1, secondary: str = "32 blocks", rank: int = 0, ranks: int = 1,
               is_mla: bool = False, **settings: Any) -> Controller:
        extra = {"backend_name": "kvtier", "module_path": "kvtier.tiering.attach.sglang", "class_name": "TieredHiCache",
                 "secondary": secondary} | settings | ({"interface_v1": 1} if interface_v1 else {})
        config = StorageConfig(extra, tp_rank=rank, tp_size=ranks, is_mla_model=is_mla)
        controller = Controller(TieredHiCache(config, {}), pool or HostPool(seed=1), config)
        attached.append(controller)
        return controller

    yield attach
    for controller in attached:
        store = controller.backend._store
        if store is not None:
            store.index.verify()
            stats = store.index.stats()
            assert (stats.leases, stats.jobs, stats.requests) == (0, 0, 0)
        controller.backend.close()
        controller.backend.close()
