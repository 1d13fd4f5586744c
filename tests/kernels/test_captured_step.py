"""A decode step as a captured graph runs it: the same calls over the same buffers, replayed while sequences end and others begin.

Nothing here is captured, there is no GPU; but the step may read nothing except what lies at addresses that were there before, no value is
checked (the host would wait), and each replay has the shapes of the largest batch.
"""

from __future__ import annotations

import pytest
import torch

from kvtier.kernels import DecodePlan, OffsetTable, attention_decode, fused_write, gather_tokens, plan_write

ROWS, BLOCKS, UNIT, HEADS, DIM, LAYERS, SLOTS = 4, 3, 4, 2, 8, 2, 16
HOW = {"layer": 1, "num_layers": LAYERS}


class CapturedStep:
    """One layer of a step for up to ``ROWS`` sequences, with buffers of its own."""

    def __init__(self) -> None:
        self.pages = torch.full((SLOTS * LAYERS * 2, HEADS, UNIT, DIM), float("nan"))
        self.table = OffsetTable(max_rows=ROWS, max_blocks=BLOCKS, num_layers=LAYERS, kv_factor=2, num_blocks=SLOTS)
        self.cache_lengths, self.new_tokens = (torch.zeros(ROWS, dtype=torch.int32) for _ in range(2))
        self.qkv = torch.zeros(ROWS, 3 * HEADS * DIM)
        self.queries = torch.zeros(ROWS, HEADS, DIM)
        self.out = torch.zeros(ROWS, HEADS, DIM)
        self.plan = DecodePlan(max_sequences=ROWS, max_tokens=BLOCKS * UNIT, query_heads=HEADS, kv_heads=HEADS, value_dim=DIM)

    def replay(self) -> None:
        plan = plan_write(self.cache_lengths, self.new_tokens, ROWS, is_padded=True, check_values=False)
        fused_write(self.qkv, self.pages, self.table.tensor, plan, query_heads=HEADS, out=self.queries, check_values=False, **HOW)
        self.out.copy_(attention_decode(self.queries, self.pages, self.table.tensor, self.cache_lengths, plan=self.plan,
                                        check_values=False, **HOW))

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in (self.pages, self.table.tensor, self.cache_lengths, self.new_tokens, self.qkv,
                                                 self.queries, self.out)]


class Sequence:
    """What one sequence has computed, and its slots."""

    def __init__(self, slots: list[int]) -> None:
        self.slots = slots
        self.keys, self.values = torch.zeros(0, HEADS, DIM), torch.zeros(0, HEADS, DIM)


@pytest.mark.parametrize("seed", range(4))
def test_a_replay_serves_whoever_is_there_and_writes_for_nobody_else(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    step, free = CapturedStep(), torch.randperm(SLOTS, generator=generator).tolist()
    before, active = step.addresses(), [Sequence([free.pop() for _ in range(BLOCKS)]) for _ in range(ROWS)]
    for turn in range(14):
        if turn in (3, 4, 8):                      # one ends, its blocks go to whoever comes next
            free += active.pop(0).slots
        if turn in (6, 9):
            active.append(Sequence([free.pop(0) for _ in range(BLOCKS)]))
        active = [sequence for sequence in active if len(sequence.keys) < BLOCKS * UNIT]
        numbers = torch.randn(len(active), 3, HEADS, DIM, generator=generator)
        step.qkv.fill_(float("nan"))               # whatever lies in the rows of ended sequences
        step.qkv[:len(active)] = numbers.flatten(1)
        for row, sequence in enumerate(active):
            sequence.keys, sequence.values = (torch.cat([rows, numbers[row, field, None]])
                                              for rows, field in ((sequence.keys, 1), (sequence.values, 2)))
        lengths = torch.tensor([len(sequence.keys) for sequence in active], dtype=torch.int32)
        step.cache_lengths.zero_()[:len(active)] = lengths
        step.new_tokens.zero_()[:len(active)] = 1
        step.table.fill([sequence.slots[:-(-len(sequence.keys) // UNIT)] for sequence in active])
        untouched = step.pages.clone()
        step.replay()
        assert step.addresses() == before
        assert step.table.tensor[len(active):].eq(-1).all(), "rows of ended sequences are null"
        for row, sequence in enumerate(active):
            weights = torch.softmax(torch.einsum("hd,thd->ht", numbers[row, 0], sequence.keys) / DIM**0.5, dim=-1)
            torch.testing.assert_close(step.out[row], torch.einsum("ht,thd->hd", weights, sequence.values), rtol=1e-5, atol=1e-5)
            for is_value, rows in ((False, sequence.keys), (True, sequence.values)):
                assert torch.equal(gather_tokens(step.pages, step.table.tensor[row], len(rows), is_value=is_value, **HOW), rows)
        assert torch.equal(step.out[len(active):], torch.zeros(ROWS - len(active), HEADS, DIM)), "a row without keys is 0"
        changed = (step.pages.view(torch.int32) != untouched.view(torch.int32)).any(-1).nonzero()
        assert len(changed) == 2 * HEADS * len(active), "one key and one value of each sequence, and nothing else"
