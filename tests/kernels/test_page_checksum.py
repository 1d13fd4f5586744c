"""The checksum of a block where its bytes are: the same 16 bytes as xxhash gives on the host, for every size and seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from kvtier.kernels.page_checksum import BlockChecksum, finish, lanes_reference, seeded_secret


@pytest.mark.parametrize("size", [248, 256, 1000, 1024, 1032, 1088, 1096, 2048, 2056, 4096, 1536, 65536])
@pytest.mark.parametrize("seed", [0, 1, (1 << 64) - 1, 0xFEDC_BA98_7654_3210])
def test_the_algorithm_as_it_is_cut_up_here_is_xxh3(size, seed):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    secret = seeded_secret(seed)
    assert finish(lanes_reference(data, secret), secret, size) == xxhash.xxh3_128_digest(data.data, seed=seed)


def test_one_flipped_bit_anywhere_changes_the_lanes():
    data = np.random.default_rng(1).integers(0, 256, 2048, dtype=np.uint8)
    secret = seeded_secret(7)
    right = finish(lanes_reference(data, secret), secret, data.size)
    for place in (0, 7, 8, 63, 1023, 1024, 1984, 2047):
        data[place] ^= 1
        assert finish(lanes_reference(data, secret), secret, data.size) != right
        data[place] ^= 1


@pytest.mark.parametrize("size", [5, 240, 1001, 4096])
def test_memory_of_the_host_is_summed_up_by_xxhash_itself(size):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    checksum = BlockChecksum(torch.from_numpy(data))
    assert checksum.digest(9) == xxhash.xxh3_128_digest(data.data, seed=9)
    data[-1] ^= 1
    assert checksum.digest(9) == xxhash.xxh3_128_digest(data.data, seed=9), "it looks at the memory as it is now"


def test_the_kernels_interpreted_give_what_xxhash_gives():
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    script = Path(__file__).with_name("interpreted_checksum.py")
    done = subprocess.run([sys.executable, str(script)], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": same") == 10
