"""``debug_checks``: blocks hold a pattern until they are written; unordered transfers are found. A manager's other tests run with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from toy_engine import PATIENCE, PROMPT, ToyEngine

from kvtier import KVCacheManager, Request
from kvtier.errors import LedgerError
from kvtier.tiering.poison import PATTERN, Poison
from kvtier.tiering.transfer_graph import TransferGraph, TransferNode

MakeCache = Callable[..., KVCacheManager]


def rows(cache: KVCacheManager, request_id: int) -> list[torch.Tensor]:
    return [cache.pools[0].primary.rows[cache.block(block_id).slot] for block_id in cache.block_ids(request_id)]


def is_poisoned(row: torch.Tensor) -> bool:
    return bool((row == PATTERN).all())


def test_new_blocks_hold_the_pattern_and_found_ones_their_content(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4)
    ToyEngine(cache).serve(Request(1, PROMPT))
    cache.add_sequence(Request(2, [*PROMPT[:8], 7, 7, 7, 7, 7]))
    cache.wait_ready(2)
    before = [row.clone() for row in rows(cache, 2)[:2]]
    with cache.step(None, ids=[2]) as ready:
        assert ready == [2]
        assert [is_poisoned(row) for row in rows(cache, 2)] == [False, False, True, True]
        assert all(torch.equal(row, content) for row, content in zip(rows(cache, 2), before, strict=False))
        for row in rows(cache, 2)[2:]:
            row.fill_(1)
    with cache.step(None, ids=[2]):
        assert not any(is_poisoned(row) for row in rows(cache, 2)), "each is filled once"


def test_a_block_taken_while_generating_holds_the_pattern(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4)
    cache.add_sequence(Request(1, [1, 2, 3, 4]))
    with cache.step(None, ids=[1]):
        rows(cache, 1)[0].fill_(1)
    cache.mark_computed(1, 4)
    cache.append_tokens(1, [5])
    with cache.step(None, ids=[1]):
        assert [is_poisoned(row) for row in rows(cache, 1)] == [False, True]


def test_a_slot_is_filled_again_when_it_is_handed_out_again(make_cache: MakeCache) -> None:
    cache = make_cache(1, 0)
    for request_id in (1, 2):
        cache.add_sequence(Request(request_id, [request_id] * 3))
        with cache.step(None, ids=[request_id]):
            assert is_poisoned(rows(cache, request_id)[0])
            rows(cache, request_id)[0].fill_(1)
        cache.remove_sequence(request_id, store=False)


def test_while_blocks_are_filled_others_use_the_cache_and_no_engine_writes(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(8, 4)
    cache.add_sequence(Request(1, PROMPT))
    begun, goes_on, written = threading.Event(), threading.Event(), threading.Event()
    fill = Poison.fill

    def slow_fill(poison: Poison, unwritten: Sequence[tuple[int, list[int]]]) -> None:
        begun.set()
        assert goes_on.wait(PATIENCE)
        fill(poison, unwritten)

    def write() -> None:
        with cache.step(None, ids=[1]):
            for row in rows(cache, 1):
                row.fill_(1)
        written.set()

    monkeypatch.setattr(Poison, "fill", slow_fill)
    threads = [threading.Thread(target=write) for _ in range(2)]
    threads[0].start()
    assert begun.wait(PATIENCE)
    threads[1].start()  # the same sequence: what it writes must not be filled afterwards
    assert cache.stats().primary.used_blocks == 4
    cache.add_sequence(Request(2, [9]))
    cache.remove_sequence(2)
    assert not written.wait(0.05)
    goes_on.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(is_poisoned(row) for row in rows(cache, 1))


def test_a_step_whose_blocks_cannot_be_filled_is_over(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(8, 4)
    cache.add_sequence(Request(1, PROMPT))
    monkeypatch.setattr(Poison, "fill", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError), cache.step(None, ids=[1]):
        pytest.fail("it began")
    cache.append_tokens(1, [5])  # refused in a running step


def test_without_the_switch_nothing_is_filled(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, debug_checks=False)
    cache.add_sequence(Request(1, PROMPT))
    with cache.step(None, ids=[1]):
        assert not any(is_poisoned(row) for row in rows(cache, 1))


def test_verify_tells_of_an_order_that_was_forgotten(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(graph: TransferGraph, node: TransferNode) -> None:
        node.blockers = 0

    monkeypatch.setattr(TransferGraph, "add", forget)
    cache = make_cache(3, 8, faults="secondary.copy.delay=1:5ms, primary.copy.delay=1:5ms")  # so that the earlier one is not over
    with pytest.raises(LedgerError, match="unordered access"):
        serve_and_verify(cache)
    monkeypatch.undo()


def serve_and_verify(cache: KVCacheManager) -> None:
    for number in range(40):  # onto the secondary level and back, each time through slots that the other stream may still use
        cache.add_sequence(Request(number, [number % 4] * 9))
        cache.mark_computed(number, 9)
        cache.remove_sequence(number, store=True)
    cache.verify()
