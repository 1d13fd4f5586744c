"""Which SGLang this adapter fits, and what its class is built on.

SGLang loads a backend only if it is a subclass of the installed ``HiCacheStorage``; where SGLang is not installed there is a stand-in, so
that the adapter can be tried without it. SGLang's interface changes from release to release: when the adapter is loaded, method by method
is checked whether what SGLang will call is what the adapter takes.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any, Final

from kvtier.errors import ConfigError
from kvtier.tiering.attach.interface_differences import differences

STORAGE_MODULE: Final = "sglang.srt.mem_cache.hicache_storage"
READ_VERSION: Final = "0.5.23"
"""The release whose interface was read, and whose abstract class the adapter was compared with; see docs/attach/sglang.md."""


class WithoutSGLang:
    """Stands in for ``HiCacheStorage`` where SGLang is not installed."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """As in SGLang, but nothing is kept."""


def installed_version() -> str | None:
    """SGLang's release; None if it is not installed."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def base_class() -> type:
    """The installed ``HiCacheStorage``, or the stand-in.

    Raises:
        ConfigError: SGLang is installed and has no such class where it was.
    """
    version = installed_version()
    try:
        found: type = importlib.import_module(STORAGE_MODULE).HiCacheStorage
    except (ImportError, AttributeError) as error:
        if version is None:
            return WithoutSGLang
        raise ConfigError(f"SGLang {version}: its storage interface is not where this adapter looks for it ({error}). The adapter was "
                          f"written for SGLang {READ_VERSION}") from error
    return found


def check_base(ours: type, theirs: type) -> None:
    """Raise ConfigError with all differences unless our class answers all that the installed one declares."""
    if theirs is WithoutSGLang:
        return
    found = differences(ours, theirs)
    if found:
        raise ConfigError(f"SGLang {installed_version()}: its storage interface is not the one this adapter was written for "
                          f"({'; '.join(found)}). Use SGLang {READ_VERSION}")
