"""Layer pieces: a load cut by layers, so that a forward pass can begin when its first layers have arrived (design: transfer rules).

Pure arithmetic: how many pieces are worth their calls, and where they end.
"""

from __future__ import annotations

from typing import Final, TypeAlias

Layers: TypeAlias = tuple[int, int]
"""The first of some layer positions of a block, and the one behind the last."""

LEAST_CALL_BYTES: Final = 1 << 20
"""On the CPU each call of a copy moves at least so much on average: after it the copying thread has to win the GIL back, which beside
a busy Python thread takes up to a switch interval (5 ms)."""

LEAST_UNIT_BYTES: Final = 256 << 10
"""On CUDA a piece takes at least so much of each block: DMA of smaller units does not fill the link, and each unit costs the host a call
or a descriptor."""

LEAST_PIECE_BYTES: Final = 4 << 20
"""A piece of all blocks together, on CUDA: a smaller one takes a link so little time that nobody would notice that it came earlier."""


def piece_ends(num_layers: int, num_pieces: int) -> tuple[int, ...]:
    """Behind which layers pieces of about equal size end; there are no more of them than layers.

    >>> piece_ends(30, 4)
    (8, 15, 23, 30)
    """
    pieces = max(1, min(num_pieces, num_layers))
    return tuple([-(-num_layers * number // pieces) for number in range(1, pieces + 1)])


def pieces_on_host(most: int, num_bytes: int, calls: int) -> int:
    """How many pieces a copy within the host is worth, if each piece takes so many calls: 1 for none."""
    return max(1, min(most, num_bytes // max(calls * LEAST_CALL_BYTES, 1)))


def pieces_by_layer(most: int, num_bytes: int, calls: int) -> int:
    """The same where each layer takes calls of its own: as many in all, however the layers are shared out among pieces."""
    return most if num_bytes >= calls * LEAST_CALL_BYTES else 1


def pieces_on_device(most: int, num_bytes: int, block_bytes: int) -> int:
    """How many pieces a copy to a device is worth, of blocks of this size: 1 for none."""
    return max(1, min(most, block_bytes // LEAST_UNIT_BYTES, num_bytes // LEAST_PIECE_BYTES))
