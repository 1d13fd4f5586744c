"""Small random models whose answers are as varied as noise, and prompts that share beginnings."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 512


def make_uniform(folder: Path) -> Path:
    """Save a random model of two layers of full attention."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    _save_noise(LlamaForCausalLM(config), folder)
    return folder


def make_hybrid(folder: Path, seed: int) -> Path:
    """Save a random model of six layers, four of them with a window of 96 tokens."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    torch.manual_seed(seed)
    config = Gemma3TextConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
                              num_key_value_heads=2, head_dim=64, sliding_window=96, max_position_embeddings=4096,
                              layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, bos_token_id=1, eos_token_id=2,
                              pad_token_id=0, tie_word_embeddings=False)
    _save_noise(Gemma3ForCausalLM(config), folder)
    return folder


def make_deltas(folder: Path) -> Path:
    """Save a random model of two layers whose state is a matrix that each token changes (Gated DeltaNet), and two of full attention
    (Qwen3-Next)."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
    torch.manual_seed(0)
    config = Qwen3NextConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
                             num_key_value_heads=2, head_dim=64, layer_types=["linear_attention", "full_attention"] * 2,
                             linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
                             num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
                             max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False)
    _save_noise(Qwen3NextForCausalLM(config), folder)
    return folder


def make_adapter(folder: Path, seed: int) -> Path:
    """Save a random LoRA adapter of rank 8 for :func:`make_uniform`'s model, strong enough to change its answers."""
    import json

    import torch
    from safetensors.torch import save_file
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    shapes = {"q_proj": (128, 256), "v_proj": (128, 128)}
    save_file({f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight": 0.3 * torch.randn(shape)
               for layer in range(2) for name, (wide, out) in shapes.items() for part, shape in (("A", (8, wide)), ("B", (out, 8)))},
              folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": list(shapes), "bias": "none", "task_type": "CAUSAL_LM"}))
    return folder


def _save_noise(model: PreTrainedModel, folder: Path) -> None:
    """Save the model in float32, with weights so large that its answers vary."""
    import torch
    for parameter in model.float().parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(folder)


def conversations(seed: int, count: int, *, families: int = 6, shortest: int = 100, longest: int = 700) -> list[list[int]]:
    """Random prompts that share beginnings, as requests of an agent or a chat do."""
    rng = random.Random(seed)
    stems = [[rng.randrange(3, VOCABULARY) for _ in range(longest)] for _ in range(families)]
    found = []
    for _ in range(count):
        stem = rng.choice(stems)
        shared = rng.randrange(shortest // 2, longest - 20)
        found.append(stem[:shared] + [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(5, max(shortest - shortest // 2, 60)))])
    return found
