"""Sequences whose keys and values are known, in pages of any kind, for the tests of attention: where everything lies is worked out
here, in plain Python, and so is what attention over it must be, in float64. What no query may read is poison."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from kvtier.kernels import RingMap, Visibility
from kvtier.kernels.nvfp4 import dequantise_nvfp4_torch, quantise_nvfp4_torch

NVFP4 = torch.uint8
LAYERS, LAYER = 2, 1


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """All bytes 0xFF: NaN in every floating-point dtype."""
    return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN when anything is NaN, and NaN is below no limit. 0 where both are nothing but zeros."""
    difference, size = float((out.double() - expected.double()).norm()), float(expected.double().norm())
    return difference if size == 0.0 else difference / size


class AttentionBatch:
    """Sequences in scattered blocks.

    Args:
        lengths: tokens of each sequence.
        first: position of the first query of each; None: the last token. Blocks that have left its window are null.
        heads, group, tokens_per_block, key_dim, value_dim: of the model.
        window, sinks: what a query sees.
        ring: spare places of a ring, which tokens share; None: a line.
        dtype: of the pages; ``NVFP4`` for that.
        latent: one row serves as key and value.
        tokens_first: other strides.
        scales: of keys and of values.
    """

    def __init__(self, lengths: Sequence[int], *, first: Sequence[int] | None = None, heads: int = 2, group: int = 2,
                 tokens_per_block: int = 4, key_dim: int = 16, value_dim: int = 16, window: int | None = None, sinks: int = 0,
                 ring: bool | None = None, dtype: torch.dtype = torch.float32, latent: bool = False, tokens_first: bool = False,
                 scales: tuple[float, float] = (1.0, 1.0), seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.heads, self.group, self.unit = lengths, heads, group, tokens_per_block
        self.key_dim, self.value_dim, self.window, self.sinks, self.latent, self.dtype = key_dim, value_dim, window, sinks, latent, dtype
        self.scales = scales
        self.ring = None if ring is None or window is None else RingMap(window, sinks, tokens_per_block, ring)
        self.is_split = not latent and key_dim != value_dim
        self.kv_factor = 1 if latent or self.is_split else 2
        first = [length - 1 for length in lengths] if first is None else first
        is_stored = [[token for token in range(length) if self._is_stored(token, length)] for length in lengths]
        blocks = [sorted({self.place(token) // tokens_per_block for token in tokens if self._is_seen(token, start)})
                  for tokens, start in zip(is_stored, first, strict=True)]
        num_blocks = sum(map(len, blocks)) + 3
        free = random.Random(seed).sample(range(num_blocks), num_blocks)
        slots = [{block: free.pop() for block in row} for row in blocks]
        width = max((row[-1] + 1 for row in blocks if row), default=1) + 2
        self.table = torch.full((len(lengths), 2, width), -1, dtype=torch.int32)
        step = LAYERS * self.kv_factor
        for row, found in enumerate(slots):
            for block, slot in found.items():
                self.table[row, :, block] = torch.tensor([slot * step, slot * step + self.kv_factor - 1])

        def pool(dim: int, numbers: torch.dtype, shared: bool) -> torch.Tensor:
            page = (tokens_per_block, heads) if tokens_first else (heads, tokens_per_block)
            pages = poisoned((num_blocks * LAYERS * (self.kv_factor if shared else 1), *page, dim), numbers)
            return pages.transpose(1, 2) if tokens_first else pages

        packing = 2 if dtype == NVFP4 else 1
        self.pages = pool(key_dim // packing, dtype, True)
        self.value_pages = pool(value_dim // packing, dtype, False) if self.is_split else None
        self.scale_pages = pool(key_dim // 16, torch.uint8, True) if dtype == NVFP4 else None
        self.value_scale_pages = pool(value_dim // 16, torch.uint8, False) if dtype == NVFP4 and self.is_split else None

        # Dense, float64, what reading must find: [length, heads, dim].
        self.keys = [self._store(torch.randn(length, heads, key_dim, generator=generator), scales[0])[2] for length in lengths]
        self.values = [keys[..., :value_dim] if latent else
                       self._store(torch.randn(len(keys), heads, value_dim, generator=generator), scales[1])[2] for keys in self.keys]
        for row, found in enumerate(slots):
            for token in is_stored[row]:
                block, inside = divmod(self.place(token), tokens_per_block)
                if block in found:
                    self.put(0, found[block], inside, self.keys[row][token])
                    if not latent:
                        self.put(1, found[block], inside, self.values[row][token])
        self._generator = generator

    def place(self, token: int) -> int:
        """Where a token lies, counted from the start of its row."""
        bubble = -self.sinks % self.unit if self.window is not None else 0
        if token < self.sinks:
            return token
        if self.ring is not None:
            return self.sinks + bubble + (token - self.sinks) % self.ring.ring
        return token + bubble

    def _is_stored(self, token: int, length: int) -> bool:
        return self.ring is None or token < self.sinks or token >= length - self.ring.ring

    def _is_seen(self, token: int, first: int) -> bool:
        """By a query at ``first`` or behind it."""
        return self.window is None or token < self.sinks or token > first - (self.window - self.sinks)

    def _store(self, numbers: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Stored numbers, block scales and what they are again, float64."""
        if self.dtype == NVFP4:
            # Not the references, whose bits these have: a batch as large as a GPU's tests want takes those a minute.
            codes, block_scales = quantise_nvfp4_torch(numbers.float(), scale)
            return codes, block_scales, dequantise_nvfp4_torch(codes, block_scales, scale, torch.float32).double()
        scaled = numbers / scale
        stored = (scaled.round().clamp(-128, 127) if self.dtype == torch.int8 else scaled).to(self.dtype)
        return stored, None, stored.double() * scale

    def put(self, field: int, slot: int, inside: int, numbers: torch.Tensor) -> None:
        """Write one token, given as numbers that its storage holds exactly."""
        own = field == 1 and self.is_split
        page = slot * LAYERS + LAYER if self.kv_factor == 1 else (slot * LAYERS + LAYER) * 2 + field
        codes, block_scales, _ = self._store(numbers, self.scales[field])
        target = self.value_pages if own else self.pages
        assert target is not None
        target[page, :, inside] = codes
        if block_scales is not None:
            scales = self.value_scale_pages if own else self.scale_pages
            assert scales is not None
            scales[page, :, inside] = block_scales

    def queries(self, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Random, ``[count, query_heads, key_dim]``."""
        return torch.randn(count, self.heads * self.group, self.key_dim, generator=self._generator).to(dtype)

    @property
    def visibility(self) -> Visibility:
        return Visibility(self.window, self.sinks, self.ring)

    @property
    def how(self) -> dict[str, Any]:
        """The keywords that say where everything lies and what is visible."""
        found: dict[str, Any] = {
            "layer": LAYER, "num_layers": LAYERS, "kv_factor": self.kv_factor, "visibility": self.visibility,
            "value_pages": self.value_pages, "scale_pages": self.scale_pages, "value_scale_pages": self.value_scale_pages}
        if self.dtype in (NVFP4, torch.int8, torch.float8_e4m3fn):
            found |= {"key_scale": self.scales[0], "value_scale": self.scales[0 if self.latent else 1]}
        if self.latent:
            found["value_dim"] = self.value_dim
        return found

    def expected(self, sequence: int, query: torch.Tensor, positions: Sequence[int], *, scale: float | None = None,
                 soft_cap: float | None = None, hidden: Sequence[Sequence[int]] | None = None, key_positions: Sequence[int] | None = None,
                 is_causal: bool = True) -> torch.Tensor:
        """What attention of queries at these positions of a sequence is, float64. ``hidden``: tokens that each does not see."""
        keys, values = self.keys[sequence], self.values[sequence]
        keys, values = (rows.repeat_interleave(self.group, dim=1) for rows in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * (1 / math.sqrt(self.key_dim) if scale is None else scale)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        key_positions = range(len(keys)) if key_positions is None else key_positions
        for row, position in enumerate(positions):
            for token, key_position in enumerate(key_positions):
                is_seen = (key_position <= position or not is_causal) and self._is_seen(key_position, position)
                if not is_seen or (hidden is not None and token in hidden[row]):
                    scores[:, row, token] = -math.inf
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
        return torch.einsum("hqk,khd->qhd", weights, values)
