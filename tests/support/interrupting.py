"""Cuts a call short at a chosen place, as a signal handler does: Python runs one where a function begins, behind a call of what is not
Python, and where a loop goes back; nowhere between a store and the next call, and not behind a call of what is Python. (Behind that of a
class of ours it might, when the object is made and nobody has it yet; nothing could be done about it there, and it is left out.)"""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import kvtier.tiering

TIERING = Path(kvtier.tiering.__file__).parent


def cut_short(call: Callable[[], Any], place: int, kind: type[BaseException] = KeyboardInterrupt, room: Path = TIERING) -> bool:
    """Make the call. An exception of this kind comes at the place of this number, of those that its thread passes in the modules of
    ``room``; False when the call was over before."""
    count = 0
    is_behind_python = False  # the function at hand has just called a Python one

    def is_ours(frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(str(room))

    def enter(frame: FrameType, _event: str, _argument: object) -> Any:
        nonlocal is_behind_python
        is_behind_python = not is_ours(frame)
        if is_behind_python:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return look

    def look(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count, is_behind_python
        if event == "return":
            is_behind_python = True
        elif event == "opcode":
            is_here = frame.f_lasti in _places(frame.f_code) and not is_behind_python
            is_behind_python = False
            count += is_here
            if is_here and count == place + 1:
                sys.settrace(None)
                raise kind
        return look

    before = sys.gettrace()
    gc.disable()  # where it runs a finaliser, an exception is ignored
    sys.settrace(enter)
    try:
        call()
    except kind:
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    assert count <= place, "the exception was swallowed"
    return False


@functools.cache
def _places(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions in front of which a handler may run. It belongs to the instruction before: where that one has another
    ``except`` or ``with`` around it, the exception would come out elsewhere than a handler's, so there is none."""
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def around(offset: int) -> list[int]:
        return [entry.target for entry in table if entry.start <= offset < entry.end]

    instructions = list(dis.get_instructions(code))
    behind = {after.offset for before, after in itertools.pairwise(instructions)
              if before.opname in ("RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX") and around(before.offset) == around(after.offset)}
    return frozenset(behind | {instruction.offset for instruction in instructions if instruction.opname == "JUMP_BACKWARD"})
