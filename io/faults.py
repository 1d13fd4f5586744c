"""``Faults``: failures on demand, for the rules that hold on bad days (design: never a wrong byte, a tier failure is a miss).

The rooms that move bytes ask ``before`` in front of an operation; ``FaultyFile`` carries out what happens inside one. With
``faults=None``, the default everywhere, neither is there. Rules are drawn from one seeded generator, so that a run with one
thread repeats exactly. The words of a configuration are read in ``fault_text``.
"""

from __future__ import annotations

import enum
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from errno import EIO, errorcode
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.types import Level


class FaultKind(enum.Enum):
    """What goes wrong."""

    DELAY = "delay"                            #: the operation starts ``seconds`` later
    HANG = "hang"                              #: it does nothing for ``seconds`` (0: until ``end_hangs``), then it fails with EIO
    FAILURE = "failure"                        #: it raises ``OSError(errno)`` instead of starting
    SHORT_READ = "short_read"                  #: a system call moves fewer bytes than asked for, perhaps none
    SHORT_WRITE = "short_write"                #: likewise
    BIT_FLIP = "bit_flip"                      #: one bit of the bytes that travelled is turned over, without a word
    TORN_WRITE = "torn_write"                  #: only the first pages reach the file, and success is reported
    MISDIRECTED_WRITE = "misdirected_write"    #: the bytes land in another slot, and success is reported
    LOST_FILE = "lost_file"                    #: somebody deletes the file that is in use
    DELETED_DIRECTORY = "deleted_directory"    #: somebody deletes the whole directory that is in use


class FaultOperation(enum.Enum):
    """Where it goes wrong."""

    READ = "read"      #: an NVMe read
    WRITE = "write"    #: an NVMe write
    COMMIT = "commit"  #: a transaction of the NVMe level's manifest
    COPY = "copy"      #: a copy between memories; its level is the one that is written


_FILES: Final = frozenset({FaultOperation.READ, FaultOperation.WRITE})
_OPERATIONS: Final = dict.fromkeys(FaultKind, _FILES) | {
    FaultKind.DELAY: frozenset(FaultOperation), FaultKind.HANG: frozenset(FaultOperation), FaultKind.FAILURE: frozenset(FaultOperation),
    FaultKind.SHORT_READ: frozenset({FaultOperation.READ}), FaultKind.SHORT_WRITE: frozenset({FaultOperation.WRITE}),
    FaultKind.TORN_WRITE: frozenset({FaultOperation.WRITE}), FaultKind.MISDIRECTED_WRITE: frozenset({FaultOperation.WRITE})}
"""Where each kind can happen. No bits flip between memories: nothing checks bytes there, so the rule could only break the promise."""


@dataclass(frozen=True)
class FaultRule:
    """One kind of fault at one operation.

    Attributes:
        kind, operation: what and where.
        rate: share of the operations that are hit, 0.0 to 1.0.
        count: how many are hit before the rule is spent; ``None`` for no end.
        seconds: length of a DELAY, longest time of a HANG (0.0: until :meth:`Faults.end_hangs`).
        errno: error number of a FAILURE, ``errno.EIO`` unless given.
        level: of a COPY, the level that is written; ``None`` for both memories. All other operations are NVMe's.

    Raises:
        ConfigError: a kind that cannot happen there, a rate outside 0..1, a negative count or time, an impossible error number.
    """

    kind: FaultKind
    operation: FaultOperation
    rate: float = 1.0
    count: int | None = None
    seconds: float = 0.0
    errno: int = EIO
    level: Level | None = None

    def __post_init__(self) -> None:
        if self.operation not in _OPERATIONS[self.kind]:
            places = ", ".join(sorted(operation.value for operation in _OPERATIONS[self.kind]))
            raise ConfigError(f"fault {self.word!r} at operation {self.operation.value!r}: it can happen at {places}")
        if (self.level is Level.NVME) == (self.operation is FaultOperation.COPY) and self.level is not None:
            raise ConfigError(f"fault level={self.level.name.lower()!r} with operation {self.operation.value!r}: a copy goes to the "
                              "primary or the secondary level, every other operation is of the nvme level")
        if not 0.0 <= self.rate <= 1.0:
            raise ConfigError(f"fault rate={self.rate!r}: must be between 0.0 (never) and 1.0 (always)")
        if self.count is not None and self.count < 0:
            raise ConfigError(f"fault count={self.count!r}: must be 0 or more; None for no end")
        if not 0.0 <= self.seconds < float("inf"):
            raise ConfigError(f"fault seconds={self.seconds!r}: must be a finite number of seconds, 0 or more")
        if self.errno <= 0:
            raise ConfigError(f"fault errno={self.errno!r}: must be a positive error number, such as errno.EIO ({EIO})")

    @property
    def word(self) -> str:
        """The kind as a configuration calls it: failures go by the name of their error, ``"enospc"``."""
        return errorcode.get(self.errno, f"errno_{self.errno}").lower() if self.kind is FaultKind.FAILURE else self.kind.value

    @property
    def name(self) -> str:
        """Place and kind: ``"nvme.read.bit_flip"``. A copy of either level is ``"copy.delay"``."""
        level = self.level.name.lower() + "." if self.level is not None else "" if self.operation is FaultOperation.COPY else "nvme."
        return f"{level}{self.operation.value}.{self.word}"

    def __str__(self) -> str:
        """The rule as a configuration writes it."""
        seconds = f":{self.seconds:g}s" if self.seconds else ""
        return f"{self.name}={self.rate:g}{seconds}" + (f"*{self.count}" if self.count is not None else "")


class Faults:
    """A set of rules, shared by all threads that move bytes. Thread-safe.

    Args:
        rules: looked at in this order for each operation; several may hit the same one.
        seed: of the generator that decides which operations are hit and where.
    """

    def __init__(self, rules: Sequence[FaultRule] = (), seed: int = 0) -> None:
        self._rules = tuple(rules)
        self._seed = seed
        self._hits = [0] * len(self._rules)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._hangs_end = threading.Event()

    def before(self, operation: FaultOperation, level: Level | None = None) -> None:
        """Called in front of an operation: sleeps for DELAY rules, then raises for the first HANG or FAILURE rule that hits.

        Args:
            level: of a COPY, the level that is written.

        Raises:
            OSError: with the error number of the rule; EIO after a hang.
        """
        for rule in self._draw(operation, FaultKind.DELAY, level):
            time.sleep(rule.seconds)
        hangs_end = self._hangs_end  # before the hit is counted: who has seen the count and ends all hangs ends this one too
        for rule in self._draw(operation, FaultKind.HANG, level):
            hangs_end.wait(rule.seconds or None)
            raise OSError(EIO, f"{os.strerror(EIO)} (after it hung, injected into {operation.value})")
        for rule in self._draw(operation, FaultKind.FAILURE, level):
            raise OSError(rule.errno, f"{os.strerror(rule.errno)} (injected into {operation.value})")

    def hits(self, operation: FaultOperation, kind: FaultKind) -> bool:
        """Whether a rule of this kind hits this operation. Whoever asks lets it happen."""
        return bool(self._draw(operation, kind, None))

    def flip_bit(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Turn one bit over in place. ``buffer``: uint8 of any shape, strided or not, not empty."""
        position, bit = self.below(buffer.size), self.below(8)
        buffer.flat[position] ^= np.uint8(1 << bit)

    def below(self, end: int) -> int:
        """A number from 0 to ``end - 1`` out of the same generator."""
        with self._lock:
            return self._random.randrange(end)

    def end_hangs(self) -> None:
        """What hangs now fails. Closing a cache does this last, when its own patience is over."""
        ended, self._hangs_end = self._hangs_end, threading.Event()
        ended.set()

    def counts(self) -> dict[str, int]:
        """How often each rule has hit so far, as ``{"nvme.write.enospc": 2, ...}``; 0 for never."""
        counts: dict[str, int] = {}
        with self._lock:
            for rule, hits in zip(self._rules, self._hits, strict=True):
                counts[rule.name] = counts.get(rule.name, 0) + hits
        return counts

    def __reduce__(self) -> tuple[type[Faults], tuple[tuple[FaultRule, ...], int]]:
        """A configuration travels between processes; each counts what it hits itself."""
        return Faults, (self._rules, self._seed)

    def __str__(self) -> str:
        """The rules as a configuration writes them."""
        return ", ".join([*map(str, self._rules), *([f"seed={self._seed}"] if self._seed else [])]) or "no rules"

    def _draw(self, operation: FaultOperation, kind: FaultKind, level: Level | None) -> list[FaultRule]:
        """The rules that hit now: all delays, of every other kind one. A second one could not be seen and must not be used up."""
        hit: list[FaultRule] = []
        with self._lock:
            for position, rule in enumerate(self._rules):
                if rule.operation is not operation or rule.kind is not kind:
                    continue
                if operation is FaultOperation.COPY and rule.level is not None and rule.level is not level:
                    continue
                if rule.count is not None and self._hits[position] >= rule.count:
                    continue
                if rule.rate < 1.0 and self._random.random() >= rule.rate:
                    continue
                self._hits[position] += 1
                hit.append(rule)
                if kind is not FaultKind.DELAY:
                    break
        return hit
