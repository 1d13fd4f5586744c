"""Ids and enumerations that every room may use. Imports nothing of kvtier."""

from __future__ import annotations

import enum
from typing import NewType

BlockId = NewType("BlockId", int)
"""Permanent id of a block handle, local to its group. Never a slot."""

Slot = NewType("Slot", int)
"""Position inside one level's pool of one group."""


class Level(enum.IntEnum):
    """The three places a block's bytes can be, fastest first."""

    PRIMARY = 0    #: device memory (ordinary memory with ``device="cpu"``)
    SECONDARY = 1  #: pinned host memory
    NVME = 2       #: a slab file on NVMe


class TransferMode(enum.Enum):
    """How a request's bytes travel between levels. It changes the path, never the level."""

    DRAM = "dram"                                #: as the tier is set up: NVMe directly where ``gds`` works, else through host memory
    GDS = "gds"                                  #: a wish for the direct way: where the tier has none, counted in ``fallbacks`` and said
    POSIX_DEBUG_FALLBACK = "posix_debug_fallback"  #: one file per block in the request's own directory, for debugging
