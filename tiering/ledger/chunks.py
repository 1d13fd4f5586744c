"""Chunked prefill over windows, in numbers: where chunks end, and which blocks are only needed while one is computed.

A prompt that is computed chunk by chunk needs, of a window group, the blocks of its window and of the chunk. Those of the chunk's
blocks that are out of the window again when the chunk is computed are *scratch*. Their number over all sequences is fixed for each
group, so that long prompts cannot take the pool from each other at the same moment.
"""

from __future__ import annotations

from kvtier.errors import ConfigError
from kvtier.tiering.ledger.group import WINDOW, GroupGeometry
from kvtier.tiering.ledger.rules import LedgerRules
from kvtier.tiering.ledger.sequence import SequenceRow


def scratch_budgets(geometries: list[GroupGeometry], rules: LedgerRules) -> list[int]:
    """Scratch blocks of each group: what was asked for, or enough for two chunks; 0 where nothing is computed in chunks.

    Raises:
        ConfigError: a budget that the largest chunk of some group does not fit into.
    """
    budgets: list[int] = []
    for group, geometry in enumerate(geometries):
        needed = scratch_of_chunk(geometry, rules.chunk_size)
        asked = rules.window_scratch_blocks
        if asked is None:
            asked = 2 * needed
        elif asked < needed:
            raise ConfigError(f"window_scratch_blocks={asked} with chunk_size={rules.chunk_size}: a chunk over the window of "
                              f"{geometry.window} tokens (group {group}) needs {needed} scratch blocks; raise window_scratch_blocks or "
                              "lower chunk_size")
        budgets.append(asked)
    return budgets


def scratch_of_chunk(geometry: GroupGeometry, chunk_size: int) -> int:
    """The most blocks of one chunk that nothing behind it reads; 0 for a chunk that fits into its window, or without chunks."""
    if geometry.kind != WINDOW or chunk_size == 0:
        return 0
    return max((chunk_size + 1 - (geometry.window - geometry.sinks)) // geometry.tokens_per_block, 0)


def chunk_end(chunk_size: int, computed: int, num_tokens: int) -> int:
    """Where the chunk ends that starts behind ``computed`` tokens: at a multiple of the chunk size, or with the tokens."""
    return min((computed // chunk_size + 1) * chunk_size, num_tokens)


def scratch_span(geometry: GroupGeometry, first: int, end_token: int) -> tuple[int, int]:
    """Positions from ``first`` on, as (begin, end), that have left the window when ``end_token`` tokens are computed."""
    begin = max(first, geometry.num_sink_blocks)
    return begin, max(geometry.num_sink_blocks + geometry.num_departed(end_token + 1), begin)


def scratch_held(geometry: GroupGeometry, row: SequenceRow) -> int:
    """Scratch blocks that a row holds: those of its last chunk that have not left the window yet."""
    return max(row.scratch_end - max(row.scratch_begin, geometry.num_sink_blocks + row.num_departed), 0)


def most_in_prefill(geometry: GroupGeometry, chunk_size: int, num_tokens: int, private_tails: int) -> int:
    """Blocks of a window group that a prompt needs at the same time at most. ``private_tails``: more of its last block, for beams."""
    most = start = 0
    while start < num_tokens:
        end = min(start + chunk_size, num_tokens)
        held = geometry.num_blocks(end) - geometry.num_departed(start + 1) + (private_tails if end == num_tokens else 0)
        most = max(most, held)
        start = end
    return most
