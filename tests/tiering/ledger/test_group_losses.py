"""What a failed Move costs a sequence of several groups or beams: each case was found by the random machines."""

from __future__ import annotations

from naive_model import Driver
from pretend_tier import always

from kvtier.tiering.ledger.group import FULL, RECURRENT, WINDOW, GroupSpec
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import LedgerRules


def driver(*groups: GroupSpec, tokens_per_block: int = 2, reuse: bool = True) -> Driver:
    return Driver(Ledger(groups, tokens_per_block, LedgerRules(policy="lru", enable_block_reuse=reuse)))


def generate(cache: Driver, request_id: int, steps: int) -> None:
    width = cache.ledger.sequence(request_id).request.beam_width
    for step in range(steps):
        assert cache.append([request_id], [[step + beam for beam in range(width)]])


def share_a_tail_and_lose_its_copy(cache: Driver, request_id: int) -> None:
    """All beams continue the first one, and the copies that they then write into fail."""
    width = cache.ledger.sequence(request_id).request.beam_width
    assert cache.compute(request_id)
    cache.reorder(request_id, [0] * width)
    cache.append([request_id], [list(range(width))], always)


def test_beams_that_have_parted_get_blocks_of_their_own_again_where_their_window_had_moved_on() -> None:
    cache = driver(GroupSpec((20, 0, 0), WINDOW, 2))
    cache.add(Request(1, [7, 7], beam_width=2, max_new_tokens=20))
    generate(cache, 1, 7)
    share_a_tail_and_lose_its_copy(cache, 1)
    sequence = cache.ledger.sequence(1)
    assert sequence.computed == 0
    assert sequence.rows[0].num_departed == 0
    assert sequence.rows[0].blocks[0] is sequence.rows[0].other_beams[0][0], "the prompt's block is shared again"
    assert sequence.rows[0].blocks[1] is not sequence.rows[0].other_beams[0][1]
    assert cache.compute(1)
    cache.check()


def test_sinks_with_a_bubble_are_lost_from_the_token_that_starts_the_block() -> None:
    """Two beams of [sink, bubble, bubble, bubble][token, token, ...]: without the second block one token is left, not four."""
    cache = driver(GroupSpec((8, 0, 0), WINDOW, 7, 1), tokens_per_block=4)
    cache.add(Request(1, [0, 1, 2], beam_width=2))
    assert cache.compute(1)
    cache.append([1], [[3, 4]], always)
    sequence = cache.ledger.sequence(1)
    assert sequence.computed == 1
    assert cache.compute(1)
    cache.check()


def test_what_a_sequence_stored_behind_a_loss_is_not_written_over() -> None:
    """A lost copy in a window takes the sequence back to the start; its full-attention blocks in the tree stay as they are."""
    cache = driver(GroupSpec((10, 0, 0), WINDOW, 2), GroupSpec((10, 0, 0), FULL))
    cache.add(Request(1, [0, 1, 2, 3, 4], max_new_tokens=20))
    generate(cache, 1, 4)
    assert cache.compute(1)
    cache.store_context(1)
    lease = cache.ledger.pin(1)
    stored = [block for block in cache.ledger.sequence(1).rows[1].blocks if block.node is not None]
    assert len(stored) == 4
    cache.append([1], [[9]], always)
    assert cache.ledger.sequence(1).computed == 0
    assert not set(cache.ledger.sequence(1).rows[1].blocks) & set(stored)
    assert cache.compute(1)
    assert all(block.node is not None for block in stored)
    cache.check()
    cache.ledger.release_lease(lease)


def test_stored_blocks_leave_the_tree_when_there_are_none_to_write_into_instead() -> None:
    cache = driver(GroupSpec((20, 0, 0), WINDOW, 2), GroupSpec((9, 0, 0), FULL))
    cache.add(Request(1, [7, 7], beam_width=2, max_new_tokens=20))
    generate(cache, 1, 1)
    cache.store_context(1)
    generate(cache, 1, 6)
    block = cache.ledger.sequence(1).rows[1].blocks[0]
    assert block.node is not None
    assert cache.compute(1)
    cache.reorder(1, [0, 0])
    cache.add(Request(2, [8] * 6))
    cache.append([1], [[0, 1]], always)
    sequence = cache.ledger.sequence(1)
    assert cache.free_primary()[1] == 0
    assert not sequence.must_preempt
    assert sequence.computed == 0
    assert sequence.rows[1].blocks[0] is block
    assert block.node is None
    assert cache.compute(1)
    cache.check()


def test_a_lost_running_state_starts_again_from_the_last_kept_one() -> None:
    cache = driver(GroupSpec((10, 0, 0), FULL), GroupSpec((10, 0, 0), RECURRENT, snapshot_interval=2))
    cache.add(Request(1, [0, 1, 2, 3, 4], max_new_tokens=20))
    assert cache.compute(1)
    lease = cache.ledger.pin(1)
    next_number = cache.ledger.moves.next_number
    cache.append([1], [[9]], lambda move: move.number < next_number + 2)  # the copies of both tails, not what follows from it
    sequence = cache.ledger.sequence(1)
    assert sequence.computed == 4
    assert cache.compute(1)
    cache.check()
    cache.ledger.release_lease(lease)
