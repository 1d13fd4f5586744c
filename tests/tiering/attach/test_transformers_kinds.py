"""Models of other kinds than full attention, end to end over three levels: the tokens that transformers itself generates (float32)."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kvtier import ConfigError, KVLayout, Request
from kvtier.pools.primary import PrimaryPool
from kvtier.tiering.attach.transformers import AttachedModel, layout_of

SIZES = {"vocab_size": 199, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "initializer_range": 0.4}  # large enough that attention decides the result
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 4, "qk_nope_head_dim": 12, "v_head_dim": 10, "n_routed_experts": 4,
          "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 16,
          "first_k_dense_replace": 1}
MODELS = {
    # With tied embeddings these two repeat their last token whatever attention says.
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=10, layer_types=SLIDING,
                                                         query_pre_attn_scalar=8, tie_word_embeddings=False)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, sliding_window=7, layer_types=SLIDING, query_pre_attn_scalar=8,
                                                     attn_logit_softcapping=0.5, tie_word_embeddings=False)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=1)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=9)),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**{**SIZES, "num_key_value_heads": 4}, **LATENT)),
    "deepseek_v3, no query rank": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, **{**LATENT, "q_lora_rank": None}, rope_interleave=False)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
}


def make(kind):
    torch.manual_seed(1)
    model = MODELS[kind]().eval()
    model.generation_config.eos_token_id = None
    return model


def generate(model, prompt, new_tokens, **keywords):
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, **keywords)
    return output[0, len(prompt):].tolist()


@pytest.fixture
def serve(attached_loops):
    def start(model, scales=(1.0, 1.0), loop_options=(), **options):
        def attach(cache):
            pools = [cache.pool(group.number).primary for group in cache.layout.groups]
            for pool in pools:
                for section in pool.sections:
                    section.tensor.view(torch.uint8).fill_(0x7F)  # not a number, in every dtype here
            return AttachedModel(model, pools, key_scale=scales[0], value_scale=scales[1])

        return attached_loops.start(model, attach, "tiny@kind:0", loop_options={"max_batch_size": 3, **dict(loop_options)}, **{
            "primary": "50 blocks", "secondary": "30 blocks", "nvme": "100 blocks", "max_batch_size": 4, "max_seq_len": 160,
            "max_beam_width": 2, **options})

    return start


def talk(loop, prompts, expected, turns=2, new_tokens=6):
    for turn in range(turns):
        answers = loop.run(Request(10 * turn + number, prompt, max_new_tokens=new_tokens) for number, prompt in enumerate(prompts))
        for number in range(len(prompts)):
            assert answers[10 * turn + number].error is None
            assert answers[10 * turn + number].tokens == expected[number], f"turn {turn}, prompt {number}"
        assert loop.cache.flush(timeout=20)
        loop.cache.verify()
    assert sum(answer.reused_tokens for answer in answers.values()) > 0


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_is_answered_as_by_generate_over_three_levels(serve, prompts, kind):
    model = make(kind)
    expected = [generate(model, prompt, 6) for prompt in prompts]
    talk(serve(model), prompts, expected)


@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
def test_windows_of_long_prompts_hold_blocks_for_one_chunk_at_a_time(serve, prompts, kind):
    model = make(kind)
    expected = [generate(model, prompt, 6) for prompt in prompts]
    talk(serve(model, chunk_size=16), prompts, expected)


@pytest.mark.parametrize("kind", ["gemma3", "deepseek_v3"])
def test_a_small_pool_preempts_and_every_answer_is_the_same(serve, prompts, kind):
    model = make(kind)
    expected = [generate(model, prompt, 30) for prompt in prompts[:3]]
    loop = serve(model, primary="29 blocks", nvme="0 blocks")
    answers = loop.run(Request(number, prompt, max_new_tokens=30) for number, prompt in enumerate(prompts[:3]))
    assert [answers[number].tokens for number in range(3)] == expected
    assert sum(answer.preemptions for answer in answers.values()) > 0


@pytest.mark.parametrize("kind", ["gemma3", "deepseek_v3"])
def test_beams_work_with_every_kind(serve, prompts, kind):
    model = make(kind)
    expected = [generate(model, prompt, 7, num_beams=2) for prompt in prompts[:3]]
    answers = serve(model).run(Request(number, prompt, max_new_tokens=7, beam_width=2) for number, prompt in enumerate(prompts[:3]))
    assert [answers[number].tokens for number in range(3)] == expected


class Rounded(DynamicCache):
    """What a cache of another type would hold: keys and values rounded to it, and read back."""

    def __init__(self, dtype, key_scale, value_scale):
        super().__init__()
        self.kind = dtype, key_scale, value_scale

    def update(self, key_states, value_states, layer_idx, *arguments, **keywords):
        dtype, key_scale, value_scale = self.kind
        return super().update(_rounded(key_states, dtype, key_scale), _rounded(value_states, dtype, value_scale), layer_idx,
                              *arguments, **keywords)


def _rounded(states, dtype, scale):
    if dtype == torch.int8:
        return (states / scale).round().clamp(-128, 127) * scale
    return (states / scale).clamp(-448, 448).to(dtype).float() * scale


@pytest.mark.parametrize(("dtype", "scales"), [("float8_e4m3fn", (1.0, 1.0)), ("float8_e4m3fn", (0.25, 0.5)), ("int8", (0.05, 0.04))],
                         ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_quantised_cache_answers_as_a_model_whose_keys_and_values_are_rounded(serve, prompts, kind, dtype, scales):
    model = make(kind)
    plain = [generate(model, prompt, 6) for prompt in prompts]
    expected = [generate(copy.deepcopy(model), prompt, 6, cache=Rounded(getattr(torch, dtype), *scales)) for prompt in prompts]
    assert expected != plain, "rounding makes a difference here, so the comparison can fail"
    talk(serve(model, dtype=dtype, scales=scales), prompts, expected)


def test_windows_and_full_layers_are_groups_of_their_own():
    layout = layout_of(make("gemma3").config, dtype="float32", tokens_per_block=4)
    assert [(group.layers, group.window) for group in layout.groups] == [((0, 2), 10), ((1,), None)]


def test_latent_rows_are_one_for_all_heads():
    layout = layout_of(make("deepseek_v3").config, dtype="float32", tokens_per_block=4)
    assert layout.groups[0].kind == "mla"
    assert layout.groups[0].block_shape == (3, 1, 1, 4, 20)


def test_the_pools_of_all_groups_must_be_given_in_order():
    model = make("gemma3")
    groups = layout_of(model.config, dtype="float32", tokens_per_block=4).groups
    pools = [PrimaryPool(group, 4, "cpu") for group in groups]
    for given in (pools[0], pools[::-1], []):
        with pytest.raises(ConfigError, match="pool"):
            AttachedModel(model, given)
    with AttachedModel(model, pools), pytest.raises(ConfigError, match="attached to a pool already"):
        AttachedModel(model, pools)
    other = make("gemma3")
    with AttachedModel(model, pools), pytest.raises(ConfigError, match="this pool is used"):
        AttachedModel(other, pools)
    with AttachedModel(other, pools):
        pass


def test_scales_without_a_quantised_pool_are_refused():
    model = make("llama")
    pool = PrimaryPool(KVLayout.uniform(3, 2, 8, "float32", 4).groups[0], 4, "cpu")
    with pytest.raises(ConfigError, match=r"key_scale=0.5.*the pools store float32 as it is"):
        AttachedModel(model, pool, key_scale=0.5)


def test_a_model_that_attends_in_both_directions_is_refused():
    config = Gemma3TextConfig(**SIZES, use_bidirectional_attention=True)
    with pytest.raises(ConfigError, match="both directions"):
        layout_of(config, dtype="float32")


@pytest.mark.parametrize("parameters", [
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64, "short_factor": [1.0] * 4,
     "long_factor": [4.0] * 4}])
def test_a_model_whose_keys_change_with_the_length_of_the_prompt_is_refused(parameters):
    """A short prompt would be answered wrongly with what a long one that begins alike has left, and the other way round."""
    rope_type = parameters["rope_type"]
    with pytest.raises(ConfigError, match=f"rope_type='{rope_type}'"):
        layout_of(LlamaConfig(**SIZES, rope_parameters=parameters), dtype="float32")
    of_one_kind = {"full_attention": parameters, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    with pytest.raises(ConfigError, match=f"rope_type='{rope_type}'"):
        layout_of(Gemma3TextConfig(**SIZES, layer_types=SLIDING, rope_parameters=of_one_kind), dtype="float32")


@pytest.mark.parametrize("parameters", [
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128},
    {"rope_type": "llama3", "factor": 4.0, "rope_theta": 10000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 128}])
def test_other_rotary_embeddings_are_shared_by_long_and_short_prompts(serve, prompts, parameters):
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=parameters)).eval()
    model.generation_config.eos_token_id = None
    long = [*prompts[2], *prompts[0], *prompts[4]]  # 151 tokens
    expected = [generate(model, prompt, 6) for prompt in (long, long[:60])]
    loop = serve(model)
    answers = [loop.run([Request(number, prompt, max_new_tokens=6)])[number] for number, prompt in enumerate((long, long[:60]))]
    assert [answer.tokens for answer in answers] == expected
    assert answers[1].reused_tokens == 59
