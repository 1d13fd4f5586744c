"""Which build of kvtier is measured: figures of the compiled one and of plain Python are figures of two things."""

from __future__ import annotations

from kvtier.tiering.ledger import ledger as ledger_module


def is_compiled() -> bool:
    """Whether this is the compiled build (``make compiled``): the ledger's modules and the copies in C come in one wheel."""
    return str(ledger_module.__file__).endswith(".so")
