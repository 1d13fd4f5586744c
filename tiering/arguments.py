"""Checks of what callers pass, shared by the public methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Final

from kvtier.errors import RequestError
from kvtier.tiering.ledger.keyed_level import KEY_BYTES, SHORT_KEY_BYTES
from kvtier.tiering.ledger.request import Request
from kvtier.types import Level

LONGEST: Final = 1e8  # seconds; about three years, within what the platform's clocks can count to


def seconds(name: str, value: object) -> float:
    """A time-out in seconds, at most :data:`LONGEST` (infinity counts as that).

    Raises:
        RequestError: not a number, NaN, or negative.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise RequestError(f"{name}={value!r}: a time-out is a number of seconds of at least 0")
    return float(min(value, LONGEST))


def positive_number(name: str, value: object) -> float:
    """A positive finite number. Raises RequestError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
        raise RequestError(f"{name}={value!r}: must be a positive number")
    return float(value)


def truth(name: str, value: object) -> None:
    """Raise RequestError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise RequestError(f"{name}={value!r}: pass True or False")


def level(value: object) -> None:
    """Raise RequestError unless ``value`` is a :class:`Level` or its number."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(Level):
        raise RequestError(f"level={value!r}: use Level.PRIMARY, Level.SECONDARY or Level.NVME")


def sequence_of(name: str, value: object) -> None:
    """Raise RequestError unless ``value`` is a list or another sequence (no string)."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RequestError(f"{name}={value!r}: pass a list")


def content_keys(value: object) -> list[bytes]:
    """Content keys in a list of their own. Raises RequestError unless they are some, in a list."""
    sequence_of("keys", value)
    assert isinstance(value, Sequence)
    for key in value:
        if type(key) is not bytes or not (0 < len(key) <= SHORT_KEY_BYTES or len(key) == KEY_BYTES):
            raise RequestError(f"key {key!r}: a content key is bytes, {KEY_BYTES} or 1 to {SHORT_KEY_BYTES} of them")
    return list(value)


def whole_numbers(name: str, values: Iterable[int]) -> list[int]:
    """Several whole numbers, of any type that is one. Raises RequestError otherwise."""
    try:
        return [index(value) for value in values]
    except TypeError as error:
        raise RequestError(f"{name}: pass whole numbers in a list ({error})") from None


def requests(value: object) -> None:
    """Raise RequestError unless ``value`` is a list of Request."""
    sequence_of("requests", value)
    assert isinstance(value, Sequence)
    for item in value:
        if not isinstance(item, Request):
            raise RequestError(f"requests: {item!r} is no Request; make one with Request(id=..., tokens=...)")
