"""Run with TRITON_INTERPRET=1: the checksum kernels on CPU tensors against xxhash. Prints a line for each size."""

from __future__ import annotations

import numpy as np
import torch
import xxhash

from kvtier.kernels.page_checksum import finish, number_of_chunks, secret_words, seeded_secret
from kvtier.kernels.triton_checksum import sum_up

SIZES = (248, 256, 1024, 1032, 1088, 2048, 4096, 1536, 17 * 1024 + 8, 64 * 1024)


def digest(data: np.ndarray, seed: int) -> bytes:
    secret = seeded_secret(seed)
    sums = torch.full((max(number_of_chunks(data.size), 1), 8), -1, dtype=torch.int64)
    lanes = torch.full((8,), -1, dtype=torch.int64)
    sum_up(torch.from_numpy(data), torch.from_numpy(secret_words(secret)), sums, lanes)
    return finish(lanes.numpy().view(np.uint64), secret, data.size)


if __name__ == "__main__":
    generator = np.random.default_rng(4)
    for size in SIZES:
        data = generator.integers(0, 256, size, dtype=np.uint8)
        for seed in (0, 0xFEDC_BA98_7654_3210):
            assert digest(data, seed) == xxhash.xxh3_128_digest(data.data, seed=seed), (size, seed)
        print(f"{size} bytes: same")
