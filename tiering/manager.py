"""``KVCacheManager``: the front door for engines whose attention reads our primary pool (design: two ways to attach)."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from kvtier.errors import ConfigError, KVTierError, RequestError
from kvtier.kernels.offsets import OffsetTable
from kvtier.policies.retention import RetentionConfig
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.host_memory import host_memory
from kvtier.pools.layout import KVLayout
from kvtier.tiering import arguments, block_access
from kvtier.tiering.block_access import BlockView
from kvtier.tiering.config import TierConfig
from kvtier.tiering.drafting import Drafting
from kvtier.tiering.handles import Admission, Lease
from kvtier.tiering.ledger.key import next_chain_key
from kvtier.tiering.ledger.ledger import Inbound
from kvtier.tiering.ledger.request import Request, token_bytes
from kvtier.tiering.ledger.truncating import truncate
from kvtier.tiering.planning import Planning, as_request
from kvtier.tiering.prefetching import Prefetching
from kvtier.tiering.progress_watch import ProgressWatch


class KVCacheManager(Drafting, Planning, Prefetching):
    """KV cache of one model on three levels.

    Args:
        layout: shape of the cache.
        config: sizes and rules.
        device: "cpu", "cuda" or "cuda:N".
        model: "name@revision:weights-digest"; required with an NVMe level, because stored blocks outlive the process.

    Raises:
        ConfigError: sizes that do not fit (before anything is allocated), a device or
            directory that cannot be used, a setting that is not included yet.

    Block ids, blocks and tables are each group's own: ``group`` is a number of ``layout.groups``, and one that there is not is a
    RequestError. A ``request_id`` that is not active is an UnknownRequest, a ``block_id`` that there is not an UnknownBlock.

    Thread-safe. Close it, or use it as a context manager.
    """

    def __init__(self, layout: KVLayout, config: TierConfig, device: str = "cpu", model: str | None = None) -> None:
        _require_table_memory(layout, config)
        super().__init__(layout, config, device, model)
        try:
            self._tables = [OffsetTable.for_group(pools.group, max_rows=config.max_batch_size * config.max_beam_width,
                                                  max_blocks=pools.group.max_blocks(config.max_seq_len),
                                                  num_blocks=pools.primary.num_blocks, device=self._device.name) for pools in self.pools]
            self._table_lock = threading.Lock()
            self._progress = ProgressWatch()
        except BaseException:
            self.close(timeout=1.0)
            raise

    # -- requests --------------------------------------------------------------------------------------------------------

    def add_sequence(self, request: Request) -> Admission:
        """Admit one request; see :meth:`add_sequences`."""
        return self.add_sequences([request])[0]

    def add_sequences(self, requests: Sequence[Request]) -> list[Admission]:
        """Admit a batch: all matches of all requests are claimed before any block is taken. All of it or nothing.

        Raises:
            RequestError: a duplicate id, a prompt or an encoder's output longer than ``max_seq_len``, an encoder where there is no
                cross-attention or none where there is, too many beams, retention that asks for a path that is not included, an
                announcement of :meth:`set_inbound` that cannot be used.
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
            if request.encoder_length > self.config.max_seq_len:  # a row of the block table would not hold its blocks
                raise RequestError(f"request {request.id}: encoder_length={request.encoder_length}; max_seq_len is "
                                   f"{self.config.max_seq_len}, raise it or shorten the encoder's input")
            self._check_retention(request.retention)
        with self.locked() as ledger:
            self._loading.begin()
            sequences = ledger.add_sequences(requests)
            self._loading.commit()
            if self._prefetches:
                self._overtake_prefetches(requests)
            return [Admission(sequence) for sequence in sequences]

    def block_table(self, ids: Sequence[int], group: int = 0) -> torch.Tensor:
        """Kernel offsets of these sequences: int32 ``[sequences * beams, 2, max_blocks]`` at a fixed device address, the beams of a
        sequence one behind the other.

        Entry of (sequence, field, block) is ``slot * layers * kv_factor + field``; a kernel adds ``layer * kv_factor``. Of recurrent
        groups it is the slot: kernels get one layer's states. Unused entries, and blocks that have left the window, are -1. Valid
        until the next call for this group. On CUDA, call it with the engine's stream as torch's current one.

        Raises:
            RequestError: more rows than ``max_batch_size * max_beam_width``.
        """
        self._check_group(group)
        arguments.sequence_of("ids", ids)
        with self.locked() as ledger:
            sequences = [ledger.sequence(request_id).rows[group] for request_id in ids]
            rows = [[block.index for block in row.beam(beam)] for row in sequences for beam in range(len(row.other_beams) + 1)]
        with self._table_lock:  # on a GPU this waits for the stream: not while others need the ledger
            return self._tables[group].fill_indices(rows)

    def layer_buffer(self, layer: int) -> torch.Tensor:
        """One model layer's pages: strided view ``[blocks, kv_factor, heads, tokens_per_block, head_dim]`` of the primary pool.

        Of a recurrent layer uint8 ``[blocks, state_bytes]``. Layers whose keys and values differ in width have a ``key_buffer`` and
        a ``value_buffer`` in ``pool(group).primary`` instead: here they are a ConfigError, like a layer that there is not.
        """
        self._require_open()
        group, position = self.layout.place_of_layer(layer)
        return self.pools[group.number].primary.layer_buffer(position)

    def pool(self, group: int = 0) -> GroupPools:
        """The group's memory: ``.primary`` and ``.secondary``."""
        self._require_open()
        self._check_group(group)
        return self.pools[group]

    def mark_computed(self, request_id: int, num_tokens: int) -> None:
        """The engine has computed the first ``num_tokens`` tokens. Nothing beyond is ever stored, nor the newest token.

        With ``chunk_size`` and layers with a window, prompts are computed in chunks that end at its multiples. What has left the window
        is stored (unless the request may not store) and let go: now, or when a running step with this sequence ends. The next chunk
        then gets its blocks; where there are none the sequence is paused, see :meth:`is_paused`.
        """
        with self.locked() as ledger:
            ledger.mark_computed(request_id, num_tokens, ledger.sequence(request_id).id not in self._stepping)

    def append_tokens(self, request_id: int, tokens: Sequence[int]) -> None:
        """Append sampled tokens, or one for each beam; everything before the newest one counts as computed. Errors: see
        :meth:`append_step`."""
        self.append_step([request_id], [tokens])

    def append_step(self, ids: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Append sampled tokens to a whole batch. All of it or nothing.

        Raises:
            RequestError: a token outside int32, a sequence that would pass ``max_seq_len``, not one token for each beam, an id twice,
                a prompt that is not computed to its end in chunks, pending drafts, a bad read that :meth:`wait_ready` has not reported yet,
                a sequence in a running step: what leaves a window would be others' while the engine still reads it.
            CapacityError: too few primary blocks; names whom to pre-empt.
        """
        arguments.sequence_of("ids", ids)
        arguments.sequence_of("tokens", tokens)
        sampled = [array("i", token_bytes(appended)).tolist() for appended in tokens]
        with self.locked() as ledger:
            for request_id, appended in zip(ids, sampled, strict=False):
                sequence = ledger.sequence(request_id)
                self._require_no_step(request_id, "append")
                length = sequence.num_tokens + (len(appended) if sequence.request.beam_width == 1 else 1)
                if length > self.config.max_seq_len:
                    raise RequestError(f"request {request_id}: {length} tokens; max_seq_len is {self.config.max_seq_len}, raise it or end "
                                       "the sequence")
            ledger.append_step(ids, sampled)

    def reorder_beams(self, request_id: int, parents: Sequence[int]) -> None:
        """After a step of beam search: beam ``i`` continues what beam ``parents[i]`` has. Nothing is copied until beams diverge.

        Call it between a step and the append that follows. Behind an append, two beams that continue one share the block of a newest token
        that is not computed yet, and in recurrent groups each of them would move the one state on.

        RequestError while the sequence takes part in a running step, which may be writing into the beams that end.
        """
        arguments.sequence_of("parents", parents)
        with self.locked() as ledger:
            self._require_no_step(request_id, "reorder_beams")
            ledger.reorder_beams(request_id, parents)

    def store_context(self, request_id: int) -> None:
        """Full, computed blocks enter the reuse tree."""
        with self.locked() as ledger:
            ledger.store_context(request_id)

    def remove_sequence(self, request_id: int, store: bool = True) -> int | None:
        """End a sequence, finished or aborted, at any moment. ``store`` keeps what was computed for reuse.

        Returns the id of the last block (of the first full-attention group, if there is one) that a later prompt would find, None when
        nothing is stored, or when it ends only later. Its blocks are free either way; while it takes part in a running step, when that
        step ends: the engine may still be writing into them.
        """
        arguments.truth("store", store)
        with self.locked() as ledger:
            sequence = ledger.sequence(request_id)
            self._progress.end(sequence, store and self.config.enable_block_reuse and not sequence.request.skip_write)
            if request_id not in self._stepping:
                return ledger.remove_sequence(request_id, store)
            if self._ended_in_step.setdefault(request_id, store) and not store:
                self._ended_in_step[request_id] = False  # of two wishes the one that keeps nothing counts
            return None

    def rewind(self, request_id: int, num_tokens: int) -> None:
        """Take back the last ``num_tokens`` generated tokens, of every beam. What the last append brought can always be taken back.

        Raises:
            RequestError: the sequence takes part in a running step, more than was generated, further than a window has moved on (says
                how far it may go), recurrent layers, pending drafts, chunks that have no blocks yet.
            CapacityError: the block that is cut is shared and there is none for a copy; nothing has changed.
        """
        with self.locked() as ledger:
            self._require_no_step(request_id, f"rewind({num_tokens!r})")
            ledger.rewind(request_id, num_tokens)

    def pin(self, request_id: int) -> Lease:
        """Hold the sequence's blocks until the lease is released, also beyond the end of the sequence."""
        with self.locked() as ledger:
            return Lease(self, ledger.pin(request_id))

    def store_and_pin(self, request_id: int) -> Lease:
        """Store what was computed, the partial tail included, and hold what a later request of the same prompt will find."""
        with self.locked() as ledger:
            return Lease(self, ledger.store_and_pin(request_id))

    def set_inbound(self, inbound: Inbound | None) -> None:
        """Ask somebody else, at each admission, for tokens behind the reused ones: ``num_new_matched_tokens(request, num_matched)``.

        What it announces (whole blocks) gets blocks and stands in the admission's ``external_tokens``; the engine loads it and calls
        ``mark_computed``, with chunked prefill over windows for one chunk after the other. It is called with the ledger locked: it must
        answer at once and must not call the manager.
        """
        if inbound is not None and not callable(getattr(inbound, "num_new_matched_tokens", None)):
            raise RequestError(f"inbound={inbound!r}: it has no method num_new_matched_tokens(request, num_matched); pass an object that "
                               "has one, or None")
        with self.locked() as ledger:
            ledger.inbound = inbound

    # -- looking and planning --------------------------------------------------------------------------------------------

    def block_ids(self, request_id: int, beam: int = 0, group: int = 0) -> list[int]:
        """Ids of a beam's blocks in prompt order. Those that have left the window keep their place here, though they may be others'
        by now; negative numbers stand where a recurrent group keeps no state, and for reused blocks that had left it before."""
        self._check_group(group)
        with self.locked() as ledger:
            sequence = ledger.sequence(request_id)
            row = sequence.rows[group]
            beams = sequence.request.beam_width
            if isinstance(beam, bool) or not isinstance(beam, int) or not 0 <= beam < beams:
                raise RequestError(f"beam={beam!r}: request {request_id} has beams 0..{beams - 1}")
            ids: list[int] = [block.id for block in row.beam(beam if row.other_beams else 0)]
            if row.departed_ids:
                first = ledger.geometries[group].num_sink_blocks
                ids[first:first + row.num_departed] = row.departed_ids[beam]
            return ids

    def block(self, block_id: int, group: int = 0) -> BlockView:
        """A picture of one block. Raises UnknownBlock."""
        self._check_group(group)
        with self.locked() as ledger:
            return block_access.view(ledger, ledger.block(block_id, group), group)

    def block_hashes(self, request_id: int) -> list[bytes]:
        """SHA-256 chain keys (32 bytes) of the sequence's full blocks, as events name them; with several beams, of the prompt's."""
        with self.locked() as ledger:
            sequence = ledger.sequence(request_id)
            keys, parent, hashes = sequence.keys, sequence.namespace.chain_seed, []
            num_tokens = sequence.num_tokens if sequence.beam_width == 1 else sequence.num_prompt_tokens  # behind it each has its own
            for number in range(num_tokens // keys.tokens_per_block):
                parent = next_chain_key(parent, keys.block_key(number, keys.tokens_per_block))
                hashes.append(parent)
            return hashes

    # -- single blocks and prefixes --------------------------------------------------------------------------------------

    def truncate(self, tokens: Request | object, keep_tokens: int, lora_id: int | None = None, cache_salt: str | None = None,
                 **namespace: Any) -> int:
        """Forget what is stored of a prompt beyond ``keep_tokens`` tokens, on all levels. Returns the number of blocks, of all groups
        together."""
        request = as_request(tokens, lora_id=lora_id, cache_salt=cache_salt, **namespace)
        if isinstance(keep_tokens, bool) or not isinstance(keep_tokens, int) or keep_tokens < 0:
            raise RequestError(f"keep_tokens={keep_tokens!r}: must be a whole number of at least 0")
        with self.locked() as ledger:
            return truncate(ledger, request, keep_tokens)

    def set_priority(self, block_id: int, priority: int | str, group: int = 0) -> None:
        """Change the priority of an unreferenced block with content."""
        self._check_group(group)
        with self.locked() as ledger:
            ledger.set_priority(block_id, priority, group)

    def offload(self, block_id: int, group: int = 0) -> None:
        """Move an unreferenced primary block down now. RequestError or CapacityError say why not."""
        self._check_group(group)
        with self.locked() as ledger:
            ledger.offload(block_id, group)

    def onboard(self, block_id: int, group: int = 0) -> None:
        """Bring an unreferenced block to the primary level. RequestError or CapacityError say why not."""
        self._check_group(group)
        with self.locked() as ledger:
            ledger.onboard(block_id, group)

    def read_block(self, block_id: int, group: int = 0) -> bytes:
        """The block's bytes wherever they are: ``pool(group).group.block_bytes`` of them, the parts of a block behind one another. For
        tests and tools. Raises TransferError or CorruptBlock where they are lost."""
        self._check_group(group)
        return block_access.read(self, block_id, group)

    def write_block(self, block_id: int, data: bytes, group: int = 0) -> None:
        """Overwrite a block that exactly one sequence holds; it leaves the reuse tree. For tests and tools. RequestError otherwise."""
        self._check_group(group)
        block_access.write(self, block_id, data, group)

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _leave_step(self, ids: Sequence[int]) -> None:
        super()._leave_step(ids)
        with suppress(KVTierError), self.locked() as ledger:  # a closed or broken one notes nothing
            self._progress.note_step(request_id for request_id in ids if request_id in ledger.sequences)

    def _check_retention(self, retention: RetentionConfig | None) -> None:
        if retention is not None and retention.directory is not None:
            if self._debug is None:
                raise RequestError(f"directory={retention.directory!r}: requests may not name folders here; set request_directory_root, or "
                                   "leave it out")
            self._debug.root.parts(retention.directory)


def _require_table_memory(layout: KVLayout, config: TierConfig) -> None:
    """Raise ConfigError when the block tables do not fit into memory."""
    rows = config.max_batch_size * config.max_beam_width
    wanted = sum(rows * 2 * group.max_blocks(config.max_seq_len) * 4 for group in layout.groups)
    available = host_memory().available_bytes
    if wanted > available:
        raise ConfigError(f"max_batch_size={config.max_batch_size} with max_seq_len={config.max_seq_len}: block tables of {wanted} bytes, "
                          f"available are {available}; lower one of them")
