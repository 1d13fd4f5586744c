"""``LLM(...)`` with the tier: right tokens, and hits that really come from host memory and from NVMe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import Engine, differences, settled
from inputs import conversations

STOPPED_AT = 8
"""Tokens generated for each prompt."""


@pytest.fixture(scope="module")
def plain_hybrid(hybrid: Path) -> Iterator[Engine]:
    with Engine(hybrid) as engine:
        yield engine


def test_smollm_says_the_same_from_host_memory(smollm: Path) -> None:
    prompts = [[5 + (7 * number + place * place) % 40000 for place in range(200 + 33 * number)] for number in range(4)]
    with Engine(smollm) as engine:
        right = engine.generate(prompts=prompts, max_tokens=STOPPED_AT)
    with Engine(smollm, {"secondary": "128MiB"}) as engine:
        assert differences(engine.generate(prompts=prompts, max_tokens=STOPPED_AT), right) == ([], 0)
        assert engine.settle()
        engine.reset()
        again = engine.generate(prompts=prompts, max_tokens=STOPPED_AT)
        wrong, ties = differences(again, right)
        print(f"{ties} of {len(prompts)} answers parted at a near tie")
        assert wrong == []
        assert [answer["cached"] for answer in again] == [(len(prompt) - 1) // 32 * 32 for prompt in prompts]
        stats = settled(engine)
        assert stats["hit_blocks"]["secondary"] == sum((len(prompt) - 1) // 32 for prompt in prompts)
        metrics = engine.metrics()
        assert metrics["kv_offload_tiering_chunk_hits/0:primary"] == stats["hit_blocks"]["secondary"]
        assert metrics["external_prefix_cache_hits"] == sum(answer["cached"] for answer in again)
        assert metrics["kv_offload_load_bytes"] > 0


@pytest.mark.parametrize("pages_per_chunk", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_hybrid_model_says_the_same_from_host_memory(hybrid: Path, plain_hybrid: Engine, pages_per_chunk: int) -> None:
    prompts = conversations(3, 24)
    right = plain_hybrid.generate(prompts=prompts, max_tokens=STOPPED_AT)
    with Engine(hybrid, {"secondary": "64MiB", "blocks_per_chunk": pages_per_chunk}) as engine:
        for turn in range(3):
            answers = engine.generate(prompts=prompts, max_tokens=STOPPED_AT)
            assert differences(answers, right)[0] == []
            assert engine.settle()
            engine.reset()
            if turn:
                assert sum(answer["cached"] for answer in answers) > 0.7 * sum(map(len, prompts))
        assert settled(engine)["hit_blocks"]["secondary"] > 0


def test_after_a_power_cut_the_next_engine_finds_all_prompts_on_nvme(hybrid: Path, plain_hybrid: Engine, nvme: dict[str, str]) -> None:
    prompts = conversations(4, 12)
    right = plain_hybrid.generate(prompts=prompts, max_tokens=STOPPED_AT)
    tier = {"secondary": "64MiB", **nvme}
    with Engine(hybrid, tier) as engine:
        assert differences(engine.generate(prompts=prompts, max_tokens=STOPPED_AT), right)[0] == []
        assert engine.settle()
        engine.kill()
    with Engine(hybrid, tier, own_core=True) as engine:
        answers = engine.generate(prompts=prompts, max_tokens=STOPPED_AT)
        assert differences(answers, right)[0] == []
        assert sum(answer["cached"] for answer in answers) > 0.7 * sum(map(len, prompts))
        metrics = engine.metrics()
        assert metrics["kv_offload_tiering_chunk_hits/1:kvtier-nvme"] > 0
        assert metrics["kv_offload_tiering_read_bytes/1:kvtier-nvme"] > 0


@pytest.mark.slow
def test_two_ranks_say_the_same_from_host_memory_and_from_nvme(hybrid: Path, plain_hybrid: Engine, nvme: dict[str, str]) -> None:
    prompts = conversations(5, 8)
    right = plain_hybrid.generate(prompts=prompts, max_tokens=STOPPED_AT)
    tier = {"secondary": "64MiB", **nvme}
    for turn in range(2):
        with Engine(hybrid, tier, own_core=True, tensor_parallel_size=2, variables={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}) as engine:
            answers = engine.generate(prompts=prompts, max_tokens=STOPPED_AT)
            assert differences(answers, right)[0] == []
            if turn:
                assert sum(answer["cached"] for answer in answers) > 0.7 * sum(map(len, prompts))
            engine.reset()
            again = engine.generate(prompts=prompts, max_tokens=STOPPED_AT)
            assert differences(again, right)[0] == []
            assert sum(answer["cached"] for answer in again) > 0.7 * sum(map(len, prompts))


@pytest.mark.slow
def test_a_request_chooses_its_priority_its_levels_and_whether_it_reads_or_writes(hybrid: Path, nvme: dict[str, str]) -> None:
    prompts = [conversations(seed, 1, shortest=300, longest=600)[0] for seed in range(20, 27)]

    def serve(engine: Engine, number: int, **parameters: object) -> int:
        answer = engine.generate(prompts=[prompts[number]], max_tokens=2, parameters=[parameters or None])[0]
        assert engine.settle()
        engine.reset()
        return int(answer["cached"])

    tier = {"secondary": "64MiB", "secondary_offload_min_priority": 20, "nvme_offload_min_priority": 40, **nvme}
    with Engine(hybrid, tier) as engine:
        serve(engine, 0, kvtier={"skip_write": True})
        assert serve(engine, 0) == 0, "it was not to be stored"
        assert serve(engine, 0) > 0
        assert serve(engine, 0, kvtier={"skip_read": True}) == 0
        assert serve(engine, 0, kv_load_tiers=[]) == 0
        serve(engine, 1, kvtier={"priority": 10})
        assert serve(engine, 1, kvtier={"priority": 10}) == 0, "below the host level's threshold"
        serve(engine, 2, kvtier={"priority": 30})
        serve(engine, 3, kvtier={"priority": 60})
        serve(engine, 4, kvtier={"priority": 60, "keep_off_nvme": True})
        serve(engine, 5, kvtier={"prioritty": 60, "skip_read": 7})
        settled(engine)
        engine.kill()
    with Engine(hybrid, tier) as engine:
        assert serve(engine, 2) == 0, "below the threshold of NVMe"
        assert serve(engine, 4) == 0, "it was to be kept off NVMe"
        assert serve(engine, 3, kv_load_tiers=[{"medium": "CPU"}], kvtier={"skip_write": True}) == 0, "NVMe was not to be read"
        assert serve(engine, 3) > 0
        before = settled(engine)["hit_blocks"]
        assert serve(engine, 3, kv_load_tiers=[{"medium": "STORAGE"}]) > 0, "it is in host memory, too, and read again"
        after = settled(engine)["hit_blocks"]
        assert after["secondary"] == before["secondary"]
        assert after["nvme"] > before["nvme"]


@pytest.mark.slow
def test_reset_forgets_all_levels_and_goes_on(hybrid: Path, plain_hybrid: Engine, nvme: dict[str, str]) -> None:
    prompts = conversations(6, 8)
    right = plain_hybrid.generate(prompts=prompts, max_tokens=STOPPED_AT)
    with Engine(hybrid, {"secondary": "64MiB", **nvme}) as engine:
        engine.generate(prompts=prompts, max_tokens=STOPPED_AT)
        assert engine.reset(connector=True), "without settling: stores are in flight"
        answers = engine.generate(prompts=prompts, max_tokens=STOPPED_AT)
        assert differences(answers, right)[0] == []
        assert settled(engine)["hit_blocks"] == {"primary": 0, "secondary": 0, "nvme": 0}
        engine.sleep_and_wake(prompts=prompts, steps=3)
        assert differences(engine.generate(prompts=prompts, max_tokens=STOPPED_AT), right)[0] == []
        settled(engine)
        assert engine.reset(connector=True)
        engine.kill()
    with Engine(hybrid, {"secondary": "64MiB", **nvme}) as engine:
        assert sum(answer["cached"] for answer in engine.generate(prompts=prompts[:1], max_tokens=1)) == 0
