"""``GroupSpec``: what a group of equal layers is to the ledger (design: groups; sliding windows; recurrent state).

Positions count blocks of one group from the start of a sequence. With sinks that do not fill their last block, the tokens behind
them are moved up to the next block boundary (the *bubble*), so that sink blocks can stay when the window moves on.
"""

from __future__ import annotations

from typing import Final

from kvtier.errors import ConfigError

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
        sinks: first tokens that stay in the window for ever.
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
        if sinks < 0 or (sinks and kind != WINDOW):
            raise ConfigError(f"sinks={sinks} for a {KIND_NAMES[kind]} group; only window groups have sinks")
        self.num_blocks = num_blocks
        self.kind = kind
        self.window = window
        self.sinks = sinks
        self.snapshot_interval = snapshot_interval
