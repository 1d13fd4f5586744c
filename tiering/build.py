"""Which build of kvtier this is, found out without importing torch."""

from __future__ import annotations

import importlib.util
from importlib.machinery import PathFinder

from kvtier.tiering.ledger import ledger


def is_compiled() -> bool:
    """Whether this is the compiled build: the ledger's modules and the copies in C come in one wheel."""
    return not str(ledger.__file__).endswith(".py")


def host_copy_failure() -> ImportError | None:
    """Why the module in C cannot be loaded, so that copies on the host are library calls; None where it can."""
    kernels = importlib.util.find_spec("kvtier.kernels")
    spec = PathFinder.find_spec("host_copy", kernels.submodule_search_locations if kernels is not None else None)
    try:
        if spec is None:
            raise ImportError("kvtier.kernels.host_copy is missing")
        importlib.util.module_from_spec(spec)
    except ImportError as error:
        return error
    return None
