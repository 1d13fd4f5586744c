"""The reuse tree, and the same tree without compression as a model of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.pools.pool_index import PRIMARY, pool_index
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.key import Namespace, TokenKeys, next_chain_key
from kvtier.tiering.ledger.node import Node
from kvtier.tiering.ledger.request import MultimodalItem, Request
from kvtier.tiering.ledger.tree import MAX_GROWING_RUN, ReuseTree
from kvtier.types import BlockId

IMAGE = b"\x01" * 32


class Grove:
    """A tree and handles to put into it."""

    def __init__(self, tokens_per_block: int = 2, num_groups: int = 1) -> None:
        self.tree = ReuseTree(num_groups, tokens_per_block)
        self.tokens_per_block = tokens_per_block
        self.num_blocks = 0

    def block(self) -> Block:
        self.num_blocks += 1
        return Block(BlockId(self.num_blocks), pool_index(PRIMARY, self.num_blocks))

    def keys(self, tokens: list[int], **keywords: Any) -> tuple[TokenKeys, Namespace]:
        request = Request(0, tokens, **keywords)
        return TokenKeys(request, self.tokens_per_block), Namespace(b"", request)

    def insert(self, tokens: list[int], group: int = 0, **keywords: Any) -> list[Block]:
        """Store a prompt: a handle for each block whose place is empty, the partial tail included. Returns the new ones."""
        keys, namespace = self.keys(tokens, **keywords)
        walk = self.tree.walk(self.tree.root(namespace), keys, len(tokens))
        self.tree.extend(walk, keys, len(tokens))
        found = []
        for node, position in [(node, position) for node, count in zip(walk.nodes, walk.counts, strict=True) for position in range(count)]:
            if node.values[group][position] is None:
                block = self.block()
                self.tree.attach(node, position, group, block, self.tokens_per_block)
                found.append(block)
        place = self.tree.extend_partial(walk, keys, len(tokens))
        if place is not None and place[0].values[group][place[1]] is None:
            block = self.block()
            self.tree.attach(place[0], place[1], group, block, len(tokens) % self.tokens_per_block)
            found.append(block)
        return found

    def find(self, tokens: list[int], group: int = 0, **keywords: Any) -> list[Block | None]:
        """Handles along the exact path of a prompt's full blocks."""
        keys, namespace = self.keys(tokens, **keywords)
        root = self.tree.find_root(namespace)
        if root is None:
            return []
        walk = self.tree.walk(root, keys, len(tokens))
        return [value for node, count in zip(walk.nodes, walk.counts, strict=True) for value in node.values[group][:count]]

    def candidates(self, tokens: list[int], group: int = 0, **keywords: Any) -> list[tuple[int, Block]]:
        keys, namespace = self.keys(tokens, **keywords)
        root = self.tree.find_root(namespace)
        if root is None:
            return []
        places = self.tree.partial_places(self.tree.walk(root, keys, len(tokens)), keys, len(tokens))
        found = [(shared, node.values[group][position]) for shared, node, position in places.all_places()]
        return [(shared, block) for shared, block in found if block is not None]


@pytest.fixture
def grove() -> Grove:
    return Grove()


def test_case_C1_a_tree_that_loses_its_last_block_has_no_node_left(grove: Grove) -> None:
    (block,) = grove.insert([1, 2])
    assert block.has_content
    grove.tree.detach(block, 0)
    assert not block.has_content
    assert block.num_tokens == 0
    assert grove.tree.num_nodes() == 0
    assert grove.tree.roots == {}


def test_case_C2_a_block_knows_the_chain_key_of_the_one_before_it(grove: Grove) -> None:
    first, second = grove.insert([1, 2, 3, 4])
    assert first.node is not None
    assert second.node is not None
    assert first.node.parent_chain_key(first.position) is None
    assert second.node.parent_chain_key(second.position) == first.node.chain_key(first.position)


def test_case_C2_nodes_go_from_the_tail_to_the_head(grove: Grove) -> None:
    first, second = grove.insert([1, 2, 3, 4])
    assert grove.tree.num_nodes() == 2
    grove.tree.detach(second, 0)
    assert grove.tree.num_nodes() == 1
    grove.tree.detach(first, 0)
    assert grove.tree.num_nodes() == 0


def test_a_hole_stays_while_something_is_stored_behind_it(grove: Grove) -> None:
    first, second, third = grove.insert([1, 2, 3, 4, 5, 6])
    grove.tree.detach(second, 0)
    assert grove.find([1, 2, 3, 4, 5, 6]) == [first, None, third]
    assert grove.tree.num_nodes() == 3
    (refilled,) = grove.insert([1, 2, 3, 4, 5, 6])
    assert grove.find([1, 2, 3, 4, 5, 6]) == [first, refilled, third]


def test_when_the_last_block_goes_the_holes_before_it_go_too(grove: Grove) -> None:
    first, second, third = grove.insert([1, 2, 3, 4, 5, 6])
    grove.tree.detach(second, 0)
    grove.tree.detach(third, 0)
    assert grove.tree.num_nodes() == 1
    grove.tree.detach(first, 0)
    assert grove.tree.num_nodes() == 0


def test_case_C4_two_groups_on_one_node_do_not_see_each_other_and_each_keeps_the_node() -> None:
    grove = Grove(num_groups=3)
    (left,) = grove.insert([1, 2], group=0)
    (right,) = grove.insert([1, 2], group=1)
    assert left.node is right.node
    assert grove.tree.num_nodes() == 1
    grove.tree.detach(left, 0)
    assert grove.tree.num_nodes() == 1
    assert grove.find([1, 2], group=0) == [None]
    assert grove.find([1, 2], group=1) == [right]
    assert grove.find([1, 2], group=2) == [None]
    grove.tree.detach(right, 1)
    assert grove.tree.num_nodes() == 0


def test_case_C5_a_handle_attached_elsewhere_leaves_its_old_place_and_the_old_node_is_pruned(grove: Grove) -> None:
    (block,) = grove.insert([1, 2])
    keys, namespace = grove.keys([5, 6])
    root = grove.tree.root(namespace)
    ((node, position, _count),) = grove.tree.extend(grove.tree.walk(root, keys, 2), keys, 2)
    grove.tree.attach(node, position, 0, block, 2)
    assert grove.find([1, 2]) == []
    assert grove.find([5, 6]) == [block]
    assert grove.tree.num_nodes() == 1


def test_case_C6_the_first_handle_at_a_place_stays(grove: Grove) -> None:
    (block,) = grove.insert([1, 2])
    assert grove.insert([1, 2]) == []
    assert grove.find([1, 2]) == [block]


def test_attaching_to_an_occupied_place_or_detaching_twice_is_a_bug_that_is_noticed(grove: Grove) -> None:
    (block,) = grove.insert([1, 2])
    node = block.node
    assert node is not None
    with pytest.raises(AssertionError):
        grove.tree.attach(node, 0, 0, grove.block(), 2)
    grove.tree.detach(block, 0)
    with pytest.raises(AssertionError):
        grove.tree.detach(block, 0)


def test_case_C9_a_block_is_a_leaf_until_something_is_stored_behind_it(grove: Grove) -> None:
    (first,) = grove.insert([1, 2])
    assert first.node is not None
    assert first.node.is_leaf(first.position)
    (second,) = grove.insert([1, 2, 3, 4])
    assert first.node is not None
    assert not first.node.is_leaf(first.position)
    grove.tree.detach(second, 0)
    assert first.node is not None
    assert first.node.is_leaf(first.position)
    (partial,) = grove.insert([1, 2, 3])
    assert not first.node.is_leaf(first.position)
    assert partial.node is not None
    assert partial.node.is_leaf(partial.position)


def test_a_run_of_blocks_is_one_node_and_is_split_where_prompts_part(grove: Grove) -> None:
    blocks = grove.insert([1, 2, 3, 4, 5, 6])
    assert len({id(block.node) for block in blocks}) == 1
    (branch,) = grove.insert([1, 2, 3, 4, 9, 9])
    nodes = [block.node for block in blocks]
    assert nodes[0] is nodes[1] is not nodes[2]
    assert grove.find([1, 2, 3, 4, 5, 6]) == blocks
    assert grove.find([1, 2, 3, 4, 9, 9]) == [*blocks[:2], branch]
    assert grove.tree.num_nodes() == 4


def test_chain_keys_do_not_depend_on_how_runs_are_split(grove: Grove) -> None:
    blocks = grove.insert(list(range(12)))
    before = [block.node.chain_key(block.position) for block in blocks if block.node is not None]
    grove.insert([0, 1, 2, 3, 99, 99])
    grove.insert([0, 1, 98, 98])
    after = [block.node.chain_key(block.position) for block in blocks if block.node is not None]
    assert before == after


def test_a_run_cut_at_its_end_grows_again_with_other_blocks(grove: Grove) -> None:
    first, second, third = grove.insert([1, 2, 3, 4, 5, 6])
    assert third.node is not None
    old = third.node.chain_key(third.position)
    grove.tree.detach(third, 0)
    (other,) = grove.insert([1, 2, 3, 4, 9, 9])
    assert grove.find([1, 2, 3, 4, 9, 9]) == [first, second, other]
    assert grove.find([1, 2, 3, 4, 5, 6]) == [first, second]
    assert other.node is not None
    assert other.node.chain_key(other.position) != old


def test_a_growing_run_stays_short_so_that_each_step_of_a_long_generation_is_cheap(grove: Grove) -> None:
    tokens: list[int] = []
    blocks: list[Block] = []
    for number in range(3 * MAX_GROWING_RUN):
        tokens += [number, number]
        blocks += grove.insert(tokens)
    assert grove.find(tokens) == blocks
    assert all(block.node is not None and block.node.length <= MAX_GROWING_RUN for block in blocks)


def test_a_path_of_thousands_of_nodes_has_chain_keys(grove: Grove) -> None:
    """Each block of a long video is a node of its own; the tail is the first to be written out, so its key is asked for first."""
    num_blocks = 3000
    tokens = [7] * (2 * num_blocks)
    blocks = grove.insert(tokens, multimodal=[MultimodalItem(IMAGE, [(0, len(tokens))])])
    keys, namespace = grove.keys(tokens, multimodal=[MultimodalItem(IMAGE, [(0, len(tokens))])])
    expected = namespace.chain_seed
    for number in range(num_blocks):
        expected = next_chain_key(expected, keys.block_key(number, 2))
    tail = blocks[-1]
    assert tail.node is not None
    assert tail.node.chain_key(tail.position) == expected


# -- partial blocks ------------------------------------------------------------------------------------------------------


def test_partial_candidates_come_longest_first() -> None:
    grove = Grove(tokens_per_block=4)
    (full,) = grove.insert([1, 2, 3, 4])
    (two,) = grove.insert([1, 2])
    (one,) = grove.insert([1])
    assert grove.candidates([1, 2, 3, 9]) == [(3, full), (2, two), (1, one)]
    assert grove.candidates([1, 9]) == [(1, full), (1, two), (1, one)]
    assert grove.candidates([9, 1]) == []


def test_only_the_block_behind_the_exact_path_is_a_candidate() -> None:
    grove = Grove(tokens_per_block=4)
    first, second, _third = grove.insert([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert grove.candidates([1, 2, 3, 4, 5, 6, 0]) == [(2, second)]
    assert grove.candidates([1, 2, 0, 0, 5, 6]) == [(2, first)]


def test_a_hole_is_no_candidate() -> None:
    grove = Grove(tokens_per_block=4)
    _first, second, _third = grove.insert([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    grove.tree.detach(second, 0)
    assert grove.candidates([1, 2, 3, 4, 5, 6, 0]) == []


def test_an_equal_partial_tail_is_stored_once() -> None:
    grove = Grove(tokens_per_block=4)
    assert len(grove.insert([1, 2])) == 1
    assert grove.insert([1, 2]) == []


def test_part_of_an_item_is_not_that_item() -> None:
    grove = Grove(tokens_per_block=4)
    item = [MultimodalItem(IMAGE, [(0, 2)])]
    grove.insert([7, 7, 3, 4], multimodal=item)
    assert grove.candidates([7, 7, 3, 9], multimodal=item) == []
    assert grove.candidates([7, 7, 3, 9]) == []


# -- namespaces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keywords", [{"lora_id": 1}, {"cache_salt": "a"}, {"extra_ids": [0, 0]}, {"lora_id": 1, "lora_digest": IMAGE}])
def test_another_namespace_has_another_root(grove: Grove, keywords: dict[str, Any]) -> None:
    (block,) = grove.insert([1, 2])
    assert grove.find([1, 2], **keywords) == []
    (other,) = grove.insert([1, 2], **keywords)
    assert grove.find([1, 2]) == [block]
    assert grove.find([1, 2], **keywords) == [other]
    grove.tree.detach(other, 0)
    assert len(grove.tree.roots) == 1


def test_extra_ids_are_part_of_what_is_compared(grove: Grove) -> None:
    (block,) = grove.insert([1, 2], extra_ids=[5, 6])
    assert grove.find([1, 2], extra_ids=[5, 6]) == [block]
    assert grove.find([1, 2], extra_ids=[5, 7]) == []
    assert grove.candidates([1, 2], extra_ids=[5, 7]) == [(1, block)]


def test_multimodal_content_is_part_of_what_is_compared(grove: Grove) -> None:
    item = [MultimodalItem(IMAGE, [(2, 2)])]
    blocks = grove.insert([1, 2, 7, 7, 5, 6], multimodal=item)
    assert grove.find([1, 2, 7, 7, 5, 6], multimodal=item) == blocks
    assert grove.find([1, 2, 7, 7, 5, 6]) == blocks[:1]
    assert grove.find([1, 2, 7, 7, 5, 6], multimodal=[MultimodalItem(b"\x02" * 32, [(2, 2)])]) == blocks[:1]


def test_a_run_of_text_is_not_matched_by_an_item_with_the_same_token_ids(grove: Grove) -> None:
    blocks = grove.insert([1, 2, 7, 7, 5, 6])
    assert grove.find([1, 2, 7, 7, 5, 6], multimodal=[MultimodalItem(IMAGE, [(2, 2)])]) == blocks[:1]
    assert grove.find([1, 2, 7, 7, 5, 6], multimodal=[MultimodalItem(IMAGE, [(4, 2)])]) == blocks[:2]


# -- against a tree without compression ------------------------------------------------------------------------------------


class NaiveTree:
    """One entry for each block position: the path of block keys to the handle there."""

    def __init__(self, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.values: dict[tuple[tuple[Any, ...], ...], int] = {}

    def path(self, elements: list[Any]) -> list[tuple[tuple[Any, ...], ...]]:
        step = self.tokens_per_block
        blocks = [tuple(elements[start:start + step]) for start in range(0, len(elements), step)]
        return [tuple(blocks[:number + 1]) for number in range(len(blocks))]

    def nodes(self) -> set[tuple[tuple[Any, ...], ...]]:
        return {key[:length] for key in self.values for length in range(1, len(key) + 1)}

    def find(self, elements: list[Any]) -> list[int | None]:
        full = len(elements) // self.tokens_per_block
        nodes = self.nodes()
        found: list[int | None] = []
        for key in self.path(elements)[:full]:
            if key not in nodes:
                break
            found.append(self.values.get(key))
        return found

    def candidates(self, elements: list[Any]) -> set[tuple[int, int]]:
        depth = len(self.find(elements))
        before = tuple(tuple(elements[start:start + self.tokens_per_block]) for start in range(0, depth * self.tokens_per_block,
                                                                                               self.tokens_per_block))
        chunk = elements[depth * self.tokens_per_block:(depth + 1) * self.tokens_per_block]
        found = set()
        for key, value in self.values.items():
            if len(key) == depth + 1 and key[:-1] == before and all(content is None for _t, _e, content in key[-1]):
                shared = 0
                while shared < min(len(chunk), len(key[-1])) and chunk[shared] == key[-1][shared]:
                    shared += 1
                if shared:
                    found.add((shared, value))
        return found if chunk and all(content is None for _t, _e, content in chunk) else set()


prompts = st.tuples(st.sampled_from(("", "", "", "extra", "image")), st.lists(st.integers(0, 1), min_size=1, max_size=12))


IMAGE_START = 3


def _keywords(kind: str, tokens: list[int]) -> dict[str, Any]:
    if kind == "extra":
        return {"extra_ids": [position % 3 for position in range(len(tokens))]}
    if kind == "image" and len(tokens) > IMAGE_START + 1:
        return {"multimodal": [MultimodalItem(IMAGE, [(IMAGE_START, 2)])]}
    return {}


def _elements(kind: str, tokens: list[int]) -> list[Any]:
    keywords = _keywords(kind, tokens)
    return [(token, keywords["extra_ids"][position] if kind == "extra" else None,
             (IMAGE, position - IMAGE_START) if "multimodal" in keywords and 0 <= position - IMAGE_START < 2 else None)
            for position, token in enumerate(tokens)]


@given(st.sampled_from((1, 2, 3)), st.lists(st.one_of(prompts, st.integers(0, 40)), max_size=40))
def test_the_compressed_tree_is_the_tree_without_compression(tokens_per_block: int, steps: list[Any]) -> None:
    grove = Grove(tokens_per_block)
    naive = {"plain": NaiveTree(tokens_per_block), "extra": NaiveTree(tokens_per_block)}
    blocks: dict[int, Block] = {}
    seen: list[tuple[str, list[int]]] = []
    for step in steps:
        if isinstance(step, int):
            if not blocks:
                continue
            block_id = sorted(blocks)[step % len(blocks)]
            grove.tree.detach(blocks.pop(block_id), 0)
            for tree in naive.values():
                tree.values = {key: value for key, value in tree.values.items() if value != block_id}
        else:
            kind, tokens = step
            seen.append(step)
            tree = naive["extra" if kind == "extra" else "plain"]
            new = [key for key in tree.path(_elements(kind, tokens)) if key not in tree.values]
            inserted = grove.insert(tokens, **_keywords(kind, tokens))
            assert len(inserted) == len(new)
            for key, block in zip(new, inserted, strict=True):
                tree.values[key] = block.id
                blocks[block.id] = block
        assert grove.tree.num_nodes() == sum(len(tree.nodes()) for tree in naive.values())
        for kind, tokens in seen[-6:]:
            tree = naive["extra" if kind == "extra" else "plain"]
            for length in range(1, len(tokens) + 1):
                keywords = _keywords(kind, tokens)
                if "multimodal" in keywords and length < len(tokens):
                    continue
                if kind == "extra":
                    keywords = {"extra_ids": keywords["extra_ids"][:length]}
                elements = _elements(kind, tokens)[:length]
                assert [None if b is None else b.id for b in grove.find(tokens[:length], **keywords)] == tree.find(elements)
                candidates = grove.candidates(tokens[:length], **keywords)
                assert {(shared, block.id) for shared, block in candidates} == tree.candidates(elements)
                assert [shared for shared, _block in candidates] == sorted((shared for shared, _block in candidates), reverse=True)
        for block in blocks.values():
            node = block.node
            assert isinstance(node, Node)
            key = next(key for tree in naive.values() for key, value in tree.values.items() if value == block.id)
            has_children = any(other[:len(key)] == key and len(other) > len(key) for tree in naive.values() for other in tree.nodes())
            assert node.is_leaf(block.position) == (not has_children)
