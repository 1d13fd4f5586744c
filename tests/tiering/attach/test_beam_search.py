"""Beam search: the answers of transformers' own, also when beams end early, blocks are short, or reads fail."""

from __future__ import annotations

import copy

import pytest
import torch

from kvtier.errors import RequestError
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.tiering.attach.beam_search import BeamSearch
from kvtier.tiering.attach.sampling import Sampling
from kvtier.tiering.ledger.request import Request


@pytest.fixture(scope="session")
def searched(tiny_model):
    """What transformers' beam search finds: the best answer's tokens and its score."""
    model = copy.deepcopy(tiny_model)

    def run(prompt, width, new_tokens, stop=None):
        output = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                                max_new_tokens=new_tokens, num_beams=width, eos_token_id=stop, return_dict_in_generate=True,
                                output_scores=True)
        return output.sequences[0, len(prompt):].tolist(), output.sequences_scores[0].item()
    return run


@pytest.mark.parametrize("width", [2, 4])
def test_beams_are_answered_as_by_generate(serving, searched, prompts, width):
    loop = serving(primary="200 blocks", max_beam_width=4)
    answers = loop.run(Request(number, prompt, max_new_tokens=7, beam_width=width) for number, prompt in enumerate(prompts))
    for number, prompt in enumerate(prompts):
        tokens, score = searched(prompt, width, 7)
        assert answers[number].tokens == tokens
        assert answers[number].beams[0].score == pytest.approx(score, abs=1e-4)
        assert len(answers[number].beams) == width


def test_beams_that_end_early_are_answered_as_by_generate(serving, searched, prompts):
    ended_early = 0
    for stop in (32, 126, 192):
        loop = serving(primary="200 blocks", nvme="0 blocks", max_beam_width=3, loop_options={"stop_tokens": [stop]})
        answers = loop.run(Request(number, prompt, max_new_tokens=12, beam_width=3) for number, prompt in enumerate(prompts))
        for number, prompt in enumerate(prompts):
            tokens, _ = searched(prompt, 3, 12, stop)
            found = answers[number].tokens
            assert found == tokens[:len(found)]
            assert len(found) == len(tokens) or found[-1] == stop
            ended_early += found[-1] == stop
        serving.end(loop)
    assert ended_early


def test_beams_and_plain_requests_share_a_batch(serving, searched, generated, prompts):
    loop = serving(primary="200 blocks", max_beam_width=3)
    answers = loop.run(Request(number, prompt, max_new_tokens=6, beam_width=1 + 2 * (number % 2)) for number, prompt in enumerate(prompts))
    for number, prompt in enumerate(prompts):
        assert answers[number].tokens == (searched(prompt, 3, 6)[0] if number % 2 else generated(prompt, 6))


def test_beams_that_are_preempted_begin_again_and_answer_the_same(serving, searched, prompts):
    loop = serving(primary="40 blocks", max_beam_width=3)
    answers = loop.run(Request(number, prompt, max_new_tokens=16, beam_width=3) for number, prompt in enumerate(prompts))
    assert sum(answer.preemptions for answer in answers.values()) > 0
    for number, prompt in enumerate(prompts):
        assert answers[number].tokens == searched(prompt, 3, 16)[0]


def test_beams_over_failing_copies_answer_the_same(serving, searched, prompts):
    loop = serving(primary="40 blocks", max_beam_width=3,
                   faults=Faults([FaultRule(FaultKind.FAILURE, FaultOperation.COPY, rate=0.1)], seed=2))
    for turn in range(2):
        answers = loop.run(Request(10 * turn + number, prompt, max_new_tokens=9, beam_width=3) for number, prompt in enumerate(prompts))
        for number, prompt in enumerate(prompts):
            assert answers[10 * turn + number].tokens == searched(prompt, 3, 9)[0]
    assert loop.cache.stats().transfer_failures > 0


def test_beams_with_a_temperature_are_refused(serving):
    loop = serving(max_beam_width=2)
    with pytest.raises(RequestError, match=r"temperature=0.5 with beam_width=2"):
        loop.submit(Request(0, [5, 6], beam_width=2), Sampling(0.5))


def test_a_search_cut_short_still_has_its_best_beams():
    beams = BeamSearch(2, 5)
    parents = beams.advance(torch.tensor([[0.0, 3.0, 2.0, 1.0]]))
    assert parents == [0, 0]
    assert [beam.tokens for beam in beams.answers()] == [[1], [2]]
    beams.restart()
    assert beams.answers() == []
