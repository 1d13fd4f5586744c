"""Run by test_row_moves in a process of its own: the Triton kernel, interpreted, against the reference, bit by bit.

TRITON_INTERPRET must be set before triton is imported, and it then holds for the whole process.
"""

from __future__ import annotations

import sys

import torch

from kvtier.kernels.row_moves import RowPlaces, move_rows_reference
from kvtier.kernels.triton_row_moves import move_rows_triton


def rows(count: int, layers: int, num_bytes: int, shape: str, generator: torch.Generator) -> torch.Tensor:
    """uint8 ``[rows, layers, bytes]``, as pools and arenas hold them."""
    def random(*sizes: int) -> torch.Tensor:
        return torch.randint(0, 256, sizes, dtype=torch.uint8, generator=generator)

    if shape == "layer-first":
        return random(layers, count, num_bytes).transpose(0, 1)
    if shape == "padded":
        return random(count, layers * num_bytes + 24)[:, 8:8 + layers * num_bytes].view(count, layers, num_bytes)
    return random(count, layers, num_bytes)


def run_case(num_bytes: int, layers: int, source_shape: str, destination_shape: str, seed: int) -> bool:
    """One random set of pairs; True when the destination holds what it should, and nothing else changed."""
    generator = torch.Generator().manual_seed(seed)
    source = rows(7, layers, num_bytes, source_shape, generator)
    destination = rows(6, layers, num_bytes, destination_shape, generator)
    pairs = torch.stack([torch.randint(0, 7, (4,), generator=generator), torch.randperm(6, generator=generator)[:4]], dim=1)
    wanted, before = move_rows_reference(destination, source, pairs), source.clone()
    move_rows_triton(RowPlaces.of(destination), RowPlaces.of(source), pairs, layers, num_bytes)
    same = torch.equal(destination, wanted) and torch.equal(source, before)
    print(f"{num_bytes} bytes x {layers}, {source_shape} to {destination_shape}: {'same' if same else 'DIFFERENT'}")
    return same


def main() -> int:
    """Exit code 0 when every case agrees."""
    cases = [(64, 3, "dense", "layer-first"), (64, 3, "layer-first", "padded"), (9000, 1, "padded", "dense"), (20, 2, "dense", "dense"),
             (7, 2, "dense", "layer-first"), (16384, 2, "layer-first", "layer-first")]
    agreed = [run_case(*case, seed=seed) for seed, case in enumerate(cases)]  # all of them, also after one has failed
    return 0 if all(agreed) else 1


if __name__ == "__main__":
    sys.exit(main())
