"""Ask a running vLLM worker for its facts: page sizes from its tensors, identity from its configuration."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.errors import ConfigError
from kvtier.tiering.attach.rank_facts import CRYPTOGRAPHIC, Facts, check_dtype
from kvtier.tiering.attach.vllm_identity import model_identity
from kvtier.tiering.attach.vllm_settings import VllmSettings

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def group_tensors(kv_caches: CanonicalKVCaches) -> list[list[torch.Tensor]]:
    """For each KV group its tensors, each int8 ``[num_blocks, bytes that count]``; padding behind a page is left out."""
    return [[kv_caches.tensors[ref.tensor_idx].tensor[:, :ref.page_size_bytes] for ref in refs] for refs in kv_caches.group_data_refs]


def facts_of(config: OffloadingConfig, kv_caches: CanonicalKVCaches, settings: VllmSettings, version: str) -> Facts:
    """A rank's facts. Called where vLLM registers its pages, with its configuration current.

    Raises:
        ConfigError: a KV-cache dtype that is not supported.
    """
    check_dtype(config.model.dtype)
    vllm_config = get_current_vllm_config_or_none()
    layers = vllm_config.compilation_config.static_forward_context if vllm_config is not None else {}
    pages = tuple(tuple(int(ref.page_size_bytes) for ref in refs) for refs in kv_caches.group_data_refs)
    is_state = tuple(any(isinstance(layers.get(name), MambaBase) for name in group.layer_names) for group in config.groups)
    identity = {
        "vllm": ".".join(version.split(".")[:2]), "dtype": config.model.dtype, "cache_layout": str(config.kv_cache_layout),
        "attention": ",".join(sorted({_attention(layers.get(name)) for group in config.groups for name in group.layer_names})),
        "tokens_per_block": ",".join(str(group.tokens_per_block) for group in config.groups),
        "blocks_per_chunk": str(config.cache.blocks_per_chunk), "tokens_per_hash": str(config.cache.tokens_per_hash),
        "parallel": f"tp{config.parallel.tp_size} pp{config.parallel.pp_size} pcp{config.parallel.pcp_size} dcp{config.parallel.dcp_size} "
                    f"world{config.parallel.world_size}",
    }
    states = {_state_dtypes(layers.get(name)) for group in config.groups for name in group.layer_names} - {""}
    if states:  # config.model.dtype is that of keys and values; states of two dtypes of one width would read each other's bytes
        identity["state_dtypes"] = ",".join(sorted(states))
    if vllm_config is None:
        return Facts(pages, is_state, identity, settings.model or "", "vLLM does not say with which configuration it runs")
    identity |= {"hash": str(vllm_config.cache_config.prefix_caching_hash_algo), "model_config": _config_digest(vllm_config)}
    model, reason = _model(vllm_config, settings)
    return Facts(pages, is_state, identity, model, reason or _without_nvme(vllm_config, settings))


def _model(vllm_config: VllmConfig, settings: VllmSettings) -> tuple[str, str]:
    """The model's identity, or "" and why there is none."""
    if settings.model is not None:
        return settings.model, ""
    if str(vllm_config.load_config.load_format) == "dummy":
        return "", "the weights are dummies"
    model = vllm_config.model_config
    try:
        return model_identity(model.model, model.revision, getattr(model.hf_config, "_commit_hash", None)), ""
    except ConfigError as error:
        return "", str(error)


def _without_nvme(vllm_config: VllmConfig, settings: VllmSettings) -> str:
    """Why this engine's blocks cannot be told apart outside its process; "" if they can."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm not in CRYPTOGRAPHIC:
        return (f"prefix_caching_hash_algo={algorithm!r} starts from another seed in each process and may collide; use "
                f"{' or '.join(CRYPTOGRAPHIC)}")
    if vllm_config.lora_config is not None and not settings.trusted_lora_names:
        return ('vLLM knows adapters by name only, and a name may stand for other weights tomorrow; set "trusted_lora_names": true if '
                "yours never do")
    return ""


def _state_dtypes(layer: object) -> str:
    """Of a recurrent layer's states, in the order in which a page has them; "" of another layer."""
    return "/".join(map(str, layer.get_state_dtype())) if isinstance(layer, MambaBase) else ""


def _config_digest(vllm_config: VllmConfig) -> str:
    """Whatever in the model's configuration changes what is computed (positions, scaling, quantisation), as the first 16 hex digits of a
    SHA-256; without where it was found and by which version of transformers it was written."""
    settings: dict[str, Any] = {key: value for key, value in vllm_config.model_config.hf_config.to_dict().items()
                                if key not in ("_name_or_path", "transformers_version", "_commit_hash")}
    settings["kvtier"] = [str(vllm_config.model_config.dtype), str(vllm_config.model_config.quantization)]
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _attention(layer: object) -> str:
    """The attention backend of a layer, with its instruction set on a CPU: they arrange a page's bytes as they like."""
    backend = getattr(layer, "attn_backend", None)
    name = backend.get_name() if backend is not None and hasattr(backend, "get_name") else type(layer).__name__
    instructions = getattr(getattr(layer, "impl", None), "isa", "")
    return f"{name}/{instructions}" if instructions else str(name)
