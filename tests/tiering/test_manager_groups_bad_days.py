"""Several groups when files, copies or room fail: a prefix falls back in all groups together, and nobody reads a wrong byte."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
from group_engine import LAYOUTS, GroupEngine
from toy_engine import PROMPT, MakeCache, flip_stored_bit, tokens_of

from kvtier import CapacityError, KVCacheManager, Request, RequestError
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults

pytestmark = [pytest.mark.usefixtures("no_failed_callbacks"), pytest.mark.timeout(60)]

READ, COPY = FaultOperation.READ, FaultOperation.COPY
EVERY_GROUP = [pytest.param(name, group.number, id=f"{name}: {group.kind} {group.number}") for name, layout in LAYOUTS.items()
               for group in layout.groups if group.kind != "cross"]


def stored_before(make_cache: MakeCache, name: str, *prompts: list[int]) -> None:
    """A cache of this layout had these prompts, and left them on NVMe."""
    cache = make_cache(16, 8, 32, layout=LAYOUTS[name])
    engine = GroupEngine(cache)
    for number, prompt in enumerate(prompts):
        engine.serve(engine.request(number, prompt))
    assert cache.flush()
    cache.close()


# -- a file --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "group"), EVERY_GROUP)
@pytest.mark.parametrize("number", [0, 2], ids=["first block", "third block"])
def test_a_damaged_block_of_one_group_shortens_the_prefix_in_all(make_cache: MakeCache, store_directory: Any, name: str, group: int,
                                                                 number: int) -> None:
    layout = LAYOUTS[name]
    stored_before(make_cache, name, PROMPT)
    cache = make_cache(16, 8, 32, layout=layout)
    engine = GroupEngine(cache)
    request = engine.request(1, PROMPT)
    hashes = block_keys(cache, request)
    slots = [row.slot for row in cache.store.stored_blocks() if (row.group, row.key) == (group, hashes[number])]
    if not slots:
        return  # a state that is not kept
    flip_stored_bit(store_directory, layout, slots[0], group=group)
    admission = engine.admit(request)[0]
    assert admission.prepopulated_tokens == 12
    valid = engine.learn(1)
    stats = cache.stats()
    spec = layout.groups[group]
    is_read = number == 2 if spec.kind == "recurrent" else (
        spec.window is None or number < spec.sinks // 4 or number >= (12 - spec.window + spec.sinks) // 4)
    if is_read:
        assert (stats.checksum_failures, stats.quarantined) == (1, 1)
        assert stats.lost >= 1, "the block, and what was to be copied from it"
        assert valid <= 4 * number
        for found in layout.groups:
            ids = cache.block_ids(1, group=found.number)
            if found.kind in ("attention", "mla"):
                assert len(ids) == 4 + found.sink_bubble // 4
                assert all(cache.block(block_id, group=found.number).ref_count == 1 for block_id in ids[valid // 4:]), "none is shared"
    else:
        assert (stats.checksum_failures, stats.lost, stats.quarantined, valid) == (0, 0, 0, 12)
    for _ in range(3):
        assert engine.forward([1]) == [1]
        engine.sample(1)
    engine.remove(1)
    cache.verify()
    assert cache.stats().hit_tokens.nvme == valid
    assert engine.serve(engine.request(2, PROMPT)) == 12, "computed again and stored"
    assert [found.nvme.busy_blocks for found in cache.stats().groups] == [int(is_read and found.number == group) for found in layout.groups]


def block_keys(cache: KVCacheManager, request: Request) -> list[bytes]:
    """Chain keys of a prompt's full blocks."""
    cache.add_sequence(Request(999, memoryview(request.token_bytes).cast("i"), encoder_length=request.encoder_length,
                               encoder_digest=request.encoder_digest, skip_read=True, skip_write=True))
    found = cache.block_hashes(999)
    cache.remove_sequence(999, store=False)
    return found


@pytest.mark.parametrize("name", list(LAYOUTS))
@pytest.mark.parametrize("operation", [READ, COPY])
def test_no_wrong_byte_while_reads_and_copies_fail(make_cache: MakeCache, name: str, operation: FaultOperation) -> None:
    rules = [FaultRule(FaultKind.FAILURE, operation, rate=0.2)]
    if operation is READ:
        rules.append(FaultRule(FaultKind.BIT_FLIP, READ, rate=0.2))
    cache = make_cache(8, 4, 64, layout=LAYOUTS[name], faults=Faults(rules))
    engine = GroupEngine(cache)
    generator = random.Random(name)
    for number in range(60):
        stats = cache.stats()
        if number >= 15 and stats.transfer_failures > 0 and sum(stats.hit_tokens) > 0:
            break
        prompt = [*tokens_of(generator.randrange(5), generator.randrange(3, 18)), generator.randrange(3)]
        engine.admit(engine.request(number, prompt))
        for _ in range(generator.randrange(1, 6)):
            go_on(engine, number)
        engine.remove(number)
        cache.verify()
        cache.refresh()
    stats = cache.stats()
    assert stats.transfer_failures > 0
    assert sum(stats.hit_tokens) > 0
    assert cache.transfers.idle(10)
    assert all(group.primary.free_blocks == 8 for group in cache.stats().groups)


def go_on(engine: GroupEngine, request_id: int) -> None:
    """One step and one more token, however often something fails meanwhile."""
    for _ in range(50):
        engine.learn(request_id)
        if engine.forward([request_id]):
            break
    with suppress(RequestError):  # a copy failed just now: the engine has to ask first
        engine.sample(request_id)


# -- room ----------------------------------------------------------------------------------------------------------------------


def picture(cache: KVCacheManager, ids: list[int]) -> object:
    """What a refused call must leave as it was."""
    cache.verify()
    assert cache.transfers.idle(10)
    groups = range(len(cache.layout.groups))
    stats = cache.stats()
    blocks = [[cache.block(number, group=found.group) for number in range(found.primary.max_blocks + found.secondary.max_blocks)]
              for found in stats.groups]
    return stats, blocks, [[cache.block_ids(request_id, group=group) for group in groups] for request_id in ids]


@pytest.mark.parametrize("short", [0, 1, 2])
def test_a_shortage_names_the_group_that_has_too_little(make_cache: MakeCache, short: int) -> None:
    primary = ["16 blocks"] * 3
    primary[short] = "5 blocks"
    cache = make_cache(layout=LAYOUTS["states and a window"], primary=primary, secondary=["2 blocks"] * 3)
    engine = GroupEngine(cache)
    engine.serve(engine.request(0, tokens_of(5, 9)))
    engine.admit(engine.request(1, tokens_of(1, 17)))
    engine.learn(1)
    engine.forward([1])
    before = picture(cache, [1])
    needed = 5
    with pytest.raises(CapacityError, match=f"requests .2.: {needed} primary blocks of group {short} needed, .* of 5; pre-empt") as caught:
        cache.add_sequences([engine.request(2, tokens_of(2, 17))])
    assert list(caught.value.preempt) == [1]
    assert picture(cache, [1]) == before
    with pytest.raises(CapacityError, match=f"group {short} needed"):
        cache.add_sequences([engine.request(3, tokens_of(3, 3)), engine.request(4, tokens_of(4, 21))])
    assert picture(cache, [1]) == before
    engine.remove(1)
    engine.serve(engine.request(2, tokens_of(2, 17)))


def test_a_step_that_one_group_has_no_block_for_appends_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(layout=LAYOUTS["window and full"], primary=["12 blocks", "4 blocks"], secondary="0 blocks")
    engine = GroupEngine(cache)
    engine.admit(engine.request(1, tokens_of(1, 8)), engine.request(2, tokens_of(2, 8)))
    for number in (1, 2):
        engine.learn(number)
    engine.forward([1, 2])
    before = picture(cache, [1, 2])
    with pytest.raises(CapacityError, match=r"2 primary blocks of group 1 needed, 0 available of 4; pre-empt requests \[2\]"):
        cache.append_step([1, 2], [[5], [6]])
    assert picture(cache, [1, 2]) == before
    engine.remove(2)
    engine.sample(1)
    engine.forward([1])
