"""The KV layout of a transformers model, from its configuration: which layers have a window, which keep latent rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError
from kvtier.pools.layout import DTYPE_BYTES, KVLayout, LayerSpec

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

ATTENTION_TYPES: Final = ("llama", "qwen2", "qwen3", "smollm3", "mistral", "gemma2", "gemma3_text")
"""Values of ``config.model_type`` whose layers keep keys and values; SmolLM and SmolLM2 are of type "llama"."""

LATENT_TYPES: Final = ("deepseek_v3",)
"""Those whose layers keep one latent row for each token (MLA)."""

ENCODER_DECODER_TYPES: Final = ("bart", "mbart")
"""Those with an encoder, whose decoder layers keep its keys and values beside their own."""

SUPPORTED_MODEL_TYPES: Final = (*ATTENTION_TYPES, *LATENT_TYPES, *ENCODER_DECODER_TYPES)

QUANTISED: Final = ("float8_e4m3fn", "int8")
"""Storage types that keys and values of any floating-point model can be kept in, with a scale."""


def layout_of(config: PretrainedConfig, *, dtype: str | torch.dtype, tokens_per_block: int = 32) -> KVLayout:
    """The KV layout of a model, from its transformers configuration.

    Args:
        config: of a supported model.
        dtype: storage dtype of keys and values: the model's own, or "float8_e4m3fn" or "int8", which are written with a scale.
        tokens_per_block: a power of two.

    Returns:
        One layer for each of the model's, in order. With an encoder, the decoder's cross-attention layers behind its own layers.

    Raises:
        ConfigError: another type of model, a kind of layer that is not supported, a dtype kvtier does not store.
    """
    model_type = str(getattr(config, "model_type", "unknown"))
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(f"model type {model_type!r} is not supported by the transformers adapter; "
                          f"supported: {', '.join(SUPPORTED_MODEL_TYPES)} (SmolLM2 is of type llama)")
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES or name == "uint8":
        raise ConfigError(f"dtype={name!r}: load the model in one of {', '.join(other for other in DTYPE_BYTES if other != 'uint8')}")
    if getattr(config, "use_bidirectional_attention", None):
        raise ConfigError(f"this {model_type} model attends in both directions; the transformers adapter serves causal models")
    if model_type in LATENT_TYPES:
        latent = LayerSpec.mla(config.kv_lora_rank, config.qk_rope_head_dim)
        return KVLayout([latent] * config.num_hidden_layers, name, tokens_per_block)
    if model_type in ENCODER_DECODER_TYPES:
        heads: int = config.decoder_attention_heads
        layers = [LayerSpec.attention(heads, config.d_model // heads)] * config.decoder_layers
        return KVLayout([*layers, *[LayerSpec.cross(heads, config.d_model // heads)] * config.decoder_layers], name, tokens_per_block)
    heads = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVLayout([LayerSpec.attention(kv_heads, head_dim, window=window) for window in _windows(config, model_type)], name,
                    tokens_per_block)


def _windows(config: PretrainedConfig, model_type: str) -> list[int | None]:
    """Tokens that each layer's tokens see, themselves included: transformers counts a sliding window as we do."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        kinds = ["sliding_attention" if window is not None and model_type == "mistral" else "full_attention"] * config.num_hidden_layers
    windows: list[int | None] = []
    for layer, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"layer {layer} of this {model_type} model is {kind!r}; the transformers adapter supports "
                              "'full_attention' and 'sliding_attention'")
        windows.append(window if kind == "sliding_attention" else None)
    return windows
