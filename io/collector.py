"""``collector_paused``: Python's cyclic garbage collector, while very many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """A hundred thousand new tuples make the cyclic collector walk all of them again and again: a quarter of a warm start."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:
            gc.freeze()
            gc.unfreeze()  # the new ones count as old: the next collection of young objects need not walk them
        gc.enable()
