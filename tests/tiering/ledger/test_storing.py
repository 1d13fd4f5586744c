"""Storing for several groups: one walk, one place per block, one handle per group (design: groups; warm start)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.pools.pool_index import NVME, PRIMARY, level_of, pool_index
from kvtier.tiering.ledger import storing as storing_module
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.events import Removed, Stored
from kvtier.tiering.ledger.group import CROSS, FULL, RECURRENT, WINDOW, GroupSpec
from kvtier.tiering.ledger.key import Namespace, TokenKeys, next_chain_key
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.request import MultimodalItem, Request
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.sequence import ActiveSequence
from kvtier.tiering.ledger.storing import adopt_warm_blocks, store_blocks, storing_order, warm_prefix
from kvtier.types import BlockId

WIDTH = 2
PLACEHOLDER = Block(BlockId(-1), pool_index(PRIMARY, 0))
Specs = dict[str, Any]
FULL_GROUP: Specs = {"kind": FULL}
SMALL_WINDOW: Specs = {"kind": WINDOW, "window": 4}
LARGE_WINDOW: Specs = {"kind": WINDOW, "window": 8}
RECURRENT_GROUP: Specs = {"kind": RECURRENT, "snapshot_interval": 4}


class Shelf:
    """A ledger of several groups, and sequences whose rows are filled by hand: ``.`` is a placeholder, anything else a handle."""

    def __init__(self, *groups: Specs, nvme: int = 0) -> None:
        self.ledger = Ledger([GroupSpec((200, 0, nvme), **group) for group in groups], WIDTH, LedgerRules(max_events=1 << 20))
        self.ledger.events.flush()

    def sequence(self, tokens: list[int], *rows: str, **keywords: Any) -> ActiveSequence:
        request = Request(0, [*tokens, 99], **keywords)  # the newest token is never stored
        sequence = ActiveSequence(request, TokenKeys(request, WIDTH), Namespace(b"model", request), 0, len(self.ledger.groups))
        for group, row in enumerate(rows):
            for letter in row:
                block = PLACEHOLDER
                if letter != ".":
                    block = self.ledger.allocators[group].take(35, 0.0)
                    block.ref_count = 1
                sequence.rows[group].blocks.append(block)
            assert len(row) * WIDTH > len(tokens)
        sequence.computed = len(tokens)
        return sequence

    def store(self, sequence: ActiveSequence, with_partial: bool = True) -> None:
        ledger = self.ledger
        store_blocks(ledger.tree, ledger.allocators, ledger.groups, ledger.events, sequence, with_partial)

    def stored(self, tokens: list[int], *rows: str, with_partial: bool = True, **keywords: Any) -> ActiveSequence:
        sequence = self.sequence(tokens, *rows, **keywords)
        self.store(sequence, with_partial)
        return sequence

    def events(self) -> list[tuple[int, Any]]:
        return [(event.group, event.data) for event in self.ledger.events.flush()]

    def tokens_of_events(self) -> list[tuple[int, str, list[tuple[int, ...]]]]:
        return [(group, type(data).__name__, [block.tokens for block in data.blocks] if isinstance(data, Stored) else [])
                for group, data in self.events()]

    def find(self, tokens: list[int], group: int, **keywords: Any) -> list[Block | None]:
        request = Request(0, [*tokens, 99], **keywords)
        root = self.ledger.tree.find_root(Namespace(b"model", request))
        if root is None:
            return []
        walk = self.ledger.tree.walk(root, TokenKeys(request, WIDTH), len(tokens))
        return [value for node, count in zip(walk.nodes, walk.counts, strict=True) for value in node.values[group][:count]]


def test_full_attention_stores_first_then_windows_from_the_largest_down_and_cross_attention_never() -> None:
    shelf = Shelf(SMALL_WINDOW, {"kind": CROSS}, LARGE_WINDOW, RECURRENT_GROUP, FULL_GROUP)
    assert storing_order(shelf.ledger.groups) == [4, 2, 0, 3]
    sequence = shelf.stored([1, 2, 3, 4], "xxx", "xxx", "xxx", "xxx", "xxx")
    assert [(group, kind) for group, kind, _tokens in shelf.tokens_of_events()] == [(group, "Stored") for group in (4, 2, 0, 3)]
    assert shelf.find([1, 2, 3, 4], 1) == [None, None]
    for group in (0, 2, 3, 4):
        assert shelf.find([1, 2, 3, 4], group) == sequence.rows[group].blocks[:2]


def test_a_larger_window_s_stored_event_comes_before_a_smaller_one_s() -> None:
    shelf = Shelf(SMALL_WINDOW, LARGE_WINDOW)
    shelf.stored([1, 2, 3, 4], "xxx", "xxx")
    assert shelf.tokens_of_events() == [(1, "Stored", [(1, 2), (3, 4)]), (0, "Stored", [(1, 2), (3, 4)])]


def test_a_placeholder_leaves_a_hole_that_a_later_sequence_fills() -> None:
    shelf = Shelf(SMALL_WINDOW, FULL_GROUP)
    first = shelf.stored([1, 2, 3, 4, 5, 6], ".xxx", "xxxx")
    assert shelf.find([1, 2, 3, 4, 5, 6], 0) == [None, *first.rows[0].blocks[1:3]]
    full, window = shelf.events()
    assert [len(data.blocks) for _group, data in (full, window)] == [3, 2]
    assert window[1].parent_hash == full[1].blocks[0].block_hash, "the hash of the block before, though the group does not have it"
    second = shelf.stored([1, 2, 3, 4, 5, 6], "xxxx", "xxxx")
    assert shelf.find([1, 2, 3, 4, 5, 6], 0) == [second.rows[0].blocks[0], *first.rows[0].blocks[1:3]]
    assert shelf.find([1, 2, 3, 4, 5, 6], 1) == first.rows[1].blocks[:3]
    assert shelf.tokens_of_events() == [(0, "Stored", [(1, 2)])]
    assert all(block.node is None for block in second.rows[1].blocks), "its own duplicates stay out of the tree"


def test_a_gap_between_stored_blocks_parts_the_event() -> None:
    shelf = Shelf(SMALL_WINDOW)
    shelf.stored([1, 2, 3, 4, 5, 6, 7, 8, 9], "x.xxx")
    assert shelf.tokens_of_events() == [(0, "Stored", [(1, 2)]), (0, "Stored", [(5, 6), (7, 8), (9,)])]


def test_a_partial_tail_is_stored_in_every_group_that_has_a_handle_there() -> None:
    shelf = Shelf(SMALL_WINDOW, LARGE_WINDOW, FULL_GROUP)
    sequence = shelf.stored([1, 2, 3], "x.", "xx", "xx")
    assert shelf.tokens_of_events() == [(2, "Stored", [(1, 2), (3,)]), (1, "Stored", [(1, 2), (3,)]), (0, "Stored", [(1, 2)])]
    assert [sequence.rows[group].blocks[1].num_tokens for group in (1, 2)] == [1, 1]
    later = shelf.stored([1, 2, 3], "xx", "xx", "xx")
    assert shelf.tokens_of_events() == [(0, "Stored", [(3,)])], "another group still wanted the place of an equal tail"
    assert later.rows[0].blocks[1].node is sequence.rows[1].blocks[1].node


def test_a_running_state_stores_its_snapshots_and_nobody_a_partial_tail() -> None:
    shelf = Shelf(FULL_GROUP, RECURRENT_GROUP)
    sequence = shelf.stored([1, 2, 3, 4, 5, 6, 7, 8, 9], "xxxxx", ".x.xx")
    assert shelf.find([1, 2, 3, 4, 5, 6, 7, 8], 1) == [None, sequence.rows[1].blocks[1], None, sequence.rows[1].blocks[3]]
    assert shelf.tokens_of_events() == [(0, "Stored", [(1, 2), (3, 4), (5, 6), (7, 8)]), (1, "Stored", [(3, 4)]), (1, "Stored", [(7, 8)])]
    assert sequence.rows[0].blocks[4].node is None
    assert sequence.rows[1].blocks[4].node is None


@pytest.mark.parametrize("tokens", [[1, 2, 3, 4], [1, 2, 3, 4, 5], [1]])
def test_places_that_no_group_fills_are_not_left_behind(tokens: list[int]) -> None:
    shelf = Shelf(SMALL_WINDOW, LARGE_WINDOW)
    shelf.stored(tokens, "...", "...")
    assert shelf.ledger.tree.roots == {}
    shelf.stored(tokens, "x..", "...")
    assert shelf.ledger.tree.num_nodes() == 1
    assert len(shelf.events()) == 1


def test_a_handle_that_sits_elsewhere_is_removed_there_first() -> None:
    shelf = Shelf(FULL_GROUP, SMALL_WINDOW)
    first = shelf.stored([1, 2, 3, 4], "xxx", "xxx")
    removed = first.rows[0].blocks[1]
    assert removed.node is not None
    key = removed.node.chain_key(removed.position)
    shelf.events()
    second = shelf.sequence([1, 2, 7, 8], "xxx", "xxx")
    second.rows[0].blocks[1] = removed
    second.num_prefix_blocks = 2  # it was matched, and the tree has changed since
    shelf.store(second)
    events = shelf.events()
    assert events[0] == (0, Removed((key,)))
    assert [(group, type(data)) for group, data in events[1:]] == [(0, Stored), (1, Stored)]
    assert shelf.find([1, 2, 7, 8], 0)[1] is removed
    assert shelf.find([1, 2, 3, 4], 0) == [first.rows[0].blocks[0], None]


def test_multimodal_blocks_are_told_with_digest_and_offset() -> None:
    shelf = Shelf(FULL_GROUP)
    item = MultimodalItem(b"\x01" * 32, [(1, 4)])
    shelf.stored([1, 2, 3, 4, 5, 6, 7], "xxxx", multimodal=[item])
    ((_group, stored),) = shelf.events()
    assert [(block.tokens, block.multimodal) for block in stored.blocks] == [
        ((1, 2), ((b"\x01" * 32, 0),)), ((3, 4), ((b"\x01" * 32, 1),)), ((5, 6), ((b"\x01" * 32, 3),)), ((7,), ())]


# -- against a map from prefixes to handles -------------------------------------------------------------------------------

stored_prompts = st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=9), st.lists(st.booleans(), min_size=5, max_size=5),
                           st.booleans())


@given(st.lists(stored_prompts, max_size=12), st.lists(st.integers(0, 1000), max_size=12))
def test_each_group_has_the_first_handle_that_was_stored_at_each_place(prompts: list[Any], evicted: list[int]) -> None:
    shelf = Shelf(FULL_GROUP, SMALL_WINDOW)
    expected: dict[tuple[int, tuple[int, ...]], Block] = {}
    hashes: list[dict[bytes, tuple[int, ...]]] = [{}, {}]  # what a subscriber of each group knows
    evictions = iter(evicted)
    for tokens, is_real, with_partial in prompts:
        row = "".join("x" if real else "." for real in is_real)
        sequence = shelf.stored(tokens, "xxxxx", row, with_partial=with_partial)
        for group in (0, 1):
            for number, block in enumerate(sequence.rows[group].blocks):
                end = min((number + 1) * WIDTH, len(tokens))
                if number * WIDTH < len(tokens) and block is not PLACEHOLDER and (with_partial or end == (number + 1) * WIDTH):
                    expected.setdefault((group, tuple(tokens[:end])), block)
        choice = next(evictions, None)
        if choice is not None and expected:
            group, prefix = list(expected)[choice % len(expected)]
            block = expected.pop((group, prefix))
            shelf.ledger.allocators[group].publish_removed(block)
            shelf.ledger.tree.detach(block, group)
        for group, data in shelf.events():
            if isinstance(data, Removed):
                for block_hash in data.block_hashes:
                    del hashes[group][block_hash]
            else:
                assert isinstance(data, Stored)
                assert [len(block.tokens) for block in data.blocks[:-1]] == [WIDTH] * (len(data.blocks) - 1)
                for stored in data.blocks:
                    assert stored.block_hash not in hashes[group]
                    hashes[group][stored.block_hash] = stored.tokens
    for (group, prefix), block in expected.items():
        assert block.node is not None
        assert block.node.values[group][block.position] is block
        key = block.node.chain_key(block.position)
        assert hashes[group].pop(key) == prefix[(len(prefix) - 1) // WIDTH * WIDTH:]
        assert block.num_tokens == (len(prefix) - 1) % WIDTH + 1
    assert hashes == [{}, {}]
    prefixes = {prefix for _group, prefix in expected}
    places = {prefix[:end] for prefix in prefixes for end in [*range(WIDTH, len(prefix) + 1, WIDTH), len(prefix)]}
    assert shelf.ledger.tree.num_nodes() == len(places)


# -- warm start -----------------------------------------------------------------------------------------------------------


def chain_of(tokens: list[int]) -> list[bytes]:
    request = Request(0, tokens)
    keys = TokenKeys(request, WIDTH)
    chain = [Namespace(b"model", request).chain_seed]
    for number in range(len(tokens) // WIDTH):
        chain.append(next_chain_key(chain[-1], keys.block_key(number, WIDTH)))
    return chain[1:]


def warmed(shelf: Shelf, tokens: list[int], *rows: str) -> None:
    """NVMe has held these blocks since the start."""
    chain = chain_of(tokens)
    for group, row in enumerate(rows):
        for slot, letter in enumerate(row):
            if letter != ".":
                shelf.ledger.allocators[group].adopt_warm(slot, chain[slot], 35, 0.0)


def adopt(shelf: Shelf, tokens: list[int]) -> None:
    request = Request(0, [*tokens, 99])
    adopt_warm_blocks(shelf.ledger.tree, shelf.ledger.allocators, shelf.ledger.groups, Namespace(b"model", request),
                      TokenKeys(request, WIDTH), len(tokens))


def picture(blocks: list[Block | None]) -> str:
    return "".join("." if block is None else "x" for block in blocks)


def test_warm_blocks_of_a_window_may_have_gaps_and_those_of_full_attention_end_the_search() -> None:
    shelf = Shelf(SMALL_WINDOW, FULL_GROUP, nvme=8)
    tokens = list(range(10))
    warmed(shelf, tokens, "x.xxx", "xxx.x")
    adopt(shelf, tokens)
    assert picture(shelf.find(tokens, 0)) == "x.x"
    assert picture(shelf.find(tokens, 1)) == "xxx"
    assert [len(allocator.warm) for allocator in shelf.ledger.allocators] == [2, 1]
    events = shelf.events()
    assert [(group, len(data.blocks)) for group, data in events] == [(1, 3), (0, 1), (0, 1)]
    assert {block.level for _group, data in events for block in data.blocks} == {NVME}
    assert [block.block_hash for block in events[0][1].blocks] == chain_of(tokens)[:3]


def test_warm_blocks_fill_the_holes_of_their_group_before_and_behind_the_tree_s_end() -> None:
    shelf = Shelf(SMALL_WINDOW, FULL_GROUP, nvme=8)
    tokens = list(range(8))
    shelf.stored(tokens[:4], ".xx", "xxx")
    warmed(shelf, tokens, "x..x", "..xx")
    adopt(shelf, tokens)
    assert picture(shelf.find(tokens, 0)) == "xx.x"
    assert picture(shelf.find(tokens, 1)) == "xxxx"
    assert all(level_of(block.index) == NVME for block in shelf.find(tokens, 1)[2:] if block is not None)


def test_two_full_attention_groups_adopt_only_what_both_have() -> None:
    shelf = Shelf(FULL_GROUP, FULL_GROUP, nvme=8)
    warmed(shelf, list(range(6)), "xxx", "x..")
    adopt(shelf, list(range(6)))
    assert [picture(shelf.find(list(range(6)), group)) for group in (0, 1)] == ["x", "x"]


def test_looking_for_warm_blocks_changes_nothing() -> None:
    shelf = Shelf(FULL_GROUP, SMALL_WINDOW, nvme=8)
    warmed(shelf, list(range(6)), "xx.", ".xx")
    request = Request(0, range(7))
    walk, found = warm_prefix(shelf.ledger.tree, shelf.ledger.allocators, shelf.ledger.groups, Namespace(b"model", request),
                              TokenKeys(request, WIDTH), 6)
    assert walk is None
    assert [[number for number, _block in numbered] for numbered in found] == [[0, 1], [1]]
    assert shelf.ledger.tree.roots == {}
    assert shelf.events() == []


class Watched(list[Block]):
    """A row's blocks that counts how often one of them is looked at."""

    looks = 0

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, int):
            self.looks += 1
        return super().__getitem__(place)


@pytest.mark.skipif(not str(storing_module.__file__).endswith(".py"), reason="compiled code looks at lists past their methods")
@pytest.mark.parametrize("sinks", [0, 2])
def test_a_long_generation_does_not_look_at_what_has_left_its_window_each_time_that_it_stores(sinks: int) -> None:
    """What has left is given up soon, and leaves holes in the tree: places that the sequence has nothing for any more."""
    ledger = Ledger([GroupSpec((12, 0, 0), WINDOW, 8, sinks)], WIDTH, LedgerRules(policy="lru"))
    ledger.add_sequences([Request(1, [5])])
    row = ledger.sequence(1).rows[0]
    row.blocks = Watched(row.blocks)
    counts = []
    for _ in range(2):
        row.blocks.looks = 0
        for token in range(200):
            ledger.append_step([1], [[token]])
        counts.append(row.blocks.looks)
    assert ledger.counters.dropped > 50
    assert counts[1] <= 1.2 * counts[0]
