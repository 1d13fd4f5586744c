"""Known answers of an existing KV cache manager for windows, beams, recurrent layers and several groups, through the public names.

Conventions: see ``case_cache``.
"""

from __future__ import annotations

import pytest
from case_cache import CaseCache, Make, attention

from kvtier import CapacityError, LayerSpec, Request, RequestError

A = list(range(1000, 1011))


# -- D1: beams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "free", "distinct"), [(191, 14, 10), (192, 21, 3)])
def test_case_D1_the_blocks_of_eight_beams(make: Make, prompt: int, free: int, distinct: int) -> None:
    cache = make(24, layers=[attention()], tokens_per_block=64, enable_block_reuse=False, max_beam_width=8, max_seq_len=512)
    cache.add(0, list(range(prompt)), beam_width=8)
    assert cache.free() == free
    rows = [cache.manager.block_ids(0, beam=beam) for beam in range(8)]
    assert [len(row) for row in rows] == [3] * 8
    assert len({block_id for row in rows for block_id in row}) == distinct
    shared = prompt // 64
    assert all(row[:shared] == rows[0][:shared] for row in rows)
    cache.drop(0)
    assert cache.free() == 24
    assert all(cache.manager.block(block_id).tokens == () for row in rows for block_id in row), "nothing remembers the sequence"


def test_case_D1_a_third_sequence_and_an_id_in_use_are_refused(make: Make) -> None:
    cache = make(24, layers=[attention()], tokens_per_block=64, enable_block_reuse=False, max_beam_width=8, max_seq_len=512)
    for number in range(2):
        cache.add(number, list(range(191)), beam_width=8)
    with pytest.raises(RequestError):
        cache.add(0, list(range(191)), beam_width=8)
    with pytest.raises(CapacityError):
        cache.add(2, list(range(191)), beam_width=8)
    assert cache.free() == 4


# -- H5, C4, C9: several groups ------------------------------------------------------------------------------------------


def test_case_H5_events_of_two_windows(make: Make) -> None:
    cache = make(["4 blocks", "8 blocks"], layers=[attention(12), attention(16)], secondary=2, max_seq_len=128)
    cache.manager.flush_events()
    created = cache.manager.poll_events()
    assert [(event.group, event.data.num_blocks_per_level) for event in created] == [(0, (4, 2)), (1, (8, 2))]
    cache.add(0, list(range(8)))
    cache.store(0)
    cache.manager.flush_events()
    assert [(event.group, type(event.data).__name__) for event in cache.manager.poll_events()] == [(1, "Stored"), (0, "Stored")]


def test_case_C4_what_one_group_drops_the_others_keep(make: Make) -> None:
    cache = make(["3 blocks", "12 blocks"], layers=[attention(8), attention()], max_seq_len=128)
    cache.add(0, list(range(9)))
    cache.release(0)
    cache.add(1, list(range(100, 109)))
    cache.drop(1)  # the small group had to give its blocks up
    assert cache.manager.match(list(range(9))).reusable_blocks == 0
    assert cache.add(2, list(range(9))) == 0
    cache.release(2)
    assert cache.add(3, list(range(9))) == 8
    cache.drop(3)


# -- I: sliding windows ----------------------------------------------------------------------------------------------------


def with_a(make: Make, primary: int) -> CaseCache:
    cache = make(primary, layers=[attention(8)], max_seq_len=128)
    cache.add(0, A)
    cache.store(0)
    cache.append(0, 1011)
    return cache


def test_case_I1_out_of_the_window_and_released(make: Make) -> None:
    cache = with_a(make, 8)
    cache.release(0)
    assert cache.add(1, list(range(1000, 1004))) == 3
    cache.drop(1)
    assert cache.free() == 8


def test_case_I2_out_of_the_window_and_alive(make: Make) -> None:
    cache = with_a(make, 10)
    cache.append(0, 1012)
    cache.store(0)
    assert cache.add(1, list(range(1000, 1004))) == 3


def test_case_I3_out_of_the_window_and_taken(make: Make) -> None:
    cache = with_a(make, 4)
    assert cache.free() == 2
    cache.add(1, list(range(2000, 2008)))
    assert cache.manager.block_ids(1) == [3, 0]
    cache.release(0, 1)
    assert cache.free() == 4
    assert cache.add(2, list(range(2000, 2008))) > 0


def test_case_I7_out_of_the_window_in_a_what_if(make: Make) -> None:
    cache = with_a(make, 5)
    cache.manager.start_scheduling()
    cache.manager.scheduling_remove_sequence(0)
    assert cache.manager.num_schedulable_blocks() == 5
    assert cache.free() == 3
    cache.drop(0)
    assert cache.free() == 5


def test_case_I9_stored_and_pinned(make: Make) -> None:
    cache = make(6, layers=[attention(8)], max_seq_len=128)
    cache.add(0, A)
    cache.store(0)
    cache.drop(0)
    cache.add(1, A)
    cache.computed(1)
    lease = cache.manager.store_and_pin(1)
    assert len(lease.block_ids) == 3
    cache.drop(1)
    assert cache.free() < 6
    lease.release()
    assert cache.free() == 6


def test_case_I12_a_window_smaller_than_a_block(make: Make) -> None:
    cache = make(16, layers=[attention(3)], enable_block_reuse=False, max_seq_len=128)
    cache.add(0, [1, 2])
    assert cache.manager.block_ids(0) == [0]
    length = 2
    for num_tokens, ids in ((4, [0]), (5, [0, 1]), (7, [0, 1]), (9, [0, 1, 2])):
        cache.append(0, *range(length, num_tokens))
        length = num_tokens
        assert cache.manager.block_ids(0) == ids
    cache.release(0)
    assert cache.free() == 16


def test_case_I15_a_shared_head(make: Make) -> None:
    cache = make(12, layers=[attention(8)], max_seq_len=128)
    head = [1, 2, 3, 4, 5, 6]
    for number, suffix in enumerate(([10, 11, 12], [20, 21, 22], [10, 11, 12], [10, 11, 12])):
        reused = cache.add(number, [*head, *suffix])
        assert (reused > 0) is (number > 0)
        cache.release(number)
        assert cache.free() == 12


# -- J: accounting with a window ---------------------------------------------------------------------------------------------


def test_case_J2_remaining_to_completion(make: Make) -> None:
    request = Request(0, list(range(1024)), max_new_tokens=128)
    for layers, tokens_per_block, chunk, blocks in (([attention()], 1, None, 1152), ([attention()], 64, None, 18),
                                                    ([attention(128)], 64, 16384, 18)):
        cache = make(8, layers=layers, tokens_per_block=tokens_per_block, chunk_size=chunk, max_seq_len=2048)
        assert cache.manager.remaining_blocks_to_completion(request) == blocks


@pytest.mark.parametrize(("prompt", "generated", "draft", "two_steps", "blocks"), [
    (136, None, 0, False, 9), (512, None, 0, False, 32), (1024, None, 0, False, 64), (512, 0, 0, False, 1), (512, 8, 0, False, 0),
    (518, 0, 0, False, 0), (512, 16, 0, False, 1), (128, 15, 0, False, 0), (128, 15, 0, True, 1), (302, 0, 3, False, 1),
    (298, 0, 3, False, 0),
])
def test_case_J3_needed_in_one_step(make: Make, prompt: int, generated: int | None, draft: int, two_steps: bool, blocks: int) -> None:
    cache = make(80, layers=[attention(512)], tokens_per_block=16, max_seq_len=2048)
    request = Request(0, list(range(prompt)), max_new_tokens=500, num_draft_tokens=draft)
    if generated is None:
        assert cache.manager.needed_blocks_one_step(request) == blocks
        return
    cache.manager.add_sequence(request)
    cache.manager.mark_computed(0, prompt)
    for token in range(generated):
        cache.manager.append_tokens(0, [token])
    assert cache.manager.needed_blocks_one_step(0, two_steps=two_steps) == blocks


# -- recurrent states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "beams", "blocks"), [(100, 1, 1), (96, 1, 1), (100, 3, 3), (96, 3, 1)])
def test_case_recurrent_layers_without_reuse_hold_one_block_or_one_for_each_beam(make: Make, prompt: int, beams: int, blocks: int) -> None:
    layer = LayerSpec.recurrent(state_bytes=4096, snapshot_interval=64)
    cache = make(24, layers=[layer], tokens_per_block=32, enable_block_reuse=False, max_beam_width=3, max_seq_len=512)
    cache.add(0, list(range(prompt)), beam_width=beams)
    assert cache.free() == 24 - blocks
    last = (prompt - 1) // 32
    rows = [cache.manager.block_ids(0, beam=beam) for beam in range(beams)]
    assert all(block_id < 0 for row in rows for block_id in row[:last])
    assert len({row[0] for row in rows}) == 1
    assert all(row[last] >= 0 for row in rows)
    cache.release(0)
    assert cache.free() == 24


def test_case_recurrent_layers_grow_with_their_last_block(make: Make) -> None:
    layer = LayerSpec.recurrent(state_bytes=4096, snapshot_interval=64)
    cache = make(24, layers=[layer], tokens_per_block=32, enable_block_reuse=False, max_seq_len=512)
    cache.add(0, list(range(60)))
    cache.append(0, *range(100))
    ids = cache.manager.block_ids(0)
    assert [block_id >= 0 for block_id in ids] == [False] * 4 + [True]


def test_case_recurrent_layers_with_reuse_match_down_to_a_snapshot(make: Make) -> None:
    layer = LayerSpec.recurrent(state_bytes=4096, snapshot_interval=64)
    cache = make(24, layers=[attention(), layer], tokens_per_block=32, max_seq_len=512)
    prompt = list(range(163))
    cache.add(0, prompt)
    assert [position for position, block_id in enumerate(cache.manager.block_ids(0, group=1)) if block_id >= 0] == [1, 3, 4, 5]
    cache.release(0)
    for number, (length, reused) in enumerate(((163, 160), (160, 128), (129, 128), (128, 64), (65, 64), (64, 0)), 1):
        assert cache.add(number, prompt[:length]) == reused
        cache.drop(number)
    assert (cache.free(0), cache.free(1)) == (24, 24)
