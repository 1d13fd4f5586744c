"""Settings of an adapter whose engine owns its pool: the engine's own keys, the adapter's, and those of ``TierConfig``, strictly read.

Engines ignore keys they do not know, so a misspelt one would be a setting that silently does not work. Here it is an error with the
nearest name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.errors import ConfigError
from kvtier.tiering.attach.weight_files import files_fingerprint
from kvtier.tiering.config import TierConfig
from kvtier.tiering.config_sources import unknown_key

POOL_KEYS: Final = ("primary", "max_tokens", "max_batch_size", "max_seq_len", "max_beam_width", "chunk_size", "window_scratch_blocks",
                    "enable_block_reuse", "enable_partial_reuse", "copy_on_partial_reuse", "gds", "gds_threads", "gds_task_size",
                    "request_directory_root", "allreduce_min", "prefetch_bandwidth", "load_decision", "clock")
"""Settings of a tier that owns the device's pool; the engine has its own for what they mean."""

UNHEARD_KEYS: Final = ("rank", "num_ranks", "size_scope", "layer_pieces", "debug_checks", "event_buffer_max_size")
"""Settings of what engines that have no events, and whose ranks the adapter counts itself, hear nothing of."""

ADAPTER_KEYS: Final = ("model", "lookup_timeout")
WRITE_AHEAD_SHARE: Final = 1.0
"""Engines are often killed, and what is in host memory only is gone. So all that may be on NVMe is written as soon as it is stored, if the
user does not say otherwise (docs/decisions/0036)."""


@dataclass(frozen=True)
class EngineSettings:
    """What a user has set.

    Attributes:
        tier: sizes are of all ranks together.
        model: "name@revision:digest"; None: not given.
        lookup_timeout: seconds after which a request no longer waits for NVMe.
        own: the adapter's further keys, as given.
    """

    tier: TierConfig
    model: str | None
    lookup_timeout: float
    own: Mapping[str, Any]


def read_settings(given: Mapping[str, Any], origin: str, engine_keys: Sequence[str] = (), own_keys: Sequence[str] = (), *,
                  engine: str = "the engine", without_meaning: Sequence[str] = (*POOL_KEYS, *UNHEARD_KEYS)) -> EngineSettings:
    """Read a mapping of settings; environment and file (``KVTIER_...``) stand behind it, as everywhere.

    Args:
        given: keys and values.
        origin: where they come from, for messages.
        engine_keys: which the engine reads itself.
        own_keys: of this adapter, beside :data:`ADAPTER_KEYS`.
        engine: its name, for messages.
        without_meaning: keys of ``TierConfig`` that are refused.

    Raises:
        ConfigError: a key that nobody knows, or one without meaning here; a value that cannot be used; no host memory.
    """
    tier_keys = [key for key in TierConfig.model_fields if key not in without_meaning]
    for key in given:
        if key in without_meaning:
            raise ConfigError(f"{key!r} ({origin}): has no meaning here, because {engine} owns the device's memory; leave it out")
        if key not in (*engine_keys, *own_keys, *ADAPTER_KEYS, *tier_keys):
            raise unknown_key(str(key), origin, (*tier_keys, *ADAPTER_KEYS, *own_keys, *engine_keys))
    try:
        tier = TierConfig(**{key: value for key, value in given.items() if key in tier_keys})
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None
    changes: dict[str, Any] = {"event_buffer_max_size": 0} if "event_buffer_max_size" in without_meaning else {}
    if tier.sources["write_ahead_share"] == "default":
        changes["write_ahead_share"] = WRITE_AHEAD_SHARE
    if tier.secondary == TierConfig.model_fields["secondary"].default:
        raise ConfigError(f'{origin} gives the tier no host memory; set for example "secondary": "8GiB", which is the memory of all ranks '
                          "together")
    model = given.get("model")
    if model is not None and (not isinstance(model, str) or not model):
        raise ConfigError(f'model={model!r} ({origin}): must be text such as "name@revision:digest"')
    return EngineSettings(tier.model_copy(update=changes), model, seconds_of(given, "lookup_timeout", 5.0, origin),
                          {key: given[key] for key in own_keys if key in given})


def seconds_of(given: Mapping[str, Any], key: str, default: float, origin: str) -> float:
    """A setting in seconds. Raises ConfigError unless it is a number above 0 and at most a day."""
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 86400.0 or math.isnan(value):
        raise ConfigError(f"{key}={value!r} ({origin}): must be a number of seconds above 0 and at most 86400")
    return float(value)


def identity(settings: EngineSettings, engines_name: str | None, origin: str) -> str | None:
    """Whose blocks these are, "name@revision:digest": as set, or of the weights' files where the engine's name of the model is a folder.

    Raises:
        ConfigError: an NVMe level and no identity: another model's blocks would be served after a restart.
    """
    if settings.model is not None:
        return settings.model
    folder = Path(engines_name).expanduser() if engines_name else None
    if folder is not None and folder.is_dir():
        try:
            return f"{folder.resolve().name}@local:{files_fingerprint(folder, origin)}"
        except ConfigError:
            if settings.tier.nvme_directory is not None:
                raise
            return None
    if settings.tier.nvme_directory is not None:
        raise ConfigError(f'{origin}: nothing says which weights compute the blocks of {engines_name!r}; set "model": '
                          '"name@revision:digest" beside nvme_directory, so that another model\'s blocks are never served')
    return None
