"""The whole tier serves real bytes: every byte of every token, in every step, is what the engine computed for these tokens."""

from __future__ import annotations

import random

import pytest
from toy_engine import MakeCache, ToyEngine, tokens_of

from kvtier import CapacityError, KVCacheManager, KVLayout, Level, Request
from kvtier.tiering.statistics import LevelStats

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")


def assert_consistent(cache: KVCacheManager) -> None:
    """What holds of the statistics at any time, and at the end of all requests."""
    stats = cache.stats()
    block_bytes = cache.layout.groups[0].block_bytes
    for level in (stats.primary, stats.secondary, stats.nvme):
        assert level.max_blocks == level.free_blocks + level.used_blocks + level.busy_blocks
        assert level.evictable_blocks + level.backing_blocks <= level.free_blocks
    for blocks, moved in ((stats.onboard_blocks, stats.onboard_bytes), (stats.offload_blocks, stats.offload_bytes)):
        assert blocks.keys() == moved.keys()
        for pair, number in blocks.items():
            # Part of a block travels only when the front of it is reused by copying.
            partly_copied = stats.reused_partial if pair == (Level.SECONDARY, Level.PRIMARY) else 0
            assert (number - partly_copied) * block_bytes <= moved[pair] <= number * block_bytes


def assert_all_free(level: LevelStats) -> None:
    assert (level.free_blocks, level.used_blocks, level.busy_blocks) == (level.max_blocks, 0, 0)


@pytest.mark.parametrize("keep_backing", [True, False])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 3))])
def test_every_byte_is_right_on_every_level(make_cache: MakeCache, seed: int, keep_backing: bool) -> None:
    generator = random.Random(seed)
    cache = make_cache(primary=12, secondary=6, nvme=24, keep_backing=keep_backing)
    engine = ToyEngine(cache)
    prefixes = [tokens_of(family, generator.randrange(8, 24)) for family in range(6)]
    for _ in range(5):
        requests = [Request(number, generator.choice(prefixes) + [generator.randrange(4) for _ in range(generator.randrange(9))])
                    for number in range(10)]
        engine.run(requests, answer=generator.randrange(5), chunk=generator.choice([None, 3, 8]))
        assert_consistent(cache)
        assert cache.flush(), "what is evicted in the next round is on NVMe, however slow the drive"
    stats = cache.stats()
    assert min(stats.hit_tokens) > 0, "every level has served something"
    assert min(stats.hit_blocks) > 0
    assert stats.reused_partial > 0
    assert engine.preemptions > 0
    assert stats.onboard_blocks[Level.NVME, Level.PRIMARY] > 0
    assert stats.offload_blocks[Level.SECONDARY, Level.NVME] > 0
    assert cache.flush()
    stats = cache.stats()
    assert (stats.leases, stats.sequences, stats.lost, stats.transfer_failures) == (0, 0, 0, 0)
    for level in (stats.primary, stats.secondary, stats.nvme):
        assert_all_free(level)


@pytest.mark.parametrize(("primary", "secondary", "nvme"), [(8, 0, 0), (8, 4, 0), (16, 1, 8), (16, 12, 64)])
def test_every_size_of_the_levels_serves(make_cache: MakeCache, primary: int, secondary: int, nvme: int) -> None:
    cache = make_cache(primary, secondary, nvme)
    engine = ToyEngine(cache)
    for turn in range(3):
        engine.run([Request(user, [*tokens_of(user % 3, 9 + 4 * turn), user]) for user in range(5)], answer=3, chunk=5)
    assert_consistent(cache)
    assert engine.checked_tokens > 0


@pytest.mark.parametrize("layout", [
    KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=16, dtype="bfloat16", tokens_per_block=8),
    KVLayout.uniform(num_layers=1, num_kv_heads=3, head_dim=5, dtype="int8", tokens_per_block=1),
    KVLayout.uniform(num_layers=2, num_kv_heads=4, head_dim=64, dtype="float32", tokens_per_block=16),
], ids=["bf16", "odd bytes", "two pages"])
def test_every_shape_of_a_block_keeps_its_bytes(make_cache: MakeCache, layout: KVLayout) -> None:
    cache = make_cache(6, 4, 32, layout=layout)
    engine = ToyEngine(cache)
    tokens_per_block = layout.tokens_per_block
    prompts = [tokens_of(user, 3 * tokens_per_block + 1) for user in range(5)]
    for _ in range(3):
        for number, prompt in enumerate(prompts):
            engine.serve(Request(number, prompt))
            cache.flush()
    hits = cache.stats().hit_tokens
    assert hits.secondary + hits.nvme > 0


def test_a_conversation_reuses_its_own_answers(make_cache: MakeCache) -> None:
    cache = make_cache(16, 8, 32)
    engine = ToyEngine(cache)
    tokens = tokens_of(1, 10)
    reused = []
    for turn in range(4):
        engine.admit(Request(turn, tokens))
        reused.append(engine.learn(turn))
        for _ in range(5):
            engine.forward([turn])
            engine.sample(turn)
        tokens = engine.sequences[turn].tokens + tokens_of(10 + turn, 3)
        engine.remove(turn)
        engine.serve(Request(100, tokens_of(2 + turn, 40)))  # somebody else needs the room
    # All but the newest token of each turn was stored, so the next turn has to compute that and the new question.
    assert reused == [0, 14, 22, 30]


def test_different_adapters_and_salts_never_share(make_cache: MakeCache) -> None:
    cache = make_cache(16, 8, 0)
    engine = ToyEngine(cache)
    prompt = tokens_of(1, 14)
    names = [(None, None), (1, None), (2, None), (None, "a"), (None, "b"), (1, "a")]
    for number, (lora_id, salt) in enumerate(names):
        assert engine.serve(Request(number, prompt, lora_id=lora_id, cache_salt=salt)) == 0
    assert engine.serve(Request(9, prompt, lora_id=1, cache_salt="a")) == 13


def test_hits_are_counted_when_the_bytes_have_arrived(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 0)
    engine = ToyEngine(cache)
    engine.serve(Request(1, tokens_of(1, 9)))
    admission = engine.admit(Request(2, tokens_of(1, 9)))[0]
    assert (admission.prepopulated_tokens, admission.reused_blocks, admission.missed_blocks) == (8, 2, 1)
    assert cache.stats().hit_tokens.primary == 0
    engine.learn(2)
    assert (cache.stats().hit_tokens.primary, cache.stats().hit_blocks.primary) == (8, 2)
    engine.forward([2])
    assert cache.stats().hit_tokens.primary == 8, "once"


def test_a_request_that_comes_while_another_computes_the_same_shares_what_is_stored(make_cache: MakeCache) -> None:
    cache = make_cache(12, 4, 0)
    engine = ToyEngine(cache)
    engine.admit(Request(1, tokens_of(1, 17)))
    engine.learn(1)
    engine.forward([1], chunk=9)
    cache.store_context(1)
    assert engine.admit(Request(2, tokens_of(1, 17)))[0].prepopulated_tokens == 8, "nine are computed: two full blocks"
    engine.learn(2)
    assert cache.block_ids(1)[:2] == cache.block_ids(2)[:2]
    assert set(cache.block_ids(1)[2:]).isdisjoint(cache.block_ids(2)[2:])
    while engine.sequences[1].computed < 17 or engine.sequences[2].computed < 17:
        engine.forward([1, 2], chunk=3)
    for request_id in (1, 2):
        engine.sample(request_id)
    engine.forward([1, 2])
    engine.remove(2)
    engine.remove(1)
    assert_all_free(cache.stats().primary)


def test_a_batch_is_admitted_whole_or_not_at_all(make_cache: MakeCache) -> None:
    cache = make_cache(6, 0, 0)
    engine = ToyEngine(cache)
    before = cache.stats()
    with pytest.raises(CapacityError):
        cache.add_sequences([Request(1, tokens_of(1, 12)), Request(2, tokens_of(2, 13))])
    assert cache.stats() == before
    engine.admit(Request(1, tokens_of(1, 12)), Request(2, tokens_of(2, 12)))
    assert cache.num_free_blocks(Level.PRIMARY) == 0


def test_what_was_not_computed_is_never_stored(make_cache: MakeCache) -> None:
    cache = make_cache(8, 0, 0)
    engine = ToyEngine(cache)
    engine.admit(Request(1, tokens_of(1, 12)))
    engine.learn(1)
    engine.forward([1], chunk=6)
    engine.remove(1)  # an abort in the middle of the prompt
    assert engine.serve(Request(2, tokens_of(1, 12))) == 6
    engine.admit(Request(3, tokens_of(3, 12)))
    engine.remove(3)
    assert engine.serve(Request(4, tokens_of(3, 12))) == 0


def test_dropping_a_sequence_stores_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(8, 0, 0)
    engine = ToyEngine(cache)
    engine.serve(Request(1, tokens_of(1, 12)), store=False)
    assert engine.serve(Request(2, tokens_of(1, 12))) == 0


def test_reuse_can_be_turned_off(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 0, enable_block_reuse=False)
    engine = ToyEngine(cache)
    for number in range(3):
        assert engine.serve(Request(number, tokens_of(1, 12)), answer=2) == 0


def test_rewound_tokens_are_forgotten(make_cache: MakeCache) -> None:
    cache = make_cache(8, 0, 0)
    engine = ToyEngine(cache)
    engine.admit(Request(1, tokens_of(1, 6)))
    engine.learn(1)
    engine.forward([1])
    for token in (7, 8, 9, 10):  # drafts
        cache.append_tokens(1, [token])
    cache.store_context(1)
    cache.rewind(1, 3)
    cache.append_tokens(1, [50])
    sequence = engine.sequences[1]
    sequence.tokens += [7, 50]
    engine.forward([1])  # 7 and 50 are computed anew
    cache.append_tokens(1, [51])
    engine.remove(1)
    assert engine.serve(Request(2, [*tokens_of(1, 6), 7, 50, 51])) == 8
    assert engine.serve(Request(3, [*tokens_of(1, 6), 7, 8, 9])) == 7


def test_iteration_statistics_count_from_refresh_to_refresh(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4, 0)
    engine = ToyEngine(cache)
    engine.serve(Request(1, tokens_of(1, 9)))
    assert cache.iteration_stats().alloc_new == 3
    cache.refresh()
    assert cache.iteration_stats().alloc_new == 0
    engine.serve(Request(2, tokens_of(1, 9)))
    assert cache.iteration_stats().hit_tokens.primary == 8
    assert cache.stats().alloc_new == 3 + cache.iteration_stats().alloc_new
