"""The KV layout of a transformers model, from its configuration: which layers have a window, which keep latent rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError
from kvtier.kernels.nvfp4 import GROUP
from kvtier.pools.layout import DTYPE_BYTES, KVLayout, LayerGroup, LayerSpec

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

NVFP4: Final = "nvfp4"
"""Two numbers of 4 bits in a byte, with a block scale for every 16 (:mod:`kvtier.kernels.nvfp4`): not a dtype of torch's."""

QUANTISED: Final = ("float8_e4m3fn", "int8", NVFP4)
"""Storage types that keys and values of any floating-point model can be kept in, with a scale."""


LENGTH_DEPENDENT_ROPES: Final = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies change with the length of what is computed: a token's key in a long prompt is another one than in a
short prompt that begins alike, so neither can be served with the other's."""


def layout_of(config: PretrainedConfig, *, dtype: str | torch.dtype, tokens_per_block: int = 32) -> KVLayout:
    """The KV layout of a model, from its transformers configuration.

    Args:
        config: of a supported model.
        dtype: storage dtype of keys and values: the model's own, or "float8_e4m3fn", "int8" or "nvfp4", which are written with a scale.
        tokens_per_block: a power of two.

    Returns:
        One layer for each of the model's, in order. With an encoder, the decoder's cross-attention layers behind its own layers.

    Raises:
        ConfigError: another type of model, a kind of layer that is not supported, rotary embeddings that change with the length of a
            prompt, a dtype kvtier does not store, heads that NVFP4 cannot cut into groups of 16.
    """
    model_type = str(getattr(config, "model_type", "unknown"))
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(f"model type {model_type!r} is not supported by the transformers adapter; "
                          f"supported: {', '.join(SUPPORTED_MODEL_TYPES)} (SmolLM2 is of type llama)")
    name = str(dtype).removeprefix("torch.")
    known = (*(other for other in DTYPE_BYTES if other != "uint8"), NVFP4)
    if name not in known:
        raise ConfigError(f"dtype={name!r}: keys and values are kept in one of {', '.join(known)}")
    if getattr(config, "use_bidirectional_attention", None):
        raise ConfigError(f"this {model_type} model attends in both directions; the transformers adapter serves causal models")
    for rope_type in _rope_types(config):
        if rope_type in LENGTH_DEPENDENT_ROPES:
            raise ConfigError(f"rope_type={rope_type!r}: keys of this {model_type} model change with the length of the prompt that they "
                              "are computed in, so prompts cannot share them; serve it without kvtier")
    specs = _specs(config, model_type)
    if name == NVFP4:
        return KVLayout([_packed(spec) for spec in specs], "uint8", tokens_per_block)
    return KVLayout(specs, name, tokens_per_block)


def storage_of(group: LayerGroup) -> str:
    """What ``layout_of`` was told to store a group's numbers as: its dtype, or "nvfp4" for bytes with block scales."""
    return NVFP4 if group.dtype == "uint8" and group.spec.scale_bytes else group.dtype


def _specs(config: PretrainedConfig, model_type: str) -> list[LayerSpec]:
    """What each layer keeps, of numbers of any type."""
    if model_type in LATENT_TYPES:
        return [LayerSpec.mla(config.kv_lora_rank, config.qk_rope_head_dim)] * config.num_hidden_layers
    if model_type in ENCODER_DECODER_TYPES:
        heads: int = config.decoder_attention_heads
        shape = heads, config.d_model // heads
        return [*[LayerSpec.attention(*shape)] * config.decoder_layers, *[LayerSpec.cross(*shape)] * config.decoder_layers]
    heads = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return [LayerSpec.attention(kv_heads, head_dim, window=window) for window in _windows(config, model_type)]


def _rope_types(config: PretrainedConfig) -> list[str]:
    """Of all layers, or by kind of layer."""
    given: object = getattr(config, "rope_parameters", None)
    parts = [given, *given.values()] if isinstance(given, dict) else []
    return [str(part.get("rope_type")) for part in parts if isinstance(part, dict)]


def _packed(spec: LayerSpec) -> LayerSpec:
    """The same layer in NVFP4: half a byte for each number, and a byte of block scale for each group of them."""
    for dim in {spec.head_dim, spec.value_dim}:
        if dim % GROUP:
            raise ConfigError(f"dtype={NVFP4!r}: a row of {dim} numbers: NVFP4 has a scale for every {GROUP}, so it takes a multiple of "
                              f"{GROUP}; use float8_e4m3fn or int8")
    return replace(spec, head_dim=spec.head_dim // 2, value_dim=spec.value_dim // 2, scale_bytes=spec.head_dim // GROUP)


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
