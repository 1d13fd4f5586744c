"""Bad input is refused with a clear error, and nothing has changed: every call of the ledger, on one with several groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from group_run import GroupRun, cross, full, interpreted, window

from kvtier.errors import KVTierError, RequestError, UnknownBlock, UnknownRequest
from kvtier.policies.retention import RetentionConfig, TokenRange
from kvtier.tiering.ledger import capacity, scheduling
from kvtier.tiering.ledger.request import MultimodalItem, Request
from kvtier.tiering.ledger.scheduling import WhatIf

ENCODER: dict[str, Any] = {"encoder_length": 5, "encoder_digest": b"e" * 32}


@pytest.fixture
def run() -> GroupRun:
    """Request 1 has generated 13 tokens (its window has moved on), 2 is a prompt of 20 tokens half computed, 3 has beams."""
    run = GroupRun(window(8, 40, 8), full(40, 8), cross(12))
    run.serve(range(200, 213), **ENCODER)
    run.append(run.add(range(9), id=1, **ENCODER), *range(13))
    run.compute(run.add(range(100, 120), id=2, **ENCODER), 10)
    run.append(run.add(range(300, 306), id=3, beam_width=2, **ENCODER), (1, 2), (1, 2))
    return run


def refused(run: GroupRun, error: type[KVTierError], call: Callable[[], object], *words: str) -> None:
    """The error says all the words. Then everything goes on as if nothing had been asked."""
    message = str(run.refused(error, call))
    for word in words:
        assert word in message
    run.append(run.ledger.sequence(1), 1)
    run.append(run.ledger.sequence(3), (1, 2))
    run.finish()


@pytest.mark.parametrize("ranges", [
    [(0, 64), (32, 96)], [(0, None), (64, 128)], [(64, 128), (0, None)], [(0, 64), (64, 64)], [(-1, 4)], [(4, 0)],
])
def test_overlapping_empty_and_open_ended_ranges_are_refused(ranges: list[tuple[int, int | None]]) -> None:
    with pytest.raises(RequestError, match="TokenRange"):
        RetentionConfig([TokenRange(start, end, 35) for start, end in ranges])


@pytest.mark.parametrize("priority", [-1, 101, 35.0, None])
def test_a_priority_outside_0_to_100_is_refused_wherever_one_is_given(run: GroupRun, priority: object) -> None:
    bad: Any = priority
    for call in (lambda: RetentionConfig([TokenRange(0, None, bad)]), lambda: RetentionConfig(decode_priority=bad)):
        with pytest.raises(RequestError, match="0 \\(drop first\\) to 100"):
            call()
    if isinstance(bad, int):
        refused(run, RequestError, lambda: run.ledger.set_priority(0, bad), "0 (drop first) to 100")


@pytest.mark.parametrize(("runs", "word"), [
    ([(0, 3), (2, 2)], "overlap"), ([(4, 2), (0, 2)], "ascend"), ([(0, 0)], "positive"), ([(-1, 2)], "runs"), ([], "runs"),
    ([(8, 3)], "11"), ([(0, 2), (9, 2)], "11"), ([(0,)], "run"), ([(0.0, 2)], "whole"),
])
def test_multimodal_items_that_do_not_match_their_runs_are_refused(runs: list[Any], word: str) -> None:
    with pytest.raises(RequestError, match=word):
        Request(1, range(10), multimodal=[MultimodalItem(b"d" * 32, runs)])


@pytest.mark.parametrize("digest", [b"", b"d" * 31, b"d" * 33, "d" * 32, None])
def test_a_content_digest_has_32_bytes(digest: Any) -> None:
    with pytest.raises(RequestError, match="32"):
        MultimodalItem(digest, [(0, 4)])


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3], [1, 1 << 31], pytest.param([1, "2"], marks=interpreted)])
def test_a_step_that_is_not_one_token_for_each_beam_is_refused(run: GroupRun, tokens: list[Any]) -> None:
    refused(run, RequestError, lambda: run.ledger.append_step([1, 3], [[5], tokens]), "request 3")


@pytest.mark.parametrize("parents", [[0], [0, 1, 1], [0, 2], [-1, 0]])
def test_beams_without_one_parent_each_are_refused(run: GroupRun, parents: list[int]) -> None:
    refused(run, RequestError, lambda: run.ledger.reorder_beams(3, parents), "request 3")


@pytest.mark.parametrize(("request_id", "count"), [(1, 14), (2, 1), (3, 3), (1, -1)])
def test_a_rewind_past_the_prompt_is_refused(run: GroupRun, request_id: int, count: int) -> None:
    refused(run, RequestError, lambda: run.ledger.rewind(request_id, count), f"request {request_id}", "the prompt stays")


def test_a_rewind_past_a_window_is_refused(run: GroupRun) -> None:
    refused(run, RequestError, lambda: run.ledger.rewind(1, 13), "window of group 0 has moved on")


@pytest.mark.parametrize("num_tokens", [21, 9, -1, 1 << 40])
def test_more_than_there_is_or_less_than_was_said_cannot_be_computed(run: GroupRun, num_tokens: int) -> None:
    refused(run, RequestError, lambda: run.ledger.mark_computed(2, num_tokens), "10 are computed already", "20 tokens")


def test_nothing_beyond_what_was_computed_is_ever_stored(run: GroupRun) -> None:
    run.ledger.store_context(2)
    run.ledger.store_and_pin(2)
    run.check()
    assert capacity.match(run.ledger, run.request(range(100, 120), **ENCODER)).reusable_tokens == 8


@pytest.mark.parametrize("verb", ["remove", "store_context", "pin", "store_and_pin", "mark", "rewind", "reorder", "append", "writable"])
def test_a_sequence_that_has_ended_is_unknown(run: GroupRun, verb: str) -> None:
    ledger = run.ledger
    run.drop(ledger.sequence(2))
    calls: dict[str, Callable[[], object]] = {
        "remove": lambda: ledger.remove_sequence(2, True), "store_context": lambda: ledger.store_context(2),
        "pin": lambda: ledger.pin(2), "store_and_pin": lambda: ledger.store_and_pin(2),
        "mark": lambda: ledger.mark_computed(2, 20), "rewind": lambda: ledger.rewind(2, 0),
        "reorder": lambda: ledger.reorder_beams(2, [0]), "append": lambda: ledger.append_step([1, 2], [[1], [1]]),
        "writable": lambda: ledger.make_writable(2, 0),
    }
    refused(run, UnknownRequest, calls[verb], "request 2", "active: 2")


def test_a_lease_is_released_once(run: GroupRun) -> None:
    lease = run.ledger.pin(1)
    run.ledger.release_lease(lease)
    refused(run, RequestError, lambda: run.ledger.release_lease(lease), "request 1", "released already")


@pytest.mark.parametrize("block_id", [-1, -2, 48, 1 << 40, 1.0, "1", None])
def test_an_unknown_block_is_refused(run: GroupRun, block_id: Any) -> None:
    for call in (lambda: run.ledger.block(block_id), lambda: run.ledger.offload(block_id), lambda: run.ledger.onboard(block_id, 1),
                 lambda: run.ledger.set_priority(block_id, 5)):
        message = str(run.refused(UnknownBlock, call))
        assert "has blocks 0..47" in message


@pytest.mark.parametrize("group", [3, -1, *[pytest.param(value, marks=interpreted) for value in (1.0, None)]])
def test_a_group_that_there_is_not_is_refused(run: GroupRun, group: Any) -> None:
    ledger = run.ledger
    request, sequence = run.request(range(9), **ENCODER), ledger.sequence(1)
    calls: list[Callable[[], object]] = [
        lambda: ledger.block(0, group), lambda: ledger.offload(0, group), lambda: ledger.onboard(0, group),
        lambda: ledger.set_priority(0, 5, group), lambda: ledger.make_writable(1, 0, group),
        lambda: capacity.needed_blocks_one_step(ledger, request, False, group),
        lambda: capacity.needed_blocks_one_step(ledger, sequence, False, group),
        lambda: capacity.remaining_blocks_to_completion(ledger, sequence, group),
        lambda: scheduling.request_block_budget(ledger, sequence, group),
        lambda: scheduling.num_schedulable_blocks(ledger, WhatIf(3), group),
        lambda: WhatIf(3).remove(ledger, sequence, group),
    ]
    for call in calls:
        assert "groups 0..2" in str(run.refused(RequestError, call))


@pytest.mark.parametrize(("position", "group"), [(99, 1), (-1, 1), (0, 0)])
def test_a_position_without_a_block_cannot_be_written(run: GroupRun, position: int, group: int) -> None:
    refused(run, RequestError, lambda: run.ledger.make_writable(1, position, group), f"group {group} has no block at position {position}")


def test_an_id_in_use_or_twice_in_a_batch_is_refused(run: GroupRun) -> None:
    run.refused(RequestError, lambda: run.ledger.add_sequences([Request(9, range(9), **ENCODER), Request(1, range(9), **ENCODER)]))
    run.refused(RequestError, lambda: run.ledger.add_sequences([Request(9, range(9), **ENCODER), Request(9, range(5), **ENCODER)]))
    refused(run, RequestError, lambda: run.ledger.append_step([1, 1], [[1], [2]]), "twice")


@pytest.mark.parametrize("keywords", [
    {"tokens": []}, {"tokens": [1 << 31]}, {"tokens": [1.5]}, {"tokens": "abc"}, {"lora_id": -1}, {"cache_salt": 7}, {"extra_ids": [1]},
    {"beam_width": 0}, {"max_new_tokens": -1}, {"num_draft_tokens": -1}, {"encoder_length": -1}, {"retention": 35}, {"multimodal": [7]},
    {"lora_digest": b"d" * 32}, {"encoder_digest": b"d" * 32},
])
def test_a_bad_request_is_refused_when_it_is_made(keywords: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        Request(1, **({"tokens": [1, 2, 3]} | keywords))


def test_a_what_if_of_numbers_that_are_none_is_refused(run: GroupRun) -> None:
    for chunk, budget in ((-1, 5), (5, -1)):
        call = lambda c=chunk, b=budget: scheduling.fit_token_budget(run.ledger, run.ledger.sequence(2), c, b)  # noqa: E731
        run.refused(RequestError, call)
