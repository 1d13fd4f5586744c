"""``Gate``: operations that wait until a test lets them go on, so that what it sees does not depend on how long they take."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvtier.io.faults import FaultOperation, FaultRule, Faults
from kvtier.types import Level

PATIENCE = 60.0  # seconds; a test that keeps a gate closed for longer hangs


class Gate(Faults):
    """Injected as faults: operations of these kinds stop in front of it until it is opened.

    Attributes:
        arrived: how many operations have come to it so far. They stop there as long as it is closed.
    """

    def __init__(self, *operations: FaultOperation, rules: Sequence[FaultRule] = ()) -> None:
        super().__init__(rules)
        self.arrived = 0
        self._operations = operations
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        """What comes from now on waits again."""
        self._opened.clear()

    def before(self, operation: FaultOperation, level: Level | None = None) -> None:
        if operation in self._operations:
            self.arrived += 1
            assert self._opened.wait(PATIENCE), "the test left the gate closed"
        super().before(operation, level)
