"""Partial matches among siblings (design: reuse is decided by content).

In byte order the keys that share most leading tokens with a chunk stand around the place where the chunk would be, and fewer are
shared the further one goes from there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvtier.tiering.ledger.node import Node

BUCKET_KEYS: Final = 512


class SiblingOrder:
    """The keys of a node's many children, sorted, in buckets, so that adding one among a million moves only a bucket's worth of pointers.

    A place is (bucket, position inside it). ``buckets[i]`` holds the keys from ``_starts[i]`` up to below ``_starts[i + 1]``; only a
    lone bucket may be empty.
    """

    def __init__(self, keys: list[bytes]) -> None:
        self.buckets: list[list[bytes]] = [[]]
        self._starts: list[bytes] = [b""]
        for key in keys:
            self.add(key)

    def add(self, key: bytes) -> None:
        place = self.bucket_of(key)
        bucket = self.buckets[place]
        insort(bucket, key)
        if len(bucket) > BUCKET_KEYS:
            upper = bucket[BUCKET_KEYS // 2:]
            del bucket[BUCKET_KEYS // 2:]
            self.buckets.insert(place + 1, upper)
            self._starts.insert(place + 1, upper[0])

    def remove(self, key: bytes) -> None:
        place = self.bucket_of(key)
        bucket = self.buckets[place]
        position = bisect_left(bucket, key)
        assert bucket[position] == key
        del bucket[position]
        if not bucket and len(self.buckets) > 1:
            del self.buckets[place]
            del self._starts[place]
            self._starts[0] = b""

    def bucket_of(self, key: bytes) -> int:
        """The bucket in which a key is, or would be."""
        return bisect_right(self._starts, key) - 1


class PartialPlaces:
    """Places whose key shares leading tokens with a chunk, as (tokens shared, node, position), longest first.

    They are found one at a time, outwards from where the chunk would stand among the siblings: there may be a hundred thousand of
    them, and mostly the first will do. Not valid any more once the tree has changed.
    """

    def __init__(self, chunk: bytes, width: int, node: Node, found: list[tuple[int, Node, int]]) -> None:
        self._chunk = chunk
        self._width = width
        self._node = node
        self._found = found  # in descending order: taken from the end; and then from the order of many siblings, if there is one
        self._order: SiblingOrder | None = None
        self._left: tuple[int, int] = (0, -1)
        self._right: tuple[int, int] = (0, 0)
        self._left_shared = 0
        self._right_shared = 0

    def search(self, order: SiblingOrder) -> None:
        """Go outwards from the chunk's place in this order."""
        self._order = order
        bucket = order.bucket_of(self._chunk)
        position = bisect_left(order.buckets[bucket], self._chunk)
        self._left = (bucket, position)
        self._right = (bucket, position - 1)
        self._step_left(order)
        self._step_right(order)

    def next_place(self) -> tuple[int, Node, int] | None:
        """The next one, None when there is none left."""
        if self._found:
            return self._found.pop()
        order = self._order
        if order is None:
            return None
        shared = self._left_shared
        if shared >= self._right_shared:
            if shared == 0:
                return None
            bucket, position = self._left
            self._step_left(order)
        else:
            shared = self._right_shared
            bucket, position = self._right
            self._step_right(order)
        return shared, self._node.children[order.buckets[bucket][position]], 0

    def all_places(self) -> list[tuple[int, Node, int]]:
        """All that are left."""
        places: list[tuple[int, Node, int]] = []
        place = self.next_place()
        while place is not None:
            places.append(place)
            place = self.next_place()
        return places

    def _step_left(self, order: SiblingOrder) -> None:
        bucket, position = self._left
        position -= 1
        if position < 0:
            bucket -= 1
            if bucket < 0:
                self._left_shared = 0
                return
            position = len(order.buckets[bucket]) - 1
        self._left = (bucket, position)
        self._left_shared = common_tokens(order.buckets[bucket][position], self._chunk, self._width)

    def _step_right(self, order: SiblingOrder) -> None:
        bucket, position = self._right
        position += 1
        if position >= len(order.buckets[bucket]):
            bucket += 1
            if bucket >= len(order.buckets):
                self._right_shared = 0
                return
            position = 0
        self._right = (bucket, position)
        self._right_shared = common_tokens(order.buckets[bucket][position], self._chunk, self._width)


def common_tokens(left: bytes, right: bytes, width: int) -> int:
    """Equal leading tokens of two keys."""
    size = min(len(left), len(right))
    if size == 0 or left[0] != right[0]:  # mostly
        return 0
    if left.startswith(right) or right.startswith(left):
        return size // width
    different = int.from_bytes(left[:size], "big") ^ int.from_bytes(right[:size], "big")
    return (size - (different.bit_length() + 7) // 8) // width
