"""``BlockExporter``: the prefill process's side of a handover (design: two ways to attach)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvtier.errors import RequestError
from kvtier.io.handover_folder import HandoverFolder
from kvtier.io.handover_piece import PieceShape, PieceWriter, withdraw
from kvtier.pools.pool_index import PRIMARY, level_of, slot_of
from kvtier.tiering import arguments
from kvtier.tiering.handles import Lease
from kvtier.tiering.handover.block_rows import read_rows, runs_of
from kvtier.tiering.handover.shards import Shard
from kvtier.tiering.handover.ticket import BlockNames, HandoverPiece, HandoverTicket, Ranges
from kvtier.tiering.ledger.decoding import require_reported
from kvtier.tiering.ledger.sequence import SequenceRow
from kvtier.tiering.ledger.taking_in import require_same
from kvtier.tiering.manager import KVCacheManager

LIFETIME: Final = 60.0  # seconds


@dataclass(frozen=True)
class EndedHandover:
    """A handover that is over. ``was_taken``: its file was gone before its deadline, from a folder that is still the same one. That is what
    importing processes do that need nothing of it any more (and whoever withdraws it elsewhere, or deletes files of others)."""

    ticket: HandoverTicket
    was_taken: bool


class BlockExporter:
    """Hands blocks of computed prompts over to another process.

    ``export`` copies a sequence's blocks into the folder; from then on they are the importing process's, and this cache does with its own
    copies what it likes. While it copies, a lease holds the blocks. What nobody takes is removed after ``lifetime`` seconds.

    Args:
        cache: one rank's cache; ``TierConfig(rank=, num_ranks=)`` say which.
        folder: shared with the importing process.
        lifetime: seconds until a handover that nobody has taken is given up.
        total_kv_heads: KV heads of the whole model, for all attention groups or by group; needed where there are more ranks than heads.

    Raises:
        ConfigError: a cache without ``model``; recurrent or cross-attention layers; sinks that do not fill blocks; numbers of heads that do
            not fit.

    Thread-safe. It has no threads and no open files: there is nothing to close.
    """

    def __init__(self, cache: KVCacheManager, folder: HandoverFolder, *, lifetime: float = LIFETIME,
                 total_kv_heads: int | Sequence[int] | None = None) -> None:
        self.cache = cache
        self.folder = folder
        self.lifetime = min(arguments.positive_number("lifetime", lifetime), arguments.LONGEST)
        self.shard = Shard.of(cache.layout, cache.model, cache.config.rank, cache.config.num_ranks, total_kv_heads)
        self._lock = threading.Lock()
        self._outstanding: list[tuple[HandoverTicket, object]] = []  # and in which folder

    def export(self, request_id: int, skip_tokens: int = 0) -> HandoverTicket:
        """Hand over what is computed of an active sequence: call it between steps, when the prompt is computed. It stays as it is.

        It returns when all bytes are copied; an engine that cannot wait calls it in a thread of its own, and may remove the sequence
        meanwhile. With several ranks each exports its part, and ``HandoverTicket.joined`` makes one ticket of all.

        Args:
            skip_tokens: leading tokens that the importing side has (its ``probe_prefix_tokens`` says so): their full blocks are left out.
                Who does not have them after all cannot use the ticket.

        Raises:
            UnknownRequest: no such sequence, or it was removed before its blocks could be held.
            RequestError: nothing is computed, or no more than ``skip_tokens``; several beams; an adapter or extra ids without a digest,
                which mean nothing to another process; reused blocks still arriving, or lost (ask ``wait_ready``).
            CapacityError: the folder has no room: let the other process compute the prompt, or wait.
            TransferError: the file could not be written. Nothing is left behind.
        """
        cache = self.cache
        with cache.locked() as ledger:
            sequence = ledger.sequence(request_id)
        if not cache.is_ready(request_id):
            raise RequestError(f"request {request_id}: reused blocks are still arriving; call wait_ready, and export then")
        with cache.locked() as ledger:
            require_same(ledger, sequence)
            require_reported(sequence)
            num_tokens = sequence.computed
            if num_tokens == 0:
                raise RequestError(f"request {request_id}: nothing of it is computed; call mark_computed before export")
            if isinstance(skip_tokens, bool) or not isinstance(skip_tokens, int) or not 0 <= skip_tokens < num_tokens:
                raise RequestError(f"request {request_id}: skip_tokens={skip_tokens!r}; {num_tokens} tokens are computed, and at least the "
                                   "last one is handed over")
            if sequence.beam_width > 1:
                raise RequestError(f"request {request_id}: beam_width={sequence.beam_width}; a sequence of one beam is handed over, the "
                                   "decoding process may begin the beams")
            if not sequence.namespace.is_persistent:
                raise RequestError(f"request {request_id}: lora_id and extra_ids mean nothing to another process; give lora_digest and "
                                   "extra_ids_digest, too")
            names, width = BlockNames(self.shard.seed, sequence.request, sequence.keys), cache.layout.tokens_per_block
            keys = tuple(names.name(number, min(width, num_tokens - start)) for number, start in enumerate(range(0, num_tokens, width)))
            places = [_places(row, skip_tokens // width, len(keys)) for row in sequence.rows]
            lease = Lease(cache, ledger.pin(request_id))
        try:
            ticket = self._write(num_tokens, keys, places)
            identity = self.folder.identity
        finally:
            lease.release()
        with self._lock:
            self._outstanding.append((ticket, identity))
        return ticket

    def poll(self) -> list[EndedHandover]:
        """Handovers that have ended since the last call. Now and then, once per step for example: it also removes what nobody took."""
        self.folder.collect()
        ended: list[EndedHandover] = []
        with self._lock:
            outstanding: list[tuple[HandoverTicket, object]] = []
            for ticket, identity in self._outstanding:
                [piece] = ticket.pieces
                if piece.file and self.folder.has(piece.file):
                    outstanding.append((ticket, identity))
                else:
                    is_same = not piece.file or (identity is not None and identity == self.folder.identity)
                    ended.append(EndedHandover(ticket, is_same and self.folder.now() <= ticket.deadline))
            self._outstanding = outstanding
        return ended

    def withdraw(self, ticket: HandoverTicket | str | bytes) -> bool:
        """Take a handover back, as far as nobody has taken it. False when somebody has, if only one of several ranks, or is about to. It
        may be one of an exporter that is gone.

        RequestError for what is no ticket.
        """
        own = [piece for piece in HandoverTicket.read(ticket).pieces if piece.file and piece.rank == self.shard.rank]
        with self._lock:  # whoever polls meanwhile must not take it for one that was taken
            if not own or not withdraw(self.folder, own[0].file):
                return False
            self._outstanding = [other for other in self._outstanding if other[0].pieces != (own[0],)]
        return True

    @property
    def outstanding(self) -> int:
        """Handovers that nobody has taken yet, as of the last :meth:`poll`."""
        with self._lock:
            return len(self._outstanding)

    def _write(self, num_tokens: int, keys: tuple[bytes, ...], places: list[dict[int, int]]) -> HandoverTicket:
        shard = self.shard
        shape = PieceShape(shard.piece_bytes(shard.rank, shard.num_ranks), tuple(len(slots) for slots in places))
        file, digest, deadline = "", bytes(16), self.folder.now() + self.lifetime
        if any(size and count for size, count in zip(shape.block_bytes, shape.num_blocks, strict=True)):
            with PieceWriter(self.folder, shape) as writer:
                self._synchronize()
                for group, slots in enumerate(places):
                    if shape.block_bytes[group]:
                        for first, run in runs_of(list(slots), shard.layout.groups[group].block_bytes):
                            rows = read_rows(self.cache.pool(group).primary, [slots[position] for position in run])
                            writer.write(group, first, shard.extract(group, rows), [keys[position] for position in run], run)
                deadline = self.folder.now() + self.lifetime
                digest = writer.finish(deadline)
                file = writer.name
        return HandoverTicket(shard.content, shard.num_ranks, num_tokens, keys, tuple(_ranges(list(slots)) for slots in places), deadline,
                              (HandoverPiece(shard.rank, file, digest),))

    def _synchronize(self) -> None:
        device = self.cache.pool(0).primary.sections[0].rows.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the engine writes on a stream that only it knows


def _places(row: SequenceRow, first: int, end: int) -> dict[int, int]:
    """Slots by position in ``[first, end)``, of the blocks that the row has."""
    places: dict[int, int] = {}
    for position in range(first, end):
        block = row.blocks[position]
        if block.id >= 0:
            assert level_of(block.index) == PRIMARY, f"block {block.id} of an active sequence"
            places[position] = int(slot_of(block.index))
    return places


def _ranges(positions: list[int]) -> Ranges:
    ranges: list[tuple[int, int]] = []
    for position in positions:
        if ranges and ranges[-1][1] == position:
            ranges[-1] = (ranges[-1][0], position + 1)
        else:
            ranges.append((position, position + 1))
    return tuple(ranges)
