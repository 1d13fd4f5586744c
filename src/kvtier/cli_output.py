"""Standard streams that are not as usual, which is no reason to fail: letters that they cannot write, and streams that are closed.

Part of ``cli``.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import Final

_PLAIN: Final = str.maketrans({"█": "#", "▓": "=", "▒": "-", "░": ":", "·": ".", "→": ">", "…": "~"})
"""What stands for our own letters in a plain encoding. Of one letter each, so that columns stay columns."""

_HANDLER: Final = "kvtier-plain"


def prepare_streams() -> None:
    """Make the standard streams take whatever is written to them, names of files above all. Call it before anything is opened."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file that is opened, a store's slab say, would be what others take for the standard output
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # Python found it closed; print to a standard error that is None writes to the standard output
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for as long as the process lives)
    codecs.register_error(_HANDLER, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start:error.end].translate(_PLAIN)
    return text.encode("ascii", "backslashreplace").decode(), error.end
