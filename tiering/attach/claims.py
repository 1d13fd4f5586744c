"""One engine for each cache: a second one is told about the first, instead of writing into its blocks."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from kvtier.errors import ConfigError

_lock = threading.Lock()
_owners: WeakKeyDictionary[object, str] = WeakKeyDictionary()


def claim(thing: object, name: str, owner: str, remedy: str) -> None:
    """Take a cache, or a pool, for one engine, until :func:`release`.

    Args:
        thing: what is taken.
        name: what it is called in the message.
        owner: who takes it.
        remedy: how the owner lets it go.

    Raises:
        ConfigError: somebody has it already.
    """
    with _lock:
        held = _owners.get(thing)
        if held is not None:
            raise ConfigError(f"{name} is used by {held} already, and two engines would write into each other's blocks; {remedy}, or "
                              "open another cache")
        _owners[thing] = owner


def release(thing: object) -> None:
    """Let go of it. Nothing happens when nobody has it."""
    with _lock:
        _owners.pop(thing, None)
