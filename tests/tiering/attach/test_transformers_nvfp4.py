"""Keys and values kept in NVFP4, end to end: the tokens of a model whose cache is rounded so, and the same bytes on every level."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kvtier import ConfigError, KVCacheManager, KVLayout, Level, Request, RequestError, TierConfig
from kvtier.kernels import dequantise_nvfp4, quantise_nvfp4
from kvtier.pools.primary import PrimaryPool
from kvtier.tiering.attach.serving_loop import ServingLoop
from kvtier.tiering.attach.transformers import AttachedModel, layout_of
from kvtier.tiering.attach.transformers_encoder import AttachedEncoderDecoder, digest_of

SIZES = {"vocab_size": 199, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "initializer_range": 0.4}  # large enough that attention decides the result
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=16)),
    "qwen2, windows": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, head_dim=32, use_sliding_window=True, sliding_window=16,
                                                           max_window_layers=1)),
    "deepseek_v3, latent rows": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, kv_lora_rank=32, q_lora_rank=24, qk_rope_head_dim=16, qk_nope_head_dim=12, v_head_dim=10,
        n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1, moe_intermediate_size=16,
        first_k_dense_replace=1)),
    "bart, an encoder": lambda: BartForConditionalGeneration(BartConfig(
        vocab_size=199, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=256, init_std=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=None)),
}
ENCODER_TOKENS = list(range(20, 43))


def make(kind):
    torch.manual_seed(1)
    model = MODELS[kind]().eval()
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model


class Rounded(DynamicCache):
    """A cache that holds what NVFP4 makes of keys and values."""

    def __init__(self, scales):
        super().__init__()
        self.scales = scales

    def update(self, key_states, value_states, layer_idx, *arguments, **keywords):
        rounded = [dequantise_nvfp4(*quantise_nvfp4(states, scale), scale)
                   for states, scale in zip((key_states, value_states), self.scales, strict=True)]
        return super().update(*rounded, layer_idx, *arguments, **keywords)


def generate(model, prompt, scales=None):
    ids = torch.tensor([prompt])
    if not model.config.is_encoder_decoder:
        how = {} if scales is None else {"cache": Rounded(scales)}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, **how)
    else:
        how = {} if scales is None else {"cache": EncoderDecoderCache(Rounded(scales), Rounded(scales))}
        source = torch.tensor([ENCODER_TOKENS])
        output = model.generate(source, decoder_input_ids=ids, attention_mask=torch.ones_like(source), max_new_tokens=6, do_sample=False,
                                **how)
    return output[0, len(prompt):].tolist()


@pytest.fixture
def attach(tmp_path):
    opened = []

    def start(model, scales=(1.0, 1.0), **settings):
        layout = layout_of(model.config, dtype="nvfp4", tokens_per_block=4)
        levels = {"primary": "50 blocks", "secondary": "30 blocks", "nvme": "100 blocks", "nvme_directory": tmp_path / "nvme"}
        cache = KVCacheManager(layout, TierConfig(**{**levels, **settings}, max_batch_size=4, max_seq_len=160,
                                                  nvme_free_space_reserve="0B"), model="tiny@nvfp4:0")
        pools = [cache.pool(group.number).primary for group in layout.groups]
        for pool in pools:
            for section in pool.sections:
                section.tensor.fill_(0x7F)  # a block scale of these bits is not a number
        kind = AttachedEncoderDecoder if model.config.is_encoder_decoder else AttachedModel
        attached = kind(model, pools, key_scale=scales[0], value_scale=scales[1])
        opened.append((cache, attached))
        return cache, attached

    def end(cache, attached):
        attached.detach()
        cache.verify()
        assert cache.stats().leases == cache.stats().sequences == 0
        cache.close(timeout=10)
        opened.remove((cache, attached))

    start.end = end
    yield start
    for cache, attached in list(opened):
        end(cache, attached)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.002, 0.001)], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_answers_are_those_of_a_model_whose_keys_and_values_are_rounded(attach, prompts, kind, scales):
    if "latent" in kind:
        scales = scales[0], scales[0]  # one row, one scale
    if "encoder" in kind:
        prompts = [[2, *prompt] for prompt in prompts]  # generate puts the start token in front otherwise
    model = make(kind)
    model_alone = copy.deepcopy(model)
    plain = [generate(model_alone, prompt) for prompt in prompts]
    expected = [generate(model_alone, prompt, scales) for prompt in prompts]
    assert expected != plain, "rounding makes a difference here, so the comparison can fail"
    cache, attached = attach(model, scales)
    loop = ServingLoop(cache, attached, max_batch_size=3, chunk_size=16)
    encoder = {"encoder_length": len(ENCODER_TOKENS), "encoder_digest": digest_of(ENCODER_TOKENS)} if "encoder" in kind else {}
    source = {"encoder_tokens": ENCODER_TOKENS} if encoder else {}
    for turn in range(2):
        answers = [loop.submit(Request(10 * turn + number, prompt, max_new_tokens=6, **encoder), **source)
                   for number, prompt in enumerate(prompts)]
        loop.run()
        assert [(answer.error, answer.tokens) for answer in answers] == [(None, tokens) for tokens in expected], f"turn {turn}"
        assert cache.flush(timeout=20)
        cache.verify()
    assert sum(answer.reused_tokens for answer in answers) > 0


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3, latent rows"])
def test_codes_and_block_scales_come_back_from_every_level_with_the_same_bytes(attach, prompts, kind):
    model, prompt = make(kind), prompts[0]
    cache, attached = attach(model)
    full_blocks = (len(prompt) - 1) // 4

    def admit(request_id):
        cache.add_sequence(Request(request_id, prompt))
        valid = cache.wait_ready(request_id, timeout=20)
        ids = cache.block_ids(request_id)[:full_blocks]
        return valid, ids

    def bytes_of(ids):
        return [cache.read_block(block) for block in ids]

    _, ids = admit(1)
    with cache.step(None, ids=[1]) as ready:
        logits = attached.prefill(prompt, 0, cache.block_table(ready)[0])
    cache.mark_computed(1, len(prompt))
    cache.store_context(1)
    written = bytes_of(ids)
    assert len(set(written)) == full_blocks
    assert all(len(block) == cache.layout.groups[0].block_bytes for block in written)
    cache.remove_sequence(1, store=True)

    for block in ids:  # device -> host
        cache.offload(block)
    assert {cache.block(block).level for block in ids} == {Level.SECONDARY}
    assert bytes_of(ids) == written

    valid, ids = admit(2)  # host -> device
    assert valid == len(prompt) - 1
    assert {cache.block(block).level for block in ids} == {Level.PRIMARY}
    assert bytes_of(ids) == written
    with cache.step(None, ids=[2]) as ready:
        again = attached.prefill(prompt[valid:], valid, cache.block_table(ready)[0])
    torch.testing.assert_close(again, logits, rtol=1e-5, atol=1e-5)
    cache.remove_sequence(2, store=True)

    assert cache.flush(timeout=20)  # host -> NVMe
    attach.end(cache, attached)
    cache, attached = attach(model)  # NVMe -> device, in another process's place
    valid, ids = admit(3)
    assert valid == cache.stats().hit_tokens.nvme == full_blocks * 4
    assert bytes_of(ids) == written
    with cache.step(None, ids=[3]) as ready:
        again = attached.prefill(prompt[valid:], valid, cache.block_table(ready)[0])
    torch.testing.assert_close(again, logits, rtol=1e-5, atol=1e-5)
    cache.remove_sequence(3, store=True)


def test_a_row_has_half_a_byte_for_each_number_and_a_scale_for_sixteen():
    (group,) = layout_of(make("llama").config, dtype="nvfp4", tokens_per_block=4).groups
    assert [(section.name, section.shape) for section in group.sections] == [("kv", (3, 2, 2, 4, 8)), ("scales", (3, 2, 2, 4, 1))]
    (latent,) = layout_of(make("deepseek_v3, latent rows").config, dtype="nvfp4", tokens_per_block=4).groups
    assert [(section.name, section.shape) for section in latent.sections] == [("kv", (3, 1, 1, 4, 24)), ("scales", (3, 1, 1, 4, 3))]
    _, cross = layout_of(make("bart, an encoder").config, dtype="nvfp4", tokens_per_block=4).groups
    assert [(section.name, section.shape) for section in cross.sections] == [("kv", (2, 2, 4, 4, 8)), ("scales", (2, 2, 4, 4, 1))]


def test_heads_that_cannot_be_cut_into_sixteens_are_refused():
    with pytest.raises(ConfigError, match=r"a row of 8 numbers.*a multiple of 16"):
        layout_of(LlamaConfig(**SIZES), dtype="nvfp4")


def test_pools_of_bytes_without_block_scales_are_refused():
    pool = PrimaryPool(KVLayout.uniform(3, 2, 8, "uint8", 4).groups[0], 4, "cpu")
    with pytest.raises(ConfigError, match="the pools are for 3 layers of attention full, 2x8 uint8"):
        AttachedModel(make("llama"), pool)


def test_a_global_scale_that_is_no_number_is_refused_at_the_first_token(attach, prompts):
    cache, attached = attach(make("llama"), scales=(float("nan"), 1.0))
    cache.add_sequence(Request(1, prompts[1]))
    with pytest.raises(RequestError, match="key_scale=nan"), cache.step(None, ids=[1]) as ready:
        attached.prefill(prompts[1], 0, cache.block_table(ready)[0])
    cache.remove_sequence(1, store=False)
