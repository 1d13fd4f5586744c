"""``Faults``: failures on demand, for tests of the rules that hold on bad days.

The rooms that move bytes ask ``before`` in front of an operation and hand ``corrupt`` the bytes that travelled. With
``faults=None``, the default everywhere, neither is called. Rules are drawn from one seeded generator, so that a run
with one thread repeats exactly.
"""

from __future__ import annotations

import enum
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from errno import EIO

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError


class FaultKind(enum.Enum):
    """What goes wrong."""

    DELAY = "delay"        #: the operation starts ``seconds`` later
    FAILURE = "failure"    #: the operation raises ``OSError(errno)`` instead of starting
    BIT_FLIP = "bit_flip"  #: one bit of the bytes that travelled is turned over, without a word


class FaultOperation(enum.Enum):
    """Where it goes wrong."""

    READ = "read"    #: an NVMe read
    WRITE = "write"  #: an NVMe write
    COPY = "copy"    #: a copy between memories


@dataclass(frozen=True)
class FaultRule:
    """One kind of fault at one operation.

    Attributes:
        kind, operation: what and where.
        rate: share of the operations that are hit, 0.0 to 1.0.
        count: how many are hit before the rule is spent; ``None`` for no end.
        seconds: length of a DELAY.
        errno: error number of a FAILURE, ``errno.EIO`` unless given.

    Raises:
        ConfigError: a rate outside 0..1, a negative count or delay, an error number that the system does not know.
    """

    kind: FaultKind
    operation: FaultOperation
    rate: float = 1.0
    count: int | None = None
    seconds: float = 0.0
    errno: int = EIO

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise ConfigError(f"fault rate={self.rate!r}: must be between 0.0 (never) and 1.0 (always)")
        if self.count is not None and self.count < 0:
            raise ConfigError(f"fault count={self.count!r}: must be 0 or more; None for no end")
        if not 0.0 <= self.seconds < float("inf"):
            raise ConfigError(f"fault seconds={self.seconds!r}: must be a finite number of seconds, 0 or more")
        if self.errno <= 0:
            raise ConfigError(f"fault errno={self.errno!r}: must be a positive error number, such as errno.EIO ({EIO})")


class Faults:
    """A set of rules, shared by all threads that move bytes.

    Args:
        rules: looked at in this order for each operation; several may hit the same one.
        seed: of the generator that decides which operations are hit and which bit is flipped.
    """

    def __init__(self, rules: Sequence[FaultRule] = (), seed: int = 0) -> None:
        self._rules = tuple(rules)
        self._hits = [0] * len(self._rules)
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def before(self, operation: FaultOperation) -> None:
        """Called in front of an operation: sleeps for DELAY rules, then raises for the first FAILURE rule that hits.

        Raises:
            OSError: with the error number of the rule.
        """
        for rule in self._draw(operation, FaultKind.DELAY):
            time.sleep(rule.seconds)
        for rule in self._draw(operation, FaultKind.FAILURE):
            raise OSError(rule.errno, f"{os.strerror(rule.errno)} (injected into {operation.value})")

    def corrupt(self, operation: FaultOperation, buffer: npt.NDArray[np.uint8]) -> None:
        """Called with the bytes that travelled: flips one bit in place for each BIT_FLIP rule that hits.

        Args:
            operation: what carried the bytes.
            buffer: uint8 of any shape, strided or not.
        """
        if buffer.size == 0:
            return
        for _ in self._draw(operation, FaultKind.BIT_FLIP):
            with self._lock:
                position, bit = self._random.randrange(buffer.size), self._random.randrange(8)
            buffer.flat[position] ^= np.uint8(1 << bit)

    def counts(self) -> dict[str, int]:
        """How often each kind has hit each operation so far, as ``{"write.failure": 2, ...}``; 0 for never."""
        counts: dict[str, int] = {}
        with self._lock:
            for rule, hits in zip(self._rules, self._hits, strict=True):
                name = f"{rule.operation.value}.{rule.kind.value}"
                counts[name] = counts.get(name, 0) + hits
        return counts

    def _draw(self, operation: FaultOperation, kind: FaultKind) -> list[FaultRule]:
        """The rules that hit now. At most one FAILURE: a second one could not be seen and must not be used up."""
        hit: list[FaultRule] = []
        with self._lock:
            for position, rule in enumerate(self._rules):
                if rule.operation is not operation or rule.kind is not kind:
                    continue
                if rule.count is not None and self._hits[position] >= rule.count:
                    continue
                if rule.rate < 1.0 and self._random.random() >= rule.rate:
                    continue
                self._hits[position] += 1
                hit.append(rule)
                if kind is FaultKind.FAILURE:
                    break
        return hit
