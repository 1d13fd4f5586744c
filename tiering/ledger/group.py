"""``GroupSpec``: what a group of equal layers is to the ledger (design: groups; sliding windows; recurrent state).

Positions count blocks of one group from the start of a sequence. With sinks that do not fill their last block, the tokens behind
them are moved up to the next block boundary (the *bubble*), so that sink blocks can stay when the window moves on.
"""

from __future__ import annotations

from typing import Any, Final

from kvtier.errors import ConfigError, RequestError

FULL: Final = 0       # attention over everything, MLA included
WINDOW: Final = 1     # attention over the last ``window`` tokens, and the sinks
RECURRENT: Final = 2  # a running state, with snapshots
CROSS: Final = 3      # attention over an encoder's output, written once
KIND_NAMES: Final = ("full", "window", "recurrent", "cross")


class GroupSpec:
    """One group.

    Args:
        num_blocks: blocks of the primary, secondary and NVMe level.
        kind: FULL, WINDOW, RECURRENT or CROSS.
        window: tokens that a token attends to, itself included; 0 unless WINDOW.
        sinks: first tokens that stay in the window for ever, and count towards it.
        snapshot_interval: tokens between two kept states; 0 unless RECURRENT.

    Raises:
        ConfigError: values that do not belong to the kind.
    """

    def __init__(self, num_blocks: tuple[int, int, int], kind: int = FULL, window: int = 0, sinks: int = 0,
                 snapshot_interval: int = 0) -> None:
        if (kind == WINDOW) != (window > 0) or window < 0:
            raise ConfigError(f"window={window} for a {KIND_NAMES[kind]} group; a window group has at least 1 token, others have 0")
        if (kind == RECURRENT) != (snapshot_interval > 0) or snapshot_interval < 0:
            raise ConfigError(f"snapshot_interval={snapshot_interval} for a {KIND_NAMES[kind]} group; a recurrent group has at least 1 "
                              "token, others have 0")
        if sinks < 0 or (sinks and kind != WINDOW) or (sinks >= window > 0):
            raise ConfigError(f"sinks={sinks} for a {KIND_NAMES[kind]} group with window={window}; only window groups have sinks, fewer "
                              "than the window has tokens")
        self.num_blocks = num_blocks
        self.kind = kind
        self.window = window
        self.sinks = sinks
        self.snapshot_interval = snapshot_interval


class GroupGeometry:
    """Which block positions of a group a sequence of so many tokens has, for one block size.

    Attributes:
        bubble: unused places between the sinks and the tokens behind them.
        num_sink_blocks: leading blocks that never leave the window.
        snapshot_blocks: a state is kept at the end of every so many blocks; 0 unless RECURRENT.

    Raises:
        ConfigError: a snapshot interval that is not a multiple of the block size.
    """

    def __init__(self, spec: GroupSpec, tokens_per_block: int) -> None:
        if spec.snapshot_interval % tokens_per_block:
            raise ConfigError(f"snapshot_interval={spec.snapshot_interval}: must be a multiple of tokens_per_block={tokens_per_block}: "
                              "states are found again at the ends of blocks")
        self.kind = spec.kind
        self.window = spec.window
        self.sinks = spec.sinks
        self.tokens_per_block = tokens_per_block
        self.bubble = -spec.sinks % tokens_per_block
        self.num_sink_blocks = (spec.sinks + self.bubble) // tokens_per_block
        self.snapshot_blocks = spec.snapshot_interval // tokens_per_block

    def num_blocks(self, num_tokens: int) -> int:
        """Positions that the first ``num_tokens`` tokens take, out of the window or not."""
        if num_tokens > self.sinks:
            num_tokens += self.bubble
        return (num_tokens + self.tokens_per_block - 1) // self.tokens_per_block

    def next_place(self, num_tokens: int) -> int:
        """Where the token behind the first ``num_tokens`` goes, counted in places from the start of the first block: behind the bubble once
        all sinks are there."""
        return num_tokens + self.bubble if num_tokens >= self.sinks else num_tokens

    def num_full_blocks(self, num_tokens: int) -> int:
        """Positions that the first ``num_tokens`` tokens fill to the end; sinks fill their last one with the bubble."""
        return self.next_place(num_tokens) // self.tokens_per_block

    def first_token(self, position: int) -> int:
        """The first token of a block, or that would be; of a bubble's block the first sink in it."""
        return position * self.tokens_per_block - (self.bubble if position >= self.num_sink_blocks else 0)

    def num_departed(self, num_tokens: int) -> int:
        """Positions behind the sinks that the newest of ``num_tokens`` tokens, and all after it, no longer read."""
        if self.kind != WINDOW:
            return 0
        first = num_tokens - (self.window - self.sinks)  # the first token behind the sinks that is still read
        if first <= self.sinks:
            return 0
        return (first + self.bubble) // self.tokens_per_block - self.num_sink_blocks

    def keeps_state(self, position: int, num_tokens: int) -> bool:
        """Whether a recurrent group keeps the state at the end of this block of a prompt: a snapshot, or its last full block."""
        return (position + 1) % self.snapshot_blocks == 0 or position == num_tokens // self.tokens_per_block - 1


def checked_group(group: Any, count: int) -> int:
    """The number of a group, of ``count``. RequestError for anything else."""
    if isinstance(group, bool) or not isinstance(group, int) or not 0 <= group < count:
        raise RequestError(f"group={group!r}: this layout has " + (f"groups 0..{count - 1}" if count > 1 else "one group, numbered 0"))
    return group
