"""How far a transfer has got, as questions that waiting calls ask; how long they may still wait; and what broke a copy off."""

from __future__ import annotations

import time

from kvtier.errors import TransferError
from kvtier.tiering.transfer_graph import NodeState, TransferNode


def deadline_of(timeout: float | None) -> float | None:
    """The moment, by ``time.monotonic``, at which so many seconds are over; None for never."""
    return None if timeout is None else time.monotonic() + timeout


def seconds_left(deadline: float | None) -> float | None:
    """Seconds until then, 0.0 when it has passed."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def is_over(node: TransferNode) -> bool:
    """It has ended and been reported."""
    return node.state is NodeState.DONE


def is_past_files(node: TransferNode) -> bool:
    """No file keeps it any more: a stream may be ordered behind it."""
    return not waits_for_file(node)


def waits_for_file(node: TransferNode) -> bool:
    """Held back behind a file operation, or one itself."""
    return node.state is NodeState.HELD or node.state is NodeState.QUEUED


def as_exception(error: BaseException) -> Exception:
    """What ended a copy, as an error that a Move can have."""
    if isinstance(error, Exception):
        return error
    failure = TransferError(f"the copy was broken off: {error!r}")
    failure.__cause__ = error
    return failure
