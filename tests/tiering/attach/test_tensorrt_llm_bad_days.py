"""Bad days under TensorRT-LLM: a failure is a shorter prefix, or stops the engine where it cannot be told of garbage."""

from __future__ import annotations

import json
import logging
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from gate import Gate
from tier_rig import until

from kvtier.errors import ConfigError, TransferError
from kvtier.io.faults import FaultOperation
from kvtier.tiering.attach import tensorrt_llm_scheduler, tensorrt_llm_worker
from kvtier.tiering.attach.tensorrt_llm import TieredScheduler, TieredWorker

sys.path.append(str(Path(__file__).parent))
from tensorrt_double import PROMPT, Engine, Request, llm_args, nvme


def test_a_flipped_bit_on_nvme_is_a_shorter_prefix(start: Callable[..., Engine], tmp_path: Path) -> None:
    first = start(**nvme(tmp_path / "kv"))
    first.run(Request(1, PROMPT, 2))
    first.close()
    second = start(lookup_timeout=10.0, faults="nvme.read.bit_flip*1", read_threads=1, **nvme(tmp_path / "kv"))
    [offer] = second.run(Request(1, PROMPT, 2))
    assert offer < 28
    assert second.scheduler.index.stats().checksum_failures == 1


def test_a_read_that_hangs_is_not_waited_for_longer_than_lookup_timeout(start: Callable[..., Engine], tmp_path: Path) -> None:
    first = start(**nvme(tmp_path / "kv"))
    first.run(Request(1, PROMPT, 2))
    first.close()
    second = start(lookup_timeout=0.1, faults="nvme.read.hang:1s", **nvme(tmp_path / "kv"))
    assert second.run(Request(1, PROMPT, 2)) == [0]


def test_a_failed_store_is_a_miss(start: Callable[..., Engine]) -> None:
    engine = start(faults="secondary.copy.eio*1")
    engine.run(Request(1, PROMPT, 0))
    assert engine.run(Request(2, PROMPT, 0)) == [0]
    assert engine.run(Request(3, PROMPT, 0)) == [28]


def test_a_rank_that_does_not_store_makes_the_block_a_miss_for_all(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(engine={"ranks": 2})
    second = engine.workers[1].worker

    def refuse(*arguments: Any, **others: Any) -> None:
        raise TransferError("no")

    with monkeypatch.context() as patch:
        patch.setattr(second, "submit_store", refuse)
        engine.run(Request(1, PROMPT, 2))
    assert engine.run(Request(2, PROMPT, 2)) == [0]
    assert engine.run(Request(3, PROMPT, 2)) == [28]


def test_a_load_is_made_again_and_one_that_keeps_failing_stops_the_engine(start: Callable[..., Engine]) -> None:
    engine = start(faults="primary.copy.eio*5")
    engine.run(Request(1, PROMPT, 2))
    request = Request(2, PROMPT, 2)
    engine.add(request)
    with pytest.raises(TransferError, match="failed 3 times"):
        engine.step()
    engine.cancel(request)
    assert engine.run(Request(3, PROMPT, 2)) == [28], "two failures, then the third attempt"


def test_a_full_tier_keeps_what_fits_and_a_prompt_longer_than_it_hits_as_far_as_it_reaches(start: Callable[..., Engine]) -> None:
    engine = start(secondary="4 blocks")
    engine.run(Request(1, PROMPT, 1))  # with 2, an eighth block would take a place as soon as one is not written to
    assert engine.run(Request(2, PROMPT, 1)) == [16]
    for number in range(3, 9):
        engine.run(Request(number, list(range(number * 1000, number * 1000 + 30)), 2))


def test_a_forward_pass_that_never_ends_leaves_no_job(start: Callable[..., Engine]) -> None:
    engine = start()
    request = Request(1, PROMPT, 2)
    engine.add(request)

    def fail() -> None:
        raise RuntimeError("the model")

    engine.between = fail
    with pytest.raises(RuntimeError, match="the model"):
        engine.step()
    engine.between = lambda: None
    engine.cancel(request)
    assert engine.run(Request(2, PROMPT, 2)) == [0], "its step tells the workers that nothing will come of the first store"
    assert engine.run(Request(3, PROMPT, 2), Request(4, PROMPT, 2)) == [0, 0]
    assert engine.run(Request(5, PROMPT, 2)) == [28]


def test_a_reset_between_promise_and_load_takes_nothing_away(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.run(Request(1, PROMPT, 2))
    engine.add(Request(2, PROMPT, 2))
    engine.scheduler.index.reset()
    while engine.active:
        engine.step()
    engine.settle()
    assert engine.run(Request(3, list(range(900, 920)), 2)) == [0]


def test_trouble_in_the_tier_is_a_miss_and_said_once(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch,
                                                     caplog: pytest.LogCaptureFixture) -> None:
    engine = start()

    def broken(*arguments: Any, **others: Any) -> Any:
        raise RuntimeError("a bug of ours")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(engine.scheduler.index, "lookup", broken)
        patch.setattr(engine.scheduler.index, "plan_store", broken)
        for number in range(3):
            assert engine.run(Request(number, PROMPT, 2)) == [0]
    assert caplog.text.count("lookup: RuntimeError") == caplog.text.count("store: RuntimeError") == 1
    assert engine.run(Request(4, PROMPT, 2)) == [0]


def test_trouble_at_the_end_of_a_request_does_not_reach_the_engine(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch,
                                                                   caplog: pytest.LogCaptureFixture) -> None:
    engine = start()
    engine.run(Request(1, PROMPT, 2))
    request = Request(2, PROMPT, 2)
    assert engine.add(request) == 28

    def broken(*arguments: Any, **others: Any) -> Any:
        raise RuntimeError("a bug of ours")

    plans = list(engine.scheduler._sequences[2].loads)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(engine.scheduler.index, "cancel_job", broken)
        patch.setattr(engine.scheduler.index, "end_request", broken)
        engine.cancel(request)
        assert engine.scheduler.get_num_new_matched_tokens(Request(3, PROMPT, 2), 0) == (0, False)
    assert "a bug of ours" in caplog.text
    for plan in plans:
        engine.scheduler.index.cancel_job(plan.job_id)
    engine.scheduler.index.end_request("2")


def test_a_request_that_cannot_be_looked_at_is_not_kept(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    known, calls = tensorrt_llm_scheduler.namespace_of, []

    def broken_the_second_time(request: Any) -> Any:
        calls.append(request)
        if len(calls) == 2:
            raise RuntimeError("no such attribute on this side")
        return known(request)

    monkeypatch.setattr(tensorrt_llm_scheduler, "namespace_of", broken_the_second_time)
    assert engine.run(Request(1, PROMPT, 2)) == [0]
    assert engine.run(Request(2, PROMPT, 2)) == [0], "the first one was not stored"
    assert engine.run(Request(3, PROMPT, 2)) == [28]


def test_ranks_of_another_engine_under_the_same_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its facts would name this engine's blocks after another model."""
    name = f"trt-{uuid.uuid4().hex[:12]}"
    monkeypatch.setattr(tensorrt_llm_worker, "process_rank", lambda: 0)
    monkeypatch.setenv("TRTLLM_KVTIER", json.dumps({"secondary": "8 blocks", "engine_id": name, "model": "m@1:0"}))
    ours = TieredScheduler(llm_args())
    monkeypatch.setenv("TRTLLM_KVTIER", json.dumps({"secondary": "8 blocks", "engine_id": name, "model": "m@2:0"}))
    theirs = TieredWorker(llm_args())
    theirs.register_kv_caches(torch.zeros(8, 4, dtype=torch.int8))
    try:
        with pytest.raises(ConfigError, match=r"engine_id.*m@2:0"):
            ours.wait_for_initialization()
        assert ours.index is None
    finally:
        theirs.close()


def test_a_promised_load_on_a_closed_rank_stops_the_engine(start: Callable[..., Engine]) -> None:
    """Nobody can be told that the pages hold garbage."""
    engine = start()
    engine.run(Request(1, PROMPT, 2))
    request = Request(2, PROMPT, 2)
    assert engine.add(request) == 28
    engine.workers[0].close()
    with pytest.raises(TransferError, match="closed"):
        engine.step()
    engine.cancel(request)


def test_a_rank_that_is_closed_during_a_load_stops_the_engine(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    engine.run(Request(1, PROMPT, 2))
    request, worker = Request(2, PROMPT, 2), engine.workers[0].worker
    worker._faults = gate = Gate(FaultOperation.COPY)
    assert engine.add(request) == 28
    known = worker.wait

    def closed_meanwhile(*given: Any) -> Any:
        closing = threading.Thread(target=engine.workers[0].close)
        closing.start()
        until(lambda: worker._closing)
        gate.open()
        closing.join()
        return known(*given)

    monkeypatch.setattr(worker, "wait", closed_meanwhile)
    with pytest.raises(TransferError, match=r"closed|aborted"):
        engine.step()
    engine.cancel(request)


def test_a_rank_that_is_closed_behind_its_loads_stores_nothing_and_keeps_no_pages(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.add(Request(1, PROMPT, 2))
    engine.between = lambda: engine.workers[0].close()
    while engine.active:
        engine.step()
    assert engine.workers[0].get_finished([1], []) == ([1], [])
    for job_id in list(engine.scheduler._jobs):
        engine.scheduler.index.cancel_job(job_id)
    engine.settle()
    assert engine.scheduler.get_num_new_matched_tokens(Request(2, PROMPT, 2), 0) == (0, False)
    engine.scheduler.request_finished(Request(2, PROMPT, 2), [])


def test_an_old_plan_that_stays_bound_is_carried_out_once(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.add(Request(1, PROMPT, 2))
    engine.step()
    for _ in range(3):
        engine.idle()
    while engine.active:
        engine.step()
    engine.settle()
    assert engine.scheduler.index.stats().stored_blocks == 8


@pytest.mark.parametrize("seed", range(4))
def test_random_lives_compute_right_bytes_and_leave_nothing(start: Callable[..., Engine], tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    shape = [{"ranks": 2, "chunk": 12}, {"groups": 2, "window": 3, "chunk": 8}, {"is_v2": True}, {"groups": 2, "ranks": 2}][seed]
    engine = start(secondary="24 blocks", engine=shape | {"num_pages": 120}, lookup_timeout=0.05,
                   faults="secondary.copy.delay=0.3:5ms, secondary.copy.eio=0.1, nvme.read.bit_flip=0.05, nvme.write.eio=0.05, "
                          f"seed={seed}", **nvme(tmp_path / "kv"))
    parts = [[1000 * number + token for token in range(16)] for number in range(3)]
    waiting: list[Request] = []
    for number in range(70):
        while len(engine.active) < 4:
            prompt = [token for _ in range(random.randint(1, 3)) for token in random.choice(parts)] + [number] * random.randint(1, 6)
            request = waiting.pop() if waiting else Request(number * 10 + len(engine.active), prompt, random.randint(0, 9))
            engine.add(request, on_device=random.choice([0, 0, 4]) if len(request.tokens) > 4 else 0)
        engine.step()
        if engine.active and random.random() < 0.1:
            engine.cancel(random.choice(engine.active))
        if engine.active and random.random() < 0.1:
            request = random.choice(engine.active)
            engine.preempt(request)
            waiting.append(request)
    for request in [*engine.active]:
        engine.cancel(request)
    for request in waiting:
        engine.run(request)
    stats = engine.scheduler.index.stats()
    assert stats.loaded_blocks > 30, "otherwise nothing was tried"
