"""The block table that kernels read: one int32 buffer whose address never changes (spec: offset table copy).

A CUDA graph reads this buffer at a fixed address, so it is made once, for the largest batch and the longest sequence,
and filled before every step. The rows of sequences that have ended become null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from kvtier.errors import ConfigError, RequestError
from kvtier.kernels.checks import NULL_ENTRY

_MAX_PAGES: Final = 2**31 - 1


class OffsetTable:
    """Block table of one group of layers, int32 ``[max_rows, 2, max_blocks]``.

    Entry of field f (0 keys, 1 values) = slot * num_layers * kv_factor + f: the first page of the block's field, to
    which a kernel adds layer * kv_factor. With ``kv_factor`` 1 both fields are the same page. For a pool with layers in
    front (``[layers, blocks, kv_factor, ...]``) pass ``num_layers=1``. Unused entries are null (-1).

    Args:
        max_rows: sequences (times beams) of the largest batch.
        max_blocks: blocks of the longest sequence.
        num_layers: layers in a block of this group.
        kv_factor: 2, or 1 where one row serves as key and value.
        num_blocks: slots of the primary pool; a slot outside is refused.
        device: where kernels read it ("cpu", "cuda", "cuda:1").

    Raises:
        ConfigError: a size that is not positive, or a pool whose pages do not fit int32.
    """

    def __init__(self, *, max_rows: int, max_blocks: int, num_layers: int, kv_factor: int, num_blocks: int,
                 device: str | torch.device = "cpu") -> None:
        sizes = {"max_rows": max_rows, "max_blocks": max_blocks, "num_layers": num_layers, "num_blocks": num_blocks}
        for name, value in sizes.items():
            if value < 1:
                raise ConfigError(f"OffsetTable: {name}={value}: must be at least 1")
        if kv_factor not in (1, 2):
            raise ConfigError(f"OffsetTable: kv_factor={kv_factor}: pass 2 for keys and values, 1 where one row is both")
        pages = num_blocks * num_layers * kv_factor
        if pages > _MAX_PAGES:
            raise ConfigError(f"OffsetTable: {num_blocks} blocks of {num_layers} layers are {pages} pages: an entry counts "
                              f"to {_MAX_PAGES}; use fewer blocks, with more tokens each")
        self._pages_per_block = num_layers * kv_factor
        self._value_field = kv_factor - 1
        self._num_blocks = num_blocks
        self._tensor = torch.full((max_rows, 2, max_blocks), NULL_ENTRY, dtype=torch.int32, device=device)
        # On a CPU the table is written in place. A GPU's is written on the host and copied; the copy has been done when
        # it returns, so the staging buffer may be written again at once.
        on_host = self._tensor.device.type == "cpu"
        self._staging = self._tensor if on_host else self._tensor.to("cpu").pin_memory()
        self._host = self._staging.numpy()
        self._filled_rows = 0

    @property
    def tensor(self) -> torch.Tensor:
        """The whole buffer, always the same one: int32 ``[max_rows, 2, max_blocks]``."""
        return self._tensor

    def fill(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Make the table of a batch: ``rows[i]`` are the primary slots of sequence i, in the order of its tokens.

        On a GPU the copy runs on torch's current stream and the host waits for it. That must be the stream whose kernels
        read the table: on another one the copy would not wait for those of the batch before.

        Returns:
            The first ``len(rows)`` rows of :attr:`tensor`, a view. It holds until the next ``fill``.

        Raises:
            RequestError: too many rows, a row that is too long, a slot outside the pool. The table has not changed
                then.
        """
        max_rows, _, max_blocks = self._host.shape
        if len(rows) > max_rows:
            raise RequestError(f"OffsetTable: {len(rows)} rows: the table was made for {max_rows}; "
                               "make smaller batches or raise max_batch_size")
        slots = [np.asarray(row, dtype=np.int64) for row in rows]
        for number, row in enumerate(slots):
            if row.size > max_blocks:
                raise RequestError(f"OffsetTable: row {number} has {row.size} blocks: the table was made for "
                                   f"{max_blocks}; raise max_seq_len")
            outside = row[(row < 0) | (row >= self._num_blocks)]
            if outside.size:
                raise RequestError(f"OffsetTable: row {number} names slot {int(outside[0])}: the primary pool has slots 0 "
                                   f"to {self._num_blocks - 1}; only blocks at the primary level can be in a table")
        for number, row in enumerate(slots):
            first = row * self._pages_per_block
            self._host[number, 0, :row.size] = first
            self._host[number, 1, :row.size] = first + self._value_field
            self._host[number, :, row.size:] = NULL_ENTRY
        self._host[len(slots):self._filled_rows] = NULL_ENTRY
        changed = max(len(slots), self._filled_rows)
        self._filled_rows = len(slots)
        if self._staging is not self._tensor:
            self._tensor[:changed].copy_(self._staging[:changed])
        return self._tensor[:len(slots)]
