"""A toy engine on the device: keys and values follow from all tokens before them, so one wrong byte anywhere is seen.

It computes on a stream of its own and late: the device sleeps in front of every step, and the engine does not wait for it. So
only the order that ``step`` makes keeps its kernels and our copies apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvtier import KVCacheManager, Request

PATIENCE = 30.0


class GpuToyEngine:
    """Serves one request at a time, in float32 values that are whole numbers below 2**23, so that equality is exact."""

    def __init__(self, cache: KVCacheManager, stream: torch.cuda.Stream) -> None:
        self.cache = cache
        self.stream = stream
        self.sleep_cycles = 2_000_000  # about a millisecond
        group = cache.layout.groups[0]
        self._pages_per_block = group.num_layers * group.kv_factor
        self._shape = (group.num_layers, group.kv_factor, group.spec.num_kv_heads, group.spec.head_dim)
        self._salts = np.random.default_rng(3).integers(0, 1 << 31, self._shape, dtype=np.int64)
        self.buffers = [cache.layer_buffer(layer) for layer in range(group.num_layers)]
        self._wrong = torch.zeros((), dtype=torch.int64, device=self.buffers[0].device)
        self.checked_tokens = 0

    def become_slow(self) -> None:
        """Sleep for about half a second before every step from now on. Forgets what the cache holds.

        CUDA may wait for the device when a kernel is used for the first time, and the allocator when it needs memory. So
        everything that a step does is done once before, with prompts of the length that tests use.
        """
        for number in range(2):
            self.serve(number, list(range(17)))
        self.stream.synchronize()
        self.cache.reset()
        self.checked_tokens = 0
        self.sleep_cycles = 900_000_000

    def values(self, tokens: Sequence[int]) -> torch.Tensor:
        """What the cache must hold: float32 ``[tokens, layers, fields, heads, dim]`` on the host."""
        state, rows = 17, []
        for token in tokens:
            state = (state * 1_000_003 ^ token) % (1 << 31)
            rows.append((state ^ self._salts) * 2_654_435_761 >> 7 & 0x7FFFFF)
        return torch.from_numpy(np.stack(rows).astype(np.float32))

    def serve(self, request_id: int, tokens: Sequence[int], store: bool = True) -> int:
        """Admit, check what was reused, compute the rest, remove. Returns the number of reused tokens."""
        self.cache.add_sequence(Request(request_id, tokens))
        reused = self.cache.wait_ready(request_id, timeout=PATIENCE)
        self.compute(request_id, tokens, reused)
        self.cache.remove_sequence(request_id, store=store)
        self.cache.refresh()
        return reused

    def compute(self, request_id: int, tokens: Sequence[int], start: int) -> None:
        """One step: compare the tokens before ``start`` with what they must be, and write the others."""
        expected = self.values(tokens).to(self._wrong.device)
        torch.cuda.current_stream().synchronize()
        expected.record_stream(self.stream)  # the next step's must not be written into this memory while this one still sleeps
        with torch.cuda.stream(self.stream), self.cache.step(self.stream, [request_id]) as ready:
            assert ready == [request_id]
            table = self.cache.block_table(ready)
            torch.cuda._sleep(self.sleep_cycles)
            for layer, buffer in enumerate(self.buffers):
                positions = torch.arange(len(tokens), device=expected.device)
                slots = table[0, 0].long()[positions // buffer.shape[3]] // self._pages_per_block
                inside = positions % buffer.shape[3]
                found = buffer[slots[:start], :, :, inside[:start]]
                self._wrong += (found != expected[:start, layer]).sum()
                buffer[slots[start:], :, :, inside[start:]] = expected[start:, layer]
        self.checked_tokens += start
        self.cache.mark_computed(request_id, len(tokens))

    def wrong_values(self) -> int:
        """How many values were not what they had to be, in all steps so far."""
        self.stream.synchronize()
        return int(self._wrong)


def bytes_of_block(engine: GpuToyEngine, tokens: Sequence[int], first: int, tokens_per_block: int) -> bytes:
    """The block that holds positions ``first`` and the following, as it lies in memory."""
    rows = engine.values(tokens)[first:first + tokens_per_block]  # [tokens, layers, fields, heads, dim]
    return rows.permute(1, 2, 3, 0, 4).contiguous().numpy().tobytes()
