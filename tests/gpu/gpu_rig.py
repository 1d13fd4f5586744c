"""What the GPU tests share: pools on the device and pinned on the host, Moves as a ledger would number them, a slow engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from kvtier.io.device import open_device
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import KVLayout, LayerGroup
from kvtier.pools.pool_index import PRIMARY, PoolIndex, level_of, pool_index, slot_of
from kvtier.pools.primary import PrimaryPool
from kvtier.tiering.block_store import BlockStore
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.transfer import TransferManager
from kvtier.tiering.transfer_results import MoveResult

PATIENCE = 30.0
"""Seconds after which something that should have ended is taken to hang."""

STRIDED = KVLayout.uniform(num_layers=2, num_kv_heads=3, head_dim=8, dtype="float32", tokens_per_block=4).groups[0]
"""1,536 bytes: between two blocks of the host arena there is a gap."""

DENSE = KVLayout.uniform(num_layers=4, num_kv_heads=4, head_dim=64, dtype="bfloat16", tokens_per_block=16).groups[0]
"""64 KiB: as dense on the host as on the device."""

LARGE = KVLayout.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", tokens_per_block=128).groups[0]
"""16 MiB: copying it takes a third of a millisecond over PCIe."""

_ABOUT_HALF_A_SECOND = 900_000_000  # cycles at 1.8 GHz


@contextlib.contextmanager
def busy(engine: torch.cuda.Stream) -> Iterator[None]:
    """Make the engine's stream the current one, and what is enqueued on it late: it sleeps for about half a second first."""
    with torch.cuda.stream(engine):
        torch.cuda._sleep(_ABOUT_HALF_A_SECOND)
        yield


class GpuRig:
    """A transfer manager over pools of ``num_blocks`` blocks on both levels."""

    def __init__(self, group: LayerGroup, num_blocks: int = 8, store: BlockStore | None = None, staging_blocks: int = 3,
                 layer_pieces: int = 1) -> None:
        self.group = group
        self.num_blocks = num_blocks
        self.device = open_device("cuda")
        self.primary = PrimaryPool(group, num_blocks, self.device.name)
        self.secondary = HostArena(num_blocks, group.block_bytes, pin=True)
        self.pools = GroupPools(group, self.primary, self.secondary)
        self.transfers = TransferManager(self.device, [self.pools], store, staging_blocks=staging_blocks, layer_pieces=layer_pieces)
        self.results: dict[int, MoveResult] = {}
        self._number = 0

    def move(self, source: PoolIndex, destination: PoolIndex, num_tokens: int = 0, key: bytes = b"") -> Move:
        """The next Move."""
        self._number += 1
        return Move(self._number, 0, self._number, source, 0, destination, 0, num_tokens, key)

    def put(self, index: PoolIndex, data: np.ndarray) -> None:
        """Write a slot behind the manager's back: uint8 [block_bytes]. On the device it has been written when this returns."""
        if level_of(index) == PRIMARY:
            self.primary.rows[slot_of(index)].copy_(torch.from_numpy(data))
            torch.cuda.synchronize()
        else:
            self.secondary.rows[slot_of(index)] = data

    def get(self, index: PoolIndex) -> np.ndarray:
        """A slot's bytes now, once the device has done all it was given."""
        torch.cuda.synchronize()
        if level_of(index) == PRIMARY:
            return self.primary.rows[slot_of(index)].cpu().numpy()
        return np.array(self.secondary.rows[slot_of(index)])

    def put_random(self, seed: int) -> dict[PoolIndex, np.ndarray]:
        """Fill both levels with bytes that differ everywhere; returns them by slot."""
        generator = np.random.default_rng(seed)
        filled: dict[PoolIndex, np.ndarray] = {}
        for level in range(2):
            for slot in range(self.num_blocks):
                index = pool_index(level, slot)
                filled[index] = generator.integers(0, 256, self.group.block_bytes, dtype=np.uint8)
                self.put(index, filled[index])
        return filled

    def fill_of(self, index: PoolIndex) -> int:
        """The byte that fills a slot; an error when it is not the same byte everywhere."""
        data = self.get(index)
        assert (data == data[0]).all(), f"slot {level_of(index)}:{slot_of(index)} is a mixture"
        return int(data[0])

    def settle(self) -> None:
        """Wait until everything issued has ended well and been reported."""
        assert self.transfers.idle(PATIENCE), "transfers hang"
        for result in self.transfers.drain():
            assert result.error is None, result
            assert result.move.number not in self.results, "reported twice"
            self.results[result.move.number] = result

    def close(self) -> None:
        """End the transfers, then give the memory back."""
        assert self.transfers.close(PATIENCE), "transfers hang"
        self.pools.close()


def first_tokens(data: np.ndarray, rest: np.ndarray, group: LayerGroup, num_tokens: int) -> np.ndarray:
    """A block whose first tokens (of each layer, field and head) come from ``data`` and the others from ``rest``."""
    *pages, _tokens, _dim = group.block_shape
    mixed = rest.reshape(*pages, group.tokens_per_block, -1).copy()
    mixed[..., :num_tokens, :] = data.reshape(mixed.shape)[..., :num_tokens, :]
    return mixed.reshape(-1)
