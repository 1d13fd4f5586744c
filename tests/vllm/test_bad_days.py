"""Bad days in the real engine: a clear message at the start, or a miss; the engine goes on serving right answers."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import Engine, EngineDied, differences, settled
from inputs import VOCABULARY, conversations, make_hybrid

STOPPED_AT = 6


@pytest.fixture(scope="module")
def plain(hybrid: Path) -> Iterator[Engine]:
    with Engine(hybrid) as engine:
        yield engine


@pytest.fixture(scope="module")
def short_prompts() -> list[list[int]]:
    return conversations(30, 10)


@pytest.fixture(scope="module")
def right(plain: Engine, short_prompts: list[list[int]]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = plain.generate(prompts=short_prompts, max_tokens=STOPPED_AT)
    return found


def test_what_cannot_be_used_is_said_at_the_start(hybrid: Path, tmp_path: Path, nvme: dict[str, str]) -> None:
    with pytest.raises(EngineDied, match="did you mean 'secondary'"):
        Engine(hybrid, {"secondry": "64MiB"})
    with pytest.raises(EngineDied, match=r"one block of group 0 takes .* in total"):
        Engine(hybrid, {"secondary": "64KiB"})


@pytest.mark.slow
def test_a_folder_of_another_model_block_size_or_engine_is_refused_by_name(hybrid: Path, tmp_path: Path, nvme: dict[str, str]) -> None:
    other = make_hybrid(tmp_path / "other", seed=1)
    tier = {"secondary": "32MiB", **nvme}
    with Engine(hybrid, tier), pytest.raises(EngineDied, match=r"(?s)(in use|lock|another process)"):
        Engine(hybrid, tier)
    with pytest.raises(EngineDied, match="other@local"):
        Engine(other, tier)
    with pytest.raises(EngineDied, match="blocks_per_chunk"):
        Engine(hybrid, tier | {"blocks_per_chunk": 2})


def test_a_prefix_longer_than_the_host_level_still_hits(uniform: Path, nvme: dict[str, str]) -> None:
    prompts = [random.Random(seed).choices(range(3, VOCABULARY), k=900) for seed in (40, 41)]
    with Engine(uniform, {"secondary": "12 blocks", **nvme}) as engine:
        without = {"kvtier": {"skip_read": True, "skip_write": True}}
        right = engine.generate(prompts=prompts, max_tokens=STOPPED_AT, parameters=[without, without])
        engine.reset()
        for turn in range(3):
            for number, prompt in enumerate(prompts):
                answer = engine.generate(prompts=[prompt], max_tokens=STOPPED_AT)
                assert differences(answer, right[number:number + 1])[0] == []
                assert engine.settle()
                engine.reset()
                if turn:
                    assert answer[0]["cached"] >= 8 * 32
        settled(engine)


@pytest.mark.parametrize("faults", [
    "nvme.read.bit_flip=0.3, nvme.read.eio=0.2",
    pytest.param("nvme.write.enospc", marks=pytest.mark.slow),
    pytest.param("secondary.copy.eio=0.3, primary.copy.eio=0.1*6", marks=pytest.mark.slow),
    pytest.param("nvme.commit.eio=0.5, nvme.read.delay=0.3:20ms", marks=pytest.mark.slow),
])
def test_failures_are_misses_and_the_answers_are_right(hybrid: Path, short_prompts: list[list[int]], right: list[dict[str, object]],
                                                        nvme: dict[str, str], faults: str) -> None:
    with Engine(hybrid, {"secondary": "60 blocks", "faults": faults, **nvme}) as engine:
        for _ in range(4):
            answers = engine.generate(prompts=short_prompts, max_tokens=STOPPED_AT)
            assert differences(answers, right)[0] == []
            assert engine.settle()
            engine.reset()
        settled(engine)


@pytest.mark.slow
def test_a_store_that_never_ends_is_given_up(hybrid: Path, short_prompts: list[list[int]], right: list[dict[str, object]]) -> None:
    """Its blocks are not found again, requests that wait for it go on without, and the slots of the stuck copy stay out of use."""
    tier = {"secondary": "64MiB", "faults": "secondary.copy.hang*1", "job_timeout": 2.0, "lookup_timeout": 1.0}
    with Engine(hybrid, tier) as engine:
        for _ in range(2):
            assert differences(engine.generate(prompts=short_prompts, max_tokens=STOPPED_AT), right)[0] == []
            engine.reset()
        assert engine.settle()
        stats = engine.stats()
        assert (stats["leases"], stats["jobs"], stats["requests"]) == (0, 0, 0)
        assert stats["lost"] + stats["expired_jobs"] > 0


def serve_for_ever(engine: Engine) -> None:
    for seed in itertools.count():
        engine.generate(prompts=conversations(seed, 8), max_tokens=STOPPED_AT)


@pytest.mark.slow
def test_killed_in_the_middle_of_everything_it_starts_again_warm_and_right(hybrid: Path, short_prompts: list[list[int]],
                                                                          right: list[dict[str, object]], nvme: dict[str, str]) -> None:
    tier = {"secondary": "64MiB", **nvme}
    for _ in range(2):
        engine = Engine(hybrid, tier, own_core=True)
        engine.generate(prompts=short_prompts, max_tokens=STOPPED_AT)
        killer = threading.Timer(0.4, engine.kill)
        killer.start()
        with pytest.raises((EngineDied, OSError)):
            serve_for_ever(engine)
        killer.join()
        engine.close()
    with Engine(hybrid, tier) as engine:
        answers = engine.generate(prompts=short_prompts, max_tokens=STOPPED_AT)
        assert differences(answers, right)[0] == []
        assert sum(answer["cached"] for answer in answers) > 0
        settled(engine)
    assert [path.name for path in Path("/dev/shm").glob("kvtier-*") if "facts" in path.name] == []


@pytest.mark.slow
def test_without_a_cryptographic_hash_there_is_no_nvme_level_and_that_is_said(hybrid: Path, nvme: dict[str, str]) -> None:
    with Engine(hybrid, {"secondary": "32MiB", **nvme}, prefix_caching_hash_algo="xxhash") as engine:
        engine.generate(prompts=[[5] * 100], max_tokens=1)
        assert engine.settle()
        engine.reset()
        assert engine.generate(prompts=[[5] * 100], max_tokens=1)[0]["cached"] == 96
        assert engine.log().count("no NVMe level") == 1
        assert settled(engine)["nvme"]["max_blocks"] == 0
