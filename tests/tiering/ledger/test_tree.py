"""The reuse tree at its own door: places, runs, partial matches, namespaces. Nodes are counted as block positions."""

from __future__ import annotations

from typing import Any

import pytest
from grove import Grove, place_of

from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.request import MultimodalItem
from kvtier.tiering.ledger.tree import MAX_GROWING_RUN

IMAGE = b"\x01" * 32


@pytest.fixture
def grove() -> Grove:
    return Grove()


def test_case_C1_a_tree_that_loses_its_last_block_has_no_node_left(grove: Grove) -> None:
    (block,) = grove.insert([1, 2])
    assert block.has_content
    assert block.num_tokens == 2
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
    assert first.node.chain_key(first.position) == grove.chain_key([1, 2])
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
    assert [shared for shared, _block in grove.candidates([1], group=1)] == [1]
    assert grove.candidates([1], group=2) == []
    grove.tree.detach(right, 1)
    assert grove.tree.num_nodes() == 0


def test_case_C5_a_handle_attached_elsewhere_leaves_its_old_place_and_the_old_node_is_pruned(grove: Grove) -> None:
    (block,) = grove.insert([1, 2])
    grove.move(block, [5, 6])
    assert grove.find([1, 2]) == []
    assert grove.find([5, 6]) == [block]
    assert grove.tree.num_nodes() == 1


def test_a_partial_tail_that_became_full_moves_to_the_full_block_s_place() -> None:
    grove = Grove(tokens_per_block=4)
    (tail,) = grove.insert([1, 2])
    grove.move(tail, [1, 2, 3, 4])
    assert grove.tree.num_nodes() == 1
    assert tail.num_tokens == 4
    assert grove.find([1, 2, 3, 4]) == [tail]
    assert grove.candidates([1, 2, 9]) == [(2, tail)]


def test_case_C5_a_handle_attached_elsewhere_leaves_its_place_to_the_other_group() -> None:
    grove = Grove(num_groups=2)
    (left,) = grove.insert([1, 2], group=0)
    (right,) = grove.insert([1, 2], group=1)
    grove.move(left, [5, 6], group=0)
    assert grove.find([1, 2], group=0) == [None]
    assert grove.find([1, 2], group=1) == [right]
    assert grove.tree.num_nodes() == 2
    grove.move(right, [7, 8], group=1)
    assert grove.tree.num_nodes() == 2, "the old place had nothing left and is gone"


def test_case_C6_the_first_handle_at_a_place_stays(grove: Grove) -> None:
    (block,) = grove.insert([1, 2])
    assert grove.insert([1, 2]) == []
    assert grove.find([1, 2]) == [block]


def test_case_C6_the_first_handle_stays_in_each_group() -> None:
    grove = Grove(num_groups=2)
    (block,) = grove.insert([1, 2], group=1)
    assert grove.insert([1, 2], group=1) == []
    assert [grove.find([1, 2], group=group) for group in range(2)] == [[None], [block]]


def test_attaching_to_an_occupied_place_or_detaching_twice_is_a_bug_that_is_noticed(grove: Grove) -> None:
    (block,) = grove.insert([1, 2])
    node = block.node
    assert node is not None
    with pytest.raises(AssertionError):
        grove.tree.attach(node, 0, 0, grove.block(), 2)
    grove.tree.detach(block, 0)
    with pytest.raises(AssertionError):
        grove.tree.detach(block, 0)


def test_a_handle_can_only_leave_the_group_it_is_in() -> None:
    grove = Grove(num_groups=2)
    (block,) = grove.insert([1, 2], group=0)
    with pytest.raises(AssertionError):
        grove.tree.detach(block, 1)


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


def test_case_C9_a_block_is_a_leaf_until_any_group_stores_something_behind_it() -> None:
    grove = Grove(num_groups=2)
    (head,) = grove.insert([1, 2], group=0)
    assert place_of(head)[0].is_leaf(place_of(head)[1])
    child = grove.insert([1, 2, 3, 4], group=1)[-1]
    assert not place_of(head)[0].is_leaf(place_of(head)[1])
    grove.tree.detach(child, 1)
    assert place_of(head)[0].is_leaf(place_of(head)[1])


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
    assert other.node.chain_key(other.position) == grove.chain_key([1, 2, 3, 4, 9, 9]) != old


def test_a_growing_run_stays_short_so_that_each_step_of_a_long_generation_is_cheap(grove: Grove) -> None:
    tokens: list[int] = []
    blocks: list[Block] = []
    for number in range(3 * MAX_GROWING_RUN):
        tokens += [number, number]
        blocks += grove.insert(tokens)
    assert grove.find(tokens) == blocks
    assert all(block.node is not None and block.node.length <= MAX_GROWING_RUN for block in blocks)


def test_a_path_of_thousands_of_nodes_has_chain_keys_and_can_be_given_up(grove: Grove) -> None:
    """Each block of a long video is a node of its own; the tail is the first to be written out, so its key is asked for first."""
    tokens = [7] * 6000
    item = [MultimodalItem(IMAGE, [(0, len(tokens))])]
    blocks = grove.insert(tokens, multimodal=item)
    tail = blocks[-1]
    assert tail.node is not None
    assert tail.node.chain_key(tail.position) == grove.chain_key(tokens, multimodal=item)
    for block in blocks:
        grove.tree.detach(block, 0)
    assert grove.tree.num_nodes() == 0


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


def test_a_partial_tail_is_no_full_match(grove: Grove) -> None:
    first, tail = grove.insert([1, 2, 3])
    assert grove.find([1, 2, 3, 4]) == [first]
    assert grove.candidates([1, 2, 3, 4]) == [(1, tail)]


def test_the_tokens_that_count_end_where_the_caller_says(grove: Grove) -> None:
    first, second = grove.insert([1, 2, 3, 4])
    assert grove.find([1, 2, 3, 4], num_tokens=3) == [first]
    assert grove.candidates([1, 2, 3, 4], num_tokens=3) == [(1, second)]
    assert grove.candidates([1, 2, 3, 4], num_tokens=2) == []


def test_part_of_an_item_is_not_that_item() -> None:
    grove = Grove(tokens_per_block=4)
    item = [MultimodalItem(IMAGE, [(0, 2)])]
    grove.insert([7, 7, 3, 4], multimodal=item)
    assert grove.candidates([7, 7, 3, 9], multimodal=item) == []
    assert grove.candidates([7, 7, 3, 9]) == []
    (plain,) = grove.insert([7, 7, 3, 4])
    assert grove.candidates([7, 7, 3, 9]) == [(3, plain)]
    assert grove.candidates([7, 7, 3, 9], multimodal=[MultimodalItem(IMAGE, [(3, 1)])]) == []


# -- namespaces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keywords", [{"lora_id": 0}, {"lora_id": 1}, {"lora_id": 1, "lora_digest": IMAGE}, {"cache_salt": ""},
                                      {"cache_salt": "a"}, {"extra_ids": [0, 0]}])
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
    assert grove.candidates([1, 2], extra_ids=[4, 6]) == []


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
