"""The reuse tree keeps neighbouring blocks in runs: nobody sees where they are split, cut and grown, neither in blocks nor in names."""

from __future__ import annotations

import pytest
from grove import Grove, place_of

from kvtier.tiering.ledger.events import EventLog, Removed
from kvtier.tiering.ledger.key import KeyRun
from kvtier.tiering.ledger.tree import MAX_GROWING_RUN


@pytest.fixture
def grove() -> Grove:
    return Grove()


@pytest.mark.parametrize("parting", range(8))
def test_prompts_that_part_anywhere_keep_their_common_blocks(grove: Grove, parting: int) -> None:
    tokens = list(range(16))
    other = [*tokens[:parting * 2], *([99] * (16 - parting * 2))]
    stored = grove.insert(tokens)
    names = [block.node.chain_key(block.position) for block in stored if block.node is not None]
    branch = grove.insert(other)
    assert grove.find(tokens) == stored
    assert grove.find(other) == [*stored[:parting], *branch]
    assert grove.tree.num_nodes() == 16 - parting
    assert [block.node.chain_key(block.position) for block in stored if block.node is not None] == names
    for block in branch:
        grove.tree.detach(block, 0)
    assert grove.tree.num_nodes() == 8
    assert grove.find(tokens) == stored


@pytest.mark.parametrize("step", [1, 2, 63, 64, 65, 200])
def test_a_prompt_stored_piece_by_piece_is_found_whole(step: int) -> None:
    grove = Grove(tokens_per_block=1)
    tokens = [number % 7 for number in range(3 * MAX_GROWING_RUN + 5)]
    for end in range(step, len(tokens) + step, step):
        grove.insert(tokens[:end])
    assert grove.num_blocks == grove.tree.num_nodes() == len(tokens)
    assert [block.id for block in grove.find(tokens) if block is not None] == list(range(1, len(tokens) + 1))


def test_a_run_given_up_from_its_end_grows_again_with_other_tokens(grove: Grove) -> None:
    stored = grove.insert(list(range(16)))
    for block in stored[:2:-1]:
        grove.tree.detach(block, 0)
    other = [*range(6), *([99] * 10)]
    branch = grove.insert(other)
    assert grove.find(list(range(16))) == stored[:3]
    assert grove.find(other) == [*stored[:3], *branch]
    assert grove.tree.num_nodes() == 8


def test_what_is_stored_behind_a_run_given_up_from_its_end_follows_what_is_left_of_it(grove: Grove) -> None:
    """The run's keys were not cut at once; an event about the new tail must not take the old blocks for its predecessors."""
    stored = grove.insert(list(range(10)))
    grove.tree.detach(stored[-1], 0)
    (tail,) = grove.insert([*range(8), 99])
    node, position = place_of(tail)
    before, last = place_of(stored[3])
    assert node.parent_chain_key(position) == before.chain_key(last)
    assert node.chain_key(position) == grove.chain_key([*range(8), 99])


def test_a_split_keeps_no_old_run_alive_but_for_events_that_nobody_has_read(grove: Grove) -> None:
    stored = grove.insert(list(range(8)))
    below = grove.insert([*range(8), *([7] * 2 * MAX_GROWING_RUN)])[-1]
    log = EventLog(10, 1)
    old, position = place_of(stored[3])
    log.removed(0, old.run, position)
    run = old.run
    grove.insert([*range(4), 98, 99])
    chain = []
    node: KeyRun | None = place_of(below)[0].run
    while node is not None:
        chain.append(node)
        node = node.parent
    assert run not in chain
    assert [part.num_blocks for part in chain] == [MAX_GROWING_RUN, 2, 2]
    (event,) = log.flush()
    assert event.data == Removed((place_of(stored[3])[0].chain_key(1),))
