"""``Taking``: one rank's hold on the files of a handover, from the moment they are its own until they are gone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from kvtier.errors import TransferError
from kvtier.io.handover_folder import HandoverFolder
from kvtier.io.handover_piece import PieceBusy, PieceReader, PieceShape
from kvtier.tiering.handover.block_rows import runs_of
from kvtier.tiering.handover.shards import Shard
from kvtier.tiering.handover.ticket import HandoverTicket

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]


class Taking:
    """The blocks of a ticket, as this rank has them.

    Attributes:
        ticket: whose files these are.
        wanted: leading tokens that were to be taken in.
        end: those that still can be, as far as is known: fewer once damage was found.
        num_bytes: read so far, as blocks of this rank.
    """

    def __init__(self, shard: Shard, ticket: HandoverTicket, readers: dict[int, PieceReader], end: int) -> None:
        self.ticket = ticket
        self.wanted = end
        self.end = end
        self.num_bytes = 0
        self._shard = shard
        self._readers = readers
        self._numbers = [{position: number for number, position in enumerate(position for begin, stop in ranges
                                                                              for position in range(begin, stop))}
                         for ranges in ticket.positions]

    @property
    def is_damaged(self) -> bool:
        return self.end < self.wanted

    def rows(self, group: int, positions: Sequence[int]) -> Iterator[tuple[Sequence[int], Bytes]]:
        """Verified blocks of a group, uint8 ``[blocks, block_bytes]``, with their positions. They end before the first that is damaged or
        cannot be read, and :attr:`end` is where that is."""
        for run in _consecutive(positions, self._shard.layout.groups[group].block_bytes):
            rows = self._run(group, run)
            if len(rows):
                self.num_bytes += rows.nbytes
                yield run[:len(rows)], rows
            if len(rows) < len(run):
                self.end = min(self.end, run[len(rows)] * self.ticket.tokens_per_block)
                return

    def _run(self, group: int, run: Sequence[int]) -> Bytes:
        rows: Bytes = np.empty((len(run), self._shard.layout.groups[group].block_bytes), dtype=np.uint8)
        first = self._numbers[group][run[0]]
        keys = [self.ticket.keys[position] for position in run]
        for rank, reader in self._readers.items():
            if not reader.shape.block_bytes[group]:
                continue
            try:
                piece = reader.read(group, first, keys[:len(rows)], run[:len(rows)])
            except TransferError as error:
                logger.warning("%s: %s", reader.name, error)
                return rows[:0]
            if len(piece) < len(rows):
                logger.warning("%s: block %d of group %d is damaged; %d tokens are left to compute", reader.name, run[len(piece)], group,
                               self.wanted - run[len(piece)] * self.ticket.tokens_per_block)
                rows = rows[:len(piece)]
            self._shard.place(group, piece, rank, self.ticket.num_ranks, rows)
        return rows

    def acknowledge(self) -> None:
        """This rank needs nothing of them any more. With the last rank that does they are gone."""
        for reader in self._readers.values():
            try:
                reader.acknowledge()
            except TransferError as error:
                logger.warning("%s: stays until its deadline: %s", reader.name, error)

    def release(self) -> None:
        """Nothing was taken: somebody else may try."""
        for reader in self._readers.values():
            reader.release()


def claim(folder: HandoverFolder, shard: Shard, ticket: HandoverTicket, ranks: Sequence[int], end: int) -> Taking | None:
    """Open the pieces of these exporting ranks for this importing rank alone. None while another process with this rank has one.

    Raises:
        PieceGone, CorruptBlock, TransferError: as of ``PieceReader``; none is held then.
    """
    files = {piece.rank: piece for piece in ticket.pieces}
    counts = tuple(sum(stop - begin for begin, stop in ranges) for ranges in ticket.positions)
    readers: dict[int, PieceReader] = {}
    undo = ExitStack()
    try:
        for rank in ranks:
            shape = PieceShape(shard.piece_bytes(rank, ticket.num_ranks), counts)
            try:
                readers[rank] = PieceReader(folder, files[rank].file, shape, files[rank].digest, shard.rank, shard.num_ranks,
                                            shard.readers(rank, ticket.num_ranks, shard.num_ranks))
            except PieceBusy:
                undo.close()
                return None
            undo.callback(readers[rank].release)
        return Taking(shard, ticket, readers, end)
    except BaseException:
        undo.close()
        raise


def _consecutive(positions: Sequence[int], block_bytes: int) -> Iterator[Sequence[int]]:
    """Stretches of positions that lie one behind the other, and therefore do in the file, as far as they are read together."""
    start = 0
    for stop in range(1, len(positions) + 1):
        if stop == len(positions) or positions[stop] != positions[stop - 1] + 1:
            for _first, run in runs_of(positions[start:stop], block_bytes):
                yield run
            start = stop
