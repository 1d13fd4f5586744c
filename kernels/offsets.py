"""The block table that kernels read: one int32 buffer whose address never changes (spec: offset table copy).

A CUDA graph reads this buffer at a fixed address, so it is made once, for the largest batch and the longest sequence,
and filled before every step. The rows of sequences that have ended become null. On a GPU the host writes no more than the slots,
into one of a few pinned buffers, and goes on; the copy and the kernel that makes entries of them follow on the stream.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import ConfigError, RequestError
from kvtier.kernels.block_offsets import MAX_PAGES
from kvtier.kernels.checks import NULL_ENTRY, check_whole
from kvtier.kernels.dispatch import kernel_paths
from kvtier.kernels.staging_ring import StagingRing
from kvtier.pools.layout import LayerGroup
from kvtier.pools.pool_index import LEVEL_NAMES, PRIMARY, PoolIndex, level_of

STAGING_BUFFERS: Final = 3
"""Tables that may be on their way to a GPU at one time."""

Row = Sequence[int | None]
"""What a row is made of: a list, an ``array`` or a numpy array of whole numbers. None and negative numbers: no page here."""


class OffsetTable:
    """Block table of one group of layers, int32 ``[max_rows, 2, max_blocks]``.

    Entry of field f (0 keys, 1 values) = slot * num_layers * kv_factor + f: the first page of the block's field, to
    which a kernel adds layer * kv_factor. With ``kv_factor`` 1 both fields are the same page. For pages of a single layer
    (``[blocks, kv_factor, ...]``, recurrent state) pass ``num_layers=1``. Unused entries are null (-1), and so are places
    without a block: one that left the window, or a placeholder between two kept states.

    Args:
        max_rows: sequences times beams of the largest batch.
        max_blocks: block positions of the longest sequence (``LayerGroup.max_blocks``).
        num_layers: layers in a block of this group.
        kv_factor: 2, or 1 where one row serves as key and value, or keys and values lie in tensors of their own.
        num_blocks: slots of the primary pool; a slot outside is refused.
        device: where kernels read it ("cpu", "cuda", "cuda:1").

    Raises:
        ConfigError: a size that is not positive, or a pool whose pages do not fit int32.
    """

    def __init__(self, *, max_rows: int, max_blocks: int, num_layers: int, kv_factor: int, num_blocks: int,
                 device: str | torch.device = "cpu") -> None:
        sizes = {"max_rows": max_rows, "max_blocks": max_blocks, "num_layers": num_layers, "num_blocks": num_blocks}
        max_rows, max_blocks, num_layers, num_blocks, kv_factor = check_whole("OffsetTable", ConfigError, **sizes, kv_factor=kv_factor)
        for name, value in sizes.items():
            if value < 1:
                raise ConfigError(f"OffsetTable: {name}={value}: must be at least 1")
        if kv_factor not in (1, 2):
            raise ConfigError(f"OffsetTable: kv_factor={kv_factor}: pass 2 for keys and values, 1 where one row is both")
        pages = num_blocks * num_layers * kv_factor
        if pages > MAX_PAGES:
            raise ConfigError(f"OffsetTable: {num_blocks} blocks of {num_layers} layers are {pages} pages: an entry counts "
                              f"to {MAX_PAGES}; use fewer blocks, with more tokens each")
        self._pages_per_block = num_layers * kv_factor
        self._value_field = kv_factor - 1
        self._num_blocks = num_blocks
        self._tensor = torch.full((max_rows, 2, max_blocks), NULL_ENTRY, dtype=torch.int32, device=device)
        self._ring: StagingRing[torch.Tensor] | None = None   # on a CPU the table is written in place
        if self._tensor.device.type == "cuda":
            # Pointers of all rows, then their slots: int32 [max_rows + 1 + max_rows * max_blocks], here and on the device.
            size = max_rows + 1 + max_rows * max_blocks
            self._staged = torch.empty(size, dtype=torch.int32, device=device)
            buffers = [torch.empty(size, dtype=torch.int32, pin_memory=True) for _ in range(STAGING_BUFFERS)]
            self._ring = StagingRing(buffers, torch.cuda.Event)
            # An engine fills it on a stream of its own, and what was enqueued above must not come after that.
            torch.cuda.current_stream(self._tensor.device).synchronize()
        self._filled_rows = 0
        self._filled_blocks = 0

    @classmethod
    def for_group(cls, group: LayerGroup, *, max_rows: int, max_blocks: int, num_blocks: int,
                  device: str | torch.device = "cpu") -> OffsetTable:
        """The table of a group; its layers and factor say what an entry counts. Arguments and errors as above."""
        return cls(max_rows=max_rows, max_blocks=max_blocks, num_layers=group.table_layers, kv_factor=group.table_factor,
                   num_blocks=num_blocks, device=device)

    @property
    def tensor(self) -> torch.Tensor:
        """The whole buffer, always the same one: int32 ``[max_rows, 2, max_blocks]``."""
        return self._tensor

    def fill(self, rows: Sequence[Row]) -> torch.Tensor:
        """Make the table of a batch: ``rows[i]`` are the primary slots of sequence (or beam) i, in the order of its tokens.

        None or a negative number: there is no page at this place. On a GPU the copy runs on torch's current stream, and the host
        does not wait for it. That must be the stream whose kernels read the table: on another one the copy would not wait for
        those of the batch before.

        Returns:
            The first ``len(rows)`` rows of :attr:`tensor`, a view. It holds until the next ``fill``.

        Raises:
            RequestError: too many rows, a row that is too long, a slot outside the pool. The table has not changed
                then.
            TransferError: the GPU has not read the last tables for a minute. The table has not changed then.
        """
        lengths = self._lengths(rows)
        return self._write(_join(rows), lengths)

    def fill_indices(self, rows: Sequence[Row]) -> torch.Tensor:
        """As :meth:`fill`, from pool indices: a block that is not at the primary level is a RequestError too."""
        lengths = self._lengths(rows)
        indices = _join(rows)
        lower = indices & 3 != PRIMARY
        if lower.any() and (lower := lower & (indices >= 0)).any():
            place = int(lower.argmax())
            row, column = _place(place, lengths)
            index = PoolIndex(int(indices[place]))
            raise RequestError(f"OffsetTable: row {row} names at block {column} slot {index >> 2} of the {LEVEL_NAMES[level_of(index)]} "
                               "level; only blocks at the primary level can be in a table: wait until the sequence is ready")
        return self._write(indices >> 2, lengths)  # a negative number stays one

    def _lengths(self, rows: Sequence[Row]) -> npt.NDArray[np.int64]:
        """Blocks of each row, checked against the table's size."""
        max_rows, _, max_blocks = self._tensor.shape
        try:
            lengths = np.fromiter(map(len, rows), np.int64)
        except TypeError as error:
            raise RequestError(f"OffsetTable: the rows, or one of them, are no sequence: {error}; pass a list of lists") from error
        if len(rows) > max_rows:
            raise RequestError(f"OffsetTable: {len(rows)} rows: the table was made for {max_rows}; "
                               "make smaller batches or raise max_batch_size")
        if len(rows) and lengths.max() > max_blocks:
            number = int((lengths > max_blocks).argmax())
            raise RequestError(f"OffsetTable: row {number} has {lengths[number]} blocks: the table was made for "
                               f"{max_blocks}; raise max_seq_len")
        return lengths

    def _write(self, slots: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> torch.Tensor:
        """Write the slots of all rows, one row after the other; negative ones become null."""
        num_rows = len(lengths)
        longest = int(lengths.max()) if num_rows else 0
        if len(slots) and int(slots.max()) >= self._num_blocks:
            place = int((slots >= self._num_blocks).argmax())
            raise RequestError(f"OffsetTable: row {_place(place, lengths)[0]} names slot {int(slots[place])}: the primary pool has "
                               f"slots 0 to {self._num_blocks - 1}; only blocks at the primary level can be in a table")
        changed, width = max(num_rows, self._filled_rows), max(longest, self._filled_blocks)
        table = self._tensor[None, :changed, :, :width]
        indptr = np.zeros(num_rows + 1, np.int64)
        np.cumsum(lengths, out=indptr[1:])
        if self._ring is None:
            self._submit(table, torch.from_numpy(indptr), torch.from_numpy(slots))
        else:
            # The ring's event is recorded on the current device's stream: on another device's it would be done at once.
            with torch.cuda.device(self._tensor.get_device()), self._ring.buffer() as buffer:
                size = len(indptr) + len(slots)
                host = buffer.numpy()
                host[:len(indptr)] = indptr
                host[len(indptr):size] = np.maximum(slots, NULL_ENTRY)   # 32 bits of a lower number could be a slot
                self._staged[:size].copy_(buffer[:size], non_blocking=True)
                self._submit(table, self._staged[:len(indptr)], self._staged[len(indptr):size])
        self._filled_rows, self._filled_blocks = num_rows, longest
        return self._tensor[:num_rows]

    def _submit(self, table: torch.Tensor, indptr: torch.Tensor, slots: torch.Tensor) -> None:
        """Run the kernel that fills the part of the table that may change."""
        kernel_paths(self._tensor.device.type).fill_offsets(table, indptr, slots, (self._pages_per_block,), (self._value_field,),
                                                            self._num_blocks, None)


def _join(rows: Sequence[Row]) -> npt.NDArray[np.int64]:
    """All rows one after the other; None becomes -1."""
    if len(rows) and not isinstance(rows[0], (list, tuple)):
        given: list[npt.NDArray[Any]] = [np.asarray(row) for row in rows]
        if all(row.dtype.kind == "i" and row.ndim == 1 for row in given):  # no number is touched one by one
            return np.concatenate(given).astype(np.int64)
    try:
        try:
            return np.asarray(array("q", cast(Iterable[int], chain.from_iterable(rows))))  # which, unlike numpy, refuses half a slot
        except TypeError:
            return np.asarray(array("q", (-1 if slot is None else slot for slot in chain.from_iterable(rows))))
    except (TypeError, OverflowError) as error:
        raise RequestError(f"OffsetTable: a row has something that is no slot: {error}; pass whole numbers of 64 bits, or None") from error


def _place(position: int, lengths: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Row and column of a position in the joined rows."""
    ends = lengths.cumsum()
    row = int(np.searchsorted(ends, position, side="right"))
    return row, position - int(ends[row] - lengths[row])
