"""The TensorRT-LLM connector over a tier: compared with the interface as published, and driven as TensorRT-LLM's executor drives it.

Where TensorRT-LLM is installed, its abstract classes are what the adapter is compared with, too.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import pickle
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.errors import ConfigError, TransferError
from kvtier.tiering.attach import tensorrt_llm_interface, tensorrt_llm_scheduler, tensorrt_llm_worker
from kvtier.tiering.attach.tensorrt_llm import TieredScheduler, TieredWorker
from kvtier.tiering.attach.tensorrt_llm_plan import KeyChain, Part, StepPlan, namespace_of

sys.path.append(str(Path(__file__).parent))
from tensorrt_double import SCHEDULER, SOURCE, TOKENS, WORKER, Engine, Request, llm_args

PROMPT = list(range(100, 130))  # seven full blocks and two tokens


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Starts engines; at the end nothing is leased or under way, every invariant stands, and every page is free."""
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


def nvme(folder: Path, **more: Any) -> dict[str, Any]:
    return {"nvme": "64 blocks", "nvme_directory": str(folder), "nvme_free_space_reserve": "1MiB", "model": "m@1:0"} | more


# -- the interface as published ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "published"), [(TieredScheduler, SCHEDULER), (TieredWorker, WORKER)])
def test_each_method_takes_what_tensorrt_llm_passes(ours: type, published: dict[str, tuple[str, ...]]) -> None:
    for name, parameters in published.items():
        assert tuple(inspect.signature(getattr(ours, name)).parameters)[1:] == parameters, f"{name} of {SOURCE}"


def test_both_complete_sets_of_callbacks_are_ours() -> None:
    base = tensorrt_llm_interface.base_classes()
    for ours, theirs, published in ((TieredScheduler, base[0], SCHEDULER), (TieredWorker, base[1], WORKER)):
        assert not getattr(ours, "__abstractmethods__", ())
        inherited = {name for name in published if name not in vars(ours)}
        assert inherited <= {"bind_connector_meta", "get_connector_meta"}, theirs


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_llm") is None, reason="TensorRT-LLM is not installed")
def test_the_installed_abstract_classes_are_the_published_ones() -> None:
    for theirs, published in zip(tensorrt_llm_interface.base_classes(), (SCHEDULER, WORKER), strict=True):
        for name in theirs.__abstractmethods__:
            assert tuple(inspect.signature(getattr(theirs, name)).parameters)[1:] == published[name]


def test_another_interface_is_refused_with_the_method_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer:
        def request_finished(self, request: Any, cache_block_ids: list[int], reason: str) -> bool:
            return False

    monkeypatch.setattr(tensorrt_llm_interface, "installed_version", lambda: "9.9")
    with pytest.raises(ConfigError, match=r"9\.9.*Newer\.request_finished"):
        tensorrt_llm_interface.check_bases([(TieredScheduler, Newer)])


# -- what is served ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [{}, {"is_v2": True}, {"groups": 2}, {"ranks": 2}, {"ranks": 3, "groups": 2}, {"chunk": 8},
                                    {"groups": 2, "window": 2, "chunk": 8}])
def test_a_prompt_is_computed_once_and_its_blocks_come_back_byte_by_byte(start: Callable[..., Engine], engine: dict[str, Any]) -> None:
    running = start(engine=engine)
    assert running.run(Request(1, PROMPT, 5)) == [0]
    computed = running.computed
    assert running.run(Request(2, PROMPT, 5)) == [28]
    assert running.computed - computed == computed - 28
    assert running.run(Request(3, PROMPT[:14], 1), Request(4, [*PROMPT[:20], 1, 2, 3, 4, 5], 2)) == [12, 20]
    assert running.run(Request(5, [9, *PROMPT], 1)) == [0]


def test_generated_tokens_are_found_by_a_longer_prompt(start: Callable[..., Engine]) -> None:
    engine = start()
    first = Request(1, PROMPT, 12)
    engine.run(first)
    assert engine.run(Request(2, [*first.tokens, 1], 1)) == [(len(first.tokens) - 1) // TOKENS * TOKENS]


def test_one_token_of_the_prompt_is_always_left(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.run(Request(1, PROMPT[:8], 2))
    assert engine.run(Request(2, PROMPT[:8], 2)) == [4]


@pytest.mark.parametrize(("shows_position", "offer"), [(True, 44), (False, 28)])
def test_what_is_computed_behind_a_loaded_prefix_is_stored_in_the_same_step(start: Callable[..., Engine], shows_position: bool, offer: int,
                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    engine.run(Request(1, PROMPT, 2))
    if not shows_position:
        monkeypatch.setattr(Request, "context_current_position", None)
    longer = [*PROMPT[:28], *range(300, 318)]
    assert engine.run(Request(2, longer, 0), Request(3, longer, 0)) == [28, 28]
    assert engine.run(Request(4, longer, 0)) == [offer]


def test_what_lies_behind_the_prompt_is_not_offered(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.run(Request(1, PROMPT, 2))
    seen = SimpleNamespace(request_id=2, get_tokens=lambda beam: PROMPT, prompt_len=12, cache_salt=None)
    assert engine.scheduler.get_num_new_matched_tokens(seen, 0) == (8, False)
    assert not engine.scheduler.request_finished(seen, [])


def test_only_what_lies_behind_the_device_s_own_match_is_offered(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.run(Request(1, PROMPT, 2))
    assert engine.run(Request(2, PROMPT, 2), on_device=8) == [20]
    assert engine.run(Request(3, PROMPT, 2), on_device=28) == [0]
    assert engine.run(Request(4, PROMPT, 2), on_device=10) == [0], "a match that ends within a block"


def test_a_restart_finds_blocks_on_nvme_on_every_rank(start: Callable[..., Engine], tmp_path: Path) -> None:
    settings = nvme(tmp_path / "kv", engine={"ranks": 2})
    first = start(**settings)
    first.run(Request(1, PROMPT, 2))
    first.close()
    second = start(lookup_timeout=10.0, **settings)
    assert second.run(Request(1, PROMPT, 2)) == [28]
    assert second.scheduler.index.stats().promoted_blocks == 7


def test_adapters_salts_and_images_do_not_find_each_other(start: Callable[..., Engine]) -> None:
    engine = start(secondary="60 blocks")
    kinds: list[dict[str, Any]] = [{}, {"lora_task_id": 1}, {"lora_task_id": 2}, {"cache_salt": "a"}, {"cache_salt": "b"},
                                   {"multimodal_hashes": [[1, 2]], "multimodal_positions": [0]},
                                   {"multimodal_hashes": [[1, 3]], "multimodal_positions": [0]}]
    for number, kind in enumerate(kinds):
        assert engine.run(Request(number, PROMPT, 2, **kind)) == [0], kind
    for number, kind in enumerate(kinds):
        assert engine.run(Request(100 + number, PROMPT, 2, **kind)) == [28], kind


def test_what_cannot_be_named_is_neither_kept_nor_looked_for(start: Callable[..., Engine]) -> None:
    engine = start()
    for number in range(2):
        assert engine.run(Request(number, PROMPT, 2, py_multimodal_data={"image": object()})) == [0]
    assert engine.scheduler.index.stats().stored_blocks == 0


def test_images_that_the_lookup_is_not_shown_keep_a_request_out_of_the_tier(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.view = lambda request: SimpleNamespace(request_id=request.request_id, get_tokens=request.get_tokens, cache_salt_id=None)
    for number in range(2):
        assert engine.run(Request(number, PROMPT, 2, py_multimodal_data={"image": object()})) == [0]
    engine.run(Request(3, PROMPT, 2))
    assert engine.run(Request(4, PROMPT, 2)) == [28]


def test_blocks_of_adapters_stay_off_nvme_unless_their_numbers_are_trusted(start: Callable[..., Engine], tmp_path: Path) -> None:
    for trusted, offer in ((False, 0), (True, 28)):
        settings = nvme(tmp_path / str(trusted), trusted_lora_ids=trusted)
        first = start(**settings)
        first.run(Request(1, PROMPT, 2, lora_task_id=5))
        first.close()
        assert start(lookup_timeout=10.0, **settings).run(Request(1, PROMPT, 2, lora_task_id=5)) == [offer]


def test_a_block_below_the_threshold_is_not_stored(start: Callable[..., Engine]) -> None:
    engine = start(secondary_offload_min_priority=50)
    engine.run(Request(1, PROMPT, 2, priorities=49))
    assert engine.run(Request(2, PROMPT, 2, priorities=50)) == [0]
    assert engine.run(Request(3, PROMPT, 2)) == [28]


# -- lives that end early ----------------------------------------------------------------------------------------------------


def test_a_request_that_is_cancelled_before_its_step_or_in_the_middle_leaves_nothing(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.run(Request(1, PROMPT, 2))
    second, third = Request(2, PROMPT, 20), Request(3, PROMPT, 20)
    assert engine.add(second) == 28
    engine.cancel(second)
    engine.add(third)
    engine.step()
    engine.step()
    engine.cancel(third)
    assert engine.run(Request(4, PROMPT, 2)) == [28]


def test_asking_twice_for_one_request_pins_once(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.run(Request(1, PROMPT, 2))
    request = Request(2, PROMPT, 2)
    for _ in range(3):
        assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (28, False)
    assert engine.scheduler.index.stats().jobs == 1
    assert engine.run(request) == [28]


def test_a_preempted_request_comes_back_as_a_new_one_on_other_pages(start: Callable[..., Engine]) -> None:
    engine = start(engine={"chunk": 8})
    request = Request(1, PROMPT, 3)
    engine.add(request)
    engine.step()
    engine.step()
    engine.preempt(request)
    assert engine.run(Request(2, list(range(500, 520)), 2), request) == [0, 16]


def test_a_replay_that_is_not_looked_up_again_stores_its_new_pages(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(engine={"chunk": 4})
    request = Request(1, PROMPT, 3)
    engine.add(request)
    engine.step()
    engine.preempt(request)
    other = Request(2, list(range(500, 520)), 40)
    engine.add(other)
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "get_num_new_matched_tokens", lambda request, computed: (0, False))
        engine.add(request)
    while request in engine.active:
        engine.step()
    engine.cancel(other)
    assert engine.run(Request(3, PROMPT, 2)) == [28], "and their bytes are checked"


def test_pages_that_get_another_owner_are_not_overwritten_under_a_store(start: Callable[..., Engine]) -> None:
    engine = start(faults="secondary.copy.delay:300ms*2", engine={"chunk": 16})
    request = Request(1, PROMPT, 3)
    engine.add(request)
    engine.step()  # its four blocks are being copied when its pages go to others
    engine.preempt(request)
    engine.add(Request(2, list(range(500, 516)), 1))
    engine.step()
    while engine.active:
        engine.step()
    engine.settle()
    assert engine.run(request) == [16], "and their bytes are checked when they are read"


def test_a_store_that_does_not_end_is_given_up_before_its_pages_are_overwritten(start: Callable[..., Engine],
                                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_llm_worker, "WAIT_SECONDS", 0.1)
    engine = start(faults="secondary.copy.hang:2s*1")
    request = Request(1, PROMPT, 3)
    engine.add(request)
    engine.step()
    engine.preempt(request)
    assert engine.run(Request(2, list(range(500, 530)), 1), request) == [0, 0]


def test_pages_are_kept_until_their_copies_have_ended(start: Callable[..., Engine]) -> None:
    engine = start(faults="secondary.copy.delay:200ms*1")
    engine.add(Request(1, PROMPT, 0))
    engine.step()
    assert list(engine.saving) == [1], "TensorRT-LLM was told to wait"
    engine.settle()
    assert engine.run(Request(2, PROMPT, 1)) == [28]


# -- bad days ----------------------------------------------------------------------------------------------------------------


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
    engine.run(Request(1, PROMPT, 2))
    assert engine.run(Request(2, PROMPT, 2)) == [16]
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
    engine = start(faults="primary.copy.delay:200ms")
    engine.run(Request(1, PROMPT, 2))
    request, worker = Request(2, PROMPT, 2), engine.workers[0]
    assert engine.add(request) == 28
    known = worker.worker.wait

    def closed_meanwhile(*given: Any) -> Any:
        engine.workers[0].close()
        return known(*given)

    monkeypatch.setattr(worker.worker, "wait", closed_meanwhile)
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


# -- what is refused at the start ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "named"), [
    ({"secondry": "8 blocks"}, "did you mean 'secondary'"), ({}, "no host memory"), ({"secondary": "8 blocks", "gds": "off"}, "no meaning"),
    ({"secondary": "8 blocks", "engine_id": 5}, "engine_id"), ({"secondary": "8 blocks", "trusted_lora_ids": "yes"}, "trusted_lora_ids"),
    ({"secondary": "8 blocks", "nvme": "8 blocks", "nvme_directory": "/nowhere/at/all"}, "nothing says which weights")])
def test_a_misspelt_or_unusable_setting_is_refused_on_every_side(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any],
                                                                 named: str) -> None:
    monkeypatch.setenv("TRTLLM_KVTIER", json.dumps(settings))
    for side in (TieredScheduler, TieredWorker):
        with pytest.raises(ConfigError, match=named):
            side(llm_args())


def test_settings_come_from_a_file_too_and_broken_ones_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("secondary: 8 blocks\nlookup_timeout: 2.5\n")
    monkeypatch.setenv("TRTLLM_KVTIER", str(file))
    assert TieredScheduler(llm_args())._arrangement.settings.lookup_timeout == 2.5
    monkeypatch.setenv("TRTLLM_KVTIER", '{"secondary": ')
    with pytest.raises(ConfigError, match="no JSON mapping"):
        TieredScheduler(llm_args())


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "context_parallel_size"])
def test_ranks_that_hold_other_layers_or_tokens_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TRTLLM_KVTIER", '{"secondary": "8 blocks"}')
    with pytest.raises(ConfigError, match=name):
        TieredWorker(llm_args(**{name: 2}))


def test_a_cache_whose_blocks_are_not_contiguous_or_of_another_block_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_KVTIER", '{"secondary": "8 blocks"}')
    worker = TieredWorker(llm_args())
    with pytest.raises(ConfigError, match="contiguous"):
        worker.register_kv_caches(torch.zeros(4, 8, 16)[:, :, ::2])
    with pytest.raises(ConfigError, match="tokens in a block"):
        worker.register_kv_cache_layout(SimpleNamespace(tokens_per_block=TOKENS + 1, groups=()))


def test_a_folder_of_another_number_of_ranks_is_refused(start: Callable[..., Engine], tmp_path: Path) -> None:
    start(**nvme(tmp_path / "kv")).close()
    with pytest.raises(ConfigError, match="kv"):
        start(engine={"ranks": 2}, **nvme(tmp_path / "kv"))


def test_ranks_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_llm_scheduler, "START_SECONDS", 0.1)
    monkeypatch.setenv("TRTLLM_KVTIER", json.dumps({"secondary": "8 blocks", "engine_id": f"trt-{uuid.uuid4().hex[:12]}"}))
    with pytest.raises(ConfigError, match="ranks 0, 1 of 2"):
        TieredScheduler(llm_args(2)).wait_for_initialization()


# -- keys and plans ------------------------------------------------------------------------------------------------------------


def test_a_key_names_all_tokens_before_it_and_is_the_same_in_every_process() -> None:
    chain = KeyChain(b"n", 4)
    three = chain.keys(list(range(12)), 3)
    assert chain.keys(list(range(20)), 5)[:3] == three
    assert KeyChain(b"n", 4).keys([9, *range(1, 12)], 3)[2] != three[2]
    assert KeyChain(b"m", 4).keys(list(range(12)), 3)[0] != three[0]
    assert three[0].hex().startswith("23d8e978ef767bed"), "stores on NVMe have these keys: another chain needs another domain"


def test_a_plan_is_plain_and_picklable() -> None:
    plan = StepPlan(3, ((1,),), (Part(1, 2, 0, (4,), (5,)),), ())
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_request_that_shows_no_salt_at_all_has_no_name() -> None:
    assert namespace_of(object()) is None
    as_number, as_both = SimpleNamespace(cache_salt_id=7), SimpleNamespace(cache_salt_id=7, cache_salt="a")
    assert namespace_of(as_number) == namespace_of(as_both) != namespace_of(SimpleNamespace(cache_salt=None))
