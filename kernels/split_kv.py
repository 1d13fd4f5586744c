"""Joining the parts of a split attention by their log-sum-exp (spec: read path, split over pages).

Each part is attention over some of the keys. With the logarithm of its sum of exponentials it says how much of the whole it is, so the
parts can be joined exactly, in any order and number (Flash-Decoding, Dao et al., 2023; cascade attention in FlashInfer).
"""

from __future__ import annotations

import torch


def join_parts(parts: torch.Tensor, log_sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys from attention over parts of them.

    Args:
        parts: ``[..., parts, heads, value_dim]``: results, each over its own keys; floating point.
        log_sums: ``[..., parts, heads]``: logarithm in base 2 of each part's sum of 2**score, with scores in base 2; -inf for a part
            without keys, whose result may be anything finite.

    Returns:
        The joined results ``[..., heads, value_dim]`` and their log-sums ``[..., heads]``, which can be joined again. Zeros and -inf
        where no part has a key.
    """
    largest = log_sums.amax(-2, keepdim=True)
    shift = torch.where(largest == -torch.inf, 0, largest)
    weights = torch.exp2(log_sums - shift)
    sums = weights.sum(-2)
    joined = (parts * weights[..., None]).sum(-3) / torch.where(sums == 0, 1, sums)[..., None]
    return joined, torch.log2(sums) + shift.squeeze(-2)
