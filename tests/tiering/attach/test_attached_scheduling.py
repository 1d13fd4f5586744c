"""The scheduler's contract in use, over the real manager: every policy answers alike, and each keeps its promise."""

from __future__ import annotations

import time

import pytest

from kvtier.errors import CapacityError, ConfigError, RequestError
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.tiering.attach.sampling import Sampling
from kvtier.tiering.attach.serving_loop import ServingLoop
from kvtier.tiering.attach.transformers import AttachedModel
from kvtier.tiering.ledger.request import Request
from kvtier.types import Level


def requests(prompts, new_tokens=12, start=0):
    return [Request(start + number, prompt, max_new_tokens=new_tokens) for number, prompt in enumerate(prompts)]


class Watched:
    """A model that calls a hook before it computes."""

    def __init__(self, model):
        self.model = model
        self.vocabulary_size = model.vocabulary_size
        self.tokens = []      # tokens of each call
        self.before = lambda: None

    def prefill(self, tokens, past, *table_rows):
        self.tokens.append(len(tokens))
        self.before()
        return self.model.prefill(tokens, past, *table_rows)

    def decode(self, tokens, pasts, *tables):
        self.tokens.append(len(tokens))
        self.before()
        return self.model.decode(tokens, pasts, *tables)


@pytest.mark.parametrize("options", [
    {"admission": "guaranteed_no_evict"}, {"admission": "max_utilization"}, {"chunking": "equal_progress"}, {"token_budget": 7},
    {"token_budget": 20, "chunking": "equal_progress"}, {"token_budget": 32, "chunk_unit": 16}, {"chunk_size": 5},
    {"wait_for_shared_prefix": False}], ids=str)
def test_every_policy_answers_as_generate(serving, generated, prompts, options):
    loop = serving(primary="45 blocks", loop_options=options)
    for turn in range(2):
        answers = loop.run(requests(prompts, start=10 * turn))
        for number, prompt in enumerate(prompts):
            assert answers[10 * turn + number].tokens == generated(prompt, 12)
        loop.cache.verify()


def test_guaranteed_no_evict_never_preempts_where_max_utilization_does(serving, generated, prompts):
    def preemptions(admission):
        loop = serving(primary="31 blocks", nvme="0 blocks", loop_options={"admission": admission})
        answers = loop.run(requests([prompts[0]] * 3 + prompts, new_tokens=24))
        assert all(answers[number].tokens == generated(prompt, 24) for number, prompt in enumerate([prompts[0]] * 3 + prompts))
        serving.end(loop)
        return sum(answer.preemptions for answer in answers.values())

    assert preemptions("guaranteed_no_evict") == 0
    assert preemptions("max_utilization") > 0


def test_a_request_that_can_never_complete_is_refused_at_once_where_all_must(serving, prompts):
    loop = serving(primary="12 blocks", secondary="0 blocks", nvme="0 blocks", loop_options={"admission": "guaranteed_no_evict"})
    answers = loop.run([*requests(prompts[:1], new_tokens=40), *requests(prompts[1:2], start=1)])
    assert isinstance(answers[0].error, CapacityError)
    assert "20 primary blocks of group 0 are needed, the pool has 12" in str(answers[0].error)
    assert answers[0].tokens == []
    assert answers[1].error is None


def test_a_request_that_outgrows_the_pool_is_told_how_much_it_may_need(serving, prompts, generated):
    loop = serving(primary="12 blocks", secondary="0 blocks", nvme="0 blocks")
    answers = loop.run([*requests(prompts[:1], new_tokens=40), *requests(prompts[1:2], start=1)])
    assert "request 0 has outgrown the pool: until it is complete it may hold 20 primary blocks of group 0, the pool has 12" in str(
        answers[0].error)
    assert answers[0].tokens == generated(prompts[0], 40)[:len(answers[0].tokens)]
    assert answers[1].tokens == generated(prompts[1], 12)


def test_a_token_budget_holds_in_every_step(serving, prompts):
    loop = serving(loop_options={"token_budget": 10}, watch=Watched)
    for request in requests(prompts):
        loop.submit(request)
    while loop.num_requests:
        before = len(loop.model.tokens)
        loop.step()
        assert sum(loop.model.tokens[before:]) <= 10


def test_a_prefix_that_another_request_computes_is_waited_for_and_reused(serving, generated):
    system = list(range(3, 43))
    prompts = [[*system, 50 + number, 60] for number in range(4)]

    def computed(wait):
        loop = serving(primary="200 blocks", nvme="0 blocks", watch=Watched, loop_options={"wait_for_shared_prefix": wait})
        answers = loop.run(requests(prompts, new_tokens=3))
        assert all(answers[number].tokens == generated(prompt, 3) for number, prompt in enumerate(prompts))
        serving.end(loop)
        return sum(answer.prompt_tokens - answer.reused_tokens for answer in answers.values())

    assert computed(wait=True) == 42 + 3 * 2
    assert computed(wait=False) == 4 * 42


def test_blocks_of_the_next_step_arrive_while_the_model_computes_this_one(serving, prompts, generated):
    """A request is admitted while another one runs: its copies end within the model's call, without the loop's help."""
    loop = serving(primary="40 blocks", nvme="0 blocks", secondary="60 blocks", watch=Watched,
                   faults=Faults([FaultRule(FaultKind.DELAY, FaultOperation.COPY, seconds=0.03)]))
    for number, prompt in enumerate((prompts[0], [100] * 60, [101] * 60)):  # the second and third push the first one down
        loop.run(requests([prompt], start=number))
    loop.submit(Request(8, prompts[1], max_new_tokens=8))
    for _ in range(3):
        loop.step()
    late = []

    def wait_until_it_is_there():
        if not late and 9 in loop._active and loop._active[9].loading:
            deadline = time.monotonic() + 20
            while not loop.cache.is_ready(9) and time.monotonic() < deadline:
                time.sleep(0.001)
            late.append(loop.cache.is_ready(9))

    loop.model.before = wait_until_it_is_there
    loop.submit(Request(9, prompts[0], max_new_tokens=4))
    answers = loop.run()
    assert late == [True]
    assert answers[9].tokens == generated(prompts[0], 4)
    assert answers[9].reused_tokens > 0


@pytest.mark.parametrize("settings", [{"primary": "200 blocks"}, {"primary": "31 blocks"}])
def test_sampled_answers_depend_on_the_seed_and_not_on_the_company(serving, prompts, settings):
    sampling = Sampling(0.9, top_k=40, top_p=0.95, seed=11)

    def answer(others, **pool):
        loop = serving(nvme="0 blocks", **pool)
        answer = loop.submit(Request(0, prompts[0], max_new_tokens=30), sampling)
        for number, prompt in enumerate(others, start=1):
            loop.submit(Request(number, prompt, max_new_tokens=30), Sampling(1.0, seed=number))
        loop.run()
        serving.end(loop)
        return answer.tokens

    alone = answer([], primary="200 blocks")
    assert answer(prompts[1:], **settings) == alone
    assert alone == answer([], primary="200 blocks")


def test_a_cancelled_request_leaves_nothing_and_the_others_go_on(serving, prompts, generated):
    loop = serving()
    for request in requests(prompts):
        loop.submit(request)
    for _ in range(6):
        loop.step()
    assert loop.cancel(0)
    assert not loop.cancel(0)
    assert not loop.cancel(99)
    answers = loop.run()
    assert sorted(answers) == [1, 2, 3, 4]
    assert all(answers[number].tokens == generated(prompts[number], 12) for number in answers)
    assert loop.cache.num_free_blocks(Level.PRIMARY) == 40


def test_a_waiting_request_can_be_cancelled(serving, prompts):
    loop = serving(loop_options={"max_batch_size": 1})
    for request in requests(prompts[:3]):
        loop.submit(request)
    loop.step()
    assert loop.cancel(2)
    assert sorted(loop.run()) == [0, 1]


def test_a_second_loop_or_a_second_model_on_one_cache_is_refused(serving, tiny_model, prompts, generated):
    loop = serving(nvme="0 blocks")
    with pytest.raises(ConfigError, match=r"this cache is used by a serving loop already.*close\(\) that loop first"):
        ServingLoop(loop.cache, loop.model)
    import copy
    second = copy.deepcopy(tiny_model)
    second.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match=r"this pool is used by an attached LlamaForCausalLM already.*detach\(\) that model first"):
        AttachedModel(second, loop.cache.pool().primary)
    assert loop.run(requests(prompts[:1]))[0].tokens == generated(prompts[0], 12)
    loop.close()
    with ServingLoop(loop.cache, loop.model) as another:
        assert another.run(requests(prompts[:1]))[0].tokens == generated(prompts[0], 12)


def test_a_closed_loop_takes_no_requests(serving):
    loop = serving()
    loop.close()
    with pytest.raises(RequestError, match="this loop is closed"):
        loop.submit(Request(0, [5, 6]))
