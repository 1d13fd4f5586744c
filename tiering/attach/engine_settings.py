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
from kvtier.tiering.attach.vllm_identity import files_fingerprint
from kvtier.tiering.config import TierConfig
from kvtier.tiering.config_sources import unknown_key

WITHOUT_MEANING: Final = ("primary", "max_tokens", "rank", "num_ranks", "size_scope", "max_batch_size", "max_seq_len", "max_beam_width",
                          "chunk_size", "window_scratch_blocks", "enable_block_reuse", "enable_partial_reuse", "copy_on_partial_reuse",
                          "gds", "gds_threads", "gds_task_size", "request_directory_root", "allreduce_min", "prefetch_bandwidth",
                          "load_decision", "layer_pieces", "debug_checks", "event_buffer_max_size", "clock")
"""Settings of a tier that owns the device's pool, or of which these engines hear nothing."""

TIER_KEYS: Final = tuple(key for key in TierConfig.model_fields if key not in WITHOUT_MEANING)
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


def read_settings(given: Mapping[str, Any], origin: str, engine_keys: Sequence[str] = (), own_keys: Sequence[str] = ()) -> EngineSettings:
    """Read a mapping of settings; environment and file (``KVTIER_...``) stand behind it, as everywhere.

    Args:
        given: keys and values.
        origin: where they come from, for messages.
        engine_keys: which the engine reads itself.
        own_keys: of this adapter, beside :data:`ADAPTER_KEYS`.

    Raises:
        ConfigError: a key that nobody knows, or one without meaning here; a value that cannot be used; no host memory.
    """
    for key in given:
        if key in WITHOUT_MEANING:
            raise ConfigError(f"{key!r} ({origin}): has no meaning here, because the engine owns the device's memory; leave it out")
        if key not in (*engine_keys, *own_keys, *ADAPTER_KEYS, *TIER_KEYS):
            raise unknown_key(str(key), origin, (*TIER_KEYS, *ADAPTER_KEYS, *own_keys, *engine_keys))
    try:
        tier = TierConfig(**{key: value for key, value in given.items() if key in TIER_KEYS})
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None
    changes: dict[str, Any] = {"event_buffer_max_size": 0}
    if tier.sources["write_ahead_share"] == "default":
        changes["write_ahead_share"] = WRITE_AHEAD_SHARE
    if tier.secondary == TierConfig.model_fields["secondary"].default:
        raise ConfigError(f'{origin} gives the tier no host memory; set for example "secondary": "8GiB", which is the memory of all ranks '
                          "together")
    model = given.get("model")
    if model is not None and (not isinstance(model, str) or not model):
        raise ConfigError(f'model={model!r} ({origin}): must be text such as "name@revision:digest"')
    timeout = given.get("lookup_timeout", 5.0)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0.0 < timeout <= 86400.0 or math.isnan(timeout):
        raise ConfigError(f"lookup_timeout={timeout!r} ({origin}): must be a number of seconds above 0 and at most 86400")
    return EngineSettings(tier.model_copy(update=changes), model, float(timeout), {key: given[key] for key in own_keys if key in given})


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
            return f"{folder.resolve().name}@local:{files_fingerprint(folder)}"
        except ConfigError:
            pass  # the message names another engine's settings
    if settings.tier.nvme_directory is not None:
        raise ConfigError(f'{origin}: nothing says which weights compute the blocks of {engines_name!r}; set "model": '
                          '"name@revision:digest" beside nvme_directory, so that another model\'s blocks are never served')
    return None
