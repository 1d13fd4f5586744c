"""Many blocks of a primary pool at once, as rows of bytes in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvtier.pools.primary import PrimaryPool

Bytes = npt.NDArray[np.uint8]

RUN_BYTES: Final = 16 << 20
"""How much is copied by one call: enough that the copy, and not the call, takes the time."""


def runs_of(positions: Sequence[int], block_bytes: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Stretches of ``positions`` that are copied together, each with the number of its first."""
    step = max(1, RUN_BYTES // max(block_bytes, 1))
    for first in range(0, len(positions), step):
        yield first, positions[first:first + step]


def read_rows(pool: PrimaryPool, slots: Sequence[int]) -> Bytes:
    """A copy of these blocks as slots of the lower levels hold them: uint8 ``[blocks, block_bytes]``."""
    rows: Bytes = np.empty((len(slots), pool.group.block_bytes), dtype=np.uint8)
    for part in pool.sections:
        start = part.section.offset
        chosen = torch.tensor(slots, dtype=torch.int64, device=part.rows.device)
        rows[:, start:start + part.section.num_bytes] = part.rows.index_select(0, chosen).cpu().numpy()
    return rows


def write_rows(pool: PrimaryPool, slots: Sequence[int], rows: Bytes) -> None:
    """Overwrite these blocks with what :meth:`read_rows` gives. On a GPU on torch's current stream, from pageable memory: the rows may be
    used again when it returns."""
    for part in pool.sections:
        start = part.section.offset
        data = torch.from_numpy(np.ascontiguousarray(rows[:, start:start + part.section.num_bytes])).to(part.rows.device)
        part.rows.index_copy_(0, torch.tensor(slots, dtype=torch.int64, device=part.rows.device), data)
