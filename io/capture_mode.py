"""``beside_captures``: what a thread may ask of CUDA while another one captures a graph.

During a capture in CUDA's default mode every thread of the process is refused to ask after an event, to wait for one, and to allocate, and
the capture is lost with that. Who looks after copies does so all the time, with no event that a graph has to know of. He says so by
``cuThreadExchangeStreamCaptureMode``, which CuPy does not have.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeVar

from kvtier.io.cuda_batch import load_driver

RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

Argument = TypeVar("Argument")
Result = TypeVar("Result")


def beside_captures(call: Callable[[Argument], Result], argument: Argument) -> Result:
    """Make a call as one that no capture of another thread has to do with. This thread's own mode comes back afterwards."""
    exchange = exchange_of_driver()
    mode = ctypes.c_int(RELAXED)
    if exchange(ctypes.byref(mode)):  # no driver, or a thread without a context: there is nothing to put back
        return call(argument)
    # ``mode`` is the thread's own now
    try:
        return call(argument)
    finally:
        exchange(ctypes.byref(mode))


@cache
def exchange_of_driver() -> Callable[[Any], int]:
    """The driver's call, which returns 0 when it has exchanged; where there is none, one that never does."""
    try:
        exchange: Callable[[Any], int] = load_driver().cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return lambda _mode: 1
    return exchange
