"""``copy_runs`` of ``kvtier.kernels.host_copy``, the module in C, or None in the plain build, where library calls do its work."""

from __future__ import annotations

import logging
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt


class CopyRuns(Protocol):
    """Copies rows of pieces between places of the host's memory; arguments and errors are in ``host_copy.pyi``."""

    def __call__(self, destination: int, source: int, runs: npt.NDArray[np.int64], destination_row: int, source_row: int, pieces: int,
                 destination_piece: int, source_piece: int, bytes: int, threads: int, past_cache: bool, /) -> None: ...


def _load() -> CopyRuns | None:
    try:
        from kvtier.kernels.host_copy import copy_runs
    except ModuleNotFoundError:
        return None
    except ImportError as error:   # built for another system: slower, and nothing else
        logging.getLogger(__name__).warning("kvtier.kernels.host_copy cannot be loaded (%s); rows are copied by library calls", error)
        return None
    return copy_runs


copy_runs: Final = _load()
