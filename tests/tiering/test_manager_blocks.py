"""Single blocks as tools see them: views, bytes on each level, pins, priorities, moving by hand, and looking without touching."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from toy_engine import MakeCache, ToyEngine, tokens_of

from kvtier import (
    CapacityError,
    KVTierError,
    Level,
    Request,
    RequestError,
    RetentionConfig,
    TokenRange,
    TransferError,
)

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")

PROMPT = tokens_of(1, 10)


def stored_ids(engine: ToyEngine, prompt: list[int], retention: RetentionConfig | None = None) -> list[int]:
    """Serve a prompt and return the ids of its blocks."""
    request = Request(77, prompt, retention=retention)
    engine.admit(request)
    engine.learn(77)
    engine.forward([77])
    ids = engine.cache.block_ids(77)
    engine.remove(77)
    return ids


def expected_bytes(engine: ToyEngine, prompt: list[int], number: int) -> bytes:
    """A full block as the engine has computed it, in the layout of the pool."""
    states, state = [], engine.model.start(Request(0, prompt))
    for token in prompt:
        state = engine.model.advance(state, token)
        states.append(state)
    tokens_per_block = engine.cache.layout.tokens_per_block
    return engine.model.bytes_of(states[number * tokens_per_block:(number + 1) * tokens_per_block]).tobytes()


def test_a_view_tells_what_a_block_is(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 16)
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT, retention=RetentionConfig([TokenRange(4, None, 80)])))
    ids = cache.block_ids(1)
    view = cache.block(ids[0])
    assert (view.id, view.level, view.backing, view.ref_count, view.priority, view.is_full) == (0, Level.PRIMARY, (), 1, 35, True)
    assert [cache.block(block_id).tokens for block_id in ids] == [tuple(PROMPT[:4]), tuple(PROMPT[4:8]), tuple(PROMPT[8:])]
    assert [cache.block(block_id).priority for block_id in ids] == [35, 80, 80]
    assert not cache.block(ids[2]).is_full
    engine.learn(1)
    engine.forward([1])
    engine.remove(1)
    view = cache.block(ids[1])
    assert (view.level, view.ref_count, view.tokens, view.is_full) == (Level.PRIMARY, 0, tuple(PROMPT[4:8]), True)
    assert cache.block(ids[2]).tokens == (PROMPT[8],), "the newest token is not stored"
    assert (cache.block(8).level, cache.block(8).tokens, cache.block(12).level) == (Level.SECONDARY, (), Level.NVME)
    with pytest.raises(AttributeError):
        view.priority = 1  # type: ignore[misc]
    cache.flush()
    assert cache.block(ids[1]).backing == (Level.SECONDARY, Level.NVME)


def test_bytes_can_be_read_on_every_level(make_cache: MakeCache) -> None:
    cache = make_cache(4, 4, 16)
    engine = ToyEngine(cache)
    ids = stored_ids(engine, PROMPT)
    expected = [expected_bytes(engine, PROMPT, number) for number in (0, 1)]
    levels = set()
    for user in range(2, 6):
        for block_id, content in zip(ids, expected, strict=False):
            levels.add(cache.block(block_id).level)
            assert cache.read_block(block_id) == content
            assert len(content) == cache.layout.groups[0].block_bytes
        cache.verify()
        cache.flush()
        engine.serve(Request(user, tokens_of(user, 12)))
    assert levels == set(Level)
    assert cache.match(PROMPT).reusable_blocks == 2, "reading moved nothing"
    assert engine.serve(Request(1, PROMPT)) >= 8


def test_the_bytes_of_a_backing_are_those_of_its_block(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 16)
    engine = ToyEngine(cache)
    ids = stored_ids(engine, PROMPT)
    cache.flush()
    total = 8 + 4 + 16
    content = [cache.read_block(block_id) for block_id in range(total)
               if cache.block(block_id).level is not Level.NVME and block_id not in ids]
    assert expected_bytes(engine, PROMPT, 0) in content
    assert cache.stats().secondary.backing_blocks == 2


def test_an_empty_nvme_block_has_no_bytes(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 16)
    with pytest.raises(TransferError, match="no block is stored there"):
        cache.read_block(20)
    assert cache.read_block(0) == bytes(cache.layout.groups[0].block_bytes), "fresh memory is zero"
    cache.verify()
    assert cache.stats().nvme.free_blocks == 16


def test_a_block_of_one_sequence_can_be_written(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 16)
    engine = ToyEngine(cache)
    engine.serve(Request(1, PROMPT))
    cache.flush()
    engine.admit(Request(2, PROMPT))
    engine.learn(2)
    block_id = cache.block_ids(2)[0]
    content = np.random.default_rng(5).bytes(cache.layout.groups[0].block_bytes)
    cache.write_block(block_id, content)
    assert cache.read_block(block_id) == content
    slot = cache.block(block_id).slot
    assert bytes(cache.layer_buffer(1)[slot].contiguous().view(torch.uint8).numpy()) == content[len(content) // 2:]
    cache.verify()
    assert cache.block(block_id).backing == ()
    assert cache.match(PROMPT).reusable_blocks == 0, "what is stored under these tokens would be wrong now"
    cache.remove_sequence(2, store=False)
    assert ToyEngine(cache).serve(Request(3, PROMPT)) == 0


def test_only_a_block_that_one_sequence_holds_can_be_written(make_cache: MakeCache) -> None:
    cache = make_cache()
    engine = ToyEngine(cache)
    content = bytes(cache.layout.groups[0].block_bytes)
    with pytest.raises(RequestError, match="held 0 times"):
        cache.write_block(0, content)
    engine.serve(Request(1, PROMPT))
    engine.admit(Request(2, PROMPT), Request(3, PROMPT))
    with pytest.raises(RequestError, match="held 2 times"):
        cache.write_block(cache.block_ids(2)[0], content)
    lease = cache.pin(3)
    with pytest.raises(RequestError, match="held 2 times"):
        cache.write_block(cache.block_ids(3)[2], content)
    lease.release()
    with pytest.raises(RequestError, match="511 bytes; a block has 512"):
        cache.write_block(cache.block_ids(2)[2], content[1:])


def test_a_pin_holds_blocks_beyond_the_end_of_the_sequence(make_cache: MakeCache) -> None:
    cache = make_cache(4, 0)
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT))
    engine.learn(1)
    engine.forward([1])
    lease = cache.pin(1)
    assert lease.block_ids == cache.block_ids(1)
    engine.remove(1)
    stats = cache.stats()
    assert (stats.leases, stats.primary.free_blocks, stats.primary.used_blocks) == (1, 1, 3)
    with pytest.raises(CapacityError, match="2 primary blocks needed, 1 available"):
        engine.admit(Request(2, tokens_of(2, 8)))
    with pytest.raises(RequestError, match="1 leases are active"):
        cache.reset()
    assert engine.serve(Request(3, PROMPT)) == 9, "pinned blocks can be matched"
    cache.verify()
    lease.release()
    with pytest.raises(RequestError, match="released already"):
        lease.release()
    stats = cache.stats()
    assert (stats.leases, stats.primary.free_blocks) == (0, 4)


def test_a_pin_is_a_context(make_cache: MakeCache) -> None:
    cache = make_cache(4, 0)
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT))
    with cache.pin(1) as lease:
        assert len(lease.block_ids) == 3
        engine.remove(1, store=False)
        assert cache.num_free_blocks(Level.PRIMARY) == 1
    assert (cache.stats().leases, cache.num_free_blocks(Level.PRIMARY)) == (0, 4)
    engine.admit(Request(2, PROMPT))
    with pytest.raises(ZeroDivisionError), cache.pin(2):
        raise ZeroDivisionError
    assert cache.stats().leases == 0


def test_a_pinned_tail_is_not_written_over(make_cache: MakeCache) -> None:
    cache = make_cache(8, 0)
    engine = ToyEngine(cache)
    engine.admit(Request(1, PROMPT))
    engine.learn(1)
    engine.forward([1])
    with cache.pin(1) as lease:
        before = [cache.read_block(block_id) for block_id in lease.block_ids]
        for _ in range(3):
            engine.sample(1)
            engine.forward([1])
        assert cache.block_ids(1)[:2] == lease.block_ids[:2]
        assert cache.block_ids(1)[2] != lease.block_ids[2]
        assert [cache.read_block(block_id) for block_id in lease.block_ids] == before
    engine.remove(1)
    cache.verify()


def test_looking_changes_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 16)
    engine = ToyEngine(cache)
    for user in range(4):
        engine.serve(Request(user, tokens_of(user, 13)))
    assert cache.flush()
    engine.admit(Request(9, tokens_of(3, 9)))
    cache.flush_events()
    cache.poll_events()
    before = cache.stats()
    order = [cache.block(block_id) for block_id in range(28)]
    for user in range(4):
        reuse = cache.match(tokens_of(user, 13))
        assert reuse.reusable_blocks * 4 == sum(reuse.tokens_by_level)
        assert reuse.referenced_blocks == (2 if user == 3 else 0)
        cache.needed_blocks_one_step(Request(50, tokens_of(user, 13)))
        cache.remaining_blocks_to_completion(Request(50, tokens_of(user, 13)))
    cache.block_hashes(9)
    cache.start_scheduling()
    cache.scheduling_remove_sequence(9)
    assert cache.stats() == before
    assert [cache.block(block_id) for block_id in range(28)] == order
    cache.flush_events()
    assert cache.poll_events() == []


@pytest.mark.parametrize("keywords", [{"lora_id": 3}, {"cache_salt": ""}, {"extra_ids": [0] * 10}, {"skip_read": False}])
def test_a_namespace_beside_a_request_is_refused(make_cache: MakeCache, keywords: dict[str, Any]) -> None:
    """It would be ignored: the request has its own."""
    cache = make_cache()
    ToyEngine(cache).serve(Request(1, PROMPT))
    request = Request(2, PROMPT)
    for call in (lambda: cache.match(request, **keywords), lambda: cache.truncate(request, 0, **keywords)):
        with pytest.raises(RequestError, match=f"{next(iter(keywords))} beside it"):
            call()
    assert cache.match(request, lora_id=None, cache_salt=None).reusable_blocks == 2


def test_a_match_names_the_first_block_to_compute(make_cache: MakeCache) -> None:
    cache = make_cache()
    engine = ToyEngine(cache)
    engine.serve(Request(1, PROMPT, lora_id=3))
    reuse = cache.match([*PROMPT[:8], 7, 8, 9, 10], lora_id=3)
    assert (reuse.reusable_blocks, reuse.tokens_by_level) == (2, (8, 0, 0))
    assert reuse.first_new_key is not None
    assert (reuse.first_new_key.tokens, reuse.first_new_key.lora_id) == ((7, 8, 9, 10), 3)
    assert cache.match(Request(5, PROMPT, lora_id=3)).reusable_blocks == 2
    assert cache.match(PROMPT).reusable_blocks == 0
    assert cache.match(PROMPT, cache_salt="x").reusable_blocks == 0
    assert cache.match(PROMPT[:8], lora_id=3).reusable_blocks == 1, "the last token is never matched"


def test_truncating_forgets_the_rest_and_what_hangs_below(make_cache: MakeCache) -> None:
    cache = make_cache(16, 4)
    engine = ToyEngine(cache)
    engine.serve(Request(1, tokens_of(1, 17)))
    engine.serve(Request(2, [*tokens_of(1, 12), 5, 6, 7, 8, 9]))
    engine.admit(Request(3, tokens_of(1, 9)))  # holds the first two
    assert cache.truncate(tokens_of(1, 17), 6) == 1 + 1 + 1, "the third block and both that follow it"
    assert cache.match(tokens_of(1, 17)).reusable_blocks == 2
    cache.verify()
    engine.learn(3)
    engine.forward([3])
    engine.remove(3)
    assert cache.truncate(tokens_of(1, 17), 0) == 2
    assert cache.truncate(tokens_of(1, 17), 0) == 0
    assert engine.serve(Request(4, tokens_of(1, 17))) == 0
    assert cache.truncate(Request(5, tokens_of(1, 17), lora_id=1), 0) == 0, "another namespace"
    cache.verify()


def test_blocks_can_be_moved_by_hand(make_cache: MakeCache) -> None:
    cache = make_cache(8, 2, 16)
    engine = ToyEngine(cache)
    ids = stored_ids(engine, PROMPT)
    for block_id in ids[:2]:
        cache.offload(block_id)
        assert cache.block(block_id).level is Level.SECONDARY
    with pytest.raises(RequestError, match="offload needs a primary block, it is on the secondary level"):
        cache.offload(ids[0])
    assert cache.read_block(ids[0]) == expected_bytes(engine, PROMPT, 0)
    cache.onboard(ids[0])
    view = cache.block(ids[0])
    assert (view.level, view.backing) == (Level.PRIMARY, (Level.SECONDARY,))
    cache.onboard(ids[0])  # it is there already
    cache.offload(ids[0])
    assert cache.transfers.idle(10)
    assert cache.stats().offload_blocks == {(Level.PRIMARY, Level.SECONDARY): 2}, "the second time it went back to its copy"
    cache.verify()
    assert engine.serve(Request(1, PROMPT)) == 9, "the tail too"
    engine.admit(Request(2, PROMPT))
    with pytest.raises(RequestError, match=f"block {ids[1]}: offload needs an unreferenced block with content"):
        cache.offload(ids[1])
    engine.remove(2)
    with pytest.raises(RequestError, match="this one is empty"):
        cache.onboard(25)


def test_a_block_is_not_offloaded_over_one_that_is_worth_more(make_cache: MakeCache) -> None:
    cache = make_cache(8, 1)
    engine = ToyEngine(cache)
    precious = stored_ids(engine, tokens_of(1, 5), RetentionConfig([TokenRange(0, None, 90)]))[0]
    common = stored_ids(engine, tokens_of(2, 5))[0]
    cache.offload(precious)
    with pytest.raises(CapacityError, match="enlarge secondary"):
        cache.offload(common)
    assert cache.block(common).level is Level.PRIMARY
    cache.set_priority(common, 95)
    cache.offload(common)
    assert cache.match(tokens_of(1, 5)).reusable_blocks == 0
    cache.verify()


@pytest.mark.parametrize("priority", [-1, 101, 1.5, True, None])
def test_a_priority_is_0_to_100(make_cache: MakeCache, priority: int) -> None:
    cache = make_cache()
    block_id = stored_ids(ToyEngine(cache), PROMPT)[0]
    with pytest.raises(RequestError, match="a priority is a whole number from 0"):
        cache.set_priority(block_id, priority)
    cache.set_priority(block_id, 7)
    assert cache.block(block_id).priority == 7


def test_a_priority_falls_back_when_its_time_is_over(make_cache: MakeCache) -> None:
    now = [100.0]
    cache = make_cache(clock=lambda: now[0])
    engine = ToyEngine(cache)
    block_id = stored_ids(engine, tokens_of(1, 5), RetentionConfig([TokenRange(0, None, 90, duration_seconds=10.0)]))[0]
    now[0] += 9.9
    cache.refresh()
    assert cache.block(block_id).priority == 90
    now[0] += 0.2
    cache.refresh()
    assert cache.block(block_id).priority == 35


def test_the_block_table_points_at_the_pages(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4)
    engine = ToyEngine(cache)
    for user in range(3):  # afterwards ids and slots differ
        engine.serve(Request(user, tokens_of(user, 13)))
    engine.admit(Request(8, tokens_of(0, 13)), Request(9, tokens_of(5, 3)))
    table = cache.block_table([9, 8])
    assert (table.dtype, table.shape) == (torch.int32, (2, 2, 128))
    slots = [cache.block(block_id).slot for block_id in cache.block_ids(8)]
    assert slots != cache.block_ids(8), "a block id is no slot"
    assert table[1, 0, :4].tolist() == [slot * 4 for slot in slots], "two layers of keys and values"
    assert table[1, 1, :4].tolist() == [slot * 4 + 1 for slot in slots]
    assert (table[1, :, 4:] == -1).all()
    pages = cache.pool().primary.pages
    buffer = cache.layer_buffer(1)
    assert buffer.shape == (8, 2, 1, 4, 8)
    assert pages[int(table[1, 1, 2]) + 2].data_ptr() == buffer[slots[2], 1].data_ptr()
    assert cache.block_table([8]).data_ptr() == table.data_ptr(), "always at the same address"


def test_closing_twice_is_fine_and_a_context_closes(make_cache: MakeCache) -> None:
    with make_cache() as cache:
        cache.add_sequence(Request(1, PROMPT))
    with pytest.raises(KVTierError, match="closed"):
        cache.stats()
    cache.close()
