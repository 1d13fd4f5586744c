"""``KVCacheManager``: the front door for engines whose attention reads our primary pool (design: two ways to attach)."""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from kvtier.errors import CapacityError, ConfigError, RequestError, TransferError
from kvtier.io.device import EngineStream
from kvtier.kernels.offsets import OffsetTable
from kvtier.policies.retention import RetentionConfig
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.host_memory import host_memory
from kvtier.pools.layout import KVLayout
from kvtier.pools.pool_index import PoolIndex, slot_of
from kvtier.tiering import arguments, block_access
from kvtier.tiering.block_access import BlockView
from kvtier.tiering.config import TierConfig
from kvtier.tiering.core import TierCore
from kvtier.tiering.handles import Admission, Lease
from kvtier.tiering.ledger import capacity
from kvtier.tiering.ledger.capacity import PrefixReuse
from kvtier.tiering.ledger.key import next_chain_key
from kvtier.tiering.ledger.request import Request, token_bytes
from kvtier.tiering.ledger.scheduling import WhatIf
from kvtier.tiering.ledger.sequence import ActiveSequence
from kvtier.tiering.ledger.truncating import truncate
from kvtier.tiering.not_included import NotIncludedYet
from kvtier.types import Level, TransferMode

STEP_TIMEOUT: Final = 60.0  # seconds a step waits for copies between memories, which take milliseconds


class KVCacheManager(TierCore, NotIncludedYet):
    """KV cache of one model on three levels.

    Args:
        layout: shape of the cache. One full-attention group for now.
        config: sizes and rules.
        device: "cpu", "cuda" or "cuda:N".
        model: "name@revision:weights-digest"; required with an NVMe level, because stored blocks outlive the process.

    Raises:
        ConfigError: a layout that is not included yet, sizes that do not fit (before anything is allocated), a device or
            directory that cannot be used.

    Thread-safe. Close it, or use it as a context manager.
    """

    def __init__(self, layout: KVLayout, config: TierConfig, device: str = "cpu", model: str | None = None) -> None:
        if len(layout.groups) != 1 or layout.groups[0].spec.kind != "attention" or layout.groups[0].spec.window is not None:
            kinds = ", ".join(f"{group.spec.kind} window={group.spec.window}" for group in layout.groups)
            raise ConfigError(f"layout with groups [{kinds}]: one full-attention group is supported; others are not included yet")
        if config.max_beam_width != 1:
            raise ConfigError(f"max_beam_width={config.max_beam_width}: beam search is not included yet; use 1")
        if config.request_directory_root is not None:
            raise ConfigError(f"request_directory_root={str(config.request_directory_root)!r}: directories of requests are not included "
                              "yet; leave it out")
        max_blocks = -(-config.max_seq_len // layout.tokens_per_block)
        _require_table_memory(config, max_blocks)
        super().__init__(layout, config, device, model)
        group = layout.groups[0]
        try:
            self._table = OffsetTable(max_rows=config.max_batch_size, max_blocks=max_blocks, num_layers=group.num_layers,
                                      kv_factor=group.kv_factor, num_blocks=self.pools.primary.num_blocks, device=self._device.name)
        except BaseException:
            self.close(timeout=1.0)
            raise
        self._table_lock = threading.Lock()
        self._what_if = WhatIf(1)
        self._stepping: dict[int, int] = {}         # ids that take part in running steps, and in how many
        self._ended_in_step: dict[int, bool] = {}   # removed meanwhile: store or not

    # -- requests --------------------------------------------------------------------------------------------------------

    def add_sequence(self, request: Request) -> Admission:
        """Admit one request; see :meth:`add_sequences`."""
        return self.add_sequences([request])[0]

    def add_sequences(self, requests: Sequence[Request]) -> list[Admission]:
        """Admit a batch: all matches of all requests are claimed before any block is taken. All of it or nothing.

        Raises:
            RequestError: a duplicate id, or a prompt longer than ``max_seq_len``.
            CapacityError: too few primary blocks; names how many are needed and there, and whom to pre-empt.
        """
        arguments.requests(requests)
        for request in requests:
            if request.num_tokens > self.config.max_seq_len:
                raise RequestError(f"request {request.id}: {request.num_tokens} tokens; max_seq_len is {self.config.max_seq_len}, raise it "
                                   "or shorten the prompt")
            if request.beam_width > self.config.max_beam_width:
                raise RequestError(f"request {request.id}: beam_width={request.beam_width}; max_beam_width is "
                                   f"{self.config.max_beam_width}, raise it or use fewer beams")
            self._check_retention(request.retention)
        with self.locked() as ledger:
            return [Admission(sequence) for sequence in ledger.add_sequences(requests)]

    def wait_ready(self, request_id: int, layer: int | None = None, timeout: float | None = None) -> int:
        """Wait until the sequence's reused blocks have arrived. Returns how many leading tokens are really there.

        That is fewer than promised after a bad read; the engine computes the rest. Later in the sequence's life, what the
        engine has computed since counts too. ``layer`` may name the first layer needed; for now the whole block is waited for.

        Raises:
            TimeoutError: not ready after ``timeout`` seconds; the sequence is as before.
            CapacityError: a bad block could not be replaced; remove this sequence and admit it again.
        """
        self._check_layer(layer)
        deadline = None if timeout is None else time.monotonic() + arguments.seconds("timeout", timeout)
        while True:
            valid = self._ready_now(request_id)
            if valid is not None:
                return valid
            with self.locked() as ledger:
                indices = _indices(ledger.sequence(request_id))
            if not (self.transfers.wait(0, indices, _left(deadline)) and self.transfers.wait_for_files(0, indices, _left(deadline))):
                self._require_open()
                raise TimeoutError(f"request {request_id}: not ready after {timeout} s; wait again, or remove the sequence")

    async def ready(self, request_id: int, layer: int | None = None) -> int:
        """Like :meth:`wait_ready` without blocking the event loop; cancel it or use ``asyncio.timeout`` for a deadline."""
        self._check_layer(layer)
        loop = asyncio.get_running_loop()
        finished = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():  # a call that was under way when the listener was removed
                loop.call_soon_threadsafe(finished.set)

        self.transfers.add_listener(wake)
        try:
            while True:
                finished.clear()
                valid = self._ready_now(request_id)
                if valid is not None:
                    return valid
                await finished.wait()
        finally:
            self.transfers.remove_listener(wake)

    def is_ready(self, request_id: int) -> bool:
        """Whether :meth:`wait_ready` would return, or raise CapacityError, at once. Does not count as its report."""
        self._submit()
        with self.locked() as ledger:
            sequence = ledger.sequence(request_id)
            return sequence.must_preempt or self._has_arrived(_indices(sequence))

    @contextmanager
    def step(self, stream: EngineStream | None, ids: Sequence[int]) -> Iterator[list[int]]:
        """One forward pass over these sequences, ordered against our copies. Yields the ids that may take part.

        Left out are sequences that are not ready, and those that lost tokens to a bad read until :meth:`wait_ready` has said
        so. ``stream`` is the engine's CUDA stream; None on the CPU.

        Raises:
            UnknownRequest: an id that is not active.
            TransferError: copies between memories did not end within a minute.
        """
        arguments.sequence_of("ids", ids)
        self._submit()
        with self.locked() as ledger:
            candidates: dict[int, list[PoolIndex]] = {}
            for request_id in ids:
                sequence = ledger.sequence(request_id)
                indices = _indices(sequence)
                if not (sequence.must_report or sequence.must_preempt or self.transfers.pending_files(0, indices)):
                    candidates[request_id] = indices
            ordered = [index for indices in candidates.values() for index in indices]
        if ordered and not self.transfers.order_before_engine(stream, 0, ordered, STEP_TIMEOUT):
            self._require_open()
            raise TransferError(f"step: copies for requests {list(candidates)} did not end within {STEP_TIMEOUT:.0f} s")
        ready: list[int] = []
        with self.locked() as ledger:
            for request_id, indices in candidates.items():
                found = ledger.sequences.get(request_id)
                # While we waited a copy may have failed, or another thread may have ended the sequence: then it is left out.
                if found is not None and not found.must_report and not found.must_preempt and _indices(found) == indices:
                    ledger.deliver(found)
                    ready.append(request_id)
                    self._stepping[request_id] = self._stepping.get(request_id, 0) + 1
        try:
            yield ready
        finally:
            self.transfers.order_after_engine(stream)
            self._leave_step(ready)

    def block_table(self, ids: Sequence[int], group: int = 0) -> torch.Tensor:
        """Kernel offsets of these sequences: int32 ``[len(ids), 2, max_blocks]`` at a fixed device address.

        Entry of (sequence, field, block) is ``slot * layers * kv_factor + field``; a kernel adds ``layer * kv_factor``. Unused
        entries are -1. Valid until the next call. On CUDA, call it with the engine's stream as torch's current one.
        """
        self._check_group(group)
        arguments.sequence_of("ids", ids)
        with self.locked() as ledger:
            rows = [[int(slot_of(block.index)) for block in ledger.sequence(request_id).blocks] for request_id in ids]
        with self._table_lock:  # on a GPU this waits for the stream: not while others need the ledger
            return self._table.fill(rows)

    def layer_buffer(self, layer: int) -> torch.Tensor:
        """One model layer's pages: strided view ``[blocks, kv_factor, heads, tokens_per_block, head_dim]`` of the primary pool."""
        self._require_open()
        _group, position = self.layout.place_of_layer(layer)
        return self.pools.primary.layer_buffer(position)

    def pool(self, group: int = 0) -> GroupPools:
        """The group's memory: ``.primary`` and ``.secondary``."""
        self._require_open()
        self._check_group(group)
        return self.pools

    def mark_computed(self, request_id: int, num_tokens: int) -> None:
        """The engine has computed the first ``num_tokens`` tokens. Nothing beyond is ever stored, nor the newest token."""
        with self.locked() as ledger:
            ledger.mark_computed(request_id, num_tokens)

    def append_tokens(self, request_id: int, tokens: Sequence[int]) -> None:
        """Append sampled tokens; everything before the newest one counts as computed. See :meth:`append_step` for errors."""
        self.append_step([request_id], [tokens])

    def append_step(self, ids: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Append sampled tokens to a whole batch. All of it or nothing.

        Raises:
            RequestError: a token outside int32, or a sequence that would pass ``max_seq_len``.
            CapacityError: too few primary blocks; names whom to pre-empt.
        """
        arguments.sequence_of("ids", ids)
        arguments.sequence_of("tokens", tokens)
        sampled = [array("i", token_bytes(appended)).tolist() for appended in tokens]
        with self.locked() as ledger:
            for request_id, appended in zip(ids, sampled, strict=False):
                length = ledger.sequence(request_id).num_tokens + len(appended)
                if length > self.config.max_seq_len:
                    raise RequestError(f"request {request_id}: {length} tokens; max_seq_len is {self.config.max_seq_len}, raise it or end "
                                       "the sequence")
            ledger.append_step(ids, sampled)

    def store_context(self, request_id: int) -> None:
        """Full, computed blocks enter the reuse tree."""
        with self.locked() as ledger:
            ledger.store_context(request_id)

    def remove_sequence(self, request_id: int, store: bool = True) -> None:
        """End a sequence, finished or aborted, at any moment. ``store`` keeps what was computed for reuse.

        Its blocks are free either way; while it takes part in a running step, when that step ends: the engine may still be
        writing into them.
        """
        with self.locked() as ledger:
            ledger.sequence(request_id)
            if request_id not in self._stepping:
                ledger.remove_sequence(request_id, store)
            elif self._ended_in_step.setdefault(request_id, store) and not store:
                self._ended_in_step[request_id] = False  # of two wishes the one that keeps nothing counts

    def rewind(self, request_id: int, num_tokens: int) -> None:
        """Take back the last ``num_tokens`` generated tokens. RequestError while the sequence takes part in a running step."""
        with self.locked() as ledger:
            if request_id in self._stepping:
                raise RequestError(f"request {request_id}: rewind({num_tokens}) while it takes part in a running step; leave the step "
                                   "first")
            ledger.rewind(request_id, num_tokens)

    def pin(self, request_id: int) -> Lease:
        """Hold the sequence's blocks until the lease is released, also beyond the end of the sequence."""
        with self.locked() as ledger:
            return Lease(self, ledger.pin(request_id))

    # -- looking and planning --------------------------------------------------------------------------------------------

    def block_ids(self, request_id: int, beam: int = 0, group: int = 0) -> list[int]:
        """Ids of the sequence's blocks in prompt order."""
        self._check_group(group)
        if beam != 0:
            raise RequestError(f"beam={beam}: this sequence has one beam, numbered 0")
        with self.locked() as ledger:
            return [block.id for block in ledger.sequence(request_id).blocks]

    def block(self, block_id: int, group: int = 0) -> BlockView:
        """A picture of one block. Raises UnknownBlock."""
        self._check_group(group)
        with self.locked() as ledger:
            return block_access.view(ledger, ledger.block(block_id))

    def block_hashes(self, request_id: int) -> list[bytes]:
        """SHA-256 chain keys (32 bytes) of the sequence's full blocks, as events name them."""
        with self.locked() as ledger:
            sequence = ledger.sequence(request_id)
            keys, parent, hashes = sequence.keys, sequence.namespace.chain_seed, []
            for number in range(sequence.num_tokens // keys.tokens_per_block):
                parent = next_chain_key(parent, keys.block_key(number, keys.tokens_per_block))
                hashes.append(parent)
            return hashes

    def match(self, tokens: Request | object, lora_id: int | None = None, cache_salt: str | None = None, **namespace: Any) -> PrefixReuse:
        """What a prompt would reuse now. Read only, moves no counter. ``tokens``: a Request, or tokens with namespace keywords."""
        request = _as_request(tokens, lora_id=lora_id, cache_salt=cache_salt, **namespace)
        with self.locked() as ledger:
            return capacity.match(ledger, request)

    def needed_blocks_one_step(self, request: int | Request, two_steps: bool = False) -> int:
        """Primary blocks that the next step (or two) of a request, or of the active sequence with this id, may take."""
        with self.locked() as ledger:
            target = request if isinstance(request, Request) else ledger.sequence(request)
            return capacity.needed_blocks_one_step(ledger, target, two_steps)

    def remaining_blocks_to_completion(self, request: int | Request) -> int:
        """Primary blocks from now until ``max_new_tokens`` are generated."""
        with self.locked() as ledger:
            target = request if isinstance(request, Request) else ledger.sequence(request)
            return capacity.remaining_blocks_to_completion(ledger, target)

    def start_scheduling(self) -> None:
        """Begin a what-if over reference counts; the real ones are not touched."""
        with self.locked() as ledger:
            self._what_if = WhatIf(len(ledger.groups))

    def scheduling_remove_sequence(self, request_id: int) -> int:
        """As if the sequence were removed: how many primary blocks that would free, after those removed before."""
        with self.locked() as ledger:
            return self._what_if.remove(ledger.sequence(request_id))

    def num_free_blocks(self, level: Level, group: int = 0) -> int:
        """Unreferenced blocks of a level, cached content and backings included."""
        self._check_group(group)
        if level not in tuple(Level):
            raise RequestError(f"level={level!r}: use Level.PRIMARY, Level.SECONDARY or Level.NVME")
        with self.locked() as ledger:
            return ledger.allocators[0].queues.num_free(level)

    # -- single blocks and prefixes --------------------------------------------------------------------------------------

    def truncate(self, tokens: Request | object, keep_tokens: int, lora_id: int | None = None, cache_salt: str | None = None,
                 **namespace: Any) -> int:
        """Forget what is stored of a prompt beyond ``keep_tokens`` tokens, on all levels. Returns the number of blocks."""
        request = _as_request(tokens, lora_id=lora_id, cache_salt=cache_salt, **namespace)
        if isinstance(keep_tokens, bool) or not isinstance(keep_tokens, int) or keep_tokens < 0:
            raise RequestError(f"keep_tokens={keep_tokens!r}: must be a whole number of at least 0")
        with self.locked() as ledger:
            return truncate(ledger, request, keep_tokens)

    def set_priority(self, block_id: int, priority: int, group: int = 0) -> None:
        """Change the priority of an unreferenced block with content."""
        self._check_group(group)
        with self.locked() as ledger:
            ledger.set_priority(block_id, priority)

    def offload(self, block_id: int, group: int = 0) -> None:
        """Move an unreferenced primary block down now. RequestError or CapacityError say why not."""
        self._check_group(group)
        with self.locked() as ledger:
            ledger.offload(block_id)

    def onboard(self, block_id: int, group: int = 0) -> None:
        """Bring an unreferenced block to the primary level."""
        self._check_group(group)
        with self.locked() as ledger:
            ledger.onboard(block_id)

    def read_block(self, block_id: int, group: int = 0) -> bytes:
        """The block's bytes wherever they are, ``layout`` block bytes. For tests and tools."""
        self._check_group(group)
        return block_access.read(self, block_id)

    def write_block(self, block_id: int, data: bytes, group: int = 0) -> None:
        """Overwrite a block that exactly one sequence holds. For tests and tools."""
        self._check_group(group)
        block_access.write(self, block_id, data)

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _ready_now(self, request_id: int) -> int | None:
        """Valid tokens when everything has arrived, None while something is pending."""
        while True:
            self._submit()
            with self.locked() as ledger:
                sequence = ledger.sequence(request_id)
                indices = _indices(sequence)
                if not self._has_arrived(indices):
                    return None
                self._drain()  # what ended between the first drain and now
                if sequence.must_preempt:
                    raise CapacityError(f"request {request_id}: a block that could not be read cannot be replaced, no primary block is "
                                        "free; remove this sequence and admit it again", 1, 0, [request_id])
                if _indices(sequence) == indices:
                    ledger.deliver(sequence)
                    return sequence.computed

    def _leave_step(self, ids: Sequence[int]) -> None:
        """These ids have left a step; those that were removed meanwhile end now."""
        if self._closed:
            return
        with self.locked() as ledger:
            for request_id in ids:
                self._stepping[request_id] -= 1
                if self._stepping[request_id] == 0:
                    del self._stepping[request_id]
                    store = self._ended_in_step.pop(request_id, None)
                    if store is not None:
                        ledger.remove_sequence(request_id, store)

    def _has_arrived(self, indices: list[PoolIndex]) -> bool:
        return self._all_issued and self.transfers.wait(0, indices, 0.0) and not self.transfers.pending_files(0, indices)

    def _check_group(self, group: int) -> None:
        if group != 0:
            raise RequestError(f"group={group}: this layout has one group, numbered 0")

    def _check_layer(self, layer: int | None) -> None:
        if layer is not None:
            self.layout.place_of_layer(layer)

    def _check_retention(self, retention: RetentionConfig | None) -> None:
        if retention is not None and retention.directory is not None:
            raise RequestError(f"directory={retention.directory!r}: a request's own directory is not included yet; leave it out")
        if retention is not None and retention.transfer_mode is not TransferMode.DRAM:
            raise RequestError(f"transfer_mode={retention.transfer_mode}: only TransferMode.DRAM is included yet; leave it out")


def _require_table_memory(config: TierConfig, max_blocks: int) -> None:
    """Raise ConfigError when the block tables do not fit into memory."""
    wanted = config.max_batch_size * 2 * max_blocks * 4
    available = host_memory().available_bytes
    if wanted > available:
        raise ConfigError(f"max_batch_size={config.max_batch_size} with max_seq_len={config.max_seq_len}: block tables of {wanted} bytes, "
                          f"available are {available}; lower one of them")


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def _indices(sequence: ActiveSequence) -> list[PoolIndex]:
    return [block.index for block in sequence.blocks]


def _as_request(tokens: Request | object, **namespace: Any) -> Request:
    if isinstance(tokens, Request):
        return tokens
    try:
        return Request(0, tokens, **namespace)
    except TypeError as error:
        raise RequestError(f"{error}; namespace keywords are those of Request") from None
