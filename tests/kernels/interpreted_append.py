"""Run by test_triton_append in a process of its own: the Triton kernel, interpreted, against the torch path, bit by bit.

TRITON_INTERPRET must be set before triton is imported, and it then holds for the whole process.
"""

from __future__ import annotations

import sys

import torch

from kvtier.kernels.append import append_torch
from kvtier.kernels.triton_append import append_triton


def run_case(dtype: torch.dtype, heads: int, head_dim: int, tokens_per_block: int, tokens_first: bool, has_value: bool, seed: int) -> bool:
    """One random call with skipped and bad tokens among the good ones; True when both paths leave the same bytes."""
    generator = torch.Generator().manual_seed(seed)
    layers, sequences, max_blocks, blocks = 2, 3, 3, 12
    kv_factor = 2 if has_value else 1
    shape = (blocks * layers * kv_factor, *((tokens_per_block, heads) if tokens_first else (heads, tokens_per_block)), head_dim)
    pages = torch.full(shape, float("nan"), dtype=dtype)
    if tokens_first:
        pages = pages.transpose(1, 2)
    slots = torch.randperm(blocks, generator=generator)[:sequences * max_blocks].view(sequences, max_blocks)
    table = torch.stack([slots, slots], dim=1).int() * (layers * kv_factor)
    table[:, 1] += kv_factor - 1
    table[0, 1, 2] = -1                                  # null values: a page again once the layer is added
    table[1, 0, 1] = -1                                  # null keys
    table[1, 0, 2] = blocks * layers * kv_factor - 1     # beyond the pool once the layer is added
    table[2, :, 2] = 2**31 - 1
    # A token for every block, so that each entry is tried; then some that must be left out.
    sequence, block = torch.arange(sequences).repeat_interleave(max_blocks), torch.arange(max_blocks).repeat(sequences)
    position = block * tokens_per_block + torch.randint(tokens_per_block, block.shape, generator=generator)
    sequence = torch.cat([sequence, torch.tensor([-1, 3, 0, 0, -5])])
    position = torch.cat([position, torch.tensor([0, 0, -1, max_blocks * tokens_per_block, 0])])
    key = torch.randn(heads, len(sequence), head_dim, generator=generator).to(dtype).transpose(0, 1)
    value = torch.randn(len(sequence), heads, head_dim, generator=generator).to(dtype) if has_value else None
    wanted, found = pages.clone(), pages.clone()
    append_torch(wanted, key, value, table, sequence, position, kv_factor)
    append_triton(found, key, value, table, sequence.int() if seed % 2 else sequence, position, kv_factor)
    same = torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
    written = not wanted.isnan().all()
    print(f"{dtype} heads={heads} head_dim={head_dim} tokens_per_block={tokens_per_block} tokens_first={tokens_first} "
          f"has_value={has_value}: {'same' if same else 'DIFFERENT'}{'' if written else ', NOTHING WRITTEN'}")
    return same and written


def main() -> int:
    """Exit code 0 when every case agrees."""
    cases = [(torch.float32, 3, 64, 4, False, True), (torch.bfloat16, 3, 20, 2, True, True), (torch.float16, 1, 8, 16, False, True),
             (torch.bfloat16, 1, 48, 4, False, False), (torch.float32, 9, 256, 4, True, True)]
    agreed = [run_case(*case, seed=seed) for seed, case in enumerate(cases)]   # all of them, also after one has failed
    return 0 if all(agreed) else 1


if __name__ == "__main__":
    sys.exit(main())
