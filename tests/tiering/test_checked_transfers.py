"""``check_transfers``: an unordered access of a slot is found, ordered ones are not, and handed-out blocks hold poison."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from toy_engine import PROMPT, MakeCache, ToyEngine, delays, tokens_of

from kvtier import KVCacheManager, LedgerError, Level, Request, TransferError
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, pool_index
from kvtier.tiering.checked_transfers import AccessLog, CheckedTransfers
from kvtier.tiering.ledger.moves import Discard, Move
from kvtier.tiering.transfer_graph import TransferGraph, TransferNode

SOME_ARE_SLOW = FaultRule(FaultKind.DELAY, FaultOperation.COPY, rate=0.3, seconds=0.0005)
P, S, N = ([pool_index(level, slot) for slot in range(8)] for level in (PRIMARY, SECONDARY, NVME))


def move(number: int, source: int, destination: int) -> Move:
    return Move(number, 0, number, source, 0, destination, 0)


@pytest.fixture
def log() -> AccessLog:
    return AccessLog()


# -- what is unordered -------------------------------------------------------------------------------------------------------


def test_two_reads_of_a_slot_may_run_at_once(log: AccessLog) -> None:
    log.issued(move(1, P[0], S[0]))
    log.issued(move(2, P[0], S[1]))
    assert log.begin(0, P[0], False) is not None
    assert log.begin(0, P[0], False) is not None
    assert log.violations == []


@pytest.mark.parametrize(("first", "second", "is_write"), [
    (move(1, P[0], S[0]), move(2, S[0], P[1]), False),  # a read before what it reads has been written
    (move(1, P[0], S[0]), move(2, P[1], S[0]), True),   # two writes
    (move(1, S[0], P[0]), move(2, P[1], S[0]), True),   # a write over what is still to be read
    (Discard(1, 0, 0), move(2, S[0], N[0]), True)])
def test_what_begins_before_its_turn_is_a_violation(log: AccessLog, first: Move | Discard, second: Move, is_write: bool) -> None:
    slot = second.destination if is_write else second.source
    log.issued(first)
    log.issued(second)
    if is_write and isinstance(first, Move) and first.destination == slot:
        log.begin(0, slot, True)  # the first one has begun and not ended
    if isinstance(first, Discard):
        log.begin(0, slot, True)
    with pytest.raises(TransferError, match="unordered access: record 2"):
        log.begin(0, slot, is_write)
    assert len(log.violations) == 1


def test_what_has_ended_or_never_happened_is_in_nobodys_way(log: AccessLog) -> None:
    log.issued(move(1, P[0], S[0]))
    log.issued(move(2, S[0], P[1]))
    log.end(0, S[0], log.begin(0, S[0], True))
    assert log.begin(0, S[0], False) is not None
    log.finished(2)
    log.issued(move(3, P[2], S[0]))
    assert log.begin(0, S[0], True) is not None
    log.finished(1)
    log.finished(3)
    assert log.pending(0, [*P, *S]) == []


def test_an_engine_that_is_let_go_too_early_is_a_violation(log: AccessLog) -> None:
    log.issued(move(1, S[0], P[0]))
    pending = log.pending(0, P)
    log.require_over(0, log.pending(0, S[1:]))
    with pytest.raises(TransferError, match="the engine uses primary slot 0 of group 0 while record 1"):
        log.require_over(0, pending)


# -- a whole cache -----------------------------------------------------------------------------------------------------------


def checked(make_cache: MakeCache, *sizes: int, **settings: Any) -> KVCacheManager:
    cache = make_cache(*sizes, check_transfers=True, **settings)
    assert isinstance(cache.transfers, CheckedTransfers)
    return cache


def violations(cache: KVCacheManager) -> list[str]:
    assert isinstance(cache.transfers, CheckedTransfers)
    return cache.transfers.log.violations


def test_a_cache_that_keeps_its_order_has_none(make_cache: MakeCache) -> None:
    cache = checked(make_cache, 10, 6, 24, write_ahead_share=1.0, faults=Faults([SOME_ARE_SLOW]))
    engine = ToyEngine(cache)
    for turn in range(5):
        engine.run([Request(turn * 10 + user, tokens_of(user, 9 + 4 * (turn % 3))) for user in range(6)], answer=2)
        cache.flush()
    stats = cache.stats()
    assert min(stats.onboard_blocks[Level.SECONDARY, Level.PRIMARY], stats.onboard_blocks[Level.NVME, Level.PRIMARY]) > 0
    assert violations(cache) == []
    assert cache.transfers.log.pending(0, [pool_index(level, slot) for level in range(3) for slot in range(24)]) == []  # type: ignore[attr-defined]
    cache.verify()


def test_an_order_that_is_forgotten_is_found(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the transfer manager did not know which Move waits for which."""
    add: Callable[[TransferGraph, TransferNode], None] = TransferGraph.add

    def forget(graph: TransferGraph, node: TransferNode) -> None:
        add(graph, node)
        for earlier in node.depends:
            if earlier.dependents is not None and node in earlier.dependents:
                earlier.dependents.remove(node)
        node.depends.clear()
        node.blockers = 0

    monkeypatch.setattr(TransferGraph, "add", forget)
    cache = checked(make_cache, 4, 4, faults=Faults([delays(FaultOperation.COPY, 0.05)]))
    engine = ToyEngine(cache)
    engine.serve(Request(1, PROMPT))
    blocks = [block for block in range(4) if cache.block(block).tokens]
    for block in blocks:
        cache.offload(block)
    for block in blocks:
        cache.onboard(block)
    assert cache.transfers.idle(10.0)
    assert violations(cache)
    with pytest.raises(LedgerError, match="unordered access"):
        cache.verify()


def test_blocks_that_are_handed_out_hold_poison_until_they_are_written(make_cache: MakeCache) -> None:
    cache = checked(make_cache, 8, 4)
    engine = ToyEngine(cache)
    engine.serve(Request(1, PROMPT))
    cache.add_sequence(Request(2, tokens_of(5, 10)))
    assert cache.wait_ready(2) == 0
    for layer in range(2):
        pages = cache.layer_buffer(layer)
        for block in cache.block_ids(2):
            assert torch.isnan(pages[cache.block(block).slot]).all()
    cache.remove_sequence(2, store=False)
    assert engine.serve(Request(3, PROMPT)) == 12, "what was there before is as it was"
    assert cache.stats().copied_blocks == 0, "poison is no copy"
    cache.verify()


def test_a_part_of_a_block_that_is_copied_is_not_poisoned(make_cache: MakeCache) -> None:
    cache = checked(make_cache, 12, 4)
    engine = ToyEngine(cache)
    engine.serve(Request(1, PROMPT))
    assert engine.serve(Request(2, [*PROMPT[:6], 900, 901, 902])) == 6
    assert violations(cache) == []


def test_several_engines_at_one_checked_cache_find_nothing(make_cache: MakeCache) -> None:
    cache = checked(make_cache, 24, 12, 32, write_ahead_share=1.0)
    guard = threading.Lock()
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            engine = ToyEngine(cache, guard)
            for turn in range(8):
                engine.serve(Request(number * 100 + turn, tokens_of((number + turn) % 5, 13)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert violations(cache) == []
    cache.verify()
