"""How tokens are chosen: the same tokens stay as with transformers' own filters, and a seed repeats itself."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kvtier.errors import RequestError
from kvtier.tiering.attach.sampling import GREEDY, Sampling, draw, greedy, probabilities


def test_greedy_takes_the_best_token_and_tells_the_gap():
    tokens, gaps = greedy(torch.tensor([[0.0, 2.5, 1.0], [3.0, 0.0, 2.75]]))
    assert tokens == [1, 0]
    assert gaps == pytest.approx([1.5, 0.25])


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.3, top_k=5), Sampling(0.9, top_p=0.6), Sampling(2.0, top_k=7, top_p=0.5),
                                      Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-9), Sampling(1.0, top_k=1000)])
def test_probabilities_are_those_of_transformers(sampling):
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 3
    scores = TemperatureLogitsWarper(float(sampling.temperature))(None, logits[None])
    if sampling.top_k is not None:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    assert torch.allclose(probabilities(logits, sampling), torch.softmax(scores[0], -1), atol=1e-6)


def test_tokens_are_drawn_as_often_as_their_probability_says():
    logits = torch.tensor([0.0, 1.0, 2.0, -math.inf])
    generator = Sampling(1.0, seed=5).generator()
    drawn = torch.bincount(torch.tensor([draw(logits, Sampling(1.0), generator) for _ in range(4000)]), minlength=4)
    expected = torch.softmax(logits, -1) * 4000
    assert drawn[3] == 0
    assert ((drawn - expected)[:3].abs() < 5 * expected[:3].sqrt()).all()


def test_a_seed_repeats_itself_and_no_seed_does_not():
    logits = torch.zeros(1000)

    def draws(sampling):
        generator = sampling.generator()
        return [draw(logits, sampling, generator) for _ in range(8)]

    assert draws(Sampling(1.0, seed=1)) == draws(Sampling(1.0, seed=1))
    assert draws(Sampling(1.0, seed=1)) != draws(Sampling(1.0, seed=2))
    assert draws(Sampling(1.0)) != draws(Sampling(1.0))
    assert GREEDY.generator() is None


@pytest.mark.parametrize(("arguments", "message"), [
    ({"temperature": -0.1}, "temperature=-0.1"), ({"temperature": math.nan}, "temperature=nan"), ({"temperature": True}, "temperature"),
    ({"temperature": math.inf}, "temperature=inf"), ({"temperature": 1.0, "top_k": 0}, "top_k=0"),
    ({"temperature": 1.0, "top_k": 2.5}, "top_k=2.5"), ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0"),
    ({"temperature": 1.0, "top_p": 1.1}, "top_p=1.1"), ({"temperature": 1.0, "seed": -1}, "seed=-1"),
    ({"temperature": 1.0, "seed": 1 << 63}, "seed="), ({"top_k": 3}, "temperature=0 takes the best token"),
    ({"seed": 3}, "temperature=0 takes the best token")])
def test_what_cannot_be_meant_is_refused(arguments, message):
    with pytest.raises(RequestError, match=message):
        Sampling(**arguments)
