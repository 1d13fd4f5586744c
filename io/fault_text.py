"""Faults as a configuration writes them: ``nvme.read.bit_flip=0.01, secondary.copy.delay=0.1:5ms*20, seed=7``.

Each rule is ``LEVEL.OPERATION.KIND``, then, each of them optional, ``=RATE`` (1: always), ``:TIME`` (s or ms) and ``*COUNT`` (the most
hits). One form for keyword, environment and file. A word that nobody knows is refused with the nearest one: a fault that silently never
happens would prove nothing.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Sequence
from typing import Final

from kvtier.errors import ConfigError
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.pools.sizing import shown
from kvtier.types import Level

FAILURES: Final = {name.lower(): getattr(errno, name) for name in ("EIO", "ENOSPC", "EDQUOT", "EACCES", "EPERM")}
"""Errors that can be named, with their numbers."""

KINDS: Final = (*(kind.value for kind in FaultKind if kind is not FaultKind.FAILURE), *FAILURES)
"""Every word for a kind."""

_LEVELS: Final = {level.name.lower(): level for level in Level}
_OPERATIONS: Final = {operation.value: operation for operation in FaultOperation}
_TIMED: Final = (FaultKind.DELAY, FaultKind.HANG)
_NUMBER: Final = r"([0-9.]+(?:e-?[0-9]+)?)"
_RULE: Final = re.compile(rf"([a-z_]+)\.([a-z_]+)\.([a-z_]+)(?:={_NUMBER})?(?::{_NUMBER}(ms|s))?(?:\*([0-9]{{1,9}}))?", re.ASCII)
_FORM: Final = 'write LEVEL.OPERATION.KIND=RATE:TIME*COUNT, for example "nvme.read.bit_flip=0.01" or "secondary.copy.delay=0.1:5ms*20"'


def parse_faults(value: str | Sequence[str]) -> Faults:
    """Read rules, separated by commas or given as a list, and ``seed=N`` among them.

    Raises:
        ConfigError: names the rule, what is wrong with it, and the nearest word where one is unknown.
    """
    items = [item.strip() for text in ([value] if isinstance(value, str) else value) for item in text.split(",")]
    seed = 0
    rules = []
    for item in items:
        if re.fullmatch("seed=[0-9]{1,18}", item, re.ASCII):
            seed = int(item.removeprefix("seed="))
        else:
            rules.append(_rule(item))
    if not rules:
        raise ConfigError(f"faults={shown(value)} names no fault; leave it out, or {_FORM}")
    return Faults(rules, seed)


def _rule(text: str) -> FaultRule:
    found = _RULE.fullmatch(text)
    if found is None:
        raise ConfigError(f"faults: {shown(text)} is no rule; {_FORM}")
    level = _LEVELS[_known(found[1], _LEVELS, "level", text)]
    operation = _OPERATIONS[_known(found[2], _OPERATIONS, "operation", text)]
    word = _known(found[3], KINDS, "kind", text)
    kind = FaultKind.FAILURE if word in FAILURES else FaultKind(word)
    seconds = _number(found[5], "time", text) / (1000.0 if found[6] == "ms" else 1.0) if found[5] else 0.0
    if kind in _TIMED and seconds == 0.0 and (found[5] or kind is FaultKind.DELAY):
        raise ConfigError(f"faults: {shown(text)}: a {word} takes a time above 0, for example {found[1]}.{found[2]}.{word}=0.1:5ms")
    if kind not in _TIMED and found[5]:
        raise ConfigError(f"faults: {shown(text)}: only delay and hang take a time; leave {found[5]}{found[6]} out")
    rate = _number(found[4], "rate", text) if found[4] else 1.0
    try:
        return FaultRule(kind, operation, rate, int(found[7]) if found[7] else None, seconds, FAILURES.get(word, errno.EIO), level)
    except ConfigError as error:
        raise ConfigError(f"faults: {shown(text)}: {error}") from None


def _known(word: str, known: Iterable[str], what: str, text: str) -> str:
    if word not in known:
        near = difflib.get_close_matches(word, known, 1)
        raise ConfigError(f"faults: {shown(text)}: unknown {what} {shown(word)}; "
                          + (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"))
    return word


def _number(text: str, what: str, rule: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"faults: {shown(rule)}: {what} {shown(text)} is no number; {_FORM}") from None
