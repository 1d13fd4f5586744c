"""The TensorRT-LLM connector over a tier: compared with the interface as published, and driven as TensorRT-LLM's executor drives it.

Where TensorRT-LLM is installed, its abstract classes are what the adapter is compared with, too.
"""

from __future__ import annotations

import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.tiering.attach import tensorrt_llm_interface
from kvtier.tiering.attach.tensorrt_llm import TieredScheduler, TieredWorker
from kvtier.tiering.attach.tensorrt_llm_plan import KeyChain, Part, StepPlan, namespace_of

sys.path.append(str(Path(__file__).parent))
from tensorrt_double import PROMPT, SCHEDULER, SOURCE, TOKENS, WORKER, Engine, Request, nvme

# -- the interface as published --------------------------------------------------------------------------------------------


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


# -- what is served --------------------------------------------------------------------------------------------------------


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


# -- keys and plans --------------------------------------------------------------------------------------------------------


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
