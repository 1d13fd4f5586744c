"""The rules of the serving loop, one by one, over a scripted cache (see conftest.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtier.errors import CapacityError, ConfigError, RequestError
from kvtier.tiering.attach import serving_loop
from kvtier.tiering.attach.sampling import Sampling
from kvtier.tiering.attach.serving_loop import ServingLoop
from kvtier.tiering.attach.transformers import AttachedModel
from kvtier.tiering.ledger.request import Request


class Watched:
    """A model that notes every call on its way to the real one."""

    def __init__(self, model):
        self.model = model
        self.chunks = []   # (past, tokens)
        self.batches = []  # sequences in each decode
        self.vocabulary_size = model.vocabulary_size

    def prefill(self, tokens, past, table_row):
        self.chunks.append((past, list(tokens)))
        return self.model.prefill(tokens, past, table_row)

    def decode(self, tokens, pasts, table):
        self.batches.append(len(tokens))
        return self.model.decode(tokens, pasts, table)


@pytest.fixture
def serve(tiny_model, scripted_cache):
    """A loop over a fresh scripted cache; leaves the model detached and checks that the cache holds nothing at the end."""
    started = []

    def start(num_blocks=128, watch=Watched, **options):
        cache = scripted_cache(num_blocks)
        attached = AttachedModel(tiny_model, cache.primary)
        started.append(attached)
        loop = ServingLoop(cache, watch(attached), **options)
        started.append(loop)
        return loop

    yield start
    for thing in reversed(started):
        if isinstance(thing, ServingLoop):
            thing.close()
            assert not thing.cache.slots, "blocks leaked"
            assert len(thing.cache.free) == thing.cache.primary.num_blocks
        else:
            thing.detach()


def requests(prompts, new_tokens=6):
    return [Request(number, prompt, max_new_tokens=new_tokens) for number, prompt in enumerate(prompts)]


def test_answers_are_those_of_generate(serve, generated, prompts):
    expected = [generated(prompt, 6) for prompt in prompts]
    answers = serve(chunk_size=16).run(requests(prompts))
    assert [answers[number].tokens for number in range(len(prompts))] == expected
    assert all(answer.error is None and answer.preemptions == 0 for answer in answers.values())
    assert all(len(answer.top_gaps) == 6 and min(answer.top_gaps) > 0 for answer in answers.values())
    assert all(0 < answer.first_token_seconds <= answer.seconds for answer in answers.values())


def test_prompt_chunks_end_at_absolute_multiples_of_the_chunk_size(serve, prompts):
    loop = serve(chunk_size=16)
    loop.run(requests(prompts[:1]))
    assert [(past, len(tokens)) for past, tokens in loop.model.chunks] == [(0, 16), (16, 16), (32, 5)]


def test_the_first_chunk_after_reuse_is_shortened_to_the_boundary(serve, prompts):
    loop = serve(chunk_size=16)
    # What the pool "holds already" is whatever these blocks contain; only where chunks are cut is looked at.
    loop.cache.primary.tensor.zero_()
    loop.cache.promised[0] = 21
    answer = loop.run(requests(prompts[:1]))[0]
    assert [(past, len(tokens)) for past, tokens in loop.model.chunks] == [(21, 11), (32, 5)]
    assert answer.reused_tokens == 21


def test_a_chunk_is_never_cut_shorter_because_another_request_used_the_budget(serve, prompts):
    loop = serve(chunk_size=16)
    loop.run(requests([prompts[1], prompts[0]]))
    assert [(past, len(tokens)) for past, tokens in loop.model.chunks] == [(0, 5), (0, 16), (16, 16), (32, 5)]


def test_a_step_computes_at_most_one_chunks_worth_of_prompt(serve, prompts):
    loop = serve(chunk_size=16)
    for request in requests(prompts):
        loop.submit(request)
    while loop.num_requests:
        before = len(loop.model.chunks)
        loop.step()
        assert sum(len(tokens) for _, tokens in loop.model.chunks[before:]) <= 16


def test_several_requests_are_decoded_in_one_batch(serve, prompts):
    loop = serve()
    loop.run(requests(prompts[:3]))
    assert max(loop.model.batches) == 3


def test_no_more_requests_are_in_flight_than_the_batch_size_allows(serve, prompts):
    loop = serve(max_batch_size=2)
    loop.run(requests(prompts))
    assert max(loop.model.batches) == 2


def test_an_answer_ends_with_the_stop_token(serve, generated, prompts):
    full = generated(prompts[0], 6)
    answers = serve(stop_tokens=[full[2]]).run(requests(prompts[:1]))
    assert answers[0].tokens == full[:full.index(full[2]) + 1]


def test_what_was_computed_is_reported_and_stored(serve, prompts):
    loop = serve(chunk_size=16)
    answer = loop.run(requests(prompts[:1]))[0]
    calls = [call for call in loop.cache.calls if call[0] != "refresh"]
    assert calls == [("add", 0, 37, False), ("computed", 0, 16), ("computed", 0, 32), ("computed", 0, 37),
                     ("store_context", 0), ("append", 0, answer.tokens[-1]), ("remove", 0, True)]


def test_a_last_token_that_finds_no_room_is_not_worth_a_preemption(serve, generated, prompts):
    loop = serve(num_blocks=10, chunk_size=64)  # 40 tokens: the fourth new token would be the 41st
    answer = loop.run([Request(0, prompts[0], max_new_tokens=4)])[0]
    assert answer.error is None
    assert answer.preemptions == 0
    assert answer.tokens == generated(prompts[0], 4)


def test_the_cache_is_refreshed_once_per_step(serve, prompts):
    loop = serve()
    for request in requests(prompts):
        loop.submit(request)
    steps = 0
    while loop.num_requests:
        loop.step()
        steps += 1
    assert loop.cache.calls.count(("refresh",)) == steps


def test_a_full_pool_preempts_and_answers_stay_the_same(serve, generated, prompts):
    expected = [generated(prompt, 30) for prompt in prompts]
    loop = serve(num_blocks=30, chunk_size=16)  # 120 tokens; the five need up to 307
    answers = loop.run(requests(prompts, new_tokens=30))
    assert [answers[number].tokens for number in range(len(prompts))] == expected
    assert sum(answer.preemptions for answer in answers.values()) > 0
    removed_for_room = [call for call in loop.cache.calls if call[0] == "remove"]
    assert all(store for _, _, store in removed_for_room), "what a pre-empted request computed is kept"


def test_a_preempted_request_comes_back_before_those_that_never_ran(serve, prompts):
    loop = serve(num_blocks=30, chunk_size=64)
    loop.run(requests([prompts[0], prompts[0], prompts[0], prompts[4]], new_tokens=30))
    added = [call[1] for call in loop.cache.calls if call[0] == "add"]
    first_preempted = next(number for index, number in enumerate(added) if number in added[:index])
    assert added.index(3) > len(added) - 1 - added[::-1].index(first_preempted)


def test_after_a_preemption_nobody_is_admitted_until_somebody_has_finished(serve, prompts):
    loop = serve(num_blocks=30, chunk_size=64)
    for request in requests([prompts[0]] * 3, new_tokens=30):
        loop.submit(request)

    def count(name):
        return [call[0] for call in loop.cache.calls].count(name)

    while not count("remove"):
        assert loop.step() == []
    admitted = count("add")
    while not loop.step():
        assert count("add") == admitted
    loop.step()
    assert count("add") > admitted


def test_a_request_that_outgrows_the_pool_fails_and_the_others_are_served(serve, generated, prompts):
    loop = serve(num_blocks=12, chunk_size=16)  # 48 tokens
    answers = loop.run([Request(0, prompts[0], max_new_tokens=40), Request(1, prompts[1], max_new_tokens=4)])
    assert isinstance(answers[0].error, CapacityError)
    assert answers[0].tokens == generated(prompts[0], 40)[:len(answers[0].tokens)]
    assert answers[1].tokens == generated(prompts[1], 4)


def test_a_prompt_longer_than_the_pool_fails_at_once_and_the_others_are_served(serve, generated, prompts):
    loop = serve(num_blocks=12)
    answers = loop.run([Request(0, prompts[2], max_new_tokens=4), Request(1, prompts[1], max_new_tokens=4)])
    assert isinstance(answers[0].error, CapacityError)
    assert answers[0].tokens == []
    assert answers[1].tokens == generated(prompts[1], 4)


def test_room_that_never_comes_ends_the_request_after_the_timeout(serve, prompts):
    now = [0.0]
    loop = serve(num_blocks=12, room_timeout=5.0, clock=lambda: now[0])
    held = [loop.cache.free.pop() for _ in range(10)]  # as file operations that do not return would
    loop.submit(Request(0, prompts[0], max_new_tokens=4))
    assert loop.step() == []
    now[0] = 4.0
    assert loop.step() == []
    now[0] = 6.0
    (answer,) = loop.step()
    assert isinstance(answer.error, CapacityError)
    loop.cache.free += held


def test_a_request_alone_whose_next_chunk_never_finds_blocks_ends_after_the_timeout(serve, prompts):
    times = iter(range(1000))
    loop = serve(room_timeout=5.0, clock=lambda: float(next(times)))
    loop.cache.config.chunk_size = 16
    loop.cache.is_paused = lambda request_id: True
    answer = loop.submit(Request(0, prompts[0], max_new_tokens=2))
    for _ in range(12):
        loop.step()
    assert isinstance(answer.error, CapacityError)
    assert "next prompt chunk" in str(answer.error)


def test_the_loop_takes_a_nap_while_some_wait_for_room_and_the_others_for_what_is_read(serve, prompts, monkeypatch):
    naps = []
    monkeypatch.setattr(serving_loop, "time", SimpleNamespace(sleep=naps.append))
    loop = serve()
    loop.cache.config.chunk_size = 16
    loop.cache.is_paused = lambda request_id: request_id == 0
    loop.cache.never_ready.add(1)
    for request in requests(prompts[:2]):
        loop.submit(request)
    for count in range(1, 4):
        assert loop.step() == []
        assert len(naps) == count
    loop.cache.is_paused = lambda request_id: False
    loop.cache.never_ready.clear()
    assert len(loop.run()) == 2


def test_others_are_served_while_a_request_waits_for_its_blocks(serve, generated, prompts):
    loop = serve()
    loop.cache.never_ready.add(0)
    for request in requests(prompts[:2]):
        loop.submit(request)
    answers = []
    for _ in range(20):
        answers += loop.step()
    assert [answer.request_id for answer in answers] == [1]
    assert answers[0].tokens == generated(prompts[1], 6)
    loop.cache.never_ready.clear()
    assert loop.run()[0].tokens == generated(prompts[0], 6)


def test_blocks_that_never_come_are_given_up_and_computed(serve, generated, prompts):
    now = [0.0]
    loop = serve(load_timeout=5.0, clock=lambda: now[0])
    loop.cache.promised[0] = 20
    loop.cache.never_ready.add(0)
    loop.submit(requests(prompts)[0])
    assert loop.step() == []
    now[0] = 6.0
    loop.step()
    loop.cache.never_ready.clear()
    answer = loop.run()[0]
    assert answer.tokens == generated(prompts[0], 6)
    assert answer.reused_tokens == 0
    assert [call for call in loop.cache.calls if call[0] in ("add", "remove")][:3] == [
        ("add", 0, 37, False), ("remove", 0, False), ("add", 0, 37, True)]


def test_after_a_bad_read_computing_goes_on_where_the_good_tokens_end(serve, generated, prompts):
    loop = serve(chunk_size=16)
    loop.cache.promised[0] = 24
    loop.cache.valid[0] = 0
    answer = loop.run(requests(prompts[:1]))[0]
    assert loop.model.chunks[0][0] == 0
    assert answer.tokens == generated(prompts[0], 6)
    assert answer.reused_tokens == 0


def test_a_sequence_that_a_step_leaves_out_is_asked_about_and_goes_on(serve, generated, prompts):
    loop = serve(chunk_size=16)
    for request in requests(prompts[:2]):
        loop.submit(request)
    while not loop.model.batches:
        loop.step()
    loop.cache.must_report.add(0)  # a bad block was found although the sequence runs
    answers = loop.run()
    assert [answers[number].tokens for number in (0, 1)] == [generated(prompt, 6) for prompt in prompts[:2]]


class Layerwise(Watched):
    """A model that says which layer it comes to."""

    @property
    def before_layer(self):
        return self.model.before_layer

    @before_layer.setter
    def before_layer(self, call):
        self.model.before_layer = call


def test_a_step_waits_for_each_layer_when_the_model_comes_to_it(serve, generated, prompts):
    loop = serve(watch=Layerwise)
    answer = loop.run(requests(prompts[1:2], new_tokens=3))[0]
    assert answer.tokens == generated(prompts[1], 3)
    assert loop.cache.layers == [0, 1] * 3


@pytest.mark.parametrize("layer", [0, 1])
def test_what_is_computed_for_a_sequence_that_loses_blocks_in_a_step_is_forgotten(serve, generated, prompts, layer):
    loop = serve(watch=Layerwise, chunk_size=16)
    for request in requests(prompts[:3]):
        loop.submit(request)
    while not loop.model.batches:
        loop.step()
    loop.cache.lose[layer] = [0, 1]  # one is decoding, one computes its prompt
    loop.cache.valid.update({0: 0, 1: 0})
    answers = loop.run()
    assert [answers[number].tokens for number in range(3)] == [generated(prompt, 6) for prompt in prompts[:3]]
    assert not loop.cache.lose


class Breaks(Watched):
    """A model that fails once, behind a prompt of the same step."""

    has_failed = False

    def prefill(self, tokens, past, table_row):
        if self.chunks and not self.has_failed:
            self.has_failed = True
            raise ZeroDivisionError("the model broke")
        return super().prefill(tokens, past, table_row)


def test_after_an_error_of_the_model_the_step_can_be_tried_again(serve, generated, prompts):
    loop = serve(watch=Breaks, chunk_size=64, token_budget=256)
    answers = [loop.submit(request) for request in requests(prompts)]
    with pytest.raises(ZeroDivisionError):
        loop.step()
    for _ in range(40):
        loop.step()
    assert [answer.tokens for answer in answers] == [generated(prompt, 6) for prompt in prompts]


class NotANumber(Watched):
    """Logits that are no numbers, of the first prompt only."""

    def prefill(self, tokens, past, table_row):
        logits = super().prefill(tokens, past, table_row)
        return logits * float("nan") if len(self.chunks) == 1 else logits


def test_logits_that_are_no_numbers_end_their_own_request_only(serve, generated, prompts):
    loop = serve(watch=NotANumber, chunk_size=64, token_budget=256)
    bad = loop.submit(Request(0, prompts[0], max_new_tokens=4), Sampling(temperature=1.0, seed=1))
    good = loop.submit(Request(1, prompts[1], max_new_tokens=4))
    for _ in range(10):
        loop.step()
    assert isinstance(bad.error, RequestError)
    assert "no token can be drawn" in str(bad.error)
    assert good.tokens == generated(prompts[1], 4)


def test_when_one_request_of_a_run_is_refused_none_of_them_stays_queued(serve, prompts):
    loop = serve()
    with pytest.raises(RequestError, match="max_new_tokens=0"):
        loop.run([Request(0, prompts[0], max_new_tokens=2), Request(1, prompts[1], max_new_tokens=0)])
    assert loop.num_requests == 0


def test_closing_drops_what_is_in_flight(serve, prompts):
    loop = serve()
    for request in requests(prompts):
        loop.submit(request)
    loop.step()
    with loop:
        pass
    assert loop.num_requests == 0
    assert not loop.cache.slots


def test_an_id_in_flight_cannot_be_submitted_again(serve, prompts):
    loop = serve()
    loop.submit(requests(prompts)[0])
    with pytest.raises(RequestError, match="request 0 is still being answered"):
        loop.submit(requests(prompts)[0])
    loop.step()
    with pytest.raises(RequestError, match="request 0 is still being answered"):
        loop.submit(requests(prompts)[0])


@pytest.mark.parametrize("token", [-1, 199, 2**31 - 1])
def test_a_token_that_the_model_does_not_know_is_refused(serve, token):
    with pytest.raises(RequestError, match=rf"tokens\[2\]={token}; the model knows token ids 0 to 198"):
        serve().submit(Request(0, [5, 6, token, 7], max_new_tokens=1))


def test_a_request_must_ask_for_a_token(serve, prompts):
    with pytest.raises(RequestError, match="max_new_tokens=0"):
        serve().submit(Request(0, prompts[0], max_new_tokens=0))


@pytest.mark.parametrize("options", [{"chunk_size": 0}, {"max_batch_size": 0}])
def test_sizes_below_one_are_refused(scripted_cache, options):
    with pytest.raises(ConfigError, match="must be at least 1"):
        ServingLoop(scripted_cache(), None, **options)


def test_a_batch_larger_than_the_block_table_is_refused(scripted_cache):
    with pytest.raises(ConfigError, match="max_batch_size=9: the cache was made for 8"):
        ServingLoop(scripted_cache(), None, max_batch_size=9)


def test_a_request_that_would_pass_max_seq_len_is_refused_before_it_disturbs_anybody(serve, prompts):
    with pytest.raises(RequestError, match="37 tokens and 300 new ones are 337; max_seq_len is 256"):
        serve().submit(Request(0, prompts[0], max_new_tokens=300))


def test_what_is_left_of_an_interrupted_request_keeps_its_namespace():
    from kvtier.tiering.attach.serving_sequence import ServedSequence
    request = Request(3, [5, 6, 7], lora_id=2, cache_salt="s", extra_ids=[1, 2, 3], max_new_tokens=8, lora_digest=b"d" * 32,
                      extra_ids_digest=b"e" * 32, skip_write=True)
    sequence = ServedSequence.of(request, 0.0)
    sequence.take(9, 1.0, 0.5)
    sequence.interrupt(skip_read=True)
    rest = sequence.request
    assert (rest.id, rest.num_tokens, rest.max_new_tokens) == (3, 4, 7)
    assert (rest.lora_id, rest.cache_salt, rest.extra_ids, rest.skip_read, rest.skip_write) == (2, "s", (1, 2, 3, 0), True, True)
    assert (rest.lora_digest, rest.extra_ids_digest) == (b"d" * 32, b"e" * 32)

