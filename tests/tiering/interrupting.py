"""Cuts a call short at a chosen place, as a signal handler does: Python runs one where a function begins and behind a call that is not
Python, and nowhere between a store and the next call."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import kvtier.tiering

OURS = str(Path(kvtier.tiering.__file__).parent)


def cut_short(call: Callable[[], Any], place: int, kind: type[BaseException] = KeyboardInterrupt) -> bool:
    """Make the call. An exception of this kind comes at the place of this number, of those that its thread passes in
    ``kvtier.tiering``; False when the call was over before."""
    count = 0

    def look(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(OURS):
            count += 1
            if count == place + 1:
                raise kind

    before = sys.getprofile()
    gc.disable()  # where it runs a finaliser, an exception is ignored
    sys.setprofile(look)
    try:
        call()
    except kind:
        return True
    finally:
        sys.setprofile(before)
        gc.enable()
    assert count <= place, "the exception was swallowed"
    return False
