"""Looking at single blocks, and reading or writing their bytes wherever they are. For tests and tools, not for serving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvtier.errors import RequestError, TransferError
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, level_of, slot_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.group import CROSS
from kvtier.tiering.ledger.key import TOKEN_BYTES
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.types import Level

if TYPE_CHECKING:
    from kvtier.tiering.core import TierCore

ACCESS_TIMEOUT: Final = 60.0  # seconds to wait for transfers that use the block


@dataclass(frozen=True)
class BlockView:
    """A block as it was when asked. ``backing``: lower levels that hold a good copy. ``tokens``: token ids of its content."""

    id: int
    level: Level
    slot: int
    backing: tuple[Level, ...]
    ref_count: int
    priority: int
    is_full: bool
    tokens: tuple[int, ...]


def view(ledger: Ledger, block: Block, group: int) -> BlockView:
    """Picture of one block."""
    tokens = _tokens(ledger, block, group)
    backing = tuple(level for level, spare in ((Level.SECONDARY, block.secondary_backing), (Level.NVME, block.nvme_backing))
                    if spare is not None)
    return BlockView(block.id, Level(level_of(block.index)), int(slot_of(block.index)), backing, block.ref_count, block.priority,
                     len(tokens) == ledger.tokens_per_block, tokens)


def _tokens(ledger: Ledger, block: Block, group: int) -> tuple[int, ...]:
    if block.node is not None:
        key = block.node.block_key(block.position)
        width = block.node.namespace.token_width
        return tuple(int.from_bytes(key[i * width:i * width + TOKEN_BYTES], "little", signed=True) for i in range(block.num_tokens))
    for sequence in ledger.sequences.values():
        row = sequence.rows[group]
        if block in row.blocks and ledger.geometries[group].kind != CROSS and not row.other_beams:  # beams have tokens of their own
            bubble = ledger.geometries[group].bubble
            place = row.blocks.index(block)
            start = place * ledger.tokens_per_block - (bubble if place >= ledger.geometries[group].num_sink_blocks else 0)
            return tuple(sequence.keys.token_ids(start, min(start + ledger.tokens_per_block, sequence.num_tokens)))
    return ()


def read(core: TierCore, block_id: int, group: int) -> bytes:
    """The block's bytes, after every transfer into it has ended.

    Raises:
        UnknownBlock: no such id.
        CorruptBlock, TransferError: its content was lost on the way, the NVMe level could not deliver it, or transfers did not
            end within a minute.
    """
    with core.locked() as ledger:
        block = ledger.block(block_id, group)
        ledger.allocators[group].begin_access(block)  # so that nobody takes the slot meanwhile
        index = block.index
        generation = ledger.allocators[group].generation(level_of(index), slot_of(index))
        key = ledger.allocators[group].chain_key(block.owner or block)
    try:
        if not core.transfers.wait(group, [index], ACCESS_TIMEOUT):
            raise TransferError(f"block {block_id}: transfers into it did not end within {ACCESS_TIMEOUT:.0f} s; try again")
        pools = core.pools[group]
        level, slot = level_of(index), slot_of(index)
        with core.locked() as ledger:
            if ledger.allocators[group].generation(level, slot) != generation:
                raise TransferError(f"block {block_id}: the transfer into it failed, its content is lost")
        if level == PRIMARY:
            device = pools.primary.sections[0].rows.device
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the engine writes on a stream that only it knows
            return bytes(pools.primary.read_block(slot).numpy())
        if level == SECONDARY:
            assert pools.secondary is not None
            return bytes(pools.secondary.rows[slot])
        assert level == NVME
        assert core.store is not None
        out = np.empty(pools.group.block_bytes, dtype=np.uint8)
        try:
            core.store.read_block(group, slot, key, out)
        except TransferError as error:
            core.condemn(group, slot, error)  # found bad by a tool is bad for everybody
            raise
        return out.tobytes()
    finally:
        with core.locked() as ledger:
            ledger.allocators[group].end_access(level_of(index), slot_of(index))


def write(core: TierCore, block_id: int, data: bytes, group: int) -> None:
    """Overwrite the bytes of a block that one sequence holds. It leaves the reuse tree, and its lower copies are given up.

    Raises:
        UnknownBlock: no such id.
        RequestError: held by nobody or by several, or ``data`` of another length.
        TransferError: transfers that use it did not end within a minute.
    """
    pools = core.pools[group]
    if not isinstance(data, bytes | bytearray | memoryview):
        raise RequestError(f"block {block_id}: data of type {type(data).__name__}; pass bytes")
    data = bytes(data)
    if len(data) != pools.group.block_bytes:
        raise RequestError(f"block {block_id}: {len(data)} bytes; a block has {pools.group.block_bytes}")
    with core.locked() as ledger:
        block = ledger.block(block_id, group)
        rows = [row for row in (sequence.rows[group] for sequence in ledger.sequences.values())
                if any(block in row.beam(beam) for beam in range(len(row.other_beams) + 1))]
        if block.ref_count != 1 or len(rows) != 1:
            raise RequestError(f"block {block_id}: held {block.ref_count} times; writing needs a block that one sequence holds alone")
        if block.node is not None:
            ledger.allocators[group].drop(block)
        ledger.allocators[group].begin_access(block)  # the sequence may end meanwhile, and the slot must not be another's then
        index = block.index
    try:
        if not core.transfers.order_before_engine(None, group, [index], ACCESS_TIMEOUT):
            raise TransferError(f"block {block_id}: transfers that use it did not end within {ACCESS_TIMEOUT:.0f} s; try again")
        pools.primary.write_block(slot_of(index), torch.frombuffer(bytearray(data), dtype=torch.uint8))
    finally:
        with core.locked() as ledger:
            ledger.allocators[group].end_access(level_of(index), slot_of(index))
