"""``BlockImporter``: the decode process's side of a handover (design: two ways to attach)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvtier.errors import ConfigError, CorruptBlock, KVTierError, RequestError, TransferError, UnknownRequest
from kvtier.io.device import EngineStream, open_device
from kvtier.io.handover_folder import MOST_READERS, HandoverFolder
from kvtier.pools.pool_index import slot_of
from kvtier.tiering.handover.block_rows import write_rows
from kvtier.tiering.handover.shards import Shard, heads_of, require_same_content
from kvtier.tiering.handover.taking import Taking, claim
from kvtier.tiering.handover.ticket import BlockNames, HandoverPiece, HandoverTicket
from kvtier.tiering.ledger.group import WINDOW
from kvtier.tiering.ledger.key import TokenKeys
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.sequence import ActiveSequence
from kvtier.tiering.ledger.taking_in import mark_taken_in, needed_positions, require_same
from kvtier.tiering.manager import KVCacheManager

logger = logging.getLogger(__name__)

Slots = list[dict[int, int]]
"""By group: slots by position in the prompt."""


@dataclass(frozen=True)
class ImportStats:
    """Counted since the start. ``taken``: handovers of which tokens were taken in; ``tokens``, ``bytes``: how many. ``gone``: those that
    somebody else had taken, or that were over. ``failures``: those with damaged or unreadable bytes; nothing behind the damage was used."""

    offered: int
    taken: int
    tokens: int
    bytes: int
    gone: int
    failures: int


class BlockImporter:
    """Takes in blocks that another process on this machine has computed.

    It is the cache's inbound hook: what a ticket has beyond the reused tokens stands in an admission's ``external_tokens``, and
    ``fill`` brings it::

        importer.offer(ticket)
        cache.add_sequence(request)           # the prompt and the token that the other process sampled
        tokens = importer.fill(request.id)    # instead of wait_ready: compute the rest

    Whatever cannot be taken in is left to compute: ``fill`` returns fewer tokens then. Nothing is marked as computed before its
    key and checksum have been verified.

    Args:
        cache: one rank's cache; ``TierConfig(rank=, num_ranks=)`` say which. The exporting side may have another number of ranks.
        folder: shared with the exporting process.
        total_kv_heads: KV heads of the whole model, for all attention groups or by group; needed where there are more ranks than heads.
        allreduce_min: with several ranks, the least of each number over all of them, so that all go on from the same token; None for the
            one of ``TierConfig``. All ranks then call ``fill`` for the same requests in the same order.

    Raises:
        ConfigError: as of ``BlockExporter``; ``chunk_size`` in a model with windows; more than 2,048 ranks; a cache with another inbound
            hook.

    Thread-safe; each request is filled by one thread.
    """

    def __init__(self, cache: KVCacheManager, folder: HandoverFolder, *, total_kv_heads: int | Sequence[int] | None = None,
                 allreduce_min: Callable[[list[int]], list[int]] | None = None) -> None:
        self.cache = cache
        self.folder = folder
        self.shard = Shard.of(cache.layout, cache.model, cache.config.rank, cache.config.num_ranks, total_kv_heads)
        if self.shard.num_ranks > MOST_READERS:
            raise ConfigError(f"num_ranks={self.shard.num_ranks}: blocks are handed over to at most {MOST_READERS} ranks")
        self._allreduce_min = allreduce_min or cache.config.allreduce_min
        self._device = open_device(str(cache.pool(0).primary.sections[0].rows.device))
        self._lock = threading.Lock()
        self._offers: dict[tuple[HandoverPiece, ...], HandoverTicket] = {}
        self._counts = {"offered": 0, "taken": 0, "tokens": 0, "bytes": 0, "gone": 0, "failures": 0}
        with cache.locked() as ledger:
            if ledger.is_chunked:
                raise ConfigError(f"chunk_size={cache.config.chunk_size}: blocks that are handed over fill a prompt's windows at once; "
                                  "leave chunk_size out where prompts are taken in")
            if ledger.inbound is not None:
                raise ConfigError(f"cache: it asks {ledger.inbound!r} already for tokens from elsewhere; close that, or set_inbound(None)")
            self._geometries = ledger.geometries
            ledger.inbound = self

    # -- tickets ---------------------------------------------------------------------------------------------------------

    def offer(self, ticket: HandoverTicket | str | bytes) -> bool:
        """These blocks can be taken in. The ticket may come as text (``HandoverTicket.to_json``).

        Returns False when its deadline has passed: it is forgotten, and the prompt a miss. Otherwise the ticket is kept until a
        request has used it, or until its deadline.

        Raises:
            RequestError: no ticket, a damaged one, or pieces of some exporting ranks are missing (``HandoverTicket.joined``).
            ConfigError: of another model, dtype, block size or layers than this cache. Nothing has changed, on either side.
        """
        ticket = HandoverTicket.read(ticket)
        require_same_content(self.shard.content, ticket.content)
        if len(ticket.positions) != len(self._geometries):
            raise RequestError(f"ticket: positions of {len(ticket.positions)} groups; this cache has {len(self._geometries)}")
        for total in self.shard.total_heads:
            if heads_of(total, ticket.num_ranks, 0) is None:
                raise ConfigError(f"ticket: num_ranks={ticket.num_ranks}; they cannot have equal parts of {total} heads")
        missing = set(ticket.missing_ranks) & set(self._sources(ticket))
        if missing:
            raise RequestError(f"ticket: pieces of ranks {sorted(missing)} of {ticket.num_ranks} are missing; join the tickets of all "
                               "exporting ranks (HandoverTicket.joined)")
        if ticket.deadline <= self.folder.now():
            return False
        with self._lock:
            if ticket.pieces not in self._offers:
                self._counts["offered"] += 1
                self._offers[ticket.pieces] = ticket
        return True

    def decline(self, ticket: HandoverTicket | str | bytes) -> None:
        """Forget a ticket. Its blocks stay where they are: for another process, or until their deadline.

        RequestError for what is no ticket.
        """
        pieces = HandoverTicket.read(ticket).pieces
        with self._lock:
            self._offers.pop(pieces, None)

    def poll(self) -> int:
        """Forget tickets whose deadline has passed, and remove files that nobody will want any more. Now and then, once per step for
        example. Returns how many tickets are left."""
        self.folder.collect()
        return len(self._open_offers())

    def stats(self) -> ImportStats:
        with self._lock:
            return ImportStats(**self._counts)

    def close(self) -> None:
        """The cache no longer asks here, and no ticket is kept. May be called again."""
        with self._lock:
            self._offers.clear()
        with suppress(KVTierError), self.cache.locked() as ledger:  # a closed cache asks nobody
            if ledger.inbound is self:
                ledger.inbound = None

    def __enter__(self) -> BlockImporter:
        return self

    def __exit__(self, *_details: object) -> None:
        self.close()

    # -- requests --------------------------------------------------------------------------------------------------------

    def num_new_matched_tokens(self, request: Request, num_matched_tokens: int) -> int:
        """Whole blocks that a ticket has behind the reused tokens: what the cache asks at each admission. Changes nothing."""
        offers = self._open_offers()
        if not offers or not self._may_take(request):
            return 0
        width = self.cache.layout.tokens_per_block
        names = BlockNames(self.shard.seed, request, TokenKeys(request, width))
        end = max(self._end_of(ticket, names, request, num_matched_tokens) for ticket in offers)
        return max(end // width * width - num_matched_tokens, 0)

    def fill(self, request_id: int, stream: EngineStream | None = None, timeout: float | None = 60.0) -> int:
        """Take in what a ticket has of an admitted prompt, before its first step. Instead of ``wait_ready``: its report is included.

        It returns when everything is copied; an engine that cannot wait calls it in a thread of its own.

        Args:
            stream: the engine's stream, as for ``step``.
            timeout: seconds to wait for the prompt's reused blocks.

        Returns:
            how many leading tokens are there; the engine computes the rest. At least the last prompt token is always left to it.

        Raises:
            TimeoutError, CapacityError: as of ``wait_ready``.
            UnknownRequest: no such sequence, or it was removed meanwhile (also when another has its number now); the ticket can be used for
                another.
        """
        with self.cache.locked() as ledger:
            sequence = ledger.sequence(request_id)  # another one may have its number later, and is never taken for it
        valid = self.cache.wait_ready(request_id, timeout=timeout)
        taking = self._claim(sequence, valid)
        try:
            end = valid if taking is None else self._copy(taking, sequence, valid, stream)
            agreed = self._agree(end, valid, valid if taking is None else taking.wanted)
            with self.cache.locked() as ledger:
                require_same(ledger, sequence)
                if taking is not None and agreed > valid:
                    mark_taken_in(ledger, request_id, agreed)
        except BaseException:
            if taking is not None:
                taking.release()
            raise
        if taking is not None:
            self._end(taking, max(agreed - valid, 0))
        return agreed

    def take_in(self, request: Request, stream: EngineStream | None = None, timeout: float | None = 60.0) -> int:
        """Take in what a ticket has of a prompt, ahead of its request: any later request of the same beginning finds it as a cached prefix.

        ``request``: what will be asked for, the token behind the handed over ones included; it is added and removed here.

        Returns:
            how many leading tokens are cached now.

        Raises:
            RequestError, CapacityError: as of ``add_sequence``; the ticket can be used later.
            TimeoutError: as of ``fill``.
            UnknownRequest: it was removed meanwhile.
        """
        self.cache.add_sequence(request)
        try:
            taken = self.fill(request.id, stream, timeout)
        except UnknownRequest:
            raise  # what has its number now is somebody else's
        except BaseException:
            self.cache.remove_sequence(request.id, store=False)
            raise
        self.cache.remove_sequence(request.id, store=True)
        return taken

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _open_offers(self) -> list[HandoverTicket]:
        now = self.folder.now()
        with self._lock:
            for pieces in [pieces for pieces, ticket in self._offers.items() if ticket.deadline <= now]:
                del self._offers[pieces]
                self._counts["gone"] += 1
            return list(self._offers.values())

    def _may_take(self, request: Request) -> bool:
        is_local = (request.lora_id is not None and request.lora_digest is None) or (
            request.extra_ids is not None and request.extra_ids_digest is None)
        return not request.skip_read and not is_local

    def _sources(self, ticket: HandoverTicket) -> list[int]:
        """Exporting ranks whose pieces this rank reads."""
        shard = self.shard
        return [rank for rank in range(ticket.num_ranks) if shard.rank in shard.readers(rank, ticket.num_ranks, shard.num_ranks)]

    def _end_of(self, ticket: HandoverTicket, names: BlockNames, request: Request, num_there: int) -> int:
        """How many leading tokens of a prompt, whose first ``num_there`` are there, would be after taking the ticket in; 0 when that is no
        more, or blocks are missing."""
        width = ticket.tokens_per_block
        end = 0
        for number, key in enumerate(ticket.keys):
            stop = min((number + 1) * width, ticket.num_tokens)
            if stop > request.num_tokens or names.name(number, stop - number * width) != key:
                break
            end = stop
        end = min(end, request.num_tokens - 1)  # somebody has to compute the first logits
        if request.beam_width > 1:
            end = end // width * width  # each beam has an unfilled last block of its own
        if end <= num_there:
            return 0
        for geometry, ranges in zip(self._geometries, ticket.positions, strict=True):
            there = {position for begin, stop in ranges for position in range(begin, stop)}
            if not there.issuperset(needed_positions(geometry, num_there // width, end)):
                return 0
        return end

    def _claim(self, sequence: ActiveSequence, valid: int) -> Taking | None:
        """The ticket that brings the request furthest, with its files open for this rank alone; None when there is none."""
        with self.cache.locked() as ledger:
            require_same(ledger, sequence)
            request, names = sequence.request, BlockNames(self.shard.seed, sequence.request, sequence.keys)
        if not self._may_take(request):
            return None
        found = [(self._end_of(ticket, names, request, valid), ticket) for ticket in self._open_offers()]
        for end, ticket in sorted(found, key=lambda offer: offer[0], reverse=True):
            if end <= valid:
                break
            try:
                taking = claim(self.folder, self.shard, ticket, self._sources(ticket), end)
            except TransferError as error:
                self._give_up(ticket, error)
                continue
            if taking is not None:
                return taking
        return None

    def _give_up(self, ticket: HandoverTicket, error: TransferError) -> None:
        is_damaged = isinstance(error, CorruptBlock)
        logger.warning("a handover of %d tokens is left out: %s", ticket.num_tokens, error)
        self.decline(ticket)
        with self._lock:
            self._counts["failures" if is_damaged else "gone"] += 1

    def _copy(self, taking: Taking, sequence: ActiveSequence, valid: int, stream: EngineStream | None) -> int:
        """Fill the sequence's blocks behind ``valid`` tokens. Returns how many leading tokens are there now, verified."""
        width = self.cache.layout.tokens_per_block
        with self.cache.step(stream, [sequence.id]) as ready:  # a step of our own: it orders our writes against copies and other engines
            if sequence.id not in ready:
                return valid
            with self.cache.locked() as ledger:
                require_same(ledger, sequence)  # and so it stays until the step ends
                slots, end = self._slots(sequence, taking, valid // width)
            with self._device.on_engine(stream):
                for group, places in enumerate(slots):
                    for run, rows in taking.rows(group, [position for position in places if position * width < end]):
                        write_rows(self.cache.pool(group).primary, [places[position] for position in run], rows)
                    end = min(end, taking.end)
        if end < taking.wanted and self._has_windows:
            return valid  # windows were to be filled for a longer prefix: what a shorter one reads may be missing
        return max(end, valid)

    @property
    def _has_windows(self) -> bool:
        return any(geometry.kind == WINDOW for geometry in self._geometries)

    def _slots(self, sequence: ActiveSequence, taking: Taking, first: int) -> tuple[Slots, int]:
        """Where the handed over blocks go, and how many tokens that is: up to the first block that somebody else holds, too."""
        width, end = taking.ticket.tokens_per_block, taking.end
        slots: Slots = []
        for row, ranges in zip(sequence.rows, taking.ticket.positions, strict=True):
            slots.append({})
            for position in range(first, -(-end // width)):
                block = row.blocks[position]
                if block.id < 0 or not any(begin <= position < stop for begin, stop in ranges):
                    continue
                if block.node is not None or block.ref_count != sequence.beam_width:
                    end = min(end, position * width)
                    break
                slots[-1][position] = int(slot_of(block.index))
        return slots, end

    def _agree(self, end: int, valid: int, wanted: int) -> int:
        """From where all ranks go on: the least that any of them has."""
        if self._allreduce_min is None or self.shard.num_ranks == 1:
            return end
        least_end, least_valid, most_wanted = self._allreduce_min([end, valid, -wanted])
        # Windows are there for the whole of it or not at all.
        return least_valid if self._has_windows and least_end < -most_wanted else least_end

    def _end(self, taking: Taking, num_tokens: int) -> None:
        if not num_tokens and not taking.is_damaged:
            taking.release()  # there was no place for them, or another rank has lost its part: they can be used later
            return
        taking.acknowledge()
        self.decline(taking.ticket)
        with self._lock:
            self._counts["failures"] += taking.is_damaged
            if num_tokens:
                self._counts["taken"] += 1
                self._counts["tokens"] += num_tokens
                self._counts["bytes"] += taking.num_bytes
