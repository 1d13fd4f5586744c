"""A slot believes nothing: every kind of damage to its bytes is found, and the message says what differed."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ConfigError, CorruptBlock, TransferError
from kvtier.io.direct_file import aligned_buffer
from kvtier.io.slab import SlabFile, SlotHeader
from kvtier.pools.nvme_geometry import NvmeGeometry

NAMESPACE = bytes(range(100, 132))
KEYS = [bytes([slot]) * 32 for slot in range(6)]
STRIDE = 4096 + 8192


@pytest.fixture(params=[8192, 5000], ids=["whole-pages", "padded"])
def slab(request, tmp_path: Path):
    opened = SlabFile(tmp_path / "group-2.slab", 2, NvmeGeometry(request.param, 6), NAMESPACE)
    opened.file.resize(opened.geometry.file_bytes)
    for slot, key in enumerate(KEYS):
        opened.write(slot, key, block_of(opened, slot), 35, 0.0, 1.0)
    yield opened
    opened.file.close()


def block_of(slab: SlabFile, slot: int) -> np.ndarray:
    return np.random.default_rng(slot).integers(0, 256, slab.geometry.block_bytes, dtype=np.uint8)


def read(slab: SlabFile, slot: int, key: bytes | None = None) -> np.ndarray:
    out = np.empty(slab.geometry.block_bytes, np.uint8)
    slab.read(slot, KEYS[slot] if key is None else key, out)
    return out


def edit(slab: SlabFile, offset: int, content: bytes) -> None:
    with slab.file.path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def bytes_at(slab: SlabFile, offset: int, count: int) -> bytes:
    return slab.file.path.read_bytes()[offset:offset + count]


def flip(slab: SlabFile, offset: int) -> None:
    edit(slab, offset, bytes([bytes_at(slab, offset, 1)[0] ^ 1 << offset % 8]))


def test_every_slot_reads_back_what_was_written(slab: SlabFile) -> None:
    for slot in range(6):
        assert np.array_equal(read(slab, slot), block_of(slab, slot))


def test_padded_aligned_rows_and_odd_buffers_give_the_same_bytes(slab: SlabFile) -> None:
    geometry = slab.geometry
    row = aligned_buffer(geometry.payload_bytes)
    row[:geometry.block_bytes] = block_of(slab, 9)
    row[geometry.block_bytes:] = 77  # padding is nobody's business
    slab.write(1, KEYS[1], row, 35, 0.0, 1.0)
    odd = np.empty(geometry.block_bytes + 3, np.uint8)[3:]
    slab.read(1, KEYS[1], odd)
    assert np.array_equal(odd, block_of(slab, 9))
    slab.write(1, KEYS[1], odd, 35, 0.0, 1.0)
    row[:] = 0
    slab.read(1, KEYS[1], row)
    assert np.array_equal(row[:geometry.block_bytes], odd)


@pytest.mark.parametrize("position", [0, 1, 2047, 4095, 4096, 4999])
def test_a_flipped_bit_in_the_block_is_never_served(slab: SlabFile, position: int) -> None:
    flip(slab, 3 * STRIDE + 4096 + position)
    with pytest.raises(CorruptBlock, match=r"group 2, slot 3 .*checksum of the block"):
        read(slab, 3)
    assert np.array_equal(read(slab, 2), block_of(slab, 2))
    assert np.array_equal(read(slab, 4), block_of(slab, 4))


def test_every_byte_of_the_header_page_counts(slab: SlabFile) -> None:
    fields = list(range(200))
    for position in [*fields, 1000, 3000, *range(4080, 4096)]:
        flip(slab, 4 * STRIDE + position)
        with pytest.raises(CorruptBlock, match="own checksum"):
            read(slab, 4)
        assert slab.read_header(4) is None
        flip(slab, 4 * STRIDE + position)
    assert np.array_equal(read(slab, 4), block_of(slab, 4))


@pytest.mark.parametrize(("change", "named"), [
    ({"magic": b"KVTSLOU\0"}, "magic is"),
    ({"version": 2}, "format version is 2 instead of 1"),
    ({"namespace_digest": bytes(32)}, "namespace is 0000"),
    ({"key": bytes(32)}, "key is 0000"),
    ({"group": 1}, "header says group 1"),
    ({"slot": 4}, "header says slot 4"),
    ({"length": 4096}, "length is 4096 instead of"),
    ({"algorithm": "crc32"}, "checksum algorithm is 'crc32'"),
    ({"checksum": bytes(16)}, "checksum of the block is .* instead of 0000"),
])
def test_a_header_that_is_whole_but_says_something_else_is_corrupt_and_the_difference_is_named(
        slab: SlabFile, page: np.ndarray, change: dict, named: str) -> None:
    page[:] = np.frombuffer(bytes_at(slab, 3 * STRIDE, 4096), np.uint8)
    replace(SlotHeader.unpack(page), **change).pack_into(page)
    edit(slab, 3 * STRIDE, page.tobytes())
    with pytest.raises(CorruptBlock, match=f"group 2, slot 3 .*{named}"):
        read(slab, 3)


def test_blocks_that_changed_places_are_not_served(slab: SlabFile) -> None:
    one, other = bytes_at(slab, 1 * STRIDE, STRIDE), bytes_at(slab, 4 * STRIDE, STRIDE)
    edit(slab, 1 * STRIDE, other)
    edit(slab, 4 * STRIDE, one)
    for slot, really in ((1, 4), (4, 1)):
        with pytest.raises(CorruptBlock, match=f"header says slot {really}"):
            read(slab, slot)
        with pytest.raises(CorruptBlock, match=f"header says slot {really}"):
            read(slab, slot, KEYS[really])
        assert slab.read_header(slot) is None


def test_the_right_header_over_another_slots_block_is_not_served(slab: SlabFile) -> None:
    edit(slab, 1 * STRIDE + 4096, bytes_at(slab, 4 * STRIDE + 4096, 8192))
    with pytest.raises(CorruptBlock, match="checksum of the block"):
        read(slab, 1)


@pytest.mark.parametrize("written", [512, 4096, 4096 + 512])
def test_a_torn_write_is_not_served(slab: SlabFile, written: int) -> None:
    """Only the first part of header and block reached the drive; behind it lies what the slot held before."""
    old = bytes_at(slab, 2 * STRIDE, STRIDE)
    slab.write(2, KEYS[5], block_of(slab, 5), 35, 0.0, 2.0)
    new = bytes_at(slab, 2 * STRIDE, STRIDE)
    edit(slab, 2 * STRIDE, new[:written] + old[written:])
    with pytest.raises(CorruptBlock):
        read(slab, 2, KEYS[5])
    edit(slab, 2 * STRIDE, old[:written] + new[written:])
    with pytest.raises(CorruptBlock):
        read(slab, 2, KEYS[5])


def test_a_write_that_never_reached_the_drive_is_found_by_its_key(slab: SlabFile) -> None:
    with pytest.raises(CorruptBlock, match="key is 0202"):
        read(slab, 2, KEYS[5])


def test_a_hole_is_no_block(slab: SlabFile) -> None:
    edit(slab, 2 * STRIDE, bytes(STRIDE))
    with pytest.raises(CorruptBlock, match="magic"):
        read(slab, 2, bytes(32))
    assert slab.read_header(2) is None


def test_a_block_of_another_namespace_is_not_served(slab: SlabFile) -> None:
    slab.namespace_digest = bytes(32)
    with pytest.raises(CorruptBlock, match="namespace is"):
        read(slab, 2)
    assert slab.read_header(2) is None


def test_a_truncated_slab_gives_short_reads_behind_its_end_only(slab: SlabFile) -> None:
    import os

    os.truncate(slab.file.path, 3 * STRIDE + 4096 + 100)
    assert np.array_equal(read(slab, 2), block_of(slab, 2))
    for slot in (3, 5):
        with pytest.raises(TransferError, match="short read"):
            read(slab, slot)
    with pytest.raises(ConfigError, match=f"has {3 * STRIDE + 4196} bytes but its 6 slots need {6 * STRIDE}: the file was truncated"):
        slab.require_size(6)


def test_a_header_carries_what_a_lost_row_said(slab: SlabFile) -> None:
    slab.write(0, KEYS[3], block_of(slab, 0), 80, 123.5, 99.25)
    header = slab.read_header(0)
    assert header is not None
    assert (header.key, header.priority, header.expiry, header.written) == (KEYS[3], 80, 123.5, 99.25)
    assert (header.group, header.slot, header.length) == (2, 0, slab.geometry.block_bytes)


def test_the_format_on_disk_is_pinned(page: np.ndarray) -> None:
    """Changing it needs a new format version: an old directory must never be misread."""
    SlotHeader(1, 2, b"k" * 32, 3, b"n" * 32, b"c" * 16, 4, 5.0, 6.0).pack_into(page)
    expected = struct.pack("<8sIIQQ32s32s16s16sidd", b"KVTSLOT\0", 1, 1, 2, 3, b"n" * 32, b"k" * 32, b"xxh3-128", b"c" * 16, 4, 5.0, 6.0)
    assert page.tobytes()[:len(expected)] == expected
    assert not page[len(expected):4080].any()
    assert page[4080:].tobytes().hex() == "b4348bea4c92dbd8de3a8739083cf5e7"
