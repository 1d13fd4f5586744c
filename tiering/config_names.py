"""Settings under the names that TensorRT-LLM's ``KvCacheConfig`` has for them, where the same thing exists.

Names that both have alike (``secondary_offload_min_priority``, ``enable_block_reuse``, ``max_tokens``, ``event_buffer_max_size``, ...) need
nothing here. Others differ in the way a size is written: a number of bytes there, a size with its unit here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier.errors import ConfigError
from kvtier.pools.sizing import shown


@dataclass(frozen=True)
class OtherName:
    """What a name means here: the key, how a value is taken over, and both in words."""

    key: str
    convert: Callable[[object, str], object]
    meaning: str


def _bytes(value: object, name: str) -> object:
    """A number of bytes, also as text (from the environment); a size with a unit stays as it is."""
    if isinstance(value, str):
        return f"{value.strip()}B" if value.strip().isdecimal() else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f'{name}={shown(value)}: must be a number of bytes, or a size with its unit such as "64GiB"')
    return f"{value}B"


def _fraction(value: object, name: str) -> object:
    """A share of what is free, 0..1."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else -1.0
    except ValueError:
        number = -1.0
    if not 0.0 < number <= 1.0:
        raise ConfigError(f"{name}={shown(value)}: must be a share of what is free, above 0 and at most 1")
    return f"{round(number * 100, 6):g}%"


OTHER_NAMES: Final[Mapping[str, OtherName]] = {
    "host_cache_size": OtherName("secondary", _bytes, "bytes of host memory"),
    "max_gpu_total_bytes": OtherName("primary", _bytes, "bytes of device memory"),
    "free_gpu_memory_fraction": OtherName("primary", _fraction, "a share of the device memory that is free, 0..1"),
}
"""By the other name. None of them is a key here."""


def our_names(values: Mapping[str, Any], origin: Callable[[str], str]) -> dict[str, tuple[Any, str]]:
    """Values of one source under our names, each with its origin.

    Args:
        values: by whatever name they were given.
        origin: where the value of a name came from, in words.

    Raises:
        ConfigError: two names for one setting; or a value that is none.
    """
    found: dict[str, tuple[Any, str]] = {}
    given: dict[str, str] = {}
    for name, value in values.items():
        other = OTHER_NAMES.get(name)
        key = name if other is None else other.key
        if key in found:
            raise ConfigError(f"{given[key]} and {name} ({origin(name)}): two names for {key}; give one of them")
        given[key] = name
        if other is None:
            found[key] = value, origin(name)
            continue
        try:
            found[key] = other.convert(value, name), f"{origin(name)}, as {name}"
        except ConfigError as error:
            raise ConfigError(f"{origin(name)}: {error}") from None
    return found
