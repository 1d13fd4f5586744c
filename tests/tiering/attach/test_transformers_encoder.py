"""A model with an encoder, end to end over three levels: the tokens that transformers itself generates (float32)."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, LlamaConfig, LlamaForCausalLM

from kvtier import ConfigError, Request, RequestError
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.tiering.attach.serving_sequence import ServedSequence
from kvtier.tiering.attach.transformers_encoder import AttachedEncoderDecoder, digest_of


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    model = BartForConditionalGeneration(BartConfig(
        vocab_size=199, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=256, init_std=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=None)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    return model


@pytest.fixture(scope="module")
def plain(model):
    """The same model, never attached."""
    return copy.deepcopy(model)


@pytest.fixture(scope="module")
def sources():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 199, (length,), generator=generator).tolist() for length in (23, 4, 40, 9)]


@pytest.fixture
def serve(model, attached_loops):
    def attach(cache):
        pools = [cache.pool(group.number).primary for group in cache.layout.groups]
        for pool in pools:
            pool.tensor.fill_(float("nan"))
        return AttachedEncoderDecoder(model, pools)

    def start(**settings):
        return attached_loops.start(model, attach, "tiny@bart:0", loop_options={"max_batch_size": 3}, **{
            "primary": "60 blocks", "secondary": "30 blocks", "nvme": "100 blocks", "max_batch_size": 4, "max_seq_len": 128,
            "max_beam_width": 2, **settings})

    return start


def generate(model, source, prompt, new_tokens, **keywords):
    output = model.generate(torch.tensor([source]), decoder_input_ids=torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False,
                            attention_mask=torch.ones(1, len(source), dtype=torch.long), **keywords)
    return output[0, len(prompt):].tolist()


def request(number, source, prompt, new_tokens, **keywords):
    return Request(number, prompt, max_new_tokens=new_tokens, encoder_length=len(source), encoder_digest=digest_of(source), **keywords)


def run(loop, sources, prompts, new_tokens, start=0, **keywords):
    answers = [loop.submit(request(start + number, source, prompt, new_tokens, **keywords), encoder_tokens=source)
               for number, (source, prompt) in enumerate(zip(sources, prompts, strict=True))]
    loop.run()
    return answers


def test_every_answer_is_that_of_generate_and_a_prefix_is_reused_with_the_same_source_alone(plain, serve, sources):
    prompts = [[2, *range(50, 50 + length)] for length in (0, 21, 9, 3)]
    expected = [generate(plain, source, prompt, 7) for source, prompt in zip(sources, prompts, strict=True)]
    assert len({tuple(tokens) for tokens in expected}) == 4
    loop = serve()
    for turn in range(3):
        answers = run(loop, sources, prompts, 7, start=10 * turn)
        assert [answer.tokens for answer in answers] == expected
        assert loop.cache.flush(timeout=20)
    assert answers[1].reused_tokens == 21  # all but the last one, which is always computed
    fresh = [*sources[0], 77]
    (other,) = run(loop, [fresh], [prompts[1]], 7, start=90)
    assert other.tokens == generate(plain, fresh, prompts[1], 7)
    assert other.reused_tokens == 0


def test_beams_of_a_model_with_an_encoder(plain, serve, sources):
    prompts = [[2, 50, 51]] * 4
    answers = run(serve(), sources, prompts, 6, beam_width=2)
    assert [answer.tokens for answer in answers] == [generate(plain, source, prompt, 6, num_beams=2)
                                                     for source, prompt in zip(sources, prompts, strict=True)]


def test_a_small_pool_preempts_and_encodes_again(plain, serve, sources):
    prompts = [[2, *range(50, 60)]] * 4
    answers = run(serve(primary="20 blocks", nvme="0 blocks"), sources, prompts, 25)
    assert [answer.tokens for answer in answers] == [generate(plain, source, prompt, 25)
                                                     for source, prompt in zip(sources, prompts, strict=True)]
    assert sum(answer.preemptions for answer in answers) > 0


def test_failed_copies_are_computed_again_with_an_encoder_too(plain, serve, sources):
    prompts = [[2, *range(50, 50 + length)] for length in (0, 21, 9, 3)]
    expected = [generate(plain, source, prompt, 7) for source, prompt in zip(sources, prompts, strict=True)]
    loop = serve(primary="26 blocks", faults=Faults([FaultRule(FaultKind.FAILURE, FaultOperation.COPY, rate=0.2)], seed=3))
    for turn in range(3):
        assert [answer.tokens for answer in run(loop, sources, prompts, 7, start=10 * turn)] == expected


def test_a_detached_model_generates_as_before(model, serve, sources):
    before = generate(model, sources[0], [2], 5)
    loop = serve()
    loop.model.detach()
    assert generate(model, sources[0], [2], 5) == before


def test_encoder_tokens_must_be_those_of_the_request(serve, sources):
    loop = serve()
    with pytest.raises(RequestError, match="0 encoder_tokens with encoder_length=23"):
        loop.submit(request(0, sources[0], [2], 4))
    with pytest.raises(RequestError, match=r"encoder_tokens\[1\]=500"):
        loop.submit(request(0, [5, 500], [2], 4), encoder_tokens=[5, 500])


def test_a_model_without_an_encoder_is_refused():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ConfigError, match="'llama' has no encoder"):
        AttachedEncoderDecoder(model, [])


def test_after_a_loss_and_after_a_preemption_the_encoder_runs_again():
    served = ServedSequence.of(Request(0, [2, 3], encoder_length=2), 0.0)
    served.computed, served.is_encoded = 2, True
    served.confirm(2)
    assert served.is_encoded
    served.confirm(0)
    assert not served.is_encoded
    served.is_encoded = True
    served.interrupt(skip_read=False)
    assert not served.is_encoded
