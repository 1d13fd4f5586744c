"""A model served through the real manager: conversations over three levels, answered as with an unlimited cache."""

from __future__ import annotations

import pytest
import torch
from gate import Gate

from kvtier.errors import CapacityError
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.tiering.ledger.request import Request
from kvtier.types import Level

SYSTEM = list(range(3, 43))  # ten blocks that all conversations share
USERS = 6


def opening(user):
    generator = torch.Generator().manual_seed(user)
    return SYSTEM + torch.randint(50, 199, (11,), generator=generator).tolist()


def talk(loop, generated, turns=3, new_tokens=5, flush=True):
    """Conversations in turns; every answer is compared with generate() on the same prompt. Returns the answers."""
    histories = {user: opening(user) for user in range(USERS)}
    answers = []
    for turn in range(turns):
        served = loop.run(Request(100 * turn + user, history, max_new_tokens=new_tokens) for user, history in histories.items())
        for user, history in histories.items():
            answer = served[100 * turn + user]
            assert answer.error is None
            assert answer.tokens == generated(history, new_tokens), f"turn {turn}, user {user}"
            answers.append(answer)
            history += [*answer.tokens, 60 + turn, 70 + user]
        if flush:
            assert loop.cache.flush(timeout=20)
        loop.cache.verify()
    return answers


def test_conversations_over_three_levels_are_answered_as_by_generate(serving, generated):
    loop = serving(loop_options={"max_batch_size": 2})
    answers = talk(loop, generated)
    for _ in range(5):  # what is where depends on how soon copies and files were ready
        if min(loop.cache.stats().hit_tokens) > 0:
            break
        answers += talk(loop, generated)
    assert not any(answer.preemptions for answer in answers)  # those would count what they read back a second time
    stats = loop.cache.stats()
    hits = stats.hit_tokens
    assert hits.primary > 0
    assert hits.secondary > 0
    assert hits.nvme > 0
    assert sum(answer.reused_tokens for answer in answers) == sum(hits)
    assert stats.checksum_failures == 0


def test_a_shared_system_prompt_is_computed_once(serving, generated):
    loop = serving(primary="200 blocks", loop_options={"max_batch_size": 1})
    answers = talk(loop, generated, turns=1)
    assert answers[0].reused_tokens == 0
    assert all(answer.reused_tokens >= len(SYSTEM) for answer in answers[1:])


def test_reuse_switched_off_computes_everything(serving, generated):
    loop = serving(enable_block_reuse=False)
    answers = talk(loop, generated, turns=2)
    assert all(answer.reused_tokens == 0 for answer in answers)
    assert sum(loop.cache.stats().hit_tokens) == 0


def test_a_pool_too_small_for_all_preempts_and_every_answer_is_the_same(serving, generated):
    loop = serving(primary="31 blocks")
    answers = talk(loop, generated, turns=1, new_tokens=40)
    assert sum(answer.preemptions for answer in answers) > 0


def test_a_second_process_finds_the_conversations_on_nvme(serving, generated):
    first = serving()
    talk(first, generated, turns=2)
    serving.end(first)
    second = serving()
    answers = talk(second, generated, turns=1)
    assert second.cache.stats().hit_tokens.nvme > 0
    assert all(answer.reused_tokens >= len(SYSTEM) for answer in answers)


def test_flipped_bits_on_nvme_are_computed_again_and_never_served(serving, generated):
    first = serving()
    talk(first, generated, turns=2)
    serving.end(first)
    second = serving(faults=Faults([FaultRule(FaultKind.BIT_FLIP, FaultOperation.READ, rate=0.3)], seed=3))
    talk(second, generated, turns=2, flush=False)
    assert second.cache.stats().checksum_failures > 0


def test_failed_reads_and_writes_are_misses(serving, generated):
    rules = [FaultRule(FaultKind.FAILURE, FaultOperation.READ, rate=0.3), FaultRule(FaultKind.FAILURE, FaultOperation.WRITE, rate=0.2)]
    loop = serving(faults=Faults(rules, seed=5))
    talk(loop, generated, flush=False)


def test_failed_copies_between_memories_are_computed_again(serving, generated):
    loop = serving(faults=Faults([FaultRule(FaultKind.FAILURE, FaultOperation.COPY, rate=0.1)], seed=2))
    talk(loop, generated, flush=False)
    assert loop.cache.stats().transfer_failures > 0


def test_slow_reads_hold_up_only_those_who_wait_for_them(serving, generated):
    first = serving()
    talk(first, generated, turns=1)
    serving.end(first)
    gate = Gate(FaultOperation.READ)
    slow = serving(model="tiny@test:0", faults=gate)
    stored, fresh = [*opening(0), 60], [190] * 20
    slow.submit(Request(0, stored, max_new_tokens=3))
    slow.submit(Request(1, fresh, max_new_tokens=3))
    order = []
    while slow.num_requests:
        order += slow.step()
        if order:  # who does not wait for them is served while none has ended
            gate.open()
    assert [answer.request_id for answer in order] == [1, 0]
    assert order[0].tokens == generated(fresh, 3)
    assert order[1].tokens == generated(stored, 3)
    assert order[1].reused_tokens >= len(SYSTEM)


def test_reads_slower_than_the_timeout_are_given_up(serving, generated):
    first = serving()
    talk(first, generated, turns=1)
    serving.end(first)
    gate = Gate(FaultOperation.READ)
    slow = serving(faults=gate, loop_options={"load_timeout": 0.05})
    stored = [*opening(0), 60]
    answer = slow.submit(Request(0, stored, max_new_tokens=3))
    while not answer.tokens:
        slow.step()
    gate.open()
    slow.run()
    assert answer.tokens == generated(stored, 3)
    assert answer.reused_tokens == 0


def test_a_request_that_no_pool_can_hold_says_so_and_others_are_served(serving, generated):
    loop = serving(primary="12 blocks", secondary="4 blocks")
    answers = loop.run([Request(0, opening(0), max_new_tokens=5), Request(1, [5] * 20, max_new_tokens=5)])
    assert isinstance(answers[0].error, CapacityError)
    assert answers[1].tokens == generated([5] * 20, 5)
    assert loop.cache.num_free_blocks(Level.PRIMARY) == 12


@pytest.mark.parametrize("seed", range(3))
def test_late_copies_and_reads_never_let_a_wrong_byte_be_served(serving, generated, seed):
    """Delays widen every window in which a slot could be read before it is written, or written while it is read."""
    rules = [FaultRule(FaultKind.DELAY, FaultOperation.COPY, rate=0.3, seconds=0.004),
             FaultRule(FaultKind.DELAY, FaultOperation.READ, rate=0.5, seconds=0.01),
             FaultRule(FaultKind.DELAY, FaultOperation.WRITE, rate=0.5, seconds=0.01)]
    loop = serving(faults=Faults(rules, seed=seed), loop_options={"max_batch_size": 3})
    talk(loop, generated, turns=4, flush=False)
