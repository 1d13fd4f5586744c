"""Chunked prefill over windows with real bytes: prompts that share scratch blocks wait for each other, and every byte is right."""

from __future__ import annotations

from pathlib import Path

import pytest
from group_engine import LAYOUTS, GroupEngine
from toy_engine import MakeCache, fails, tokens_of

from kvtier import CapacityError, ConfigError, Level, RequestError, TierConfig
from kvtier.io.faults import FaultOperation, Faults

pytestmark = [pytest.mark.usefixtures("no_failed_callbacks"), pytest.mark.timeout(60)]

LONG = tokens_of(1, 97)
LONGER = tokens_of(2, 110)
CHUNKED = {"chunk_size": 16, "enable_partial_reuse": False}


def test_two_long_prompts_with_scratch_for_one_chunk_take_turns_and_both_complete(make_cache: MakeCache) -> None:
    cache = make_cache(["14 blocks", "80 blocks"], 0, layout=LAYOUTS["window and full"], window_scratch_blocks=3, **CHUNKED)
    engine = GroupEngine(cache)
    engine.admit(engine.request(1, LONG, max_new_tokens=3), engine.request(2, LONGER, max_new_tokens=3))
    assert [cache.is_paused(request_id) for request_id in (1, 2)] == [False, True]
    assert [cache.wait_ready(request_id, timeout=5.0) for request_id in (1, 2)] == [0, 0], "a pause is nothing to wait for"
    steps: list[list[int]] = []
    while any(sequence.computed < sequence.num_tokens for sequence in engine.sequences.values()):
        going_on = [request_id for request_id, sequence in engine.sequences.items() if sequence.computed < sequence.num_tokens]
        steps.append(engine.forward(going_on))
        cache.verify()
    assert steps[:4] == [[1], [2], [1], [2]]
    for request_id in (1, 2):
        for _ in range(3):
            engine.sample(request_id)
            assert engine.forward([request_id]) == [request_id]
        engine.remove(request_id)
    assert cache.num_free_blocks(Level.PRIMARY, 0) == 14
    cache.verify()


def test_a_prompt_of_many_windows_goes_through_a_pool_of_a_few_blocks(make_cache: MakeCache) -> None:
    cache = make_cache(["7 blocks", "80 blocks"], ["60 blocks", "80 blocks"], layout=LAYOUTS["window and full"], **CHUNKED)
    engine = GroupEngine(cache)
    assert cache.needed_blocks_one_step(engine.request(1, LONG), group=0) == 4
    assert engine.serve(engine.request(1, LONG), answer=9) == 0
    assert engine.serve(engine.request(2, [*LONG[:64], 7, 8]), answer=3) == 64
    small = GroupEngine(make_cache(["5 blocks", "80 blocks"], 0, layout=LAYOUTS["window and full"], **CHUNKED))
    with pytest.raises(CapacityError, match="chunks of 16"):
        small.admit(small.request(1, LONG))


def test_blocks_that_a_running_step_reads_are_let_go_when_it_ends(make_cache: MakeCache) -> None:
    cache = make_cache(["20 blocks", "80 blocks"], 0, layout=LAYOUTS["window and full"], **CHUNKED)
    engine = GroupEngine(cache)
    engine.admit(engine.request(1, LONG))
    free = cache.num_free_blocks(Level.PRIMARY, 0)
    with cache.step(None, [1]) as ready:
        assert ready == [1]
        cache.mark_computed(1, 16)
        assert cache.is_paused(1)
        assert cache.num_free_blocks(Level.PRIMARY, 0) == free
        with cache.step(None, [1]) as again:
            assert again == []
        cache.verify()
    assert not cache.is_paused(1)
    assert len(cache.block_ids(1, group=0)) == 8
    assert cache.num_free_blocks(Level.PRIMARY, 0) == free - 4 + 2
    cache.remove_sequence(1, store=False)


def test_a_paused_request_can_be_dropped_and_gives_its_turn_away(make_cache: MakeCache) -> None:
    cache = make_cache(["20 blocks", "80 blocks"], 0, layout=LAYOUTS["window and full"], window_scratch_blocks=2, **CHUNKED)
    engine = GroupEngine(cache)
    engine.admit(*[engine.request(number, tokens_of(number, 60)) for number in (1, 2, 3)])
    assert [cache.is_paused(number) for number in (1, 2, 3)] == [False, True, True]
    engine.remove(2)
    engine.remove(1)
    assert engine.forward([3]) == [3]
    engine.remove(3)
    assert cache.num_free_blocks(Level.PRIMARY, 0) == 20
    cache.verify()


def test_after_a_bad_read_the_prompt_is_computed_again_chunk_by_chunk(make_cache: MakeCache) -> None:
    layout = LAYOUTS["window and full"]
    with make_cache(["12 blocks", "40 blocks"], 40, 80, layout=layout, **CHUNKED) as first:
        GroupEngine(first).serve(first_request := GroupEngine(first).request(1, LONG))
        assert first.flush()
    faults = Faults([fails(FaultOperation.READ)])
    cache = make_cache(["12 blocks", "40 blocks"], 40, 80, layout=layout, faults=faults, **CHUNKED)
    engine = GroupEngine(cache)
    engine.admit(engine.request(2, [*LONG, 1, 2, 3]))
    valid = engine.learn(2)
    assert valid < 96 <= first_request.num_tokens
    sequence = engine.sequences[2]
    while sequence.computed < sequence.num_tokens:
        assert engine.forward([2]) == [2]
        cache.verify()
    engine.sample(2)
    engine.forward([2])
    engine.remove(2)
    assert cache.num_free_blocks(Level.PRIMARY, 0) == 12


def test_what_has_no_blocks_yet_is_refused_by_name(make_cache: MakeCache) -> None:
    cache = make_cache(["20 blocks", "80 blocks"], 0, layout=LAYOUTS["window and full"], **CHUNKED)
    cache.add_sequence(GroupEngine(cache).request(1, LONG))
    with pytest.raises(RequestError, match="first 16 of 97 tokens"):
        cache.append_tokens(1, [5])
    with pytest.raises(RequestError, match="blocks for the first 16 tokens"):
        cache.mark_computed(1, 32)
    cache.remove_sequence(1, store=False)


def test_scratch_settings_that_cannot_work_are_refused(make_cache: MakeCache, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without chunk_size"):
        TierConfig(window_scratch_blocks=4)
    with pytest.raises(ConfigError, match=r"window_scratch_blocks=1 with chunk_size=16.*needs 2 scratch blocks"):
        make_cache(20, 0, layout=LAYOUTS["window and full"], window_scratch_blocks=1, **CHUNKED)
