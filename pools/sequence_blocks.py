"""How many blocks a sequence takes in a group (spec: accounting). Pure arithmetic on whole numbers, without any import.

``window=None`` is full attention. Sinks are the leading tokens that never leave the window; behind them the *bubble* pads to
a block boundary, so that the blocks of sinks hold nothing that leaves.
"""

from __future__ import annotations


def sink_bubble(sinks: int, window: int | None, tokens_per_block: int) -> int:
    """Places left empty behind the sinks. Without a window nothing leaves, and there is no bubble."""
    if window is None:
        return 0
    return -sinks % tokens_per_block


def blocks_per_sequence(seq_len: int, sinks: int, window: int | None, tokens_per_block: int) -> int:
    """Blocks that one beam of a sequence of ``seq_len`` tokens holds at most at one time.

    ceil((min(seq_len, window) + bubble) / tokens_per_block), and one more when the sequence is longer than the window: the
    oldest block leaves only when all its tokens have left.
    """
    if window is None:
        return -(-seq_len // tokens_per_block)
    held = (seq_len if seq_len < window else window) + sink_bubble(sinks, window, tokens_per_block)
    blocks = -(-held // tokens_per_block)
    return blocks + 1 if seq_len > window else blocks


def block_positions(seq_len: int, sinks: int, window: int | None, tokens_per_block: int) -> int:
    """Block positions of a sequence, those that have left the window included: the length of its row in a block table."""
    bubble = sink_bubble(sinks, window, tokens_per_block) if seq_len > sinks else 0
    return -(-(seq_len + bubble) // tokens_per_block)
