"""What the threads of file operations have in common: how long they wait, and what becomes of nodes that they cannot serve."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

from kvtier.errors import TransferError
from kvtier.tiering import hang_watch
from kvtier.tiering.run_queue import RunQueue
from kvtier.tiering.staging import Staging
from kvtier.tiering.transfer_graph import TransferNode

_log = logging.getLogger(__name__)

PATIENCE: Final = 60.0
"""Seconds a file operation waits for memory it depends on (a staging buffer, the copy into its source slot) before it
fails. These are memory copies; one that takes longer hangs."""

LOOK_UP: Final = 0.1
"""Seconds between two looks at whether the manager is being closed, while waiting."""


def hand_back(call: Callable[..., None], *arguments: object) -> None:
    """An error in the manager's own code must not end the thread: every later Move would hang."""
    try:
        call(*arguments)
    except Exception:
        _log.exception("handing back a file operation failed")


def take_buffer(staging: Staging, node: TransferNode, is_closing: Callable[[], bool]) -> int:
    """A staging buffer for a node, waited for.

    Raises:
        TransferError: none came free in time, or the manager is being closed.
    """
    deadline = time.monotonic() + PATIENCE
    while not is_closing():
        buffer = staging.take(LOOK_UP)
        if buffer is not None:
            return buffer
        if time.monotonic() > deadline:
            raise TransferError(f"{node.move}: no staging buffer came free within {PATIENCE:.0f} s; a copy hangs")
    raise cancelled(node)


def take_all(waiting: SimpleQueue[TransferNode | None] | RunQueue) -> list[TransferNode]:
    """What is queued. The marks that end threads stay."""
    taken: list[TransferNode] = []
    marks = 0
    while True:
        try:
            node = waiting.get_nowait()
        except Empty:
            break
        if node is None:
            marks += 1
        else:
            taken.append(node)
    for _ in range(marks):
        waiting.put(None)
    return taken


def hung(node: TransferNode) -> TransferError:
    """The error of a file operation that hangs, or is queued behind those that do."""
    return TransferError(f"{node.move or 'discard'}: given up, because file operations hang for more than {hang_watch.HANG_SECONDS:.0f} s")


def cancelled(node: TransferNode) -> TransferError:
    """The error of a file operation that was not begun because the manager is being closed."""
    return TransferError(f"{node.move}: cancelled, because the cache is being closed")
