"""``TransferBalance``: notices when blocks go one way only, and says what to change (design: statistics).

Offloading pays when what goes down comes back. Much that goes down and never comes back is wasted bandwidth (and, on NVMe, wear);
much that comes up again and again says that the level above is too small.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Final

from kvtier.types import Level

WINDOW: Final = 1024          # iterations
MIN_BLOCKS: Final = 4096      # in the larger direction, within the window
MAX_RATIO: Final = 4.0        # of the larger direction to the smaller one
END_RATIO: Final = 2.0        # the situation has ended: well below MAX_RATIO, so that it does not begin and end in turns
BUSY_SHARE: Final = 1 / 16    # of the window's iterations move something: one burst is no lasting situation

SIZES: Final = {Level.PRIMARY: "primary", Level.SECONDARY: "secondary", Level.NVME: "nvme"}
THRESHOLDS: Final = {Level.SECONDARY: "secondary_offload_min_priority", Level.NVME: "nvme_offload_min_priority"}


class Excess(enum.Enum):
    """Which direction prevails."""

    NONE = "none"
    OFFLOAD = "offload"
    ONBOARD = "onboard"


class TransferBalance:
    """Onboarding and offloading between a lower level and those above it, over a sliding window of iterations.

    Args:
        level: the lower level, ``Level.SECONDARY`` or ``Level.NVME``.
        window: iterations looked at; nothing is said before so many have passed.
        min_blocks: blocks that must have moved in the larger direction within the window.
    """

    def __init__(self, level: Level, window: int = WINDOW, min_blocks: int = MIN_BLOCKS) -> None:
        self.level = level
        self.advice: str | None = None
        self._window = window
        self._min_blocks = min_blocks
        self._iterations: deque[tuple[int, int, int]] = deque()
        self._onboarded = 0
        self._offloaded = 0
        self._dropped = 0
        self._num_moving = 0  # iterations of the window that moved anything
        self._excess = Excess.NONE

    def note(self, onboarded: int, offloaded: int, dropped: int) -> str | None:
        """One more iteration: blocks that came up from the level and went down to it, and blocks that lost their content.

        Returns the advice when a situation has just begun; ``advice`` keeps it until that has ended.
        """
        self._slide(onboarded, offloaded, dropped)
        before = self._excess
        self._excess = self._judge()
        if self._excess is Excess.NONE:
            self.advice = None
        elif self._excess is not before:
            self.advice = self._describe()
            return self.advice
        return None

    def _slide(self, onboarded: int, offloaded: int, dropped: int) -> None:
        self._iterations.append((onboarded, offloaded, dropped))
        self._onboarded += onboarded
        self._offloaded += offloaded
        self._dropped += dropped
        self._num_moving += 1 if onboarded or offloaded else 0
        if len(self._iterations) > self._window:
            onboarded, offloaded, dropped = self._iterations.popleft()
            self._onboarded -= onboarded
            self._offloaded -= offloaded
            self._dropped -= dropped
            self._num_moving -= 1 if onboarded or offloaded else 0

    def _judge(self) -> Excess:
        if self._onboarded > self._offloaded:
            direction, larger, smaller = Excess.ONBOARD, self._onboarded, self._offloaded
        else:
            direction, larger, smaller = Excess.OFFLOAD, self._offloaded, self._onboarded
        if direction is self._excess:  # goes on until it is clearly over
            return direction if larger > END_RATIO * smaller and larger * 2 >= self._min_blocks else Excess.NONE
        is_lasting = len(self._iterations) == self._window and self._num_moving >= self._window * BUSY_SHARE
        return direction if is_lasting and larger >= self._min_blocks and larger > MAX_RATIO * smaller else Excess.NONE

    def _describe(self) -> str:
        size, threshold = SIZES[self.level], THRESHOLDS[self.level]
        above = SIZES[Level(self.level - 1)]
        seen = (f"in the last {self._window} iterations {self._offloaded} blocks were offloaded to the {size} level and {self._onboarded} "
                "were onboarded from it")
        if self._excess is Excess.ONBOARD:
            return f"{seen}: what is asked for again and again does not stay where it is needed; enlarge {above}"
        if self._dropped * 2 >= self._offloaded:
            return (f"{seen}, {self._dropped} lost their content: most are gone before they are asked for again; enlarge {size}, or raise "
                    f"{threshold} so that less goes there")
        return f"{seen}: hardly anything is asked for again; raise {threshold} so that only what comes back goes there"
