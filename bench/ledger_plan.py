"""How much the ledger benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

VLLM: Final = "vllm"
"""Name of the peer in options and rows."""


@dataclass(frozen=True)
class LedgerPlan:
    """How much is measured. Lengths are in tokens, pools in blocks.

    Attributes:
        rounds: recorded for each workload; fewer, but at least five, when its ``seconds`` are over before.
        match_tokens: the prompt of W1 and W1S; in W1S others branch off after every ``branch_every`` blocks.
        insert_tokens, inserts: prompts of W2 and W3, and how many in one turn. In the rows that end in ``first`` a turn is one of them.
        evict_pools: W3's pools.
        decode_sequences, decode_tokens, decode_steps: W4.
        users, history, added, turns: W5.
        host_blocks: blocks of W6 in one turn, in 16 prompts.
        growth: pools of the growth rows; memory is measured at ``memory_blocks``.
        siblings: cached prompts of ``sibling_tokens`` tokens that begin with the same token.
    """

    rounds: int
    seconds: float
    match_tokens: int = 32_768
    branch_every: int = 8
    insert_tokens: int = 8_192
    inserts: int = 16
    evict_pools: tuple[int, ...] = (4_096, 65_536)
    decode_sequences: int = 256
    decode_tokens: int = 480
    decode_steps: int = 64
    users: int = 64
    history: int = 2_000
    added: int = 96
    turns: int = 4
    host_blocks: int = 4_096
    growth: tuple[int, ...] = (1_024, 10_240, 102_400, 1_024_000)
    memory_blocks: int = 1_024_000
    siblings: tuple[int, ...] = (64, 4_096)
    sibling_tokens: int = 65

    @classmethod
    def usual(cls, quick: bool) -> LedgerPlan:
        """Everything in 21 rounds; or 5 rounds without the largest pools."""
        if quick:
            return cls(rounds=5, seconds=10.0, evict_pools=(4_096,), growth=(1_024, 10_240, 102_400), memory_blocks=204_800)
        return cls(rounds=21, seconds=90.0)
