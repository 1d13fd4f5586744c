"""Partial matches among many siblings, against a search through all of them."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvtier.pools.pool_index import PRIMARY, pool_index
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.key import Namespace, TokenKeys
from kvtier.tiering.ledger.request import MultimodalItem, Request
from kvtier.tiering.ledger.siblings import BUCKET_KEYS, SiblingOrder, common_tokens
from kvtier.tiering.ledger.tree import FEW_CHILDREN, ReuseTree
from kvtier.types import BlockId

WIDTH = 4


class Siblings:
    """Prompts of at most one block: all of them are children of the root."""

    def __init__(self) -> None:
        self.tree = ReuseTree(1, WIDTH)
        self.prompts: dict[tuple[int, ...], Block] = {}

    def keys(self, tokens: list[int]) -> tuple[TokenKeys, Namespace]:
        request = Request(0, tokens)
        return TokenKeys(request, WIDTH), Namespace(b"", request)

    def store(self, tokens: list[int]) -> None:
        if tuple(tokens) in self.prompts:
            return
        keys, namespace = self.keys(tokens)
        walk = self.tree.walk(self.tree.root(namespace), keys, len(tokens))
        block = Block(BlockId(len(self.prompts)), pool_index(PRIMARY, len(self.prompts)))
        spans = self.tree.extend(walk, keys, len(tokens))
        place = self.tree.extend_partial(walk, keys, len(tokens)) if not spans else spans[0][:2]
        assert place is not None
        self.tree.attach(place[0], place[1], 0, block, len(tokens))
        self.prompts[tuple(tokens)] = block

    def remove(self, tokens: tuple[int, ...]) -> None:
        self.tree.detach(self.prompts.pop(tokens), 0)

    def found(self, tokens: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        keys, namespace = self.keys(tokens)
        walk = self.tree.walk(self.tree.root(namespace), keys, len(tokens))
        names = {block: prompt for prompt, block in self.prompts.items()}
        found = []
        for shared, node, position in self.tree.partial_places(walk, keys, len(tokens)).all_places():
            block = node.values[0][position]
            assert block is not None
            found.append((shared, names[block]))
        return found

    def check(self, tokens: list[int]) -> None:
        found = self.found(tokens)
        shares = [shared for shared, _prompt in found]
        assert shares == sorted(shares, reverse=True)
        expected = set() if tuple(tokens) in self.prompts and len(tokens) == WIDTH else {
            (shared(tokens, prompt), prompt) for prompt in self.prompts if shared(tokens, prompt)}
        assert set(found) == expected
        assert len(found) == len(expected)


def shared(left: list[int], right: tuple[int, ...]) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


one_block = st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH)


@given(st.lists(one_block, min_size=1, max_size=40), st.lists(st.integers(0, 40)), st.lists(one_block, min_size=1))
def test_candidates_are_those_of_a_search_through_all_siblings(stored: list[list[int]], removed: list[int], asked: list[list[int]]) -> None:
    siblings = Siblings()
    for tokens in stored:
        siblings.store(tokens)
    for number in removed:
        if len(siblings.prompts) > 1:
            siblings.remove(list(siblings.prompts)[number % len(siblings.prompts)])
    for tokens in [*asked, *stored]:
        siblings.check(tokens)


def test_many_siblings_come_and_go() -> None:
    siblings = Siblings()
    choose = random.Random(3)
    for _ in range(4 * BUCKET_KEYS):
        siblings.store([choose.randrange(9) for _ in range(choose.randrange(1, WIDTH + 1))])
        if choose.randrange(4) == 0:
            siblings.remove(choose.choice(list(siblings.prompts)))
    for _ in range(20):
        siblings.check([choose.randrange(9) for _ in range(choose.randrange(1, WIDTH + 1))])
    for prompt in list(siblings.prompts):
        siblings.remove(prompt)
    assert siblings.tree.roots == {}


def test_the_first_candidate_of_many_is_found_without_looking_at_the_others() -> None:
    siblings = Siblings()
    for number in range(200):
        siblings.store([1, 2, number % 50, number])
    keys, namespace = siblings.keys([1, 2, 7, 9])
    places = siblings.tree.partial_places(siblings.tree.walk(siblings.tree.root(namespace), keys, 4), keys, 4)
    place = places.next_place()
    assert place is not None
    assert place[0] == 3
    assert len(places.all_places()) == 199


def test_blocks_with_an_item_are_not_in_the_order_of_many_siblings() -> None:
    siblings = Siblings()
    for number in range(FEW_CHILDREN):
        siblings.store([1, 2, 3, number])
    request = Request(0, [1, 2, 3, 99], multimodal=[MultimodalItem(b"\x01" * 32, [(3, 1)])])
    keys = TokenKeys(request, WIDTH)
    root = siblings.tree.root(Namespace(b"", request))
    for _ in range(2):
        ((node, position, _count),) = siblings.tree.extend(siblings.tree.walk(root, keys, 4), keys, 4)
        block = Block(BlockId(99), pool_index(PRIMARY, 99))
        siblings.tree.attach(node, position, 0, block, 4)
        siblings.store([1, 2, 3, 50])
        siblings.check([1, 2, 3, 98])
        siblings.tree.detach(block, 0)


@given(st.lists(st.integers(0, 99).map(lambda number: b"%02d" % number), max_size=80))
def test_the_order_is_sorted_whatever_comes_and_goes(keys: list[bytes]) -> None:
    order = SiblingOrder([])
    present: set[bytes] = set()
    for key in keys:
        if key in present:
            present.remove(key)
            order.remove(key)
        else:
            present.add(key)
            order.add(key)
        assert [key for bucket in order.buckets for key in bucket] == sorted(present)


@given(st.binary(max_size=24), st.binary(max_size=24), st.sampled_from((1, 4, 12)))
def test_common_tokens_are_counted_in_whole_tokens(left: bytes, right: bytes, width: int) -> None:
    count = 0
    while (count + 1) * width <= min(len(left), len(right)) and left[:(count + 1) * width] == right[:(count + 1) * width]:
        count += 1
    assert common_tokens(left, right, width) == count
    assert common_tokens(left, left, width) == len(left) // width
