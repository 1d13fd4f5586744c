"""What became of a store's blocks after something happened to it: read everything back and compare (``kvtier bench integrity``)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier.errors import CorruptBlock, TransferError
from kvtier.io.direct_file import Buffer
from kvtier.io.manifest_rows import Place
from kvtier.io.nvme_store import NvmeStore
from kvtier.io.store_messages import BlockWrite
from kvtier.pools.nvme_geometry import NvmeGeometry

NAMESPACE: Final = '{"model": "kvtier bench integrity"}'
GEOMETRIES: Final = (NvmeGeometry(16384, 48), NvmeGeometry(5000, 24))
"""Two groups: one whose blocks are whole pages, one whose blocks are not."""


def content(key: bytes, group: int) -> Buffer:
    """The one block that has this key, uint8 [block_bytes]."""
    return np.frombuffer(hashlib.shake_128(key).digest(GEOMETRIES[group].block_bytes), np.uint8)


def block(place: Place, key: bytes) -> BlockWrite:
    """The block of this key, to be stored there."""
    return BlockWrite(*place, key, content(key, place[0]), priority=35, expiry=0.0)


@dataclass(frozen=True)
class Outcome:
    """One trial.

    Attributes:
        committed: blocks that the store had confirmed and that nobody gave up.
        lost: of these, not served any more.
        silent: of the lost ones, those whose slot is not in quarantine either: the index has become shorter without a word.
        wrong: blocks served with bytes that are not those of their key.
        unexplained: blocks served that had been given up, or that nobody stored, without a rebuild that would explain it.
        came_back: blocks served that had been given up, after a rebuild, which cannot know.
        quarantined: slots whose block did not verify.
        rebuilt: whether the manifest was made anew from the slot headers.
        seconds: from the start of the store to the moment when it could serve.
    """

    committed: int
    lost: int
    silent: int
    wrong: int
    unexplained: int
    came_back: int
    quarantined: int
    rebuilt: bool
    seconds: float


def examine(store: NvmeStore, must: Mapping[Place, bytes], may: Mapping[Place, Collection[bytes]],
            given_up: Mapping[Place, Collection[bytes]], seconds: float) -> tuple[Outcome, dict[Place, bytes]]:
    """Read every block that the store offers.

    Args:
        store: open; blocks that do not verify are quarantined, as an engine would do.
        must: blocks that were committed.
        may: by place, other blocks that may be there: those of an operation that was under way.
        given_up: by place, blocks that may still lie in the slot though no row said so: discarded, or never confirmed.
        seconds: how long it took the store to start.

    Returns:
        The outcome, and what was served.
    """
    rebuilt = store.stats().rebuilt
    served: dict[Place, bytes] = {}
    wrong = unexplained = came_back = bad = 0
    for stored in store.stored_blocks():
        place = (stored.group, stored.slot)
        out = np.empty(GEOMETRIES[stored.group].block_bytes, np.uint8)
        try:
            store.read_block(*place, stored.key, out)
        except (CorruptBlock, TransferError) as error:
            store.quarantine(*place, str(error))
            bad += 1
            continue
        served[place] = stored.key
        if not np.array_equal(out, content(stored.key, stored.group)):
            wrong += 1
        elif stored.key != must.get(place) and stored.key not in may.get(place, ()):
            if rebuilt and stored.key in given_up.get(place, ()):
                came_back += 1
            else:
                unexplained += 1
    lost = [place for place, key in must.items() if served.get(place) != key]
    quarantined = set(store.quarantined())
    silent = sum(place not in quarantined for place in lost)
    return Outcome(len(must), len(lost), silent, wrong, unexplained, came_back, bad, rebuilt, seconds), served
