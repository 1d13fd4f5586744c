"""Faults of a slab file really happen, each in its own way: what the file holds afterwards, and what the call said."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import CorruptBlock, TransferError
from kvtier.io.fault_text import parse_faults
from kvtier.io.faults import Faults
from kvtier.io.nvme_store import NvmeStore
from kvtier.io.slab import SlabFile
from kvtier.pools.nvme_geometry import NvmeGeometry

NAMESPACE = bytes(range(32))
SLOTS = 6
KEYS = [bytes([slot + 1]) * 32 for slot in range(SLOTS)]


def block(slot: int) -> np.ndarray:
    return np.random.default_rng(slot).integers(0, 256, 20000, dtype=np.uint8)


class Bench:
    """A slab with right blocks in slots 1 to 5 and slot 0 empty; then rules, and a look at the file past them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.geometry = NvmeGeometry(20000, SLOTS)
        self.right = SlabFile(path, 0, self.geometry, NAMESPACE)
        self.right.file.resize(self.geometry.file_bytes)
        for slot in range(1, SLOTS):
            self.right.write(slot, KEYS[slot], block(slot), 35, 0.0, 1.0)

    def under(self, rules: str) -> tuple[SlabFile, Faults]:
        faults = parse_faults(rules)
        return SlabFile(self.path, 0, self.geometry, NAMESPACE, faults=faults), faults

    def wrong_slots(self) -> list[int]:
        return [slot for slot in range(SLOTS) if not is_right(self.right, slot)]


def is_right(slab: SlabFile, slot: int) -> bool:
    out = np.zeros(20000, np.uint8)
    try:
        slab.read(slot, KEYS[slot], out)
    except CorruptBlock:
        return False
    assert np.array_equal(out, block(slot)), "verified, and yet wrong"
    return True


def write(slab: SlabFile, slot: int) -> None:
    slab.write(slot, KEYS[slot], block(slot), 35, 0.0, 1.0)


@pytest.fixture
def bench(tmp_path: Path):
    made = Bench(tmp_path / "store" / "group-0.slab") if (tmp_path / "store").mkdir() is None else None
    yield made
    made.right.file.close()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["torn_write", "bit_flip"])
def test_a_write_that_lies_reports_success_and_is_found_by_the_check(bench: Bench, kind: str, seed: int) -> None:
    slab, faults = bench.under(f"nvme.write.{kind}*1, seed={seed}")
    write(slab, 0)
    assert bench.wrong_slots() == [0]
    assert faults.counts() == {f"nvme.write.{kind}": 1}
    write(slab, 0)
    assert bench.wrong_slots() == []


def test_a_torn_write_leaves_its_beginning(bench: Bench) -> None:
    slab, _ = bench.under("nvme.write.torn_write*1")
    write(slab, 0)
    assert bench.right.read_header(0).key == KEYS[0]


@pytest.mark.parametrize("seed", range(8))
def test_a_misdirected_write_takes_the_place_of_another_block(bench: Bench, seed: int) -> None:
    slab, _ = bench.under(f"nvme.write.misdirected_write*1, seed={seed}")
    write(slab, 0)
    wrong = bench.wrong_slots()
    assert len(wrong) == 2, "the one that was meant to be written, and the victim"
    assert wrong[0] == 0
    assert bench.right.read_header(wrong[1]) is None


def test_a_misdirected_write_with_no_other_slot_is_written_nowhere(tmp_path: Path) -> None:
    slab = SlabFile(tmp_path / "slab", 0, NvmeGeometry(5000, 1), NAMESPACE, faults=parse_faults("nvme.write.misdirected_write"))
    slab.file.resize(slab.geometry.file_bytes)
    slab.write(0, KEYS[0], block(0)[:5000], 35, 0.0, 1.0)
    assert not any((tmp_path / "slab").read_bytes())


@pytest.mark.parametrize("seed", range(8))
def test_a_bit_flipped_on_the_way_is_found_and_the_file_is_right(bench: Bench, seed: int) -> None:
    slab, _ = bench.under(f"nvme.read.bit_flip*1, seed={seed}")
    assert not is_right(slab, 1)
    assert is_right(slab, 1)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_short_system_call_is_continued_or_reported_and_nothing_else(bench: Bench, operation: str, direct: bool) -> None:
    continued = reported = 0
    for seed in range(20):
        faults = parse_faults(f"nvme.{operation}.short_{operation}*1, seed={seed}")
        slab = SlabFile(bench.path, 0, bench.geometry, NAMESPACE, direct=direct, faults=faults)
        try:
            assert is_right(slab, 1) if operation == "read" else write(slab, 0) is None
            continued += 1
        except TransferError:
            reported += 1
        assert list(faults.counts().values()) == [1]
        slab.file.close()
    assert continued > reported > 0
    assert bench.wrong_slots() == ([0] if operation == "read" else [])


@pytest.mark.parametrize("word", ["eio", "enospc", "edquot", "eacces", "eperm"])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_failure_comes_instead_of_the_call(bench: Bench, operation: str, word: str) -> None:
    slab, _ = bench.under(f"nvme.{operation}.{word}*1")
    with pytest.raises(OSError, match="injected") as caught:
        is_right(slab, 1) if operation == "read" else write(slab, 1)
    assert caught.value.errno == getattr(errno, word.upper())
    assert bench.wrong_slots() == [0]


def test_a_deleted_file_goes_on_working_and_knows_it(bench: Bench) -> None:
    slab, _ = bench.under("nvme.read.lost_file*1")
    assert not slab.file.is_deleted()
    assert is_right(slab, 1), "whoever has it open still reads it"
    assert slab.file.is_deleted()
    assert not bench.path.exists()
    assert bench.path.parent.exists()


def test_a_deleted_directory_takes_everything_with_it(bench: Bench) -> None:
    (bench.path.parent / "beside").write_text("x")
    slab, _ = bench.under("nvme.write.deleted_directory*1")
    write(slab, 0)
    assert slab.file.is_deleted()
    assert not bench.path.parent.exists()


# -- the store above ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lost_file", "deleted_directory"])
def test_a_store_whose_files_were_deleted_stores_no_more_says_so_once_and_still_reads(
        nvme, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    nvme.fill(nvme.open(), slots=range(4))
    store = nvme.reopen(faults=parse_faults(f"nvme.read.{kind}*1"))
    keys = {row.slot: row.key for row in store.stored_blocks()}
    for _ in range(2):
        assert np.array_equal(nvme.read(store, 0, 1, keys[1]), nvme.content(keys[1]))
    caplog.clear()
    for slot in (4, 5, 1):
        (error,) = store.write_blocks([nvme.item(slot, "late")])
        assert isinstance(error, TransferError)
    assert np.array_equal(nvme.read(store, 0, 1, keys[1]), nvme.content(keys[1])), "what was refused has cost nothing"
    (warning,) = caplog.messages
    assert "it was deleted while it was in use; restart" in warning
    store.close(60.0)
    again = nvme.open()
    assert [row.slot for row in again.stored_blocks() if row.group == 0] == []
    nvme.fill(again)


def test_a_reset_never_touches_the_directory_that_took_the_place_of_a_deleted_one(nvme) -> None:
    old = nvme.open(faults=parse_faults("nvme.write.deleted_directory*1"))
    old.write_blocks([nvme.item(0, "any")])
    new: NvmeStore = nvme.open()
    keys = nvme.fill(new)
    with pytest.raises(TransferError, match="it was deleted while it was in use"):
        old.clear()
    assert old.close(60.0)
    new = nvme.reopen()
    assert {(row.group, row.slot): row.key for row in new.stored_blocks()} == keys
    assert os.path.exists(nvme.directory)


@pytest.mark.parametrize("word", ["eio", "enospc", "edquot"])
def test_a_commit_that_fails_stores_nothing_and_stops_stores_for_a_while(nvme, caplog: pytest.LogCaptureFixture, word: str) -> None:
    store = nvme.open(faults=parse_faults(f"nvme.commit.{word}*1"))
    first, second = store.write_blocks([nvme.item(0, "a"), nvme.item(1, "b")])
    assert isinstance(first, TransferError)
    assert isinstance(second, TransferError)
    assert not store.accepts_writes
    assert store.stored_blocks() == []
    assert len(caplog.messages) == 1
    assert nvme.reopen().stored_blocks() == []
