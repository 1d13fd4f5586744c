"""Every type that kernels store, with block scales and indexer keys where it has them: written, moved down to the drive and up again, it
is read as it was, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.io.device import open_device
from kvtier.io.nvme_store import NvmeStore
from kvtier.kernels import OffsetTable, gather_tokens, scatter_indexer_keys, write_kv
from kvtier.pools.group_pools import open_group_pools
from kvtier.pools.layout import KVLayout, LayerSpec
from kvtier.pools.pool_index import NVME, PRIMARY, SECONDARY, PoolIndex, pool_index
from kvtier.pools.primary import TORCH_DTYPES, PrimaryPool
from kvtier.pools.sizing import PoolSizes, nvme_geometries
from kvtier.tiering.ledger.moves import Move
from kvtier.tiering.transfer import TransferManager

TOKENS, LAYERS, HEADS, DIM, SLOTS, INDEXER_BYTES = 4, 2, 2, 32, 4, 20


def layout_of(dtype: str) -> KVLayout:
    """uint8 are codes of 4 bits, two in a byte, with a scale for sixteen."""
    is_packed = dtype == "uint8"
    layer = LayerSpec.attention(HEADS, DIM // 2 if is_packed else DIM, scale_bytes=DIM // 16 if is_packed else 0,
                                indexer_bytes=INDEXER_BYTES)
    return KVLayout([layer] * LAYERS, dtype, TOKENS)


class Pages:
    """The pages of a pool, as kernels are given them."""

    def __init__(self, pool: PrimaryPool, dtype: str) -> None:
        self.pool, self.dtype = pool, TORCH_DTYPES[dtype]
        self.table = OffsetTable.for_group(pool.group, max_rows=1, max_blocks=2, num_blocks=SLOTS)
        self.how = {"num_layers": LAYERS} | ({"key_scale": 0.03, "value_scale": 0.01} if self.dtype.itemsize == 1 else {})
        if dtype == "uint8":
            self.how["scale_pages"] = pool.scale_pages

    def write(self, slots: list[int]) -> None:
        """All layers of two blocks; a token with a NaN and one with infinities among them."""
        table, tokens = self.table.fill([slots]), torch.arange(2 * TOKENS)
        for layer in range(LAYERS):
            keys, values = torch.randn(2, 2 * TOKENS, HEADS, DIM)
            keys[3, 0, 5], values[6, 1, :2] = float("nan"), torch.tensor([float("inf"), -float("inf")])
            if self.dtype.itemsize > 1:
                keys, values = keys.to(self.dtype), values.to(self.dtype)
            write_kv(self.pool.pages, keys, values, table, torch.zeros_like(tokens), tokens, layer=layer, **self.how)
            rows = (torch.tensor(slots)[:, None] * TOKENS + torch.arange(TOKENS)).flatten() * INDEXER_BYTES
            scatter_indexer_keys(self.pool.indexer_buffer(layer), torch.randint(0, 256, (len(rows), 16), dtype=torch.uint8),
                                 torch.randn(len(rows)), rows, rows + 16)

    def read(self, slots: list[int]) -> list[torch.Tensor]:
        """What attention, and the indexer, would find there, as bytes."""
        row, found = self.table.fill([slots])[0], []
        for layer in range(LAYERS):
            for is_value in (False, True):
                found.append(gather_tokens(self.pool.pages, row, 2 * TOKENS, layer=layer, is_value=is_value, **self.how))
            found.append(self.pool.indexer_buffer(layer)[slots])
        return [numbers.contiguous().view(torch.uint8).clone() for numbers in found]


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_what_kernels_wrote_kernels_read_after_a_way_through_every_level(tmp_path: Path, dtype: str) -> None:
    torch.manual_seed(0)
    layout, sizes = layout_of(dtype), PoolSizes((SLOTS,), (SLOTS,), (SLOTS,))
    pools = open_group_pools(layout, sizes, "cpu")
    store = NvmeStore.open(tmp_path / "store", layout.describe(), nvme_geometries(layout, sizes), free_space_reserve=0)
    transfers = TransferManager(open_device("cpu"), pools, store)
    pages = Pages(pools[0].primary, dtype)
    pages.write([2, 0])
    written, blocks = pages.read([2, 0]), [pools[0].primary.read_block(slot).clone() for slot in (2, 0)]
    assert all(bool(part.any()) for part in written)
    ways = [(PRIMARY, 2, SECONDARY, 1), (PRIMARY, 0, SECONDARY, 3), (SECONDARY, 1, NVME, 0), (SECONDARY, 3, NVME, 2), None,
            (NVME, 0, PRIMARY, 1), (NVME, 2, PRIMARY, 3)]
    for number, way in enumerate(ways):
        if way is None:   # nothing is left but what is on the drive
            assert transfers.idle(20.0)
            for slot in range(SLOTS):
                pools[0].primary.write_block(slot, torch.full_like(blocks[0], 0x5A))
                pools[0].secondary.rows[slot] = 0xA5
            continue
        level, slot, to_level, to_slot = way
        key = {0: b"one", 2: b"two"}[to_slot if to_level == NVME else slot] if NVME in (level, to_level) else b""
        transfers.issue([Move(number, 0, number, PoolIndex(pool_index(level, slot)), 0, PoolIndex(pool_index(to_level, to_slot)), 0, 0,
                              key=key.ljust(32, b"."))])
    assert transfers.idle(20.0)
    assert [result.error for result in transfers.drain()] == [None] * 6
    assert all(torch.equal(pools[0].primary.read_block(slot), block) for slot, block in zip((1, 3), blocks, strict=True))
    assert all(np.array_equal(after, before) for after, before in zip(pages.read([1, 3]), written, strict=True))
    assert transfers.close(10.0)
    assert store.close(10.0)
    pools[0].close()
