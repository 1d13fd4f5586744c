"""Looking at single blocks, and reading or writing their bytes wherever they are. For tests and tools, not for serving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvtier.errors import RequestError, TransferError
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, level_of, slot_of
from kvtier.tiering.ledger.block import Block
from kvtier.tiering.ledger.key import TOKEN_BYTES
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.types import Level

if TYPE_CHECKING:
    from kvtier.tiering.core import TierCore

GROUP: Final = 0
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


def view(ledger: Ledger, block: Block) -> BlockView:
    """Picture of one block."""
    tokens = _tokens(ledger, block)
    backing = tuple(level for level, spare in ((Level.SECONDARY, block.secondary_backing), (Level.NVME, block.nvme_backing))
                    if spare is not None)
    return BlockView(block.id, Level(level_of(block.index)), int(slot_of(block.index)), backing, block.ref_count, block.priority,
                     len(tokens) == ledger.tokens_per_block, tokens)


def _tokens(ledger: Ledger, block: Block) -> tuple[int, ...]:
    if block.node is not None:
        key = block.node.block_key(block.position)
        width = block.node.namespace.token_width
        return tuple(int.from_bytes(key[i * width:i * width + TOKEN_BYTES], "little", signed=True) for i in range(block.num_tokens))
    for sequence in ledger.sequences.values():
        if block in sequence.blocks:
            start = sequence.blocks.index(block) * ledger.tokens_per_block
            return tuple(sequence.keys.token_ids(start, min(start + ledger.tokens_per_block, sequence.num_tokens)))
    return ()


def read(core: TierCore, block_id: int) -> bytes:
    """The block's bytes, after every transfer into it has ended.

    Raises:
        UnknownBlock: no such id.
        CorruptBlock, TransferError: its content was lost on the way, the NVMe level could not deliver it, or transfers did not
            end within a minute.
    """
    with core.locked() as ledger:
        block = ledger.block(block_id)
        ledger.allocators[0].begin_access(block)  # so that nobody takes the slot meanwhile
        index = block.index
        generation = ledger.allocators[0].generation(level_of(index), slot_of(index))
        key = ledger.allocators[0].chain_key(block.owner or block)
    try:
        if not core.transfers.wait(GROUP, [index], ACCESS_TIMEOUT):
            raise TransferError(f"block {block_id}: transfers into it did not end within {ACCESS_TIMEOUT:.0f} s; try again")
        pools = core.pools
        level, slot = level_of(index), slot_of(index)
        with core.locked() as ledger:
            if ledger.allocators[0].generation(level, slot) != generation:
                raise TransferError(f"block {block_id}: the transfer into it failed, its content is lost")
        if level == PRIMARY:
            rows = pools.primary.rows
            if rows.is_cuda:
                torch.cuda.synchronize(rows.device)  # the engine writes on a stream that only it knows
            return bytes(rows[slot].cpu().numpy())
        if level == SECONDARY:
            assert pools.secondary is not None
            return bytes(pools.secondary.rows[slot])
        assert level == NVME
        assert core.store is not None
        out = np.empty(pools.group.block_bytes, dtype=np.uint8)
        try:
            core.store.read_block(GROUP, slot, key, out)
        except TransferError as error:
            core.condemn(slot, error)  # found bad by a tool is bad for everybody
            raise
        return out.tobytes()
    finally:
        with core.locked() as ledger:
            ledger.allocators[0].end_access(level_of(index), slot_of(index))


def write(core: TierCore, block_id: int, data: bytes) -> None:
    """Overwrite the bytes of a block that one sequence holds. It leaves the reuse tree, and its lower copies are given up.

    Raises:
        UnknownBlock: no such id.
        RequestError: held by nobody or by several, or ``data`` of another length.
        TransferError: transfers that use it did not end within a minute.
    """
    pools = core.pools
    if not isinstance(data, bytes | bytearray | memoryview):
        raise RequestError(f"block {block_id}: data of type {type(data).__name__}; pass bytes")
    data = bytes(data)
    if len(data) != pools.group.block_bytes:
        raise RequestError(f"block {block_id}: {len(data)} bytes; a block has {pools.group.block_bytes}")
    with core.locked() as ledger:
        block = ledger.block(block_id)
        holders = [sequence for sequence in ledger.sequences.values() if block in sequence.blocks]
        if block.ref_count != 1 or len(holders) != 1:
            raise RequestError(f"block {block_id}: held {block.ref_count} times; writing needs a block that one sequence holds alone")
        ledger.make_writable(holders[0].id, holders[0].blocks.index(block))
        index = block.index
    if not core.transfers.order_before_engine(None, GROUP, [index], ACCESS_TIMEOUT):
        raise TransferError(f"block {block_id}: transfers that use it did not end within {ACCESS_TIMEOUT:.0f} s; try again")
    pools.primary.rows[slot_of(index)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
