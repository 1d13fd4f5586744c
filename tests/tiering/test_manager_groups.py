"""Several groups of layers with real bytes: whatever a token may attend to is right, wherever it has been meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from group_engine import DIGEST, LAYOUTS, GroupEngine
from toy_engine import OTHER, PROMPT, MakeCache, tokens_of

from kvtier import KVCacheManager, Level, Request, RequestError, UnknownBlock
from kvtier.pools.block_sections import INDEXER, KEYS, KV, SCALES, STATE, VALUES

pytestmark = [pytest.mark.usefixtures("no_failed_callbacks"), pytest.mark.timeout(60)]

EVERY_LAYOUT = pytest.mark.parametrize("name", list(LAYOUTS))


@pytest.fixture
def make_groups(make_cache: MakeCache) -> Callable[..., tuple[KVCacheManager, GroupEngine]]:
    """``make_groups(name of a layout, primary, secondary, nvme)``: a cache and its engine."""
    def make(name: str, primary: int = 8, secondary: int = 4, nvme: int = 24, **settings: Any) -> tuple[KVCacheManager, GroupEngine]:
        cache = make_cache(primary, secondary, nvme, layout=LAYOUTS[name], **settings)
        return cache, GroupEngine(cache)
    return make


MakeGroups = Callable[..., tuple[KVCacheManager, GroupEngine]]


def is_everything_free(cache: KVCacheManager) -> bool:
    stats = cache.stats()
    return (stats.sequences, stats.leases) == (0, 0) and all(
        (group.primary.free_blocks, group.primary.used_blocks) == (group.primary.max_blocks, 0) for group in stats.groups)


# -- bytes -------------------------------------------------------------------------------------------------------------------


@EVERY_LAYOUT
def test_a_prompt_seen_before_is_reused_with_the_right_bytes(make_groups: MakeGroups, name: str) -> None:
    cache, engine = make_groups(name)
    assert engine.serve(engine.request(1, PROMPT), answer=5) == 0
    assert engine.serve(engine.request(2, PROMPT), answer=5) == 12
    assert engine.serve(engine.request(3, [*PROMPT[:8], 1, 2, 3]), answer=9) == 8
    assert engine.serve(engine.request(4, OTHER)) == 0
    assert is_everything_free(cache)


@EVERY_LAYOUT
def test_the_first_tokens_of_a_block_are_reused_unless_the_model_has_a_state(make_groups: MakeGroups, name: str) -> None:
    _cache, engine = make_groups(name)
    engine.serve(engine.request(1, PROMPT))
    assert engine.serve(engine.request(2, [*PROMPT[:10], 7, 8, 9])) == (8 if "state" in name else 10)


@EVERY_LAYOUT
def test_bytes_survive_every_way_through_the_levels(make_groups: MakeGroups, name: str) -> None:
    cache, engine = make_groups(name)
    generator = random.Random(name)
    seen: list[list[int]] = []

    def fewest_hits_first(prompt: list[int]) -> tuple[int, ...]:
        """Tokens it would have from the level that has served least until now, then from the next: what lies where is the disk's doing."""
        there, served = cache.match(engine.request(999, prompt)).tokens_by_level, cache.stats().hit_tokens
        return tuple(there[level] for level in sorted(Level, key=lambda level: served[level]))

    for number in range(60):
        if number >= 20 and min(cache.stats().hit_tokens) > 0:
            break
        if number % 3 == 2:
            prompt = max(seen, key=fewest_hits_first)
        else:
            prompt = [*tokens_of(generator.randrange(6), generator.randrange(3, 18)), generator.randrange(3)]
            seen.append(prompt)
        engine.serve(engine.request(number, prompt), answer=generator.randrange(6), chunk=generator.choice([None, 3]))
    stats = cache.stats()
    assert min(stats.hit_tokens) > 0, "blocks came back from each level"
    assert (stats.lost, stats.checksum_failures, stats.transfer_failures) == (0, 0, 0)
    assert engine.checked > 500
    assert is_everything_free(cache)


@EVERY_LAYOUT
def test_a_batch_shares_what_it_has_in_common(make_groups: MakeGroups, name: str) -> None:
    cache, engine = make_groups(name, 24)
    engine.serve(engine.request(1, PROMPT))
    engine.admit(*[engine.request(number, [*PROMPT[:8], number, 5, 6]) for number in range(3)], engine.request(9, PROMPT))
    assert [engine.learn(number) for number in (0, 1, 2, 9)] == [8, 8, 8, 12]
    for _ in range(9):
        assert engine.forward([0, 1, 2, 9]) == [0, 1, 2, 9]
        for number in (0, 1, 2, 9):
            engine.sample(number)
    for number in (0, 1, 2, 9):
        engine.remove(number)
    cache.verify()
    assert is_everything_free(cache)


@EVERY_LAYOUT
def test_a_restart_finds_what_every_group_has_on_nvme(make_groups: MakeGroups, name: str) -> None:
    cache, engine = make_groups(name)
    engine.serve(engine.request(1, PROMPT))
    engine.serve(engine.request(2, OTHER), answer=7)
    assert cache.flush()
    stored = cache.stats().nvme.evictable_blocks + cache.stats().nvme.backing_blocks
    cache.close()
    cache, engine = make_groups(name, 16)
    assert cache.stats().nvme.evictable_blocks == stored
    assert cache.match(engine.request(1, PROMPT)).tokens_by_level == (0, 0, 12)
    assert engine.serve(engine.request(1, PROMPT), answer=9) == 12
    assert engine.serve(engine.request(2, OTHER)) == 12
    assert engine.serve(engine.request(3, PROMPT)) == 12
    stats = cache.stats()
    assert stats.hit_tokens.nvme == 24
    assert (stats.lost, stats.checksum_failures) == (0, 0)


@EVERY_LAYOUT
def test_only_what_is_still_read_comes_back_from_nvme(make_groups: MakeGroups, name: str) -> None:
    cache, engine = make_groups(name)
    engine.serve(engine.request(1, tokens_of(1, 25)))
    assert cache.flush()
    cache.close()
    cache, engine = make_groups(name)
    assert engine.serve(engine.request(1, tokens_of(1, 25))) == 24
    brought = cache.stats().onboard_blocks[Level.NVME, Level.PRIMARY]
    expected = 0
    for group in cache.layout.groups:
        if group.kind == "recurrent":
            expected += 1
        elif group.window is not None:
            expected += group.sinks // 4 + 6 - (24 - (group.window - group.sinks)) // 4
        elif group.kind != "cross":
            expected += 6
    assert brought == expected


def test_another_encoder_input_is_another_prompt(make_groups: MakeGroups) -> None:
    _cache, engine = make_groups("encoder")
    assert engine.serve(engine.request(1, PROMPT)) == 0
    assert engine.serve(engine.request(2, PROMPT, encoder_digest=b"\x02" * 32)) == 0
    assert engine.serve(engine.request(3, PROMPT)) == 12
    assert engine.serve(engine.request(4, PROMPT, encoder_digest=None)) == 0


def test_the_parts_of_a_block_are_all_looked_at() -> None:
    """The engine compares every section that the layouts of these tests have."""
    sections = {section.name for layout in LAYOUTS.values() for group in layout.groups for section in group.sections}
    assert sections == {KV, KEYS, VALUES, STATE, SCALES, INDEXER}


# -- beams -------------------------------------------------------------------------------------------------------------------


@EVERY_LAYOUT
@pytest.mark.parametrize("length", [8, 10])
def test_beams_read_what_their_parents_wrote(make_groups: MakeGroups, name: str, length: int) -> None:
    cache, engine = make_groups(name, 40, max_beam_width=3)
    generator = random.Random(length)
    for round_number in range(2):
        engine.admit(engine.request(1, tokens_of(1, length), beam_width=3), engine.request(2, tokens_of(2, 5)))
        valid = engine.learn(1)
        assert valid == 8 * round_number or length == 8, "of an unfilled last block each beam has its own"
        engine.learn(2)
        for _ in range(8):
            assert engine.forward([1, 2]) == [1, 2]
            engine.sample(1)
            engine.sample(2)
            assert engine.forward([2, 1]) == [2, 1]
            if generator.random() < 0.7:
                engine.reorder(1, [generator.randrange(3) for _ in range(3)])
            cache.verify()
        for group in cache.layout.groups:
            num_blocks = 2 if group.kind == "cross" else (length + 11) // 4
            assert [len(cache.block_ids(1, beam, group.number)) for beam in range(3)] == [num_blocks] * 3
        engine.remove(1)
        engine.remove(2)
    assert is_everything_free(cache)


def test_block_hashes_of_beams_are_those_of_the_prompt_they_share(make_groups: MakeGroups) -> None:
    cache, engine = make_groups("window and full", 40, nvme=0, max_beam_width=2)
    engine.admit(engine.request(1, tokens_of(1, 7), beam_width=2))
    hashes = cache.block_hashes(1)
    assert len(hashes) == 1
    engine.forward([1])
    for token in range(10, 19):
        cache.append_tokens(1, [token, token + 100])
        cache.reorder_beams(1, [1, 0])
    assert cache.block_hashes(1) == hashes, "no beam's text is the one that was appended first each time"


def test_the_ids_of_blocks_that_have_left_the_window_follow_their_beam(make_groups: MakeGroups) -> None:
    cache, engine = make_groups("window and full", 40, nvme=0, max_beam_width=2)
    engine.admit(engine.request(1, tokens_of(1, 8), beam_width=2))
    for _ in range(12):
        engine.forward([1])
        engine.sample(1)
    first, second = cache.block_ids(1, beam=0), cache.block_ids(1, beam=1)
    assert (cache.block_table([1]).numpy()[:, 0, 2] == -1).all(), "the beams' first blocks of their own have left"
    assert first[2] != second[2]
    engine.reorder(1, [1, 0])
    assert (cache.block_ids(1, beam=0), cache.block_ids(1, beam=1)) == (second, first)
    engine.reorder(1, [1, 1])
    assert (cache.block_ids(1, beam=0), cache.block_ids(1, beam=1)) == (first, first)


def test_a_block_of_a_later_beam_can_be_written_by_tools(make_groups: MakeGroups) -> None:
    cache, engine = make_groups("window and full", 24, max_beam_width=2)
    engine.admit(engine.request(1, tokens_of(1, 6), beam_width=2))
    engine.learn(1)
    engine.forward([1])
    engine.sample(1)
    for group in cache.layout.groups:
        block_id = cache.block_ids(1, beam=1, group=group.number)[-1]
        content = np.random.default_rng(1).bytes(group.block_bytes)
        cache.write_block(block_id, content, group=group.number)
        assert cache.read_block(block_id, group=group.number) == content
        assert cache.block_ids(1, beam=1, group=group.number)[-1] == block_id
    cache.verify()


# -- windows and states as the public names show them --------------------------------------------------------------------------


def test_a_block_that_has_left_the_window_is_null_in_the_table_and_keeps_its_place_in_the_ids(make_groups: MakeGroups) -> None:
    cache, engine = make_groups("window and full", 24)
    engine.admit(engine.request(1, PROMPT))
    engine.learn(1)
    engine.forward([1])
    before = cache.block_ids(1, group=0)
    free = cache.num_free_blocks(Level.PRIMARY, group=0)
    engine.sample(1)
    table = cache.block_table([1], group=0).numpy()
    assert (table[0, :, 0] == -1).all()
    assert (table[0, :, 1:4] >= 0).all()
    assert cache.block_ids(1, group=0)[:4] == before
    assert cache.num_free_blocks(Level.PRIMARY, group=0) == free + 1
    assert (cache.block_table([1], group=1).numpy()[0, :, :4] >= 0).all(), "full attention keeps everything"


def test_table_entries_count_in_the_pages_of_their_group(make_groups: MakeGroups) -> None:
    """A kernel reads page ``entry + layer * table_factor`` of ``key_pages`` and ``value_pages``."""
    for name in ("window and full", "values of another width", "mla"):
        cache, engine = make_groups(name, 12, nvme=0)
        engine.admit(engine.request(1, PROMPT))
        engine.learn(1)
        engine.forward([1])
        for group in cache.layout.groups:
            table = cache.block_table([1], group=group.number).numpy()[0]
            primary = cache.pool(group.number).primary
            for position in range(group.num_layers):
                keys, values = primary.key_buffer(position), primary.value_buffer(position)
                for block_id, (key, value) in zip(cache.block_ids(1, group=group.number), table[:, :4].T.tolist(), strict=True):
                    slot = cache.block(block_id, group=group.number).slot
                    layer = position * group.table_factor
                    assert primary.key_pages[key + layer].data_ptr() == keys[slot].data_ptr()
                    assert primary.value_pages[value + layer].data_ptr() == values[slot].data_ptr()
        engine.remove(1)


def test_a_rewind_takes_drafts_back_in_every_group(make_groups: MakeGroups) -> None:
    cache, engine = make_groups("window and full", 24)
    engine.admit(engine.request(1, PROMPT))
    engine.learn(1)
    for _ in range(5):
        engine.forward([1])
        engine.sample(1)
    engine.rewind(1, 2)
    engine.forward([1])
    engine.sample(1)
    engine.forward([1])
    engine.remove(1)
    cache.verify()
    _cache, engine = make_groups("states", 24, nvme=0)
    engine.admit(engine.request(1, PROMPT))
    engine.learn(1)
    engine.forward([1])
    engine.sample(1)
    with pytest.raises(RequestError, match="group 1 keeps one running state"):
        engine.rewind(1, 1)


# -- every name that takes a group -----------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[KVCacheManager, int], object]] = {
    "block_table": lambda cache, group: cache.block_table([1], group=group),
    "pool": lambda cache, group: cache.pool(group),
    "block_ids": lambda cache, group: cache.block_ids(1, group=group),
    "block": lambda cache, group: cache.block(0, group=group),
    "needed_blocks_one_step": lambda cache, group: cache.needed_blocks_one_step(1, group=group),
    "remaining_blocks_to_completion": lambda cache, group: cache.remaining_blocks_to_completion(1, group=group),
    "scheduling_remove_sequence": lambda cache, group: cache.scheduling_remove_sequence(1, group=group),
    "num_schedulable_blocks": lambda cache, group: cache.num_schedulable_blocks(group=group),
    "request_block_budget": lambda cache, group: cache.request_block_budget(1, group=group),
    "num_free_blocks": lambda cache, group: cache.num_free_blocks(Level.PRIMARY, group=group),
    "read_block": lambda cache, group: cache.read_block(0, group=group),
    "write_block": lambda cache, group: cache.write_block(cache.block_ids(1, group=group)[-1],
                                                          bytes(cache.layout.groups[group].block_bytes), group=group),
    "set_priority": lambda cache, group: cache.set_priority(_stored(cache, group), 50, group=group),
    "offload": lambda cache, group: cache.offload(_stored(cache, group), group=group),
    "onboard": lambda cache, group: cache.onboard(_stored(cache, group), group=group),
    "lease.block_ids_of": lambda cache, group: _pinned(cache, group),
}


def _stored(cache: KVCacheManager, group: int) -> int:
    """An unreferenced block with content. Of a group that there is not: any number."""
    if group not in range(len(cache.layout.groups)) or isinstance(group, bool):
        return 0
    views = [cache.block(number, group=group) for number in range(16)]
    return next(view.id for view in views if view.tokens and not view.ref_count)


def _pinned(cache: KVCacheManager, group: int) -> list[int]:
    with cache.pin(1) as lease:
        return lease.block_ids_of(group)


@pytest.mark.parametrize("call", list(CALLS))
def test_names_that_take_a_group_take_each_that_there_is_and_no_other(make_groups: MakeGroups, call: str) -> None:
    cache, engine = make_groups("states and a window", 16)
    engine.serve(engine.request(0, OTHER))
    engine.admit(engine.request(1, PROMPT))
    engine.learn(1)
    engine.forward([1])
    for group in range(3):
        CALLS[call](cache, group)
        cache.verify()
    assert cache.transfers.idle(10)
    before = cache.stats()
    for group in (3, -1, True, "0", 1.0, None):
        with pytest.raises(RequestError, match=r"group=.*: this layout has groups 0\.\.2"):
            CALLS[call](cache, group)  # type: ignore[arg-type]
    assert cache.stats() == before
    cache.verify()


def test_block_ids_are_a_groups_own(make_groups: MakeGroups) -> None:
    cache, engine = make_groups("states and a window", 16)
    engine.serve(engine.request(1, PROMPT))
    for group, tokens in ((0, PROMPT[:4]), (1, PROMPT[:4]), (2, PROMPT[:4])):
        assert cache.block(cache.layout.groups[group].number, group=group).id == group
        found = [view for view in (cache.block(number, group=group) for number in range(44)) if view.tokens == tuple(tokens)]
        assert len(found) == 1, f"group {group} has its own block of these tokens"
        assert found[0].is_full
        assert len(cache.read_block(found[0].id, group=group)) == cache.layout.groups[group].block_bytes
    with pytest.raises(UnknownBlock, match=r"group 2 has blocks 0\.\.43"):
        cache.block(44, group=2)


def test_tools_read_the_same_bytes_on_each_level_of_each_group(make_groups: MakeGroups) -> None:
    for name, layout in LAYOUTS.items():
        cache, engine = make_groups(name, 8, 4, 0)
        engine.serve(engine.request(1, PROMPT))
        for group in layout.groups:
            if group.kind == "cross":
                continue
            block_id = next(view.id for view in (cache.block(number, group=group.number) for number in range(8)) if view.is_full)
            before = cache.read_block(block_id, group=group.number)
            assert len(before) == group.block_bytes
            cache.offload(block_id, group=group.number)
            assert cache.block(block_id, group=group.number).level is Level.SECONDARY
            assert cache.read_block(block_id, group=group.number) == before
            cache.onboard(block_id, group=group.number)
            assert cache.read_block(block_id, group=group.number) == before
        cache.verify()


# -- refused -----------------------------------------------------------------------------------------------------------------


def test_an_encoder_longer_than_a_block_table_row_is_refused_when_it_is_added(make_groups: MakeGroups) -> None:
    cache, engine = make_groups("encoder", 16, max_seq_len=16)
    with pytest.raises(RequestError, match="request 1: encoder_length=17; max_seq_len is 16"):
        cache.add_sequence(Request(1, [1, 2, 3], encoder_length=17, encoder_digest=DIGEST))
    engine.serve(engine.request(2, PROMPT, encoder_length=16))
    assert is_everything_free(cache)


