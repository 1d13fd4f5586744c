"""Where new tokens go: (sequence, position) through the block table to (page, entry), and which tokens may not be written.

Shared by everything that writes tokens into pages. tokens_per_block is a power of two: a position is a shift and a mask away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import INDEX_TYPES, LayerPages, check_dtype, check_shape, check_table

Numbers = npt.NDArray[Any]
"""Whole numbers on the host."""


@dataclass(frozen=True)
class TokenPlaces:
    """Places of ``nnz`` tokens.

    Attributes:
        table: int32 ``[sequences, 2, max_blocks]``; -1 is null.
        sequence_of_token: int32 or int64 ``[nnz]``: row of the table, or -1 to skip the token.
        positions: int32 or int64 ``[nnz]``.
        first_writable: int32 or int64 ``[sequences]``: the first position that is not in a block shared with others; None: all are
            this sequence's own.
        is_checked: :meth:`checked` has found nothing wrong with them.
    """

    table: torch.Tensor
    sequence_of_token: torch.Tensor
    positions: torch.Tensor
    first_writable: torch.Tensor | None = None
    is_checked: bool = False

    def check_shapes(self, kernel: str, nnz: int) -> None:
        """Shapes and dtypes: costs nothing."""
        check_table(kernel, "table", self.table, with_sequences=True)
        for name, index in (("sequence_of_token", self.sequence_of_token), ("positions", self.positions)):
            check_shape(kernel, name, index, (nnz,), "nnz")
            check_dtype(kernel, name, index, INDEX_TYPES)
        if self.first_writable is not None:
            check_shape(kernel, "first_writable", self.first_writable, (self.table.shape[0],), "sequences")
            check_dtype(kernel, "first_writable", self.first_writable, INDEX_TYPES)

    def checked(self, layer_pages: LayerPages) -> TokenPlaces:
        """These places, once every token that is not skipped has a page, and one that it may write. On a GPU the host waits.

        Raises:
            RequestError: names the first token that has not.
        """
        kernel, tokens_per_block = layer_pages.kernel, layer_pages.tokens_per_block
        table, rows, places = _host(self.table), _host(self.sequence_of_token), _host(self.positions)
        sequences, _, max_blocks = table.shape
        capacity = max_blocks * tokens_per_block
        wrong = (rows < -1) | (rows >= sequences)
        if wrong.any():
            token = int(wrong.argmax())
            raise RequestError(f"{kernel}: sequence_of_token[{token}]={rows[token]}: the table has {sequences} sequences (allowed: 0 to "
                               f"{sequences - 1}, or -1 to skip the token)")
        active = rows >= 0
        wrong = ((places < 0) | (places >= capacity)) & active
        if wrong.any():
            token = int(wrong.argmax())
            raise RequestError(f"{kernel}: positions[{token}]={places[token]} (sequence {rows[token]}): the table's {max_blocks} blocks of "
                               f"{tokens_per_block} tokens hold positions 0 to {capacity - 1}; allocate more blocks, or make a wider table")
        if not active.any():
            return replace(self, is_checked=True)
        if self.first_writable is not None:
            first = _host(self.first_writable)[rows]
            wrong = (places < first) & active
            if wrong.any():
                token = int(wrong.argmax())
                raise RequestError(f"{kernel}: positions[{token}]={places[token]} (sequence {rows[token]}) lies in a block that others "
                                   f"share (allowed: {first[token]} to {capacity - 1}); what is reused is never written: leave the token "
                                   "out, or copy the block first")
        blocks = np.where(active, places, 0) >> (tokens_per_block.bit_length() - 1)
        for field in (0, 1):
            if sequences * max_blocks < len(rows):   # a long prompt: fewer entries than tokens
                wrong = layer_pages.is_bad_field(table[:, field], field)[rows, blocks] & active
            else:
                wrong = layer_pages.is_bad_field(table[rows, field, blocks], field) & active
            if wrong.any():
                token = int(wrong.argmax())
                row, block = int(rows[token]), int(blocks[token])
                raise layer_pages.entry_error("table", row, field, block, int(table[row, field, block]))
        return replace(self, is_checked=True)

    def resolve(self, num_pages: int, tokens_per_block: int, layer_offset: int) -> tuple[Numbers, Numbers, Numbers, Numbers | None]:
        """Pages of keys and of values, entries in them, and the numbers of the tokens that have a place (None: all), without an error.

        Of tables on the host. Both fields decide together: half a token would be worse than none.
        """
        table, rows, places = self.table.numpy(), self.sequence_of_token.numpy(), self.positions.numpy()
        sequences, _, max_blocks = table.shape
        blocks, inside = places >> (tokens_per_block.bit_length() - 1), places & (tokens_per_block - 1)
        placed = rows >= 0
        if not self.is_checked:
            placed &= (rows < sequences) & (blocks >= 0) & (blocks < max_blocks)
        tokens = None
        if not placed.all():
            tokens = placed.nonzero()[0]
            rows, places, blocks, inside = rows[tokens], places[tokens], blocks[tokens], inside[tokens]
        keys, values = table[rows, 0, blocks], table[rows, 1, blocks]
        if not self.is_checked:
            # Judged before the layer is added: null plus an offset would be somebody else's page.
            limit = num_pages - layer_offset
            placed = (keys >= 0) & (keys < limit) & (values >= 0) & (values < limit)
            if self.first_writable is not None:
                placed &= places >= self.first_writable.numpy()[rows]
            if not placed.all():
                kept = placed.nonzero()[0]
                tokens = kept if tokens is None else tokens[kept]
                keys, values, inside = keys[kept], values[kept], inside[kept]
        return keys.astype(np.int64) + layer_offset, values.astype(np.int64) + layer_offset, inside, tokens

    def list_reference(self, num_pages: int, tokens_per_block: int, layer_offset: int) -> list[tuple[int, int, int] | None]:
        """(key page, value page, entry) of each token, None for one to skip; for the references. Refuses a bad place."""
        sequences, _, max_blocks = self.table.shape
        first_writable = [0] * sequences if self.first_writable is None else self.first_writable.tolist()
        table = self.table.tolist()
        found: list[tuple[int, int, int] | None] = []
        for token, (sequence, position) in enumerate(zip(self.sequence_of_token.tolist(), self.positions.tolist(), strict=True)):
            if sequence == -1:
                found.append(None)
                continue
            block, inside = divmod(position, tokens_per_block)
            if not 0 <= sequence < sequences or not 0 <= block < max_blocks:
                raise RequestError(f"token {token}: sequence {sequence}, position {position} is outside the table "
                                   f"{tuple(self.table.shape)}")
            if position < first_writable[sequence]:
                raise RequestError(f"token {token}: position {position} of sequence {sequence} is shared (allowed: from "
                                   f"{first_writable[sequence]})")
            entries = [table[sequence][field][block] for field in (0, 1)]
            for entry in entries:
                if entry < 0 or entry + layer_offset >= num_pages:
                    raise RequestError(f"token {token}: entry {entry} of sequence {sequence}, block {block} names no page "
                                       f"(allowed: 0 to {num_pages - 1 - layer_offset})")
            found.append((entries[0] + layer_offset, entries[1] + layer_offset, inside))
        return found


def _host(numbers: torch.Tensor) -> Numbers:
    array: Numbers = numbers.cpu().numpy()
    return array
