"""What a user writes into ``kv_connector_extra_config``: vLLM's own keys, the adapter's, and those of ``TierConfig``, all strictly read.

vLLM ignores keys it does not know, so a misspelt one would be a setting that silently does not work. Here it is an error with the
nearest name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier.errors import ConfigError
from kvtier.tiering.config import TierConfig
from kvtier.tiering.config_sources import unknown_key

VLLM_KEYS: Final = ("spec_name", "spec_module_path", "blocks_per_chunk", "block_size", "offload_prompt_only", "self_describing_kv_events",
                    "max_recompute_pending_tokens")
"""What vLLM reads itself. ``canonical_layout`` is not among them: pages are stored as they are."""

WITHOUT_MEANING: Final = ("primary", "max_batch_size", "max_seq_len", "max_beam_width", "chunk_size", "window_scratch_blocks", "max_tokens",
                          "gds", "gds_threads", "gds_task_size", "enable_partial_reuse", "copy_on_partial_reuse", "enable_block_reuse",
                          "request_directory_root", "allreduce_min", "clock", "load_decision", "prefetch_bandwidth")
"""Settings of a tier that owns the device's pool; vLLM has its own for what they mean."""

TIER_KEYS: Final = tuple(key for key in TierConfig.model_fields if key not in WITHOUT_MEANING)
WRITE_AHEAD_SHARE: Final = 1.0
"""vLLM kills its engine core a few seconds after it was told to end, whatever is unsaved. So all that may be on NVMe is written as soon as
it is stored, if the user does not say otherwise (docs/decisions/0036)."""

_ORIGIN: Final = "kv_connector_extra_config"


@dataclass(frozen=True)
class VllmSettings:
    """The settings of one engine.

    Attributes:
        tier: sizes are of all ranks together; ``primary`` is vLLM's own.
        model: "name@revision:digest" instead of what is found in the model's files; None: found.
        trusted_lora_names: an adapter's name always stands for the same weights, so blocks of adapters may be kept on NVMe.
        lookup_timeout: seconds after which a request no longer waits for host memory, NVMe or another request's store.
        job_timeout: seconds after which a transfer that no worker has reported is given up.
    """

    tier: TierConfig
    model: str | None = None
    trusted_lora_names: bool = False
    lookup_timeout: float = 5.0
    job_timeout: float = 120.0


ADAPTER_KEYS: Final = ("model", "trusted_lora_names", "lookup_timeout", "job_timeout")


def read_settings(extra_config: Mapping[str, Any]) -> VllmSettings:
    """Read ``kv_connector_extra_config``; environment and file (``KVTIER_...``) stand behind it, as everywhere.

    Raises:
        ConfigError: a key that nobody knows, or one without meaning here; a value that cannot be used; no host memory.
    """
    for key in extra_config:
        if key in WITHOUT_MEANING:
            raise ConfigError(f"{key!r} ({_ORIGIN}): has no meaning here, because vLLM owns the device's memory; leave it out")
        if key == "canonical_layout":
            raise ConfigError(f"'canonical_layout' ({_ORIGIN}): not supported, pages are stored as they are; leave it out")
        if key not in (*VLLM_KEYS, *ADAPTER_KEYS, *TIER_KEYS):
            raise unknown_key(key, _ORIGIN, (*TIER_KEYS, *ADAPTER_KEYS, *VLLM_KEYS))
    try:
        tier = TierConfig(**{key: value for key, value in extra_config.items() if key in TIER_KEYS})
        if tier.sources["write_ahead_share"] == "default":
            tier = tier.model_copy(update={"write_ahead_share": WRITE_AHEAD_SHARE})
    except ConfigError as error:
        raise ConfigError(f"{_ORIGIN}: {error}") from None
    if tier.secondary == TierConfig.model_fields["secondary"].default:
        raise ConfigError(f'{_ORIGIN} gives the tier no host memory; set for example "secondary": "8GiB", which is the memory of all ranks '
                          "together")
    model = extra_config.get("model")
    if model is not None and (not isinstance(model, str) or not model):
        raise ConfigError(f'model={model!r} ({_ORIGIN}): must be text such as "name@revision:digest"')
    return VllmSettings(tier, model, _truth(extra_config, "trusted_lora_names"), _seconds(extra_config, "lookup_timeout", 5.0),
                        _seconds(extra_config, "job_timeout", 120.0))


def _truth(given: Mapping[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r} ({_ORIGIN}): must be true or false")
    return value


def _seconds(given: Mapping[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0.0 < value <= 86400.0) or math.isnan(value):
        raise ConfigError(f"{key}={value!r} ({_ORIGIN}): must be a number of seconds above 0 and at most 86400")
    return float(value)
