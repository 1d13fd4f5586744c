"""Where new tokens go: (sequence, position) through the block table to (page, entry), and which tokens may not be written.

Shared by everything that writes tokens into pages. tokens_per_block is a power of two: a position is a shift and a mask away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import INDEX_TYPES, LayerPages, check_dtype, check_shape, check_table


@dataclass(frozen=True)
class TokenPlaces:
    """Places of ``nnz`` tokens.

    Attributes:
        table: int32 ``[sequences, 2, max_blocks]``; -1 is null.
        sequence_of_token: int32 or int64 ``[nnz]``: row of the table, or -1 to skip the token.
        positions: int32 or int64 ``[nnz]``.
        first_writable: int32 or int64 ``[sequences]``: the first position that is not in a block shared with others; None: all are
            this sequence's own.
    """

    table: torch.Tensor
    sequence_of_token: torch.Tensor
    positions: torch.Tensor
    first_writable: torch.Tensor | None = None

    def check_shapes(self, kernel: str, nnz: int) -> None:
        """Shapes and dtypes: costs nothing."""
        check_table(kernel, "table", self.table, with_sequences=True)
        for name, index in (("sequence_of_token", self.sequence_of_token), ("positions", self.positions)):
            check_shape(kernel, name, index, (nnz,), "nnz")
            check_dtype(kernel, name, index, INDEX_TYPES)
        if self.first_writable is not None:
            check_shape(kernel, "first_writable", self.first_writable, (self.table.shape[0],), "sequences")
            check_dtype(kernel, "first_writable", self.first_writable, INDEX_TYPES)

    def check_values(self, layer_pages: LayerPages) -> None:
        """Every token that is not skipped has a page, and one that it may write. On a GPU this makes the host wait."""
        kernel, tokens_per_block = layer_pages.kernel, layer_pages.tokens_per_block
        sequences, _, max_blocks = self.table.shape
        capacity = max_blocks * tokens_per_block
        wrong = (self.sequence_of_token < -1) | (self.sequence_of_token >= sequences)
        if bool(wrong.any()):
            token = int(wrong.nonzero()[0])
            raise RequestError(f"{kernel}: sequence_of_token[{token}]={int(self.sequence_of_token[token])}: the table has "
                               f"{sequences} sequences (allowed: 0 to {sequences - 1}, or -1 to skip the token)")
        active = (self.sequence_of_token >= 0).nonzero().flatten()
        rows, places = self.sequence_of_token[active], self.positions[active]
        wrong = (places < 0) | (places >= capacity)
        if bool(wrong.any()):
            found = int(wrong.nonzero()[0])
            raise RequestError(f"{kernel}: positions[{int(active[found])}]={int(places[found])} (sequence {int(rows[found])}): the "
                               f"table's {max_blocks} blocks of {tokens_per_block} tokens hold positions 0 to {capacity - 1}; "
                               "allocate more blocks, or make a wider table")
        if not active.numel():
            return
        if self.first_writable is not None:
            first = self.first_writable[rows]
            if bool((places < first).any()):
                found = int((places < first).nonzero()[0])
                raise RequestError(f"{kernel}: positions[{int(active[found])}]={int(places[found])} (sequence {int(rows[found])}) lies in "
                                   f"a block that others share (allowed: {int(first[found])} to {capacity - 1}); what is reused is never "
                                   "written: leave the token out, or copy the block first")
        blocks = places // tokens_per_block
        entries = self.table[rows, :, blocks]
        bad = layer_pages.is_bad(entries, field_axis=1)
        if bool(bad.any()):
            found, field = bad.nonzero()[0].tolist()
            raise layer_pages.entry_error("table", int(rows[found]), field, int(blocks[found]), int(entries[found, field]))

    def resolve(self, num_pages: int, tokens_per_block: int, layer_offset: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pages, entries and which tokens have a place, without a check: int64 ``[nnz, 2]``, ``[nnz]`` and bool ``[nnz]``.

        Both fields decide together: half a token would be worse than none. Of a token without a place the page means nothing.
        """
        sequences, _, max_blocks = self.table.shape
        if not self.table.numel():
            nothing = torch.zeros_like(self.positions, dtype=torch.bool)
            return self.positions.new_zeros(len(nothing), 2), self.positions, nothing
        blocks = self.positions >> (tokens_per_block.bit_length() - 1)
        inside = self.positions & (tokens_per_block - 1)
        placed = (self.sequence_of_token >= 0) & (self.sequence_of_token < sequences) & (blocks >= 0) & (blocks < max_blocks)
        rows = self.sequence_of_token.clamp(0, sequences - 1)
        if self.first_writable is not None:
            placed &= self.positions >= self.first_writable[rows]
        entries = self.table[rows, :, blocks.clamp(0, max_blocks - 1)]
        placed &= ((entries >= 0) & (entries < num_pages - layer_offset)).all(1)
        return entries.long() + layer_offset, inside, placed

    def list_reference(self, num_pages: int, tokens_per_block: int, layer_offset: int) -> list[tuple[int, int, int, int] | None]:
        """(key page, value page, entry, sequence) of each token, None for one to skip; for the references. Refuses a bad place."""
        sequences, _, max_blocks = self.table.shape
        first_writable = [0] * sequences if self.first_writable is None else self.first_writable.tolist()
        table = self.table.tolist()
        found: list[tuple[int, int, int, int] | None] = []
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
            found.append((entries[0] + layer_offset, entries[1] + layer_offset, inside, sequence))
        return found
