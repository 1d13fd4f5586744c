"""Warm start: what a store directory holds already is matched by content (design: NVMe rules)."""

from __future__ import annotations

import hashlib

import pytest
from hand_run import LAST, HandRun, ends, level, on_nvme, on_secondary, place, words

from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, slot_of
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.events import Stored
from kvtier.tiering.ledger.key import Namespace, TokenKeys, next_chain_key
from kvtier.tiering.ledger.moves import Discard, WarmRow
from kvtier.tiering.ledger.request import MultimodalItem
from kvtier.tiering.ledger.truncating import truncate


def chain_keys(run: HandRun, letters: str, **keywords: object) -> list[bytes]:
    """What another process would have named these blocks."""
    request = run.request(letters, **keywords)
    keys = TokenKeys(request, 4)
    parent = Namespace(b"", request).chain_seed
    found = []
    for number in range(len(letters)):
        parent = next_chain_key(parent, keys.block_key(number, 4))
        found.append(parent)
    return found


def warm_rows(letters: str, **keywords: object) -> list[WarmRow]:
    return [WarmRow(0, slot, key) for slot, key in enumerate(chain_keys(HandRun(1), letters, **keywords))]


def expect_on_nvme(run: HandRun, letters: str, **keywords: object) -> None:
    """Pretend that an earlier process served this prompt: its bytes are there, and its blocks count as ever stored."""
    request = run.request(letters, **keywords)
    other = HandRun(len(letters) + 1)
    other.driver.add(request)
    cells = other.driver.lives[request.id].beams[0]
    run.driver.ever_stored.update(cells[:-1])
    for slot in range(len(letters)):
        run.tier.cells[NVME, slot] = cells[slot * 4:slot * 4 + 4]


def test_a_warm_start_adopts_what_nvme_holds_with_the_requests_own_tokens() -> None:
    run = HandRun(4, 2, 4, warm=warm_rows("abc"))
    expect_on_nvme(run, "abc")
    assert len(run.content(NVME)) == 3
    keys = [row.key for row in warm_rows("abc")]
    run.driver.events.consume()
    sequence = run.add("abz")
    assert sequence.prepopulated == 8
    assert [run.key(block) for block in sequence.blocks[:2]] == keys[:2]
    assert [ends(move) for move in run.moves()] == [(NVME, PRIMARY)] * 2
    [stored, *_updates] = run.events()
    assert isinstance(stored, Stored)
    assert [block.tokens for block in stored.blocks] == [tuple(words("a")), tuple(words("b"))]
    assert [block.level for block in stored.blocks] == [NVME, NVME]
    assert set(run.ledger.allocators[0].warm) == {keys[2]}, "what was not asked for waits on"
    assert run.compute(sequence)
    assert run.ledger.counters.hit_tokens == [0, 0, 8]
    run.finish()


def test_a_warm_block_is_adopted_behind_blocks_that_the_tree_holds() -> None:
    run = HandRun(6, 2, 4, warm=[WarmRow(0, 1, warm_rows("ab")[1].key)])
    expect_on_nvme(run, "ab")
    assert run.add("ab").prepopulated == 0, "its predecessor is missing"
    run.remove(run.ledger.sequence(max(run.ledger.sequences)), store=False)
    run.serve("a")
    sequence = run.add("ab")
    assert sequence.prepopulated == 8
    assert run.compute(sequence)
    run.finish()


def test_other_tokens_never_adopt_a_warm_block() -> None:
    run = HandRun(4, 2, 4, warm=warm_rows("a"))
    expect_on_nvme(run, "a")
    for tokens in ([*words("a")[:3], 5, LAST], [*words("b"), LAST]):
        sequence = run.add(tokens)
        assert sequence.prepopulated == 0
        run.remove(sequence, store=False)
    assert run.add("a", cache_salt="tenant").prepopulated == 0
    assert len(run.ledger.allocators[0].warm) == 1
    run.finish()


def test_a_multimodal_block_is_adopted_only_by_the_same_content() -> None:
    def item(name: bytes) -> list[MultimodalItem]:
        return [MultimodalItem(hashlib.sha256(name).digest(), [(1, 2)])]
    run = HandRun(6, 2, 4, warm=warm_rows("a", multimodal=item(b"cat")))
    expect_on_nvme(run, "a", multimodal=item(b"cat"))
    assert run.add("a", multimodal=item(b"dog")).prepopulated == 0
    assert run.add("a").prepopulated == 0
    sequence = run.add("a", multimodal=item(b"cat"))
    assert sequence.prepopulated == 4
    assert run.compute(sequence)
    run.finish()


@pytest.mark.parametrize(("keywords", "digests"), [
    ({"lora_id": 3}, {"lora_digest": b"\x05" * 32}),
    ({"extra_ids": [1] * 5}, {"extra_ids_digest": b"\x06" * 32}),
])
def test_a_namespace_that_is_not_persistent_neither_adopts_nor_writes(keywords: dict[str, object], digests: dict[str, object]) -> None:
    run = HandRun(4, 2, 4, warm=warm_rows("a", **keywords))
    expect_on_nvme(run, "a", **keywords)
    sequence = run.add("a", **keywords)
    assert sequence.prepopulated == 0
    assert capacity.match(run.ledger, run.request("a", **keywords)).reusable_blocks == 0
    assert len(run.ledger.allocators[0].warm) == 1
    assert run.compute(sequence)
    run.remove(sequence)
    block = sequence.blocks[0]
    assert block.node is not None
    run.ledger.write_everything_out()
    run.offload(block)
    run.settle()
    run.refresh()
    run.ledger.write_everything_out()
    run.note()
    assert level(block) == SECONDARY
    assert not any(NVME in ends(move) for move in run.moves())

    named = HandRun(4, 2, 4, warm=warm_rows("a", **keywords, **digests))
    expect_on_nvme(named, "a", **keywords, **digests)
    sequence = named.add("a", **keywords, **digests)
    assert sequence.prepopulated == 4, "with a stable digest it persists"
    assert named.compute(sequence)
    named.finish()
    run.finish()


def test_a_second_warm_row_of_the_same_key_is_discarded() -> None:
    [row] = warm_rows("a")
    run = HandRun(4, 2, 4, warm=[row, WarmRow(0, 3, row.key)])
    assert [record.slot for record in run.tier.waiting if isinstance(record, Discard)] == [3]
    assert len(run.content(NVME)) == 1
    run.finish()


def test_warm_rows_are_given_up_least_used_first() -> None:
    rows = [WarmRow(0, slot, key, hits=hits) for slot, (key, hits) in enumerate(zip(chain_keys(HandRun(1), "abc"), (5, 1, 3), strict=True))]
    run = HandRun(4, 2, 3, warm=rows)
    assert [place(block)[1] for block in run.content(NVME)] == [1, 2, 0]
    run.finish()


def test_a_warm_block_keeps_its_priority() -> None:
    [row] = warm_rows("a")
    run = HandRun(4, 2, 4, warm=[WarmRow(0, 0, row.key, 80)])
    expect_on_nvme(run, "a")
    sequence = run.add("a")
    assert sequence.blocks[0].priority == 80
    run.finish()


def test_a_slot_quarantined_earlier_is_never_used() -> None:
    run = HandRun(4, 1, 2, quarantined=[0])
    assert run.free(NVME) == 1
    for letter in "abcd":
        on_secondary(run, letter)
        run.refresh()
        run.settle()
    written = {slot_of(move.destination) for move in run.moves() if ends(move) == (SECONDARY, NVME)}
    assert written == {1}
    run.finish()


def test_truncate_forgets_warm_blocks_behind_the_kept_part_and_deletes_their_rows() -> None:
    rows = warm_rows("abc")
    run = HandRun(4, 2, 4, warm=rows)
    assert truncate(run.ledger, run.request("abc"), 4) == 2
    run.settle()
    assert set(run.ledger.allocators[0].warm) == {rows[0].key}
    assert run.tier.rows == {0: rows[0].key}
    run.finish()


@pytest.mark.parametrize("is_backing", [False, True])
def test_a_block_forgotten_while_a_tool_reads_its_slot_loses_its_row_when_the_tool_is_done(is_backing: bool) -> None:
    run = HandRun(4, 2, 4)
    [block] = on_nvme(run, "a")
    slot = slot_of(block.index)
    if is_backing:
        run.serve("a")
    allocator = run.ledger.allocators[0]
    allocator.begin_access(allocator.holders[NVME][slot])
    truncate(run.ledger, run.request("a"), 0)
    run.settle()
    assert slot in run.tier.rows, "or the tool would take the slot for a bad one"
    allocator.end_access(NVME, slot)
    run.settle()
    assert run.tier.rows == {}
    run.finish()
