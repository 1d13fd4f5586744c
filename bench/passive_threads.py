"""Import this before torch: idle OpenMP threads sleep instead of spinning.

By default each torch operation ends with its threads spinning for a while in case more work comes. As soon as another
program, or our own reader and writer threads, needs a core, the spinning thread holds it while the one that has work waits:
with two threads on two busy cores a forward pass was seen to become many times slower. Sleeping costs some microseconds
per operation. OpenMP reads the setting once, when torch loads it; a setting of the user's own is left alone.
"""

from __future__ import annotations

import os
from typing import Final

_VARIABLE: Final = "OMP_WAIT_POLICY"

os.environ.setdefault(_VARIABLE, "PASSIVE")


def wait_policy() -> str:
    """The policy that OpenMP was given, for reports."""
    return os.environ[_VARIABLE].lower()
