"""Where new tokens go: (sequence, position) through the block table to (page, entry), and which tokens may not be written.

Shared by everything that writes tokens into pages. tokens_per_block is a power of two: a position is a shift and a mask away.

On the host tokens are judged and looked up run by run: tokens of one sequence that follow one another within a block. A prefill has
as many runs as blocks; where order means nothing, or a decode has one token of each sequence, every token is a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import INDEX_TYPES, LayerPages, check_dtype, check_shape, check_table

Numbers = npt.NDArray[Any]
"""Whole numbers on the host."""

_WORTH_CUTTING: Final = 64
"""Tokens from which on to look for runs costs less than to do without."""


class PageRuns(NamedTuple):
    """Runs with their pages; each fills entries of one page one after the other."""

    key_pages: Numbers     #: int64 [runs]
    value_pages: Numbers   #: int64 [runs]
    inside: Numbers        #: int64 [runs]: entry of a run's first token
    lengths: Numbers       #: int64 [runs]: its tokens
    tokens: Numbers | None   #: int64: numbers of the tokens that are written, run after run; None: all


class TokenRuns(NamedTuple):
    """Runs before anything is looked up: [runs] each."""

    starts: Numbers      #: int64: number of the first token
    lengths: Numbers     #: int64: tokens
    rows: Numbers        #: row of the table
    positions: Numbers   #: of the first token
    blocks: Numbers      #: of the table's row

    @classmethod
    def of(cls, rows: Numbers, positions: Numbers, tokens_per_block: int) -> TokenRuns:
        """Runs of tokens with these rows and positions [nnz], whatever they are, and whatever another thread makes of them meanwhile: a run
        that did not end with its block would lead out of its page."""
        rows, positions = np.array(rows), np.array(positions)
        begins = np.ones(len(rows), np.bool_)
        if len(rows) >= _WORTH_CUTTING:
            numbers = positions[1:] - positions[:-1]
            begins[1:] = numbers != 1
            begins[1:] |= rows[1:] != rows[:-1]
            begins[1:] |= np.bitwise_and(positions[1:], tokens_per_block - 1, out=numbers) == 0   # memory that is in the cache
        starts = begins.nonzero()[0]
        lengths = np.full(len(starts), len(rows))
        lengths[:-1] = starts[1:]
        lengths -= starts
        positions = positions[starts]
        return cls(starts, lengths, rows[starts], positions, positions >> (tokens_per_block.bit_length() - 1))

    def select(self, chosen: npt.NDArray[np.bool_]) -> TokenRuns:
        """Some of them."""
        return self if chosen.all() else TokenRuns(*(numbers[chosen] for numbers in self))


def spread(starts: Numbers, lengths: Numbers, total: int, step: int = 1) -> Numbers:
    """``starts[i], starts[i] + step, ...``, ``lengths[i]`` numbers of each, at least one, one after the other: ``total`` numbers."""
    if len(starts) == total:
        return starts
    numbers = np.repeat(starts - (lengths.cumsum() - lengths) * step, lengths)
    numbers += np.arange(0, total * step, step)
    return numbers


@dataclass(frozen=True)
class TokenPlaces:
    """Places of ``nnz`` tokens.

    Attributes:
        table: int32 ``[sequences, 2, max_blocks]``; -1 is null.
        sequence_of_token: int32 or int64 ``[nnz]``: row of the table, or -1 to skip the token.
        positions: int32 or int64 ``[nnz]``.
        first_writable: int32 or int64 ``[sequences]``: the first position that is not in a block shared with others; None: all are
            this sequence's own.
        checked_runs: those that are not skipped, once :meth:`checked` has found nothing wrong with them.
        checked_entries: [runs, 2], of the table. What is written to is what was checked, whatever another thread makes of the table.
    """

    table: torch.Tensor
    sequence_of_token: torch.Tensor
    positions: torch.Tensor
    first_writable: torch.Tensor | None = None
    checked_runs: TokenRuns | None = None
    checked_entries: Numbers | None = None

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
        table = _host(self.table)
        sequences, _, max_blocks = table.shape
        capacity = max_blocks * tokens_per_block
        runs = TokenRuns.of(_host(self.sequence_of_token), _host(self.positions), tokens_per_block)
        wrong = (runs.rows < -1) | (runs.rows >= sequences)
        if wrong.any():
            run = int(wrong.argmax())
            raise RequestError(f"{kernel}: sequence_of_token[{runs.starts[run]}]={runs.rows[run]}: the table has {sequences} sequences "
                               f"(allowed: 0 to {sequences - 1}, or -1 to skip the token)")
        runs = runs.select(runs.rows >= 0)
        wrong = (runs.positions < 0) | (runs.positions >= capacity)
        if wrong.any():
            run = int(wrong.argmax())
            raise RequestError(f"{kernel}: positions[{runs.starts[run]}]={runs.positions[run]} (sequence {runs.rows[run]}): the table's "
                               f"{max_blocks} blocks of {tokens_per_block} tokens hold positions 0 to {capacity - 1}; allocate more "
                               "blocks, or make a wider table")
        if self.first_writable is not None:
            first = _host(self.first_writable)[runs.rows]
            wrong = runs.positions < first   # positions of a run ascend: its first is the one to judge
            if wrong.any():
                run = int(wrong.argmax())
                raise RequestError(f"{kernel}: positions[{runs.starts[run]}]={runs.positions[run]} (sequence {runs.rows[run]}) lies in a "
                                   f"block that others share (allowed: {first[run]} to {capacity - 1}); what is reused is never written: "
                                   "leave the token out, or copy the block first")
        entries = table[runs.rows, :, runs.blocks]
        wrong = layer_pages.is_bad_entry(entries)
        if wrong.any():
            field = int(not wrong[:, 0].any())
            run = int(wrong[:, field].argmax())
            row, block = int(runs.rows[run]), int(runs.blocks[run])
            raise layer_pages.entry_error("table", row, field, block, int(entries[run, field]))
        return replace(self, checked_runs=runs, checked_entries=entries)

    def resolve(self, num_pages: int, tokens_per_block: int, layer_offset: int) -> PageRuns:
        """The pages of all tokens that have a place, without an error for those that have none. Of tables on the host.

        Keys and values decide together: half a token would be worse than none.
        """
        runs, entries = self.checked_runs, self.checked_entries
        if runs is None or entries is None:
            table = self.table.numpy()
            runs = TokenRuns.of(self.sequence_of_token.numpy(), self.positions.numpy(), tokens_per_block)
            sequences, _, max_blocks = table.shape
            runs = runs.select((runs.rows >= 0) & (runs.rows < sequences) & (runs.blocks >= 0) & (runs.blocks < max_blocks))
            if self.first_writable is not None:
                ends = runs.positions + runs.lengths
                shared = np.clip(self.first_writable.numpy()[runs.rows], runs.positions, ends) - runs.positions   # no overflow
                runs = runs._replace(starts=runs.starts + shared, lengths=runs.lengths - shared, positions=runs.positions + shared)
                runs = runs.select(runs.lengths > 0)
            # Judged before the layer is added: null plus an offset would be somebody else's page.
            entries, limit = table[runs.rows, :, runs.blocks], num_pages - layer_offset
            is_page = np.all((entries >= 0) & (entries < limit), axis=1)
            runs, entries = runs.select(is_page), entries[is_page]
        total = int(runs.lengths.sum())
        tokens = None if total == len(self.positions) else spread(runs.starts, runs.lengths, total)
        pages = entries.astype(np.int64) + layer_offset
        inside = (runs.positions & (tokens_per_block - 1)).astype(np.int64)   # in 32 bits a token of a large pool cannot be reached
        return PageRuns(pages[:, 0], pages[:, 1], inside, runs.lengths, tokens)

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
