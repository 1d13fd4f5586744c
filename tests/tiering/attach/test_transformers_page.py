"""The code on docs/attach/transformers.md runs as it stands there, and answers as ``generate`` does."""

from __future__ import annotations

import asyncio
import copy
import re
from pathlib import Path

import torch
from transformers import BartConfig, BartForConditionalGeneration, LlamaConfig, LlamaForCausalLM

from kvtier import KVCacheManager, TierConfig
from kvtier.tiering.attach.serving_loop import ServingLoop
from kvtier.tiering.attach.transformers import SUPPORTED_MODEL_TYPES, AttachedModel, layout_of

PAGE = Path(__file__).parents[3] / "docs" / "attach" / "transformers.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def run(block, **names):
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_the_serving_loop_of_the_page(tiny_model, generated, prompts):
    names = run(BLOCKS[0], model=copy.deepcopy(tiny_model), prompt=prompts[0])
    assert names["answer"].tokens == generated(prompts[0], 8)
    assert len(names["sampled"].tokens) == 8


def test_asyncio_on_the_page(tiny_model, generated, prompts):
    model = copy.deepcopy(tiny_model)
    layout = layout_of(model.config, dtype=model.dtype, tokens_per_block=16)
    with KVCacheManager(layout, TierConfig(primary="20 blocks", max_batch_size=8, max_seq_len=128)) as cache, \
            AttachedModel(model, cache.pool().primary) as attached, ServingLoop(cache, attached) as loop:
        names = run(BLOCKS[0].split("layout =")[0] + BLOCKS[1], prompt=prompts[0])
        assert asyncio.run(names["serve"](loop)) == (generated(prompts[0], 8), generated(prompts[0], 8))


def test_the_plain_cache_of_the_page(tiny_model, generated, prompts, capsys):
    names = run(BLOCKS[0].split("layout =")[0] + BLOCKS[2], model=copy.deepcopy(tiny_model), prompt=prompts[0], torch=torch)
    assert names["output"][0, len(prompts[0]):].tolist() == generated(prompts[0], 8)
    assert capsys.readouterr().out.split() == ["0", str(len(prompts[0]) - 1)]


def test_the_encoder_of_the_page(prompts):
    torch.manual_seed(1)
    bart = BartForConditionalGeneration(BartConfig(
        vocab_size=199, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, init_std=0.3, forced_eos_token_id=None)).eval()
    bart.generation_config.eos_token_id = None
    expected = copy.deepcopy(bart).generate(torch.tensor([prompts[0]]), decoder_input_ids=torch.tensor([[2]]), max_new_tokens=8,
                                            do_sample=False)
    names = run(BLOCKS[0].split("layout =")[0] + BLOCKS[3], bart=bart, source=prompts[0])
    assert names["translated"].tokens == expected[0, 1:].tolist()


def test_the_smaller_cache_of_the_page(prompts):
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=199, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                         num_key_value_heads=2, head_dim=16, initializer_range=0.4)).eval()
    names = run(BLOCKS[0].split("layout =")[0] + BLOCKS[4], model=model, prompt=prompts[0])
    assert names["layout"].groups[0].spec.scale_bytes == 1
    assert (names["answer"].error, len(names["answer"].tokens)) == (None, 8)


def test_the_page_names_every_supported_type_of_model():
    assert [kind for kind in SUPPORTED_MODEL_TYPES if kind not in TEXT] == []
