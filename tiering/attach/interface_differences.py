"""Whether a class answers what an engine's interface, as installed, will call: method by method, by names of parameters."""

from __future__ import annotations

import inspect
from typing import Final

_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


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
