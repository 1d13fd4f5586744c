"""The rest of a scheduler's contract: what if a sequence ended, is waiting worth it, how long may a chunk be.

Nothing here touches the real counts. Source of the questions: TensorRT-LLM's capacity and micro-batch schedulers.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from kvtier.errors import RequestError
from kvtier.pools.pool_index import PRIMARY
from kvtier.tiering.ledger.admission import may_reuse
from kvtier.tiering.ledger.capacity import held_blocks, match, most_blocks
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.sequence import ActiveSequence
from kvtier.tiering.ledger.state import LedgerState


class WhatIf:
    """References taken away in thought, since the last start, by group and block id; and the blocks that this freed."""

    def __init__(self, num_groups: int) -> None:
        self._taken: list[dict[int, int]] = [{} for _ in range(num_groups)]
        self._removed: set[int] = set()
        self.freed: list[int] = [0] * num_groups

    def remove(self, state: LedgerState, sequence: ActiveSequence, group: int = 0) -> int:
        """As if the sequence were removed, from all groups. Returns how many primary blocks of ``group`` that would free: none the
        second time, and none that a file is being read into or written from, for those are free only later."""
        state.check_group(group)
        before = self.freed[group]
        if sequence.order in self._removed:
            return 0
        self._removed.add(sequence.order)
        for row in sequence.rows:
            taken = self._taken[row.group]
            for beam in range(len(row.other_beams) + 1):
                for block in row.beam(beam):
                    if block.id < 0:
                        continue
                    count = taken.get(block.id, 0) + 1
                    taken[block.id] = count
                    if count == block.ref_count and not state.allocators[row.group].is_busy(block):
                        self.freed[row.group] += 1
        return self.freed[group] - before


def num_schedulable_blocks(state: LedgerState, what_if: WhatIf, group: int) -> int:
    """Primary blocks that would be free after everything removed in thought."""
    state.check_group(group)
    return state.allocators[group].queues.num_free(PRIMARY) + what_if.freed[group]


def request_block_budget(state: LedgerState, sequence: ActiveSequence, group: int) -> int:
    """Blocks that the request may hold at most until it is complete.

    Scope: the primary blocks of one group, over all beams, from now until ``max_new_tokens`` are generated, those it holds already
    included; not its blocks on lower levels, nor what leases hold beyond it.
    """
    state.check_group(group)
    asked = sequence.request
    total = most_blocks(state, asked, max(asked.num_tokens + asked.max_new_tokens, sequence.num_tokens), group)
    return max(total, held_blocks(sequence, group))


def probe_prefix_tokens(state: LedgerState, request: Request) -> int:
    """Prompt tokens that could be reused now, for routers: the sum of what :func:`match` says, by the same rules."""
    return match(state, request).reusable_tokens


def beneficial_to_skip(state: LedgerState, request: Request, contributed_keys: Container[object]) -> bool:
    """Whether the request should wait a step, because the first block that it would compute is being computed by another request.

    ``contributed_keys`` are the ``first_new_key`` of the requests that compute now. What may not reuse gains nothing by waiting.
    """
    if not may_reuse(state, request):
        return False
    key = match(state, request).first_new_key
    return key is not None and key in contributed_keys


def fit_token_budget(state: LedgerState, sequence: ActiveSequence, chunk_tokens: Any, token_budget: Any) -> int:
    """How many prompt tokens to compute now, when less was reusable than estimated and the planned chunk no longer fits the budget.

    No more than ``chunk_tokens``, ``token_budget`` and what is left of the prompt. A chunk that does not end the prompt ends at a
    multiple of the block size, unless the budget does not reach that far. With chunked prefill over windows no more than there are blocks
    for: nothing while the sequence is paused.

    Raises:
        RequestError: a negative number.
    """
    for name, value in (("chunk_tokens", chunk_tokens), ("token_budget", token_budget)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise RequestError(f"{name}={value!r}: must be a whole number of at least 0")
    left = max(sequence.num_prompt_tokens - sequence.computed, 0)
    if state.is_chunked:
        left = max(min(sequence.covered, sequence.num_prompt_tokens) - sequence.computed, 0)
    fitting: int = min(chunk_tokens, token_budget, left)
    if fitting == left:
        return fitting
    aligned = (sequence.computed + fitting) // state.tokens_per_block * state.tokens_per_block - sequence.computed
    return aligned if aligned > 0 else fitting
