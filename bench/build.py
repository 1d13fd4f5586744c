"""Which build of kvtier is measured: figures of the compiled one and of plain Python are figures of two things."""

from __future__ import annotations

from typing import Final

from kvtier.tiering.build import host_copy_failure, is_compiled

LEDGER_ALONE: Final = "the ledger alone, without copies in C"
"""A compiled build whose module in C cannot be loaded; ``kvtier doctor`` says why."""


def compiled() -> bool | str:
    """What reports have under "compiled": whether this is the compiled build (``make compiled``), or what of it."""
    return is_compiled() and (LEDGER_ALONE if host_copy_failure() is not None else True)
