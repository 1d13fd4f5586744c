"""Requests of TensorRT-LLM that are cancelled, preempted, asked for twice or overtaken by a reset leave nothing behind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gate import Gate

from kvtier.io.faults import FaultOperation
from kvtier.tiering.attach import tensorrt_llm_worker

sys.path.append(str(Path(__file__).parent))
from tensorrt_double import PROMPT, Engine, Request, nvme


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
    engine = start()
    engine.workers[0].worker._faults = gate = Gate(FaultOperation.COPY)
    engine.add(Request(1, PROMPT, 0))
    engine.step()
    assert list(engine.saving) == [1], "TensorRT-LLM was told to wait"
    gate.open()
    engine.settle()
    assert engine.run(Request(2, PROMPT, 1)) == [28]


def test_a_reset_forgets_all_levels_and_stores_nothing_of_requests_that_came_before(start: Callable[..., Engine], tmp_path: Path) -> None:
    engine = start(engine={"chunk": 8}, **nvme(tmp_path / "kv"))
    engine.run(Request(1, PROMPT, 2))
    running, waiting = Request(2, [9, *PROMPT], 12), Request(3, [8, *PROMPT], 2)
    engine.add(running)
    engine.step()
    engine.add(waiting)
    engine.scheduler.reset()
    while engine.active:
        engine.step()
    engine.settle()
    assert engine.scheduler.index.stats().secondary.evictable_blocks == 0, "what was computed of them is of the old weights"
    for number, prompt in enumerate(([*PROMPT], running.tokens, waiting.tokens), 4):
        assert engine.run(Request(number, prompt, 2)) == [0]
    assert engine.run(Request(7, PROMPT, 2)) == [28], "and what came behind it is stored"


def test_a_reset_just_before_a_step_is_planned_stores_nothing_of_it(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    index = engine.scheduler.index
    plan_store = index.plan_store

    def overtaken(*given: Any) -> Any:
        engine.scheduler.reset()
        return plan_store(*given)

    with monkeypatch.context() as patch:
        patch.setattr(index, "plan_store", overtaken)
        engine.run(Request(1, PROMPT, 2))
    engine.settle()
    assert index.stats().stored_blocks == 0
    assert engine.run(Request(2, PROMPT, 2), Request(3, PROMPT, 2)) == [0, 0]


def test_a_reset_of_a_tier_that_is_not_open_is_nothing(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.close()
    engine.scheduler.reset()
