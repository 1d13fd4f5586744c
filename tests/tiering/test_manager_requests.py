"""Bad input: each a clear error that names value, limit and remedy, and nothing is half done."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from toy_engine import MakeCache, ToyEngine, tokens_of

from kvtier import (
    CapacityError,
    ConfigError,
    KVCacheManager,
    KVLayout,
    Level,
    Request,
    RequestError,
    RetentionConfig,
    TierConfig,
    TokenRange,
    UnknownBlock,
    UnknownRequest,
)

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")


def active(make_cache: MakeCache, *prompts: list[int], **sizes: int) -> ToyEngine:
    """An engine whose requests 0, 1, ... hold these prompts, computed."""
    engine = ToyEngine(make_cache(**sizes))
    for number, prompt in enumerate(prompts):
        engine.admit(Request(number, prompt))
        engine.learn(number)
        engine.forward([number])
    return engine


# -- ids, tokens, lengths -------------------------------------------------------------------------------------------------


def test_an_id_is_active_once(make_cache: MakeCache) -> None:
    engine = active(make_cache, tokens_of(1, 5))
    before = engine.cache.stats()
    with pytest.raises(RequestError, match="request 0: this id is active already"):
        engine.cache.add_sequence(Request(0, [1]))
    with pytest.raises(RequestError, match="request 7: this id is active already"):
        engine.cache.add_sequences([Request(7, [1]), Request(7, [2])])
    assert engine.cache.stats() == before
    engine.remove(0)
    engine.serve(Request(0, tokens_of(1, 5)))


UNKNOWN: list[Callable[[KVCacheManager], object]] = [
    lambda cache: cache.wait_ready(9),
    lambda cache: cache.is_ready(9),
    lambda cache: cache.step(None, ids=[0, 9]).__enter__(),
    lambda cache: cache.block_table([0, 9]),
    lambda cache: cache.mark_computed(9, 1),
    lambda cache: cache.append_tokens(9, [1]),
    lambda cache: cache.append_step([0, 9], [[1], [1]]),
    lambda cache: cache.store_context(9),
    lambda cache: cache.remove_sequence(9),
    lambda cache: cache.rewind(9, 0),
    lambda cache: cache.pin(9),
    lambda cache: cache.block_ids(9),
    lambda cache: cache.block_hashes(9),
    lambda cache: cache.needed_blocks_one_step(9),
    lambda cache: cache.remaining_blocks_to_completion(9),
    lambda cache: cache.scheduling_remove_sequence(9),
]


@pytest.mark.parametrize("call", UNKNOWN)
def test_an_unknown_id_is_an_error(make_cache: MakeCache, call: Callable[[KVCacheManager], object]) -> None:
    engine = active(make_cache, tokens_of(1, 5))
    before = engine.cache.stats()
    with pytest.raises(UnknownRequest, match=r"request 9: no active sequence has this id \(active: 1\)"):
        call(engine.cache)
    assert engine.cache.stats() == before
    engine.cache.verify()


async def test_an_unknown_id_is_never_ready(make_cache: MakeCache) -> None:
    with pytest.raises(UnknownRequest):
        await make_cache().ready(9)


@pytest.mark.parametrize("tokens", [[1 << 31], [-(1 << 31) - 1], [1.5], ["a"], [None], 5, "abc", [[1, 2]], [],
                                    np.array([0.5]), np.zeros((2, 2), dtype=np.int32), torch.tensor([1.0])],
                         ids=str)
def test_tokens_are_one_list_of_int32(make_cache: MakeCache, tokens: Any) -> None:
    with pytest.raises(RequestError, match="token"):
        Request(1, tokens)
    if isinstance(tokens, list) and not tokens:
        return  # appending nothing is nothing
    engine = active(make_cache, tokens_of(1, 5))
    with pytest.raises(RequestError, match="token"):
        engine.cache.append_tokens(0, tokens)
    engine.cache.verify()
    assert engine.forward([0]) == [0]


@pytest.mark.parametrize("kind", [list, tuple, lambda ids: array("i", ids), lambda ids: np.array(ids, dtype=np.int32),
                                  lambda ids: np.array(ids, dtype=np.int64), torch.tensor])
def test_tokens_come_as_engines_have_them(make_cache: MakeCache, kind: Callable[[list[int]], Any]) -> None:
    engine = active(make_cache, [1, 2, 3, 4, -5])
    engine.remove(0)
    assert engine.serve(Request(1, kind([1, 2, 3, 4, -5, 6]))) == 4, "the newest token is never stored"
    engine.admit(Request(2, kind([1, 2, 3, 4])))
    engine.learn(2)
    engine.forward([2])
    engine.cache.append_tokens(2, kind([-5, 6]))
    assert engine.cache.match([1, 2, 3, 4, -5, 6]).reusable_blocks == 1


def test_lists_of_different_length_are_an_error(make_cache: MakeCache) -> None:
    engine = active(make_cache, tokens_of(1, 5), tokens_of(2, 5))
    with pytest.raises(RequestError, match="2 ids and 1 token lists"):
        engine.cache.append_step([0, 1], [[1]])
    with pytest.raises(RequestError, match="an id is given twice"):
        engine.cache.append_step([0, 0], [[1], [1]])
    engine.cache.append_step([0, 1], [[1], [2]])


def test_one_bad_token_of_a_batch_changes_nobody(make_cache: MakeCache) -> None:
    engine = active(make_cache, tokens_of(1, 4), tokens_of(2, 4))
    before = engine.cache.stats(), engine.cache.block_ids(0)
    with pytest.raises(RequestError, match="2147483648"):
        engine.cache.append_step([0, 1], [[1], [1 << 31]])
    assert (engine.cache.stats(), engine.cache.block_ids(0)) == before


def test_a_sequence_ends_at_max_seq_len(make_cache: MakeCache) -> None:
    cache = make_cache(max_seq_len=8)
    with pytest.raises(RequestError, match="request 1: 9 tokens; max_seq_len is 8"):
        cache.add_sequence(Request(1, tokens_of(1, 9)))
    cache.add_sequences([Request(1, tokens_of(1, 8)), Request(2, tokens_of(2, 7))])
    before = cache.stats()
    with pytest.raises(RequestError, match="request 1: 9 tokens; max_seq_len is 8, raise it or end the sequence"):
        cache.append_step([2, 1], [[1], [1]])
    assert cache.stats() == before
    cache.append_tokens(2, [1])
    assert cache.block_table([1, 2]).shape == (2, 2, 2)


def test_a_step_is_at_most_max_batch_size(make_cache: MakeCache) -> None:
    cache = make_cache(max_batch_size=2)
    cache.add_sequences([Request(number, [number]) for number in range(3)])
    with pytest.raises(RequestError, match="raise max_batch_size"):
        cache.block_table([0, 1, 2])
    assert cache.block_table([2, 0]).shape[0] == 2


@pytest.mark.parametrize("num_tokens", [-1, 4, 6, True, 1.5])
def test_computed_goes_up_to_the_length_and_never_back(make_cache: MakeCache, num_tokens: Any) -> None:
    engine = active(make_cache, tokens_of(1, 5))
    with pytest.raises(RequestError, match="5 are computed already and the sequence has 5 tokens"):
        engine.cache.mark_computed(0, num_tokens)


@pytest.mark.parametrize("num_tokens", [-1, 3, True, 0.5])
def test_only_generated_tokens_are_taken_back(make_cache: MakeCache, num_tokens: Any) -> None:
    engine = active(make_cache, tokens_of(1, 5))
    engine.cache.append_tokens(0, [1, 2])
    with pytest.raises(RequestError, match="it has generated 2 tokens and the prompt stays"):
        engine.cache.rewind(0, num_tokens)
    engine.cache.rewind(0, 2)


@pytest.mark.parametrize("call", [
    lambda cache: cache.block_ids(0, beam=1), lambda cache: cache.block_ids(0, group=1), lambda cache: cache.block_table([0], group=1),
    lambda cache: cache.pool(1), lambda cache: cache.num_free_blocks(Level.PRIMARY, group=-1), lambda cache: cache.num_free_blocks(3),
    lambda cache: cache.layer_buffer(2), lambda cache: cache.layer_buffer(-1), lambda cache: cache.wait_ready(0, layer=2),
    lambda cache: cache.truncate([1], -1), lambda cache: cache.truncate([1], 1.5), lambda cache: cache.match([]),
    lambda cache: cache.report_prefill(0, 1.0), lambda cache: cache.report_prefill(1, 0.0),
    lambda cache: cache.report_prefill(1, float("nan")),
])
def test_what_is_out_of_range_is_refused(make_cache: MakeCache, call: Callable[[KVCacheManager], object]) -> None:
    engine = active(make_cache, tokens_of(1, 5))
    with pytest.raises((RequestError, ConfigError)):
        call(engine.cache)


@pytest.mark.parametrize("block_id", [-1, 12, 9999, True, "0"])
def test_an_unknown_block_is_an_error(make_cache: MakeCache, block_id: Any) -> None:
    cache = make_cache()
    calls: list[Callable[[], object]] = [
        lambda: cache.block(block_id), lambda: cache.read_block(block_id), lambda: cache.offload(block_id),
        lambda: cache.onboard(block_id), lambda: cache.set_priority(block_id, 5),
        lambda: cache.write_block(block_id, bytes(cache.layout.groups[0].block_bytes)),
    ]
    for call in calls:
        with pytest.raises(UnknownBlock, match=r"group 0 has blocks 0\.\.11"):
            call()


def test_a_request_that_asks_for_what_is_not_included_is_refused(make_cache: MakeCache) -> None:
    cache = make_cache()
    with pytest.raises(RequestError, match="set request_directory_root"):
        cache.add_sequence(Request(1, [1], retention=RetentionConfig([TokenRange(0, None, 50)], directory="/anywhere")))
    with pytest.raises(RequestError, match="max_beam_width is 1"):
        cache.add_sequence(Request(1, [1], beam_width=2))
    with pytest.raises(RequestError, match="no cross-attention"):
        cache.add_sequence(Request(1, [1], encoder_length=3))


# -- capacity -------------------------------------------------------------------------------------------------------------


def test_a_pool_smaller_than_one_request_says_how_many_blocks_it_takes(make_cache: MakeCache) -> None:
    cache = make_cache(4, 4)
    with pytest.raises(CapacityError, match="5 primary blocks needed, 4 available of 4; enlarge primary") as caught:
        cache.add_sequence(Request(1, tokens_of(1, 17)))
    assert (caught.value.needed, caught.value.available, caught.value.preempt) == (5, 4, ())
    cache.verify()
    cache.add_sequence(Request(1, tokens_of(1, 16)))
    with pytest.raises(CapacityError) as caught:
        cache.append_tokens(1, [1])
    assert (caught.value.needed, caught.value.available) == (1, 0)


def test_preempting_who_is_named_makes_room(make_cache: MakeCache) -> None:
    engine = active(make_cache, tokens_of(1, 12), tokens_of(2, 8), tokens_of(3, 12))
    cache = engine.cache
    wanted = Request(9, tokens_of(9, 16))
    message = r"requests \[9\]: 4 primary blocks needed, 0 available of 8; pre-empt requests \[2, 1\]"
    with pytest.raises(CapacityError, match=message) as caught:
        cache.add_sequence(wanted)
    assert (caught.value.needed, caught.value.available) == (4, 0)
    assert caught.value.preempt == (2, 1), "the newest first, and no more than needed"
    for victim in caught.value.preempt:
        engine.remove(victim)
    assert engine.admit(wanted)[0].total_blocks == 4
    assert engine.serve(Request(4, tokens_of(4, 4))) == 0
    engine.forward([0])


def test_preempting_counts_only_blocks_that_become_free(make_cache: MakeCache) -> None:
    engine = active(make_cache, tokens_of(1, 9))
    cache = engine.cache
    cache.store_context(0)
    for number in (1, 2):  # share two blocks with it and have one each
        engine.admit(Request(number, [*tokens_of(1, 8), number]))
        engine.learn(number)
        engine.forward([number])
    engine.admit(Request(3, tokens_of(3, 12)))
    assert cache.num_free_blocks(Level.PRIMARY) == 0
    with pytest.raises(CapacityError) as caught:
        cache.append_step([0, 1, 2], [[1] * 4, [1] * 4, [1] * 4])
    assert (caught.value.needed, caught.value.preempt) == (3, (3,))
    with pytest.raises(CapacityError) as caught:
        cache.add_sequence(Request(9, tokens_of(9, 17)))
    assert (caught.value.needed, caught.value.preempt) == (5, (3, 2, 1))
    for victim in caught.value.preempt:
        engine.remove(victim)
    engine.admit(Request(9, tokens_of(9, 17)))


def test_a_step_that_does_not_fit_changes_nobody(make_cache: MakeCache) -> None:
    engine = active(make_cache, tokens_of(1, 16), tokens_of(2, 12))
    cache = engine.cache
    before = cache.stats(), cache.block_ids(0), cache.block_ids(1)
    with pytest.raises(CapacityError, match=r"one more step of requests \[0, 1\]: 2 primary blocks needed, 1 available of 8") as caught:
        cache.append_step([0, 1], [[5], [6]])
    assert caught.value.preempt == (1,)
    assert (cache.stats(), cache.block_ids(0), cache.block_ids(1)) == before
    engine.remove(1)
    engine.sample(0)
    engine.forward([0])


def test_capacity_estimates_agree_with_what_is_taken(make_cache: MakeCache) -> None:
    engine = active(make_cache, tokens_of(1, 10))
    cache = engine.cache
    cache.store_context(0)
    request = Request(9, [*tokens_of(1, 8), 1, 2], max_new_tokens=4)
    assert cache.needed_blocks_one_step(request) == 1, "two are stored, and held by the other"
    assert cache.remaining_blocks_to_completion(request) == 2
    free = cache.num_free_blocks(Level.PRIMARY)
    engine.admit(request)
    assert free - cache.num_free_blocks(Level.PRIMARY) == 1
    assert cache.remaining_blocks_to_completion(9) == 1
    assert (cache.needed_blocks_one_step(9), cache.needed_blocks_one_step(9, two_steps=True)) == (0, 0)
    cache.start_scheduling()
    assert cache.scheduling_remove_sequence(9) == 1
    assert cache.scheduling_remove_sequence(0) == 3
    assert cache.num_free_blocks(Level.PRIMARY) == 8 - 4, "only as if"


# -- sizes, layouts, devices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [
    {"primary": "0 blocks"}, {"primary": "-1 blocks"}, {"primary": "8"}, {"primary": "0 bytes"}, {"primary": "1.5 blocks"},
    {"secondary": "-4 blocks"}, {"nvme": "-1 blocks"}, {"primary": "101%"}, {"primary": "8 blocks", "max_seq_len": 0},
    {"primary": "8 blocks", "max_batch_size": 0}, {"primary": "8 blocks", "nvme": "8 blocks", "secondary": "4 blocks"},
    {"primary": "8 blocks", "nvme": "8 blocks", "nvme_directory": "/nowhere"}, {"primry": "8 blocks"},
], ids=str)
def test_sizes_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TierConfig(**settings)


@pytest.mark.parametrize(("settings", "message"), [
    ({"primary": "1000000TiB"}, "primary"),
    ({"primary": "8 blocks", "secondary": "1000000TiB"}, "secondary"),
    ({"primary": "100 bytes"}, "primary"),
    ({"primary": ["8 blocks", "8 blocks"]}, "primary"),
    ({"primary": "8 blocks", "max_seq_len": 1 << 31, "max_batch_size": 1 << 20}, "max_batch_size=1048576 with max_seq_len=2147483648"),
    ({"primary": "8 blocks", "gds": "required"}, "without an NVMe level"),
], ids=str)
def test_what_does_not_fit_is_refused_before_anything_is_allocated(layout: KVLayout, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVCacheManager(layout, TierConfig(**settings))


def test_an_nvme_level_larger_than_the_disk_is_refused(make_cache: MakeCache) -> None:
    with pytest.raises(ConfigError, match="nvme"):
        make_cache(nvme=1 << 40)
    make_cache(nvme=16)


@pytest.mark.parametrize("tokens_per_block", [0, -4, 3, 12, 1 << 20])
def test_a_block_holds_a_power_of_two_of_tokens(tokens_per_block: int) -> None:
    with pytest.raises(ConfigError, match="tokens_per_block"):
        KVLayout.uniform(1, 1, 8, tokens_per_block=tokens_per_block)


def test_an_unknown_device_is_refused(layout: KVLayout) -> None:
    with pytest.raises(ConfigError, match="use 'cpu', 'cuda' or 'cuda:N'"):
        KVCacheManager(layout, TierConfig(primary="8 blocks"), device="tpu")
