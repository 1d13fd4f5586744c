"""The verbs of the known-answer cases on a driver: policy "lru", no backings, threshold 30, every call followed by all checks."""

from __future__ import annotations

from typing import Any

from naive_model import Driver

from kvtier.policies.retention import RetentionConfig, TokenRange
from kvtier.pools.pool_index import PRIMARY
from kvtier.tiering.ledger.group import GroupSpec
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import LedgerRules


def driver(primary: int, secondary: int = 0, nvme: int = 0, **rules: Any) -> Driver:
    settings: dict[str, Any] = {"policy": "lru", "keep_backing": False, "secondary_offload_min_priority": 30} | rules
    return Driver(Ledger([GroupSpec((primary, secondary, nvme))], 4, LedgerRules(**settings)))


def keep(*ranges: tuple[Any, ...], decode: int = 35) -> RetentionConfig:
    return RetentionConfig([TokenRange(*r) for r in ranges], decode_priority=decode)


def pos(cache: Driver, request_id: int, tokens: Any, **keywords: Any) -> int:
    """Prepopulated tokens right after adding."""
    (sequence,) = cache.add(Request(request_id, tokens, **keywords))
    cache.check()
    return sequence.prepopulated


def ids(cache: Driver, request_id: int) -> list[int]:
    return [block.id for block in cache.ledger.sequence(request_id).blocks]


def free(cache: Driver) -> int:
    return cache.ledger.allocators[0].queues.num_free(PRIMARY)


def store(cache: Driver, request_id: int) -> None:
    assert cache.compute(request_id)
    cache.store_context(request_id)
    cache.check()


def release(cache: Driver, *request_ids: int) -> None:
    for request_id in request_ids:
        cache.release(request_id)
        cache.check()


def seeded(*prompts: Any, primary: int = 16, **rules: Any) -> Driver:
    cache = driver(primary, **rules)
    for number, prompt in enumerate(prompts):
        pos(cache, 100 + number, prompt)
        release(cache, 100 + number)
    return cache


def batch(cache: Driver, *prompts: Any, **keywords: Any) -> list[int]:
    sequences = cache.add(*[Request(number, prompt, **keywords) for number, prompt in enumerate(prompts)])
    cache.check()
    return [sequence.prepopulated for sequence in sequences]


def finish(cache: Driver) -> None:
    """Every sequence reads right bytes, and then everything is free."""
    release(cache, *list(cache.ledger.sequences))
    cache.check_idle()
    cache.events.check()
