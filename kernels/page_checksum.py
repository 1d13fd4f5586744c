"""Checksum of a block where its bytes are (spec: page checksum): XXH3-128, on a GPU the same 16 bytes as on the host.

XXH3 (Yann Collet, xxHash 0.8, "long" inputs) takes a block in chunks of 1,024 bytes, 16 stripes of eight 64-bit lanes each.
Within a chunk the stripes' contributions are only added up; between chunks each lane is scrambled. So the bytes are summed up
in parallel, a chunk of 1,024 bytes to 64, and one short pass goes over those sums. The last 64 bits of arithmetic, which want
products of 128 bits, are done on the host.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash

CHUNK_BYTES: Final = 1024
STRIPE_BYTES: Final = 64
SHORTEST: Final = 248
"""Below, XXH3 is another algorithm; and the kernels read whole words of 8 bytes."""

_MASK: Final = (1 << 64) - 1
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
FIRST_LANES: Final = (_PRIME32[2], _PRIME64[0], _PRIME64[1], _PRIME64[2], _PRIME64[3], _PRIME32[1], _PRIME64[4], _PRIME32[0])
"""What the eight lanes start with."""

_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e")
_LAST_STRIPE: Final = len(_SECRET) - STRIPE_BYTES - 7  # where in the secret the last stripe reads, and the two halves of the end
_LOW: Final = 11
_HIGH: Final = len(_SECRET) - STRIPE_BYTES - 11


class BlockChecksum:
    """Computes the checksum of one piece of memory again and again. One thread at a time.

    Args:
        block: uint8 ``[bytes]``, contiguous.
    """

    def __init__(self, block: torch.Tensor) -> None:
        self._block = block
        self._is_on_device = block.is_cuda and block.numel() >= SHORTEST and block.numel() % 8 == 0 and block.data_ptr() % 8 == 0
        if self._is_on_device:
            # torch has few streams and takes turns. One of a high priority is not an engine's, whose kernels this would have to wait for.
            self._stream = torch.cuda.Stream(block.device, priority=-1)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):  # on another stream the memory might still be in use by whoever had it before
                self._secret = torch.empty(40, dtype=torch.int64, device=block.device)
                self._sums = torch.empty(max(number_of_chunks(block.numel()), 1), 8, dtype=torch.int64, device=block.device)
                self._lanes = torch.empty(8, dtype=torch.int64, device=block.device)

    def digest(self, seed: int) -> bytes:
        """``xxh3_128_digest(bytes of the block, seed)``. What wrote the block must be over on the host's word.

        On a GPU it runs on a stream of its own and the call waits for that. Odd sizes that the kernels do not take are
        fetched and summed up on the host.
        """
        if not self._is_on_device:
            return xxhash.xxh3_128_digest(self._block.cpu().numpy().data, seed=seed)
        from kvtier.kernels.triton_checksum import sum_up

        secret = seeded_secret(seed)
        with torch.cuda.stream(self._stream):
            self._secret.copy_(torch.from_numpy(secret_words(secret)))
            sum_up(self._block, self._secret, self._sums, self._lanes)
            lanes = self._lanes.cpu()
        return finish(lanes.numpy().view(np.uint64), secret, self._block.numel())


def number_of_chunks(num_bytes: int) -> int:
    """Chunks that end in a scrambling. The last one, whole or not, does not."""
    return (num_bytes - 1) // CHUNK_BYTES


def seeded_secret(seed: int) -> bytes:
    """The 192 bytes that a seed makes of the secret: it is added to every other word and taken from the rest."""
    words = struct.unpack("<24Q", _SECRET)
    return struct.pack("<24Q", *[(word + (seed if number % 2 == 0 else -seed)) & _MASK for number, word in enumerate(words)])


def secret_words(secret: bytes) -> npt.NDArray[np.int64]:
    """What the kernels read: int64 [40], its 24 words, the 8 of the last stripe, which begin between two of those, and what the lanes
    start with."""
    last = secret[_LAST_STRIPE:_LAST_STRIPE + STRIPE_BYTES]
    return np.frombuffer(bytearray(secret + last + struct.pack("<8Q", *FIRST_LANES)), np.int64)


def finish(lanes: npt.NDArray[np.uint64], secret: bytes, num_bytes: int) -> bytes:
    """The digest from the eight lanes after the last stripe: 16 bytes, in the order of ``xxh3_128_digest``."""
    values = [int(lane) for lane in lanes]
    low = _merge(values, secret[_LOW:_LOW + STRIPE_BYTES], num_bytes * _PRIME64[0] & _MASK)
    high = _merge(values, secret[_HIGH:_HIGH + STRIPE_BYTES], ~(num_bytes * _PRIME64[1]) & _MASK)
    return struct.pack(">QQ", high, low)


def _merge(lanes: list[int], secret: bytes, start: int) -> int:
    words = struct.unpack("<8Q", secret)
    result = start
    for first in range(0, 8, 2):
        product = (lanes[first] ^ words[first]) * (lanes[first + 1] ^ words[first + 1])
        result += (product & _MASK) ^ (product >> 64)
    result &= _MASK
    result ^= result >> 37
    result = result * 0x165667919E3779F9 & _MASK
    return result ^ (result >> 32)


def lanes_reference(data: npt.NDArray[np.uint8], secret: bytes) -> npt.NDArray[np.uint64]:
    """The eight lanes after the last stripe, step by step as the algorithm is defined. For tests: slow."""
    lanes = np.array(FIRST_LANES, np.uint64)

    def add(stripe: npt.NDArray[np.uint8], place: int) -> None:
        words = stripe.view(np.uint64)
        keyed = words ^ np.frombuffer(secret, np.uint64, 8, place)
        lanes[...] += words[[1, 0, 3, 2, 5, 4, 7, 6]] + (keyed & np.uint64(0xFFFFFFFF)) * (keyed >> np.uint64(32))

    for number in range((data.size - 1) // STRIPE_BYTES):
        add(data[number * STRIPE_BYTES:(number + 1) * STRIPE_BYTES], number % 16 * 8)
        if number % 16 == 15:
            lanes ^= (lanes >> np.uint64(47)) ^ np.frombuffer(secret, np.uint64, 8, len(secret) - STRIPE_BYTES)
            lanes *= np.uint64(_PRIME32[0])
    add(data[-STRIPE_BYTES:], _LAST_STRIPE)
    return lanes
