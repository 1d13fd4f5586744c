"""The transformers adapter: which models it takes, and that they compute over pages what they compute by themselves."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import (
    AttentionInterface,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvtier.errors import ConfigError, RequestError
from kvtier.kernels import OffsetTable
from kvtier.pools.layout import KVLayout
from kvtier.pools.primary import PrimaryPool
from kvtier.tiering.attach.transformers import AttachedModel, check_version, layout_of
from kvtier.tiering.attach.transformers_forward import paged_attention

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "initializer_range": 0.4}  # large enough that attention decides the result


def paged(model, blocks=64, tokens_per_block=4):
    group = layout_of(model.config, dtype=model.dtype, tokens_per_block=tokens_per_block).groups[0]
    pool = PrimaryPool(group, blocks, "cpu")
    pool.tensor.fill_(float("nan"))
    table = OffsetTable(max_rows=4, max_blocks=blocks, num_layers=group.num_layers, kv_factor=2, num_blocks=blocks)
    return pool, table


@pytest.mark.parametrize(("config_class", "model_class"), [
    (LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM),
    (SmolLM3Config, SmolLM3ForCausalLM)])
def test_every_supported_model_type_computes_over_pages_what_it_computes_by_itself(config_class, model_class):
    torch.manual_seed(1)
    model = model_class(config_class(**SIZES)).eval()
    tokens = torch.randint(3, 97, (23,)).tolist()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
    pool, table = paged(model)
    with AttachedModel(model, pool) as attached:
        row = table.fill([[5, 60, 2, 33, 0, 7]])
        assert torch.allclose(attached.prefill(tokens[:10], 0, row[0]), expected[9], atol=1e-4)
        assert torch.allclose(attached.prefill(tokens[10:21], 10, row[0]), expected[20], atol=1e-4)
        assert torch.allclose(attached.decode([tokens[21]], [21], row)[0], expected[21], atol=1e-4)
        assert torch.allclose(attached.decode([tokens[22]], [22], row)[0], expected[22], atol=1e-4)


def test_sequences_of_a_decode_batch_do_not_see_each_other(tiny_model):
    first, second = list(range(3, 20)), list(range(100, 109))
    pool, table = paged(tiny_model)
    with torch.inference_mode():
        expected = [tiny_model(input_ids=torch.tensor([tokens])).logits[0, -1] for tokens in (first, second)]
    with AttachedModel(tiny_model, pool) as attached:
        rows = table.fill([[9, 3, 4, 1, 30], [2, 8, 6]])
        attached.prefill(first[:-1], 0, rows[0])
        attached.prefill(second[:-1], 0, rows[1])
        logits = attached.decode([first[-1], second[-1]], [len(first) - 1, len(second) - 1], rows)
    assert torch.allclose(logits[0], expected[0], atol=1e-4)
    assert torch.allclose(logits[1], expected[1], atol=1e-4)


def test_a_wrong_block_in_the_table_changes_the_result(tiny_model):
    """The comparison above can fail: attention does read the pages that the table names."""
    tokens = list(range(3, 20))
    pool, table = paged(tiny_model)
    with AttachedModel(tiny_model, pool) as attached:
        attached.prefill([60, 61, 62, 63], 0, table.fill([[5]])[0])
        attached.prefill(tokens, 0, table.fill([[0, 1, 2, 3, 4]])[0])
        right = attached.decode([50], [17], table.fill([[0, 1, 2, 3, 4]]))
        wrong = attached.decode([50], [17], table.fill([[0, 5, 2, 3, 4]]))
    assert (right - wrong).abs().max() > 0.1


def test_a_detached_model_generates_as_before(tiny_model, generated, prompts):
    pool, _ = paged(tiny_model)
    attached = AttachedModel(tiny_model, pool)
    attached.detach()
    attached.detach()
    output = tiny_model.generate(torch.tensor([prompts[0]]), max_new_tokens=4, do_sample=False)
    assert output[0, len(prompts[0]):].tolist() == generated(prompts[0], 4)


def test_an_attached_model_called_without_a_step_says_what_to_do(tiny_model):
    pool, _ = paged(tiny_model)
    with AttachedModel(tiny_model, pool), pytest.raises(RequestError, match="detach"):
        tiny_model(input_ids=torch.tensor([[3, 4]]), use_cache=False)


def test_a_model_is_attached_to_one_pool_at_a_time(tiny_model):
    pool, _ = paged(tiny_model)
    with AttachedModel(tiny_model, pool), pytest.raises(ConfigError, match="attached to a pool already"):
        AttachedModel(tiny_model, pool)
    with AttachedModel(tiny_model, pool):
        pass


@pytest.mark.parametrize("version", ["5.19.0", "5.21.3", "5.24.0", "5.24.0.dev0", "5.20rc1"])
def test_releases_in_the_range_are_accepted(version):
    check_version(version)


@pytest.mark.parametrize("version", ["4.57.1", "5.18.2", "5.25.0", "6.0", "unknown"])
def test_a_release_outside_the_range_is_refused_with_the_range(version):
    with pytest.raises(ConfigError, match=r"5\.19 to 5\.24"):
        check_version(version)


def test_another_type_of_model_is_refused_with_what_is_supported():
    with pytest.raises(ConfigError, match=r"'gpt2'.*llama, qwen2, qwen3, smollm3"):
        layout_of(GPT2Config(), dtype="float32")


def test_a_kind_of_layer_that_is_not_supported_is_refused():
    config = Qwen2Config(**SIZES)
    config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ConfigError, match="layer 1 of this qwen2 model is 'chunked_attention'"):
        layout_of(config, dtype="float32")


def test_a_dtype_that_is_not_stored_is_refused():
    with pytest.raises(ConfigError, match="complex64"):
        layout_of(LlamaConfig(**SIZES), dtype=torch.complex64)


def test_the_layout_takes_heads_and_head_dimension_from_the_configuration():
    layout = layout_of(Qwen3Config(**SIZES, head_dim=16), dtype=torch.bfloat16, tokens_per_block=8)
    assert layout.groups[0].block_shape == (2, 2, 2, 8, 16)
    assert layout.groups[0].dtype == "bfloat16"


def test_a_pool_of_another_shape_or_dtype_is_refused(tiny_model):
    other = PrimaryPool(KVLayout.uniform(3, 2, 8, "float32", 4).groups[0], 2, "cpu")
    with pytest.raises(ConfigError, match=r"3 layers of attention full, 2x8 float32; the model needs 2 layers"):
        AttachedModel(tiny_model, other)
    half = PrimaryPool(KVLayout.uniform(2, 2, 8, "bfloat16", 4).groups[0], 2, "cpu")
    with pytest.raises(ConfigError, match="bfloat16"):
        AttachedModel(tiny_model, half)


def test_our_attention_function_takes_what_the_installed_transformers_passes():
    """Contract test: the parameters that transformers gives its own attention functions by position or name."""
    theirs = inspect.signature(sdpa_attention_forward).parameters
    ours = inspect.signature(paged_attention).parameters
    positional = [name for name, parameter in theirs.items() if parameter.default is parameter.empty
                  and parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert list(ours)[:len(positional)] == positional
    assert {"scaling", "dropout"} <= set(theirs) & set(ours)
    assert callable(AttentionInterface.register)
