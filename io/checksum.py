"""Checksums of what is on NVMe (design: checksums are seeded with key and slot).

XXH3-128 (Yann Collet's xxHash, through the ``xxhash`` package, which releases the GIL while it works on a block). It finds
accidents, not attackers. The seed holds group, slot and key, so the right bytes in the wrong place do not verify either: a
misdirected read or write is found like a flipped bit.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

ALGORITHM: Final = "xxh3-128"
"""Name of the algorithm, as slot headers carry it."""

CHECKSUM_BYTES: Final = 16

_PLACE: Final = struct.Struct("<QQ")


def block_checksum(data: npt.NDArray[np.uint8], key: bytes, group: int, slot: int) -> bytes:
    """Checksum of a block's bytes for one place.

    Args:
        data: uint8 [block_bytes], contiguous, without padding.
        key: chain key of the content, 32 bytes.
        group, slot: where the block lies.

    Returns:
        16 bytes.
    """
    return xxhash.xxh3_128_digest(data.data, seed=block_seed(key, group, slot))


def block_seed(key: bytes, group: int, slot: int) -> int:
    """Seed of a block's checksum, 64 bits: what it is and where it lies. Also for whoever computes it where the bytes are."""
    return xxhash.xxh3_64_intdigest(_PLACE.pack(group, slot) + key)


def page_checksum(page: memoryview) -> bytes:
    """Checksum of a header page's own bytes (uint8, contiguous). 16 bytes."""
    return xxhash.xxh3_128_digest(page)


def row_digest(packed: bytes, seed: int) -> int:
    """Digest of a manifest row's packed columns as a signed 64-bit integer, the widest that SQLite stores."""
    digest = xxhash.xxh3_64_intdigest(packed, seed=seed)
    return digest - (1 << 64) if digest >> 63 else digest
