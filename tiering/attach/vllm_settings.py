"""What a user writes into ``kv_connector_extra_config``: vLLM's own keys, the adapter's, and those of ``TierConfig``, all strictly read.

Read as the settings of every engine that owns its pool are (``engine_settings.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier.errors import ConfigError
from kvtier.tiering.attach import engine_settings
from kvtier.tiering.attach.engine_settings import POOL_KEYS, seconds_of
from kvtier.tiering.attach.vllm_identity import ORIGIN
from kvtier.tiering.config import TierConfig

VLLM_KEYS: Final = ("spec_name", "spec_module_path", "blocks_per_chunk", "block_size", "offload_prompt_only", "self_describing_kv_events",
                    "max_recompute_pending_tokens")
"""What vLLM reads itself. ``canonical_layout`` is not among them: pages are stored as they are."""


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


OWN_KEYS: Final = ("trusted_lora_names", "job_timeout")


def read_settings(extra_config: Mapping[str, Any]) -> VllmSettings:
    """Read ``kv_connector_extra_config``; environment and file (``KVTIER_...``) stand behind it, as everywhere.

    Raises:
        ConfigError: a key that nobody knows, or one without meaning here; a value that cannot be used; no host memory.
    """
    if "canonical_layout" in extra_config:
        raise ConfigError(f"'canonical_layout' ({ORIGIN}): not supported, pages are stored as they are; leave it out")
    read = engine_settings.read_settings(extra_config, ORIGIN, VLLM_KEYS, OWN_KEYS, engine="vLLM", without_meaning=POOL_KEYS)
    trusted = read.own.get("trusted_lora_names", False)
    if not isinstance(trusted, bool):
        raise ConfigError(f"trusted_lora_names={trusted!r} ({ORIGIN}): must be true or false")
    return VllmSettings(read.tier, read.model, trusted, read.lookup_timeout, seconds_of(read.own, "job_timeout", 120.0, ORIGIN))
