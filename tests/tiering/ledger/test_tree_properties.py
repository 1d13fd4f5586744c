"""The reuse tree at its own door, and against a naive tree of one node for each block.

Nodes are counted as block positions, however the tree is compressed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.pools.pool_index import PRIMARY, pool_index
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.events import EventLog, Removed, Stored, StoredBlock
from kvtier.tiering.ledger.key import KeyRun, Namespace, TokenKeys, next_chain_key
from kvtier.tiering.ledger.node import Node, Walk
from kvtier.tiering.ledger.request import MultimodalItem, Request
from kvtier.tiering.ledger.tree import FEW_CHILDREN, MAX_GROWING_RUN, ReuseTree
from kvtier.types import BlockId

IMAGES = (b"\x01" * 32, b"\x02" * 32)


class Tree:
    """A reuse tree of a few groups, and handles numbered as they are stored."""

    def __init__(self, num_groups: int = 1, tokens_per_block: int = 2) -> None:
        self.tokens_per_block = tokens_per_block
        self.tree = ReuseTree(num_groups, tokens_per_block)
        self.num_handles = 0

    def handle(self) -> Block:
        self.num_handles += 1
        return Block(BlockId(self.num_handles), pool_index(PRIMARY, self.num_handles))

    def keys(self, tokens: list[int], **keywords: Any) -> tuple[Namespace, TokenKeys]:
        request = Request(1, tokens, **keywords)
        return Namespace(b"model", request), TokenKeys(request, self.tokens_per_block)

    def walk(self, tokens: list[int], **keywords: Any) -> Walk:
        namespace, keys = self.keys(tokens, **keywords)
        return self.tree.walk(self.tree.root(namespace), keys, len(tokens))

    def store(self, tokens: list[int], group: int = 0, **keywords: Any) -> list[Block]:
        """Fresh handles in every empty place of the prompt's full blocks. Returns those of all its places."""
        namespace, keys = self.keys(tokens, **keywords)
        walk = self.tree.walk(self.tree.root(namespace), keys, len(tokens))
        found = []
        self.tree.extend(walk, keys, len(tokens))
        for node, position in places_of(walk):
            if node.values[group][position] is None:
                self.tree.attach(node, position, group, self.handle(), self.tokens_per_block)
            block = node.values[group][position]
            assert block is not None
            found.append(block)
        return found

    def store_tail(self, tokens: list[int], group: int = 0, **keywords: Any) -> Block | None:
        """A fresh handle as the partial tail of a prompt whose full blocks are stored. None when the tree has no place for it."""
        namespace, keys = self.keys(tokens, **keywords)
        walk = self.tree.walk(self.tree.root(namespace), keys, len(tokens))
        place = self.tree.extend_partial(walk, keys, len(tokens))
        if place is None or place[0].values[group][place[1]] is not None:
            return None
        block = self.handle()
        self.tree.attach(place[0], place[1], group, block, len(tokens) % self.tokens_per_block)
        return block

    def partial(self, tokens: list[int], group: int = 0, **keywords: Any) -> list[tuple[int, Block]]:
        namespace, keys = self.keys(tokens, **keywords)
        walk = self.tree.walk(self.tree.root(namespace), keys, len(tokens))
        return candidates_of(self.tree, walk, keys, len(tokens), group)


def candidates_of(tree: ReuseTree, walk: Walk, keys: TokenKeys, num_tokens: int, group: int = 0) -> list[tuple[int, Block]]:
    """What a partial match of one group chooses from."""
    places = tree.partial_places(walk, keys, num_tokens).all_places()
    found = [(shared, node.values[group][position]) for shared, node, position in places]
    return [(shared, block) for shared, block in found if block is not None]


def places_of(walk: Walk) -> list[tuple[Node, int]]:
    return [(node, position) for node, count in zip(walk.nodes, walk.counts, strict=True) for position in range(count)]


def handles_of(walk: Walk, group: int = 0) -> list[Block | None]:
    return [node.values[group][position] for node, position in places_of(walk)]


def place_of(block: Block) -> tuple[Node, int]:
    assert block.node is not None
    return block.node, block.position


@pytest.fixture
def tree() -> Tree:
    return Tree()


@pytest.fixture
def two_groups() -> Tree:
    return Tree(num_groups=2)


# -- places and pruning --------------------------------------------------------------------------------------------------


def test_an_attached_handle_has_content_and_a_detached_one_leaves_no_node(tree: Tree) -> None:
    (block,) = tree.store([1, 2])
    assert block.has_content
    assert block.num_tokens == 2
    tree.tree.detach(block, 0)
    assert not block.has_content
    assert block.num_tokens == 0
    assert tree.tree.num_nodes() == 0
    assert tree.tree.roots == {}


def test_the_block_before_is_the_tree_s_and_before_the_first_there_is_none(tree: Tree) -> None:
    first, second = tree.store([1, 2, 3, 4])
    namespace, keys = tree.keys([1, 2, 3, 4])
    assert first.node is not None
    assert second.node is not None
    assert first.node.parent_chain_key(first.position) is None
    assert first.node.chain_key(first.position) == next_chain_key(namespace.chain_seed, keys.block_key(0, 2))
    assert second.node.parent_chain_key(second.position) == first.node.chain_key(first.position)


def test_nodes_leave_from_the_end(tree: Tree) -> None:
    first, second = tree.store([1, 2, 3, 4])
    assert tree.tree.num_nodes() == 2
    tree.tree.detach(second, 0)
    assert tree.tree.num_nodes() == 1
    tree.tree.detach(first, 0)
    assert tree.tree.num_nodes() == 0


def test_a_block_given_up_in_the_middle_leaves_a_hole_that_can_be_filled_again(tree: Tree) -> None:
    first, second, third = tree.store([1, 2, 3, 4, 5, 6])
    tree.tree.detach(second, 0)
    assert tree.tree.num_nodes() == 3
    assert handles_of(tree.walk([1, 2, 3, 4, 5, 6])) == [first, None, third]
    again = tree.store([1, 2, 3, 4])[1]
    assert handles_of(tree.walk([1, 2, 3, 4, 5, 6])) == [first, again, third]


def test_the_last_block_to_leave_takes_the_holes_before_it_along(tree: Tree) -> None:
    first, second, third = tree.store([1, 2, 3, 4, 5, 6])
    tree.tree.detach(second, 0)
    tree.tree.detach(first, 0)
    assert tree.tree.num_nodes() == 3
    tree.tree.detach(third, 0)
    assert tree.tree.num_nodes() == 0
    assert tree.tree.find_root(tree.keys([1])[0]) is None


def test_a_node_stays_while_another_group_has_a_block_there(two_groups: Tree) -> None:
    (block,) = two_groups.store([1, 2], group=0)
    (other,) = two_groups.store([1, 2], group=1)
    assert two_groups.tree.num_nodes() == 1
    two_groups.tree.detach(block, 0)
    assert two_groups.tree.num_nodes() == 1
    assert handles_of(two_groups.walk([1, 2]), group=0) == [None]
    assert handles_of(two_groups.walk([1, 2]), group=1) == [other]
    two_groups.tree.detach(other, 1)
    assert two_groups.tree.num_nodes() == 0


def test_a_group_does_not_find_another_group_s_blocks() -> None:
    three_groups = Tree(num_groups=3, tokens_per_block=4)
    three_groups.store([1, 2, 3, 4], group=0)
    three_groups.store([1, 2, 3, 4], group=1)
    assert handles_of(three_groups.walk([1, 2, 3, 4]), group=2) == [None]
    assert three_groups.partial([1, 2], group=2) == []
    assert [shared for shared, _block in three_groups.partial([1, 2], group=1)] == [2]


def test_a_handle_attached_elsewhere_leaves_its_old_place_and_prunes_it(tree: Tree) -> None:
    (block,) = tree.store([1, 2])
    namespace, keys = tree.keys([3, 4])
    walk = tree.tree.walk(tree.tree.root(namespace), keys, 2)
    ((node, position, _count),) = tree.tree.extend(walk, keys, 2)
    tree.tree.attach(node, position, 0, block, 2)
    assert tree.tree.num_nodes() == 1
    assert handles_of(tree.walk([1, 2])) == []
    assert handles_of(tree.walk([3, 4])) == [block]


def test_a_partial_tail_that_became_full_moves_to_the_full_block_s_place() -> None:
    tree = Tree(tokens_per_block=4)
    tail = tree.store_tail([1, 2])
    assert tail is not None
    namespace, keys = tree.keys([1, 2, 3, 4])
    walk = tree.tree.walk(tree.tree.root(namespace), keys, 4)
    ((node, position, _count),) = tree.tree.extend(walk, keys, 4)
    tree.tree.attach(node, position, 0, tail, 4)
    assert tree.tree.num_nodes() == 1
    assert tail.num_tokens == 4
    assert handles_of(tree.walk([1, 2, 3, 4])) == [tail]
    assert tree.partial([1, 2, 9]) == [(2, tail)]


def test_the_first_handle_keeps_an_occupied_place(tree: Tree) -> None:
    stored = tree.store([1, 2, 3, 4])
    assert tree.store([1, 2, 3, 4]) == stored
    assert tree.num_handles == 2
    node, position = place_of(stored[0])
    with pytest.raises(AssertionError):
        tree.tree.attach(node, position, 0, tree.handle(), 2)
    assert handles_of(tree.walk([1, 2, 3, 4])) == stored


def test_the_first_partial_tail_keeps_its_place(tree: Tree) -> None:
    tree.store([1, 2])
    assert tree.store_tail([1, 2, 3]) is not None
    assert tree.store_tail([1, 2, 3]) is None
    assert tree.store_tail([1, 2, 4]) is not None
    assert tree.tree.num_nodes() == 3


def test_a_handle_can_only_leave_the_group_it_is_in(two_groups: Tree) -> None:
    (block,) = two_groups.store([1, 2], group=0)
    with pytest.raises(AssertionError):
        two_groups.tree.detach(block, 1)


def test_a_block_is_a_leaf_until_something_is_stored_behind_it_and_again_when_that_has_left(two_groups: Tree) -> None:
    (block,) = two_groups.store([1, 2], group=0)
    node, position = place_of(block)
    assert node.is_leaf(position)
    behind = two_groups.store([1, 2, 3, 4], group=1)[1]
    node, position = place_of(block)
    assert not node.is_leaf(position), "another group's block counts too"
    two_groups.tree.detach(behind, 1)
    node, position = place_of(block)
    assert node.is_leaf(position)


# -- matching ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keywords", [
    {"lora_id": 0}, {"lora_id": 1}, {"lora_id": 1, "lora_digest": b"\x03" * 32}, {"cache_salt": ""}, {"cache_salt": "a"},
    {"extra_ids": [0, 0]}, {"multimodal": [MultimodalItem(IMAGES[0], [(1, 1)])]},
])
def test_what_is_not_the_same_in_adapter_salt_extra_ids_and_items_is_not_found(tree: Tree, keywords: dict[str, Any]) -> None:
    plain = tree.store([1, 2])
    other = tree.store([1, 2], **keywords)
    assert plain != other
    assert handles_of(tree.walk([1, 2])) == plain
    assert handles_of(tree.walk([1, 2], **keywords)) == other


def test_a_partial_tail_is_no_full_match(tree: Tree) -> None:
    tree.store([1, 2])
    tail = tree.store_tail([1, 2, 3])
    assert len(handles_of(tree.walk([1, 2, 3, 4]))) == 1
    assert tree.partial([1, 2, 3, 4]) == [(1, tail)]


def test_partial_candidates_come_longest_first() -> None:
    tree = Tree(tokens_per_block=4)
    stored = {shared: tree.store(tokens)[0] for shared, tokens in
              ((1, [1, 9, 9, 9]), (3, [1, 2, 3, 9]), (0, [9, 1, 2, 3]), (2, [1, 2, 9, 9]))}
    assert tree.partial([1, 2, 3, 4]) == [(shared, stored[shared]) for shared in (3, 2, 1)]


def test_the_tokens_that_count_end_where_the_caller_says(tree: Tree) -> None:
    namespace, keys = tree.keys([1, 2, 3, 4])
    stored = tree.store([1, 2, 3, 4])
    walk = tree.tree.walk(tree.tree.root(namespace), keys, 3)
    assert handles_of(walk) == stored[:1]
    assert candidates_of(tree.tree, walk, keys, 3) == [(1, stored[1])]
    assert candidates_of(tree.tree, tree.tree.walk(tree.tree.root(namespace), keys, 2), keys, 2) == []


def test_a_hole_is_no_partial_candidate(tree: Tree) -> None:
    _first, second, _third = tree.store([1, 2, 3, 4, 5, 6])
    assert tree.partial([1, 2, 3, 9]) == [(1, second)]
    tree.tree.detach(second, 0)
    assert tree.partial([1, 2, 3, 9]) == []


def test_a_block_with_an_item_takes_no_part_in_partial_matching() -> None:
    tree = Tree(tokens_per_block=4)
    tree.store([1, 2, 3, 4], multimodal=[MultimodalItem(IMAGES[0], [(2, 2)])])
    assert tree.partial([1, 2, 9, 9]) == []
    (plain,) = tree.store([1, 2, 3, 4])
    assert tree.partial([1, 2, 9, 9]) == [(2, plain)]
    assert tree.partial([1, 2, 9, 9], multimodal=[MultimodalItem(IMAGES[0], [(3, 1)])]) == []


def test_extra_ids_count_in_partial_matching() -> None:
    tree = Tree(tokens_per_block=4)
    (block,) = tree.store([1, 2, 3, 4], extra_ids=[5, 5, 6, 6])
    assert tree.partial([1, 2, 3, 9], extra_ids=[5, 5, 7, 7]) == [(2, block)]
    assert tree.partial([1, 2, 3, 9], extra_ids=[4, 5, 6, 6]) == []


# -- runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parting", range(8))
def test_prompts_that_part_anywhere_keep_their_common_blocks(tree: Tree, parting: int) -> None:
    tokens = list(range(16))
    other = [*tokens[:parting * 2], *([99] * (16 - parting * 2))]
    stored = tree.store(tokens)
    places = [block.node.chain_key(block.position) for block in stored if block.node is not None]
    branch = tree.store(other)
    assert branch[:parting] == stored[:parting]
    assert handles_of(tree.walk(tokens)) == stored
    assert handles_of(tree.walk(other)) == branch
    assert tree.tree.num_nodes() == 16 - parting
    assert [block.node.chain_key(block.position) for block in stored if block.node is not None] == places
    for block in branch[parting:]:
        tree.tree.detach(block, 0)
    assert tree.tree.num_nodes() == 8
    assert handles_of(tree.walk(tokens)) == stored


@pytest.mark.parametrize("step", [1, 2, 63, 64, 65, 200])
def test_a_prompt_stored_piece_by_piece_is_found_whole(step: int) -> None:
    tree = Tree(tokens_per_block=1)
    tokens = [number % 7 for number in range(3 * MAX_GROWING_RUN + 5)]
    for end in range(step, len(tokens) + step, step):
        tree.store(tokens[:end])
    assert tree.num_handles == tree.tree.num_nodes() == len(tokens)
    handles = handles_of(tree.walk(tokens))
    assert [block.id for block in handles if block is not None] == list(range(1, len(tokens) + 1))


def test_a_run_given_up_from_its_end_grows_again_with_other_tokens(tree: Tree) -> None:
    stored = tree.store(list(range(16)))
    for block in stored[:2:-1]:
        tree.tree.detach(block, 0)
    other = [*range(6), *([99] * 10)]
    assert tree.store(other)[:3] == stored[:3]
    assert len(handles_of(tree.walk(list(range(16))))) == 3
    assert len(handles_of(tree.walk(other))) == 8
    assert tree.tree.num_nodes() == 8


def test_a_run_that_grows_again_with_other_tokens_forgets_the_chain_keys_it_had(tree: Tree) -> None:
    stored = tree.store(list(range(8)))
    node, position = place_of(stored[-1])
    old = node.chain_key(position)
    tree.tree.detach(stored[-1], 0)
    node, position = place_of(tree.store([*range(6), 99, 99])[-1])
    namespace, keys = tree.keys([*range(6), 99, 99])
    expected = namespace.chain_seed
    for number in range(4):
        expected = next_chain_key(expected, keys.block_key(number, 2))
    assert node.chain_key(position) == expected != old


def test_what_is_stored_behind_a_run_given_up_from_its_end_follows_what_is_left_of_it() -> None:
    """The run's keys were not cut at once; an event about the new tail must not take the old blocks for its predecessors."""
    tree = Tree(tokens_per_block=2)
    stored = tree.store(list(range(10)))
    tree.tree.detach(stored[-1], 0)
    tail = tree.store_tail([*range(8), 99])
    assert tail is not None
    node, position = place_of(tail)
    before, last = place_of(stored[3])
    assert node.parent_chain_key(position) == before.chain_key(last)
    namespace, keys = tree.keys([*range(8), 99])
    expected = namespace.chain_seed
    for number in range(5):
        expected = next_chain_key(expected, keys.block_key(number, 1 if number == 4 else 2))
    assert node.chain_key(position) == expected


def test_a_split_keeps_no_old_run_alive_but_for_events_that_nobody_has_read() -> None:
    tree = Tree(tokens_per_block=2)
    stored = tree.store(list(range(8)))
    below = tree.store([*range(8), *([7] * 2 * MAX_GROWING_RUN)])[-1]
    log = EventLog(10, 1)
    old, position = place_of(stored[3])
    log.removed(0, old.run, position)
    run = old.run
    tree.store([*range(4), 98, 99])
    chain = []
    node: KeyRun | None = place_of(below)[0].run
    while node is not None:
        chain.append(node)
        node = node.parent
    assert run not in chain
    assert [part.num_blocks for part in chain] == [MAX_GROWING_RUN, 2, 2]
    (event,) = log.flush()
    assert event.data == Removed((place_of(stored[3])[0].chain_key(1),))


def test_a_path_of_a_thousand_nodes_needs_no_deep_recursion() -> None:
    tree = Tree(tokens_per_block=1)
    tokens = [5] * 1500
    item = [MultimodalItem(IMAGES[0], [(0, 1500)])]  # a block with an item is a node of its own
    stored = tree.store(tokens, multimodal=item)
    node, position = place_of(stored[-1])
    namespace, keys = tree.keys(tokens, multimodal=item)
    expected = namespace.chain_seed
    for number in range(1500):
        expected = next_chain_key(expected, keys.block_key(number, 1))
    assert node.chain_key(position) == expected
    for block in stored:
        tree.tree.detach(block, 0)
    assert tree.tree.num_nodes() == 0


# -- against a naive tree ------------------------------------------------------------------------------------------------

NUM_GROUPS = 2
BlockContent = tuple[Any, ...]
"""(token, extra id) of each token, and where an item overlaps the block: (digest, offset in the item, position, tokens)."""
NAMESPACES: tuple[dict[str, Any], ...] = ({}, {}, {}, {"cache_salt": "a"}, {"lora_id": 1})


class NaiveNode:
    """One block."""

    def __init__(self, parent: NaiveNode | None, content: BlockContent) -> None:
        self.parent = parent
        self.content = content
        self.children: dict[BlockContent, NaiveNode] = {}
        self.handles: list[Block | None] = [None] * NUM_GROUPS
        self.chain_key = b""
        self.namespace: Namespace | None = None if parent is None else parent.namespace

    def stored(self) -> StoredBlock:
        """What a Stored event says of this block."""
        elements, item = self.content
        assert self.namespace is not None
        return StoredBlock(self.chain_key, tuple(token for token, _extra in elements), self.namespace.lora_id, self.namespace.cache_salt,
                           PRIMARY, 35, () if item is None else (item[:2],))

    def parent_hash(self) -> bytes | None:
        return None if self.parent is None or self.parent.parent is None else self.parent.chain_key

    def below(self) -> Iterator[NaiveNode]:
        for child in self.children.values():
            yield child
            yield from child.below()

    def path(self) -> list[BlockContent]:
        return [] if self.parent is None else [*self.parent.path(), self.content]

    def prune(self) -> None:
        if self.parent is not None and not self.children and not any(self.handles):
            del self.parent.children[self.content]
            self.parent.prune()


class Prompt:
    """Tokens in a namespace, perhaps with one item, in a form that a naive tree reads."""

    def __init__(self, tokens: list[int], extra_ids: list[int] | None, item: tuple[bytes, int, int] | None, namespace: dict[str, Any],
                 num_tokens: int) -> None:
        self.tokens = tokens
        self.num_tokens = num_tokens
        self.elements = [(token, None if extra_ids is None else extra_ids[position]) for position, token in enumerate(tokens)]
        self.item = item
        items = () if item is None else (MultimodalItem(item[0], [item[1:]]),)
        self.request = Request(1, tokens, extra_ids=extra_ids, multimodal=items, **namespace)
        self.namespace = Namespace(b"model", self.request)

    def content(self, number: int, num_tokens: int, tokens_per_block: int) -> BlockContent:
        start = number * tokens_per_block
        return tuple(self.elements[start:start + num_tokens]), self.overlap(start, start + tokens_per_block)

    def overlap(self, start: int, end: int) -> BlockContent | None:
        if self.item is None:
            return None
        digest, item_start, length = self.item
        first, last = max(start, item_start), min(end, item_start + length)
        return (digest, first - item_start, first - start, last - first) if first < last else None


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Mostly of two token values, so that prompts meet and part often."""
    tokens = draw(st.lists(st.integers(0, 1), min_size=1, max_size=6)) * draw(st.integers(1, 3))
    kind = draw(st.integers(0, 7))
    extra_ids = [draw(st.integers(0, 1))] * len(tokens) if kind == 0 else None
    item = None
    if kind in (1, 2):
        start = draw(st.integers(0, len(tokens) - 1))
        item = (draw(st.sampled_from(IMAGES)), start, draw(st.integers(1, len(tokens) - start)))
    return Prompt(tokens, extra_ids, item, draw(st.sampled_from(NAMESPACES)), draw(st.integers(1, len(tokens))))


class EagerLog:
    """Events with their content made at once."""

    def __init__(self) -> None:
        self.removed_hashes: list[list[bytes]] = [[] for _ in range(NUM_GROUPS)]
        self.events: list[tuple[int, Stored | Removed]] = []

    def stored(self, group: int, nodes: list[NaiveNode]) -> None:
        self.publish_removed(group)
        self.events.append((group, Stored(nodes[0].parent_hash(), tuple(node.stored() for node in nodes))))

    def removed(self, group: int, node: NaiveNode) -> None:
        self.removed_hashes[group].append(node.chain_key)

    def publish_removed(self, group: int) -> None:
        if self.removed_hashes[group]:
            self.events.append((group, Removed(tuple(self.removed_hashes[group]))))
            self.removed_hashes[group] = []

    def flush(self) -> list[tuple[int, Stored | Removed]]:
        for group in range(NUM_GROUPS):
            self.publish_removed(group)
        events, self.events = self.events, []
        return events


class TreeMachine(RuleBasedStateMachine):
    """Random lives of handles in the compressed tree and in the naive one."""

    @initialize(tokens_per_block=st.integers(1, 4))
    def start(self, tokens_per_block: int) -> None:
        self.width = tokens_per_block
        self.tree = ReuseTree(NUM_GROUPS, tokens_per_block)
        self.roots: dict[object, NaiveNode] = {}
        self.home: dict[Block, tuple[NaiveNode, int]] = {}  # where each attached handle sits, and its group
        self.num_handles = 0
        self.log = EventLog(1 << 20, NUM_GROUPS)
        self.eager = EagerLog()

    def fresh(self) -> Block:
        self.num_handles += 1
        return Block(BlockId(self.num_handles), pool_index(PRIMARY, self.num_handles))

    def full_blocks(self, prompt: Prompt) -> list[BlockContent]:
        return [prompt.content(number, self.width, self.width) for number in range(prompt.num_tokens // self.width)]

    def put(self, block: Block, place: tuple[Node, int], node: NaiveNode, group: int, num_tokens: int) -> None:
        """Attach on both sides."""
        if block in self.home:
            self.take_out(block)
        self.tree.attach(place[0], place[1], group, block, num_tokens)
        self.log.stored(group, [(place[0].run, place[1], 1)], PRIMARY, [35])
        self.eager.stored(group, [node])
        node.handles[group] = block
        self.home[block] = (node, group)

    def take_out(self, block: Block) -> None:
        assert block.node is not None
        self.log.removed(self.home[block][1], block.node.run, block.position)
        self.take_out_of_the_naive_tree(block)

    def take_out_of_the_naive_tree(self, block: Block) -> None:
        node, group = self.home.pop(block)
        self.eager.removed(group, node)
        node.handles[group] = None
        node.prune()

    @rule(prompt=prompts(), group=st.integers(0, NUM_GROUPS - 1), with_tail=st.booleans(), mover=st.none() | st.integers(0, 1000))
    def store(self, prompt: Prompt, group: int, with_tail: bool, mover: int | None) -> None:
        """Full blocks, and the partial tail if asked. The last full block may get a handle that sits on another branch."""
        blocks = self.full_blocks(prompt)
        tail = prompt.num_tokens % self.width if with_tail else 0
        if not blocks and not tail:
            return
        keys = TokenKeys(prompt.request, self.width)
        root = self.roots.setdefault(prompt.namespace.identity, NaiveNode(None, ()))
        root.chain_key = prompt.namespace.chain_seed
        root.namespace = prompt.namespace
        walk = self.tree.walk(self.tree.root(prompt.namespace), keys, prompt.num_tokens)
        before = walk.num_blocks
        spans = self.tree.extend(walk, keys, prompt.num_tokens)
        places = places_of(walk)
        assert len(places) == walk.num_blocks == len(blocks)
        assert places[before:] == [(node, position) for node, first, count in spans for position in range(first, first + count)]
        node, nodes = root, []
        for number, content in enumerate(blocks):
            node = self.child(node, content, keys.block_key(number, self.width))
            nodes.append(node)
        for place, node in zip(places, nodes, strict=True):
            assert place[0].values[group][place[1]] is node.handles[group]
            if node.handles[group] is None:
                block = self.handle_from(mover, node, group) if node is nodes[-1] else self.fresh()
                self.put(block, place, node, group, self.width)
        if tail:
            node = nodes[-1] if nodes else root
            content = prompt.content(len(blocks), tail, self.width)
            walk = self.tree.walk(self.tree.root(prompt.namespace), keys, prompt.num_tokens)
            found = self.tree.extend_partial(walk, keys, prompt.num_tokens)
            assert found is not None
            node = self.child(node, content, keys.block_key(len(blocks), tail))
            assert found[0].values[group][found[1]] is node.handles[group]
            if node.handles[group] is None:
                self.put(self.fresh(), found, node, group, tail)

    def child(self, node: NaiveNode, content: BlockContent, key: bytes) -> NaiveNode:
        child = node.children.get(content)
        if child is None:
            child = node.children[content] = NaiveNode(node, content)
            child.chain_key = next_chain_key(node.chain_key, key)
        return child

    def handle_from(self, mover: int | None, target: NaiveNode, group: int) -> Block:
        """A handle of this group that sits neither before nor behind the target, or a fresh one."""
        if mover is not None:
            path = target.path()
            others = [block for block, (node, its_group) in self.home.items() if its_group == group
                      and node.path() != path[:len(node.path())] and node.path()[:len(path)] != path]
            if others:
                return others[mover % len(others)]
        return self.fresh()

    @rule(prompt=prompts(), group=st.integers(0, NUM_GROUPS - 1))
    def store_spans(self, prompt: Prompt, group: int) -> None:
        """What lies behind the walk, a span at a time, in one event."""
        blocks = self.full_blocks(prompt)
        keys = TokenKeys(prompt.request, self.width)
        walk = self.tree.walk(self.tree.root(prompt.namespace), keys, prompt.num_tokens)
        number = walk.num_blocks
        if number == len(blocks):
            self.tree.prune(walk.end()[0])  # a root that was just made
            return
        root = self.roots.setdefault(prompt.namespace.identity, NaiveNode(None, ()))
        root.chain_key = prompt.namespace.chain_seed
        root.namespace = prompt.namespace
        handles = [self.fresh() for _ in blocks]
        node, nodes = root, []
        for block_number, content in enumerate(blocks):
            node = self.child(node, content, keys.block_key(block_number, self.width))
            nodes.append(node)
        for naive, block in list(zip(nodes, handles, strict=True))[number:]:
            naive.handles[group] = block
            self.home[block] = (naive, group)
        start = number
        spans = self.tree.extend(walk, keys, prompt.num_tokens)
        for run, first, count in spans:
            self.tree.attach_span(run, first, group, handles, start, count)
            start += count
        self.log.stored(group, [(run.run, first, count) for run, first, count in spans], PRIMARY, [35] * (len(blocks) - number))
        self.eager.stored(group, nodes[number:])

    @precondition(lambda self: self.home)
    @rule(choice=st.integers(0, 1000), length=st.integers(1, 6))
    def detach_span(self, choice: int, length: int) -> None:
        """A handle and those right before it in its run."""
        block = list(self.home)[choice % len(self.home)]
        group = self.home[block][1]
        node, end = block.node, block.position + 1
        assert node is not None
        first = end - 1
        while end - first < length and first > 0 and node.values[group][first - 1] is not None:
            first -= 1
        gone = [node.values[group][position] for position in range(end - 1, first - 1, -1)]
        self.log.removed_span(group, node.run, first, end)
        for handle in gone:
            assert handle is not None
            self.take_out_of_the_naive_tree(handle)
        self.tree.detach_span(node, group, first, end)
        for handle in gone:
            assert handle is not None
            assert (handle.node, handle.position, handle.num_tokens) == (None, 0, 0)

    @rule()
    def read_events(self) -> None:
        """Made now, from runs as they were when the tree was another, events say what they would have said then."""
        assert [(event.group, event.data) for event in self.log.flush()] == self.eager.flush()

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.read_events()

    @precondition(lambda self: self.home)
    @rule(choices=st.lists(st.integers(0, 1000), min_size=1, max_size=6))
    def detach(self, choices: list[int]) -> None:
        for choice in choices:
            if self.home:
                block = list(self.home)[choice % len(self.home)]
                group = self.home[block][1]
                self.take_out(block)
                self.tree.detach(block, group)
                assert block.node is None
                assert block.num_tokens == 0

    @rule(prompt=prompts())
    def look(self, prompt: Prompt) -> None:
        """Every group finds the same blocks, under the same chain keys, and the same candidates for a partial match."""
        root = self.tree.find_root(prompt.namespace)
        node = self.roots.get(prompt.namespace.identity)
        assert (root is None) == (node is None or not node.children)
        if root is None or node is None:
            return
        keys = TokenKeys(prompt.request, self.width)
        walk = self.tree.walk(root, keys, prompt.num_tokens)
        nodes = []
        for content in self.full_blocks(prompt):
            if content not in node.children:
                break
            node = node.children[content]
            nodes.append(node)
        assert walk.num_blocks == len(nodes)
        for group in range(NUM_GROUPS):
            assert handles_of(walk, group) == [found.handles[group] for found in nodes]
            self.compare_partial(walk, keys, prompt, node, group)
        for (run, position), found in zip(places_of(walk), nodes, strict=True):
            assert run.chain_key(position) == found.chain_key
            first = found.parent is None or found.parent.parent is None
            assert run.parent_chain_key(position) == (None if first or found.parent is None else found.parent.chain_key)

    def compare_partial(self, walk: Walk, keys: TokenKeys, prompt: Prompt, node: NaiveNode, group: int) -> None:
        start = walk.num_blocks * self.width
        wanted = prompt.elements[start:min(start + self.width, prompt.num_tokens)]
        expected = []
        for elements, item in node.children:
            block = node.children[elements, item].handles[group]
            shared = 0
            while shared < min(len(wanted), len(elements)) and wanted[shared] == elements[shared]:
                shared += 1
            if shared and block is not None and item is None and prompt.overlap(start, start + self.width) is None:
                expected.append((shared, block.id))
        found = candidates_of(self.tree, walk, keys, prompt.num_tokens, group)
        assert sorted((shared, block.id) for shared, block in found) == sorted(expected)
        lengths = [shared for shared, _block in found]
        assert lengths == sorted(lengths, reverse=True)

    @invariant()
    def both_trees_have_the_same_nodes_and_every_handle_is_where_it_says(self) -> None:
        nodes = [node for root in self.roots.values() for node in root.below()]
        assert self.tree.num_nodes() == len(nodes)
        assert set(self.tree.roots) == {identity for identity, root in self.roots.items() if root.children}
        for block, (node, group) in self.home.items():
            assert block.node is not None
            assert block.node.values[group][block.position] is block
            assert block.num_tokens == len(node.content[0])
            assert block.node.is_leaf(block.position) == (not node.children)
        for run in self.runs():
            ordered = [] if run.order is None else [key for bucket in run.order.buckets for key in bucket]
            if run.order is not None or len(run.children) > FEW_CHILDREN:
                assert ordered == sorted(key for key, node in run.children.items() if node.takes_partial())
            self.check_run(run)
            for values, present in zip(run.values, run.present, strict=True):
                assert len(values) == run.length
                assert present == sum(value is not None for value in values)

    def check_run(self, node: Node) -> None:
        """The keys of the run are those of the node, and it stands behind its parent node's run."""
        assert node.run.label is node.label
        assert node.run.num_blocks >= node.length
        assert not node.children or node.run.num_blocks == node.length
        assert node.parent is not None
        assert node.run.parent is (None if node.parent.parent is None else node.parent.run)

    def runs(self) -> list[Node]:
        found = list(self.tree.roots.values())
        for node in found:
            found.extend(node.children.values())
        return [node for node in found if node.parent is not None]


TestTreeAgainstANaiveOne = TreeMachine.TestCase
