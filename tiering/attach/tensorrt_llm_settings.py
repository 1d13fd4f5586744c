"""What a user sets for TensorRT-LLM: its connector configuration has no place for settings, so they are in one environment variable.

``TRTLLM_KVTIER`` holds a JSON mapping, or the path of a YAML or TOML file. Variables that begin with TRTLLM are those that TensorRT-LLM
hands on to the processes of its ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier.errors import ConfigError
from kvtier.tiering.attach.engine_settings import EngineSettings, identity, read_settings
from kvtier.tiering.config_sources import expand_path, read_file

VARIABLE: Final = "TRTLLM_KVTIER"
LOOKUP_SECONDS: Final = 0.5
"""TensorRT-LLM asks in its executor's loop and cannot be told to ask later: all requests wait while one waits for NVMe."""
JOB_SECONDS: Final = 120.0
_OWN: Final = ("engine_id", "trusted_lora_ids")


@dataclass(frozen=True)
class Arrangement:
    """What a scheduler or worker knows from ``llm_args`` and the settings.

    Attributes:
        settings: the tier's.
        engine_id: names the arena in shared memory.
        ranks: tensor-parallel ones.
        tokens_per_block: of TensorRT-LLM's blocks.
        model: "name@revision:digest", or "" without an NVMe level.
        model_name: TensorRT-LLM's own name of the model.
        trusted_lora_ids: an adapter's number always stands for the same weights.
    """

    settings: EngineSettings
    engine_id: str
    ranks: int
    tokens_per_block: int
    model: str
    model_name: str
    trusted_lora_ids: bool


def arrange(llm_args: Any) -> Arrangement:
    """Read the settings and TensorRT-LLM's arguments.

    Raises:
        ConfigError: a misspelt or unusable setting, or an arrangement that is not supported (pipeline or context parallel).
    """
    given = _given()
    settings = read_settings({"lookup_timeout": LOOKUP_SECONDS} | dict(given), VARIABLE, own_keys=_OWN)
    for name in ("pipeline_parallel_size", "context_parallel_size"):
        if (getattr(llm_args, name, 1) or 1) > 1:
            raise ConfigError(f"{name}={getattr(llm_args, name)}: not supported by this connector; use tensor parallelism only")
    if getattr(llm_args, "enable_attention_dp", False):
        raise ConfigError("enable_attention_dp=True: not supported by this connector; leave it out")
    engine_id = settings.own.get("engine_id", "trtllm")
    if not isinstance(engine_id, str):
        raise ConfigError(f"engine_id={engine_id!r} ({VARIABLE}): pass a text; it names the arena in shared memory")
    trusted = settings.own.get("trusted_lora_ids", False)
    if not isinstance(trusted, bool):
        raise ConfigError(f"trusted_lora_ids={trusted!r} ({VARIABLE}): must be true or false")
    cache = getattr(llm_args, "kv_cache_config", None)
    tokens = getattr(cache, "tokens_per_block", None)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(f"kv_cache_config.tokens_per_block={tokens!r}: the connector needs a whole number of tokens in a block")
    if getattr(cache, "enable_block_reuse", True) is False:
        raise ConfigError("kv_cache_config.enable_block_reuse=False: TensorRT-LLM uses nothing of a connector then; leave it on")
    model = getattr(llm_args, "model", None)
    return Arrangement(settings, engine_id, int(getattr(llm_args, "tensor_parallel_size", 1) or 1), tokens,
                       identity(settings, None if model is None else str(model), VARIABLE) or "", str(model or ""), trusted)


def _given() -> Mapping[str, Any]:
    text = os.environ.get(VARIABLE, "").strip()
    if not text.startswith("{"):
        return read_file(expand_path(text, VARIABLE)) if text else {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: no JSON mapping ({error}); write for example '{{\"secondary\": \"64GiB\"}}'") from None
    assert isinstance(found, dict)
    return found
