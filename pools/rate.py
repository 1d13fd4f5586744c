"""Rates: from "200MiB/s" to bytes per second. Pure arithmetic, as ``sizing``."""

from __future__ import annotations

from kvtier.errors import ConfigError
from kvtier.pools.sizing import SizeKind, parse_size, shown


def parse_rate(text: object, name: str) -> float:
    """Bytes per second; ``name`` is the key or option it came from, for messages.

    Raises:
        ConfigError: no size in bytes with its unit, per second; or nothing at all.
    """
    if not isinstance(text, str) or not text.endswith("/s"):
        raise ConfigError(f'{name}={shown(text)}: a rate is a size per second; write for example "200MiB/s"')
    size = parse_size(text.removesuffix("/s"), name)
    if size.kind is not SizeKind.BYTES or size.amount == 0:
        raise ConfigError(f'{name}={shown(text)}: a rate is more than 0 bytes per second; write for example "200MiB/s"')
    return float(size.amount)
