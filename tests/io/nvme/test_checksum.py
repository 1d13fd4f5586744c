"""A checksum stands for bytes, key and place together."""

from __future__ import annotations

import numpy as np

from kvtier.io.checksum import CHECKSUM_BYTES, block_checksum, row_digest

DATA = np.arange(8192, dtype=np.uint32).astype(np.uint8)
KEY = bytes(range(32))


def test_every_single_bit_of_the_block_counts() -> None:
    right = block_checksum(DATA, KEY, 0, 5)
    assert len(right) == CHECKSUM_BYTES
    for position in range(0, DATA.size, 97):
        damaged = DATA.copy()
        damaged[position] ^= 1 << position % 8
        assert block_checksum(damaged, KEY, 0, 5) != right


def test_the_same_bytes_have_another_checksum_in_another_place_or_under_another_key() -> None:
    right = block_checksum(DATA, KEY, 0, 5)
    assert block_checksum(DATA.copy(), KEY, 0, 5) == right
    assert block_checksum(DATA, KEY, 0, 6) != right
    assert block_checksum(DATA, KEY, 1, 5) != right
    assert block_checksum(DATA, bytes(32), 0, 5) != right
    assert block_checksum(DATA, KEY, 0, 5 + (1 << 33)) != right


def test_a_row_digest_fits_what_sqlite_stores() -> None:
    digests = [row_digest(bytes([number]), 1) for number in range(64)]
    assert all(-(1 << 63) <= digest < 1 << 63 for digest in digests)
    assert min(digests) < 0 < max(digests)
    assert row_digest(b"x", 1) != row_digest(b"x", 2)
