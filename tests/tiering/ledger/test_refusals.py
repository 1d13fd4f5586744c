"""A refused call changes nothing, and a CapacityError names whom to pre-empt (design: all or nothing)."""

from __future__ import annotations

import pytest
from hand_run import HandRun, level, on_nvme, on_secondary

from kvtier.errors import CapacityError, RequestError, UnknownBlock, UnknownRequest
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger import ledger as ledger_module

# -- whom to pre-empt --------------------------------------------------------------------------------------------------


def test_a_capacity_error_names_the_newest_requests_and_pre_empting_exactly_those_makes_it_fit() -> None:
    run = HandRun(8)
    for number, letters in ((1, "a"), (2, "b"), (3, "c"), (4, "d")):
        run.add(letters, id=number)
    request = run.request("xyz")
    error = run.no_room(lambda: run.ledger.add_sequences([request]))
    assert error.preempt == (4, 3)
    assert (error.needed, error.available) == (4, 0)
    assert "[4, 3]" in str(error)
    run.remove(run.ledger.sequence(4))
    run.no_room(lambda: run.ledger.add_sequences([request]))
    run.remove(run.ledger.sequence(3))
    run.add_all(request)
    run.finish()


def test_who_is_pre_empted_of_a_step_takes_no_block_of_it() -> None:
    """Both unfilled blocks are leased, so that no end of a sequence frees one; but without the newer one the step needs one block less."""
    run = HandRun(3)
    first, second = run.add([1, 2], id=1), run.add([3, 4], id=2)
    run.compute(first)
    run.compute(second)
    leases = [run.ledger.pin(1), run.ledger.pin(2)]
    error = run.no_room(lambda: run.ledger.append_step([1, 2], [[7], [7]]))
    assert (error.needed, error.available, error.preempt) == (2, 1, (2,))
    run.remove(second, store=False)
    run.append(first, 7)
    for lease in leases:
        run.ledger.release_lease(lease)
    run.finish()


def test_no_more_are_pre_empted_of_a_step_than_the_others_need() -> None:
    run = HandRun(4)
    first, second = run.add([1] * 8, id=1), run.add([2] * 4, id=2)
    run.compute(first)
    run.compute(second)
    error = run.no_room(lambda: run.ledger.append_step([1, 2], [[7], [7] * 8]))
    assert (error.needed, error.available, error.preempt) == (3, 1, (2,)), "the other one needs one block"
    run.remove(second, store=False)
    run.append(first, 7)
    run.finish()


def test_pre_emption_counts_a_shared_block_only_with_its_last_holder() -> None:
    run = HandRun(6)
    run.serve("abc")
    run.add_all(run.request("abc", id=1), run.request("abc", id=2))
    assert run.free() == 1
    request = run.request([1] * 12)
    error = run.no_room(lambda: run.ledger.add_sequences([request]))
    assert error.preempt == (2, 1)
    for number in error.preempt:
        run.remove(run.ledger.sequence(number))
    run.add_all(request)
    run.finish()


def test_pre_emption_does_not_count_blocks_that_the_request_itself_wants() -> None:
    run = HandRun(6)
    run.serve("abc")
    run.add([1] * 8, id=1)
    run.add("ab", id=2)
    request = run.request("abcd")  # wants the three stored blocks and two more
    error = run.no_room(lambda: run.ledger.add_sequences([request]))
    assert error.preempt == (2, 1), "the end of request 2 alone frees one block that is not wanted"
    run.remove(run.ledger.sequence(2), store=False)
    run.no_room(lambda: run.ledger.add_sequences([request]))
    run.remove(run.ledger.sequence(1), store=False)
    assert run.add_all(request)[0].prepopulated == 12
    run.finish()


def test_nobody_is_named_when_pre_empting_everybody_would_not_help() -> None:
    run = HandRun(4)
    run.add("a", id=1)
    error = run.no_room(lambda: run.ledger.add_sequences([run.request("abcde")]))
    assert error.preempt == ()
    assert "enlarge primary" in str(error)
    run.finish()


def test_leased_blocks_are_not_promised() -> None:
    run = HandRun(4)
    sequence = run.add("a", id=1)
    lease = run.ledger.pin(1)
    assert run.compute(sequence)
    run.remove(sequence)
    error = run.no_room(lambda: run.ledger.add_sequences([run.request("xyz")]))
    assert error.preempt == ()
    assert error.available == 2
    run.ledger.release_lease(lease)
    run.add("xyz")
    run.finish()


def test_a_block_that_is_being_read_from_nvme_is_not_promised_and_the_message_says_so() -> None:
    run = HandRun(2, 1, 2)
    on_nvme(run, "a")
    sequence = run.add("a")
    run.remove(sequence, store=False)
    assert run.free() == 1
    error = run.no_room(lambda: run.ledger.add_sequences([run.request("x")]))
    assert error.preempt == ()
    assert "try again" in str(error)
    run.settle()
    run.add("x")
    run.finish()


def test_the_next_step_names_whom_to_pre_empt_and_appends_to_nobody() -> None:
    run = HandRun(3)
    first = run.add([1] * 4, id=1)
    second = run.add([2] * 8, id=2)
    for sequence in (first, second):
        assert run.compute(sequence)
    error = run.no_room(lambda: run.ledger.append_step([1, 2], [[5], [5]]))
    assert error.needed == 2
    assert error.preempt == (2,)
    assert (first.num_tokens, second.num_tokens) == (4, 8)
    run.remove(second)
    run.append(first, 5)
    run.finish()


# -- nothing changes on an error ---------------------------------------------------------------------------------------


def test_a_batch_that_does_not_fit_admits_none_of_its_requests() -> None:
    run = HandRun(5, 1)
    on_secondary(run, "a")
    small, large = run.request("a"), run.request("wxyz")
    run.no_room(lambda: run.ledger.add_sequences([small, large]))
    assert run.ledger.sequences == {}
    assert run.tier.waiting == []
    run.add_all(small)
    run.finish()


def test_a_duplicate_id_admits_none_of_the_batch() -> None:
    run = HandRun(6)
    run.add("a", id=1)
    run.refused(RequestError, lambda: run.ledger.add_sequences([run.request("b", id=2), run.request("c", id=1)]))
    run.refused(RequestError, lambda: run.ledger.add_sequences([run.request("b", id=3), run.request("c", id=3)]))
    assert sorted(run.ledger.sequences) == [1]
    run.finish()


def test_bad_steps_change_nothing() -> None:
    run = HandRun(6)
    sequence = run.add("a", id=1)
    assert run.compute(sequence)
    run.append(sequence, 1)
    for ids, tokens in (([1], [[1], [2]]), ([1, 1], [[1], [2]]), ([1], [[1 << 31]])):
        run.refused(RequestError, lambda i=ids, t=tokens: run.ledger.append_step(i, t))
    run.refused(UnknownRequest, lambda: run.ledger.append_step([1, 9], [[1], [1]]))
    for num_tokens in (0, 7, -1):
        run.refused(RequestError, lambda n=num_tokens: run.ledger.mark_computed(1, n))
    for num_tokens in (2, -1):
        run.refused(RequestError, lambda n=num_tokens: run.ledger.rewind(1, n))
    run.finish()


@pytest.mark.skipif(not str(ledger_module.__file__).endswith(".py"), reason="compiled with mypyc, True is 1")
def test_a_truth_value_is_no_number_of_tokens_and_no_token() -> None:
    run = HandRun(6)
    sequence = run.add("a", id=1)
    assert run.compute(sequence, 0)
    for call in (lambda: run.ledger.mark_computed(1, True), lambda: run.ledger.rewind(1, True),
                 lambda: run.ledger.append_step([1], [[True]])):
        run.refused(RequestError, call)
    run.finish()


def test_unknown_ids_change_nothing() -> None:
    run = HandRun(6)
    for call in (lambda: run.ledger.mark_computed(9, 1), lambda: run.ledger.rewind(9, 1), lambda: run.ledger.store_context(9),
                 lambda: run.ledger.remove_sequence(9, True), lambda: run.ledger.pin(9)):
        run.refused(UnknownRequest, call)
    for block_id in (-1, 6, 9999):
        run.refused(UnknownBlock, lambda b=block_id: run.ledger.offload(b))
    run.finish()


def test_single_blocks_that_are_held_empty_or_in_transfer_are_refused() -> None:
    run = HandRun(5, 1, 2)
    empty = run.ledger.block(4)
    [block] = on_secondary(run, "a")
    run.refused(RequestError, lambda: run.ledger.offload(block.id))
    run.refused(RequestError, lambda: run.ledger.offload(empty.id))
    run.refused(RequestError, lambda: run.ledger.set_priority(block.id, 101))
    run.refresh()
    for call in (lambda: run.ledger.onboard(block.id), lambda: run.ledger.set_priority(block.id, 5)):
        run.refused(RequestError, call)
    run.settle()
    sequence = run.add("a")
    assert sequence.blocks[0] is block
    run.refused(RequestError, lambda: run.ledger.offload(block.id))
    run.finish()


def test_onboarding_into_a_full_pool_is_refused() -> None:
    run = HandRun(2, 1)
    [block] = on_secondary(run, "a")
    run.add([1] * 8)
    with pytest.raises(CapacityError):
        run.ledger.onboard(block.id)
    run.no_room(lambda: run.ledger.onboard(block.id))
    assert level(block) == SECONDARY
    run.finish()


def test_a_lease_ends_once() -> None:
    run = HandRun(4)
    sequence = run.add("a")
    lease = run.ledger.pin(sequence.id)
    run.ledger.release_lease(lease)
    run.refused(RequestError, lambda: run.ledger.release_lease(lease))
    run.finish()


def test_a_reset_is_refused_while_somebody_holds_blocks_and_forgets_everything_afterwards() -> None:
    run = HandRun(6, 2, 4)
    on_nvme(run, "ab")
    sequence = run.add("c")
    run.refused(RequestError, run.ledger.reset)
    run.remove(sequence, store=False)
    run.ledger.reset()
    run.settle()
    assert run.tier.rows == {}
    assert all(run.content(where) == [] for where in (PRIMARY, SECONDARY, NVME))
    assert capacity.match(run.ledger, run.request("ab")).reusable_blocks == 0
    run.finish()
