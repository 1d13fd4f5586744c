"""``BlockWriter``: runs are written by their own threads while the next ones are prepared."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvtier.io.block_writer import RUN_BYTES, BlockWriter
from kvtier.io.slab import SlabFile, SlotHeader
from kvtier.io.store_messages import BlockWrite
from kvtier.pools.host_arena import HostArena
from kvtier.pools.nvme_geometry import NvmeGeometry

BLOCK = RUN_BYTES // 2  # a run of one: two with their headers are more
SLOTS = 16


@pytest.fixture
def slab(tmp_path):
    made = SlabFile(tmp_path / "slab", 0, NvmeGeometry(BLOCK, SLOTS), bytes(32))
    made.file.resize(SLOTS * made.geometry.stride)
    yield made
    made.file.close()


@pytest.fixture
def items():
    arena = HostArena(SLOTS, BLOCK, pin=False)
    for slot in range(SLOTS):
        arena.rows[slot] = slot + 1
    yield [BlockWrite(0, slot, bytes([slot] * 32), arena.padded_rows[slot], 35, 0.0) for slot in range(SLOTS)]
    arena.close()


def test_checksums_are_computed_while_others_write(slab: SlabFile, items: list[BlockWrite], monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = 0
    third = threading.Event()
    seal, write = slab.seal, slab.file.write

    def counted(*arguments):
        nonlocal sealed
        sealed += 1
        if sealed == 3:
            third.set()
        return seal(*arguments)

    def patient(offset, buffers) -> None:
        assert third.wait(20.0), "the next block was not prepared before this one was written"
        write(offset, buffers)

    monkeypatch.setattr(slab, "seal", counted)
    monkeypatch.setattr(slab.file, "write", patient)
    writer = BlockWriter([slab], 2)
    assert all(isinstance(result, SlotHeader) for result in writer.write(items, 1.0))
    assert writer.close(60.0)


def test_every_header_stands_before_its_block_also_when_header_pages_are_used_again(slab: SlabFile, items: list[BlockWrite]) -> None:
    writer = BlockWriter([slab], 2)
    for _ in range(3):
        writer.write(items[::-1], 1.0)
    out = HostArena(1, BLOCK, pin=False)
    for item in items:
        slab.read(item.slot, item.key, out.padded_rows[0])
        assert np.array_equal(out.rows[0], item.data[:BLOCK])
    out.close()
    assert writer.close(60.0)


def test_what_was_begun_when_another_failed_is_finished_and_told_apart(
        slab: SlabFile, items: list[BlockWrite], monkeypatch: pytest.MonkeyPatch) -> None:
    write = slab.file.write

    def third_fails(offset, buffers) -> None:
        if offset == slab.geometry.offset(2):
            raise OSError("the drive is on fire")
        write(offset, buffers)

    monkeypatch.setattr(slab.file, "write", third_fails)
    writer = BlockWriter([slab], 2)
    outcome = writer.write(items, 1.0)
    assert isinstance(outcome[2], OSError)
    assert outcome[-1] is None, "all were begun although an early one failed"
    out = HostArena(1, BLOCK, pin=False)
    for item, result in zip(items, outcome, strict=True):
        if isinstance(result, SlotHeader):
            slab.read(item.slot, item.key, out.padded_rows[0])
    out.close()
    assert writer.close(60.0)


def test_who_is_cut_short_waits_for_the_writes_that_have_begun(slab: SlabFile, items: list[BlockWrite],
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would take other data from there, or come behind the next write of their slots."""
    begun, may_end = threading.Event(), threading.Event()
    ended: list[int] = []
    seal, write = slab.seal, slab.file.write

    def slow(offset, buffers) -> None:
        begun.set()
        may_end.wait(20.0)
        write(offset, buffers)
        ended.append(offset)

    def cut(page, slot, *arguments):
        if slot < 2:
            return seal(page, slot, *arguments)
        assert begun.wait(20.0)
        threading.Timer(0.05, may_end.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(slab.file, "write", slow)
    monkeypatch.setattr(slab, "seal", cut)
    writer = BlockWriter([slab], 2)
    with pytest.raises(KeyboardInterrupt):
        writer.write(items, 1.0)
    assert len(ended) == 2
    assert writer.close(60.0)
