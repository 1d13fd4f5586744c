"""The store against a dictionary: whatever is written, discarded, quarantined, reset or reopened, both say the same."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.errors import CorruptBlock, TransferError
from kvtier.io.nvme_store import NvmeStore
from kvtier.io.store_messages import BlockWrite
from kvtier.pools.nvme_geometry import PAGE_BYTES, NvmeGeometry

BLOCK_BYTES = (4096, 700)
places = st.tuples(st.integers(0, 1), st.integers(0, 5))


def content(key: bytes, group: int) -> np.ndarray:
    return np.random.default_rng(list(key)).integers(0, 256, BLOCK_BYTES[group], dtype=np.uint8)


class StoreMachine(RuleBasedStateMachine):
    """Model: what is stored by place; what is damaged on disk; what is in quarantine."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvtier-model-"))
        self.num_slots = 6
        self.model: dict[tuple[int, int], tuple[bytes, int, float]] = {}
        self.damaged: set[tuple[int, int]] = set()
        self.quarantined: set[tuple[int, int]] = set()
        self.open()

    def open(self) -> None:
        self.store = NvmeStore.open(self.directory, '{"model": "m"}', [NvmeGeometry(size, self.num_slots) for size in BLOCK_BYTES],
                                    free_space_reserve=0)

    def teardown(self) -> None:
        self.store.close(60.0)
        shutil.rmtree(self.directory)

    @rule(batch=st.lists(st.tuples(places, st.binary(min_size=32, max_size=32), st.integers(0, 100),
                                   st.floats(0, 1e12, allow_subnormal=False)), min_size=1, max_size=6))
    def write(self, batch: list[tuple[tuple[int, int], bytes, int, float]]) -> None:
        errors = self.store.write_blocks([BlockWrite(*place, key, content(key, place[0]), priority, expiry)
                                          for place, key, priority, expiry in batch])
        for (place, key, priority, expiry), error in zip(batch, errors, strict=True):
            possible = place not in self.quarantined and place[1] < self.num_slots
            assert (error is None) == possible
            if possible:
                self.model[place] = (key, priority, expiry)
                self.damaged.discard(place)

    @rule(group=st.integers(0, 1), slots=st.lists(st.integers(0, 5), max_size=4))
    def discard(self, group: int, slots: list[int]) -> None:
        self.store.discard(group, slots)
        for slot in slots:
            self.model.pop((group, slot), None)

    @rule(place=places)
    def read(self, place: tuple[int, int]) -> None:
        if place[1] >= self.num_slots:
            return
        out = np.zeros(BLOCK_BYTES[place[0]], np.uint8)
        key = self.model[place][0] if place in self.model else bytes(32)
        if place in self.model and place not in self.damaged:
            self.store.read_block(*place, key, out)
            assert np.array_equal(out, content(key, place[0]))
            return
        with pytest.raises(CorruptBlock if place in self.model else TransferError) as caught:
            self.store.read_block(*place, key, out)
        if isinstance(caught.value, CorruptBlock):
            self.store.quarantine(*place, str(caught.value))
            del self.model[place]
            self.quarantined.add(place)

    @rule(place=places, byte=st.integers(0, 699), header=st.booleans())
    def damage(self, place: tuple[int, int], byte: int, header: bool) -> None:
        if place in self.model and place not in self.damaged:
            stride = PAGE_BYTES + -(-BLOCK_BYTES[place[0]] // PAGE_BYTES) * PAGE_BYTES
            offset = place[1] * stride + (byte % 200 if header else PAGE_BYTES + byte)
            with (self.directory / f"group-{place[0]}.slab").open("r+b") as file:
                file.seek(offset)
                old = file.read(1)[0]
                file.seek(offset)
                file.write(bytes([old ^ 16]))
            self.damaged.add(place)

    @rule()
    def reopen(self) -> None:
        assert self.store.close(60.0)
        self.open()

    @rule(num_slots=st.integers(3, 6))
    def reopen_with_another_size(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.reopen()
        for gone in (self.model, self.damaged, self.quarantined):
            for place in [place for place in gone if place[1] >= num_slots]:
                gone.pop(place) if isinstance(gone, dict) else gone.discard(place)

    @rule()
    def reset(self) -> None:
        self.store.clear()
        self.model.clear()
        self.damaged.clear()

    @precondition(lambda self: not self.damaged)
    @rule()
    def lose_the_manifest(self) -> None:
        """Rebuilt from headers: discarded blocks may come back, lost is none. The quarantine is gone with its table."""
        assert self.store.close(60.0)
        (self.directory / "manifest.sqlite").unlink()
        self.quarantined.clear()
        self.open()
        keys = {(group, key): place for place, (key, _, _) in self.model.items() for group in [place[0]]}
        stored = {(block.group, block.slot): block for block in self.store.stored_blocks()}
        assert keys.keys() <= {(block.group, block.key) for block in stored.values()}
        self.store.clear()
        self.model.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        stored = {(block.group, block.slot): (block.key, block.priority, block.expiry) for block in self.store.stored_blocks()}
        assert stored == self.model
        assert set(self.store.quarantined()) == self.quarantined


TestStoreAgainstModel = StoreMachine.TestCase
TestStoreAgainstModel.settings = settings(max_examples=8, stateful_step_count=20)
