"""Import this before torch: idle OpenMP threads spin only briefly before they sleep.

By default each torch operation ends with its threads spinning for about a millisecond in case more work comes. As soon as another
program, or our own reader and writer threads, needs a core, the spinning thread holds it while the one that has work waits: with
two threads on two busy cores a forward pass was seen to become many times slower. Never spinning costs a third of the prefill
speed on idle cores instead. A few thousand rounds cost neither. GNU OpenMP reads the setting once, when torch loads it; settings of
the user's own are left alone.
"""

from __future__ import annotations

import os
import sys
from typing import Final

_SPIN: Final = "GOMP_SPINCOUNT"
_POLICY: Final = "OMP_WAIT_POLICY"

_IS_TOO_LATE: Final = "torch" in sys.modules and _POLICY not in os.environ and _SPIN not in os.environ
if _POLICY not in os.environ and not _IS_TOO_LATE:
    os.environ.setdefault(_SPIN, "3000")


def openmp_waiting() -> str:
    """How idle threads wait, for reports: what was set when torch was loaded."""
    if _IS_TOO_LATE:
        return "OpenMP's own waiting"
    return f"{_POLICY}={os.environ[_POLICY]}" if _POLICY in os.environ else f"{_SPIN}={os.environ[_SPIN]}"
