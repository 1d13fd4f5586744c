"""``runs``: whether a function that has noted itself somewhere is still at it, or was cut short before it could take that back."""

from __future__ import annotations

import sys
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import FrameType
from typing import Final

_MAY_REST: Final = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
"""Of code whose frames are on no stack between two of their steps."""


def runs(wanted: FrameType) -> bool:
    """Whether any thread is within this frame. True also where that is not known: it may rest, or somebody has come to rest meanwhile
    and who was behind it is not known any more."""
    frames = list(sys._current_frames().values())
    while frames:
        frame = frames.pop()
        if frame is wanted:
            return True
        if frame.f_back is not None:
            frames.append(frame.f_back)
        elif frame.f_code.co_flags & _MAY_REST:
            return True
    return bool(wanted.f_code.co_flags & _MAY_REST)
