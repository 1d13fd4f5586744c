"""Which TensorRT-LLM this adapter fits, and what its classes are built on.

The interface has moved within TensorRT-LLM (``_torch/pyexecutor/kv_cache_connector.py``, later in ``connectors/``) and has grown. Where
TensorRT-LLM is not installed there are stand-ins, so that the adapter can be tried without it. When the adapter is loaded, method by method
is checked whether what TensorRT-LLM will call is what the adapter takes.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterable
from typing import Any, Final

from kvtier.errors import ConfigError
from kvtier.tiering.attach.interface_differences import differences

MODULES: Final = ("tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector", "tensorrt_llm._torch.pyexecutor.kv_cache_connector")


class WorkerWithoutTensorRT:
    """Stands in for ``KvCacheConnectorWorker`` where TensorRT-LLM is not installed."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: object = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata


class SchedulerWithoutTensorRT:
    """Stands in for ``KvCacheConnectorScheduler``."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args


def installed_version() -> str | None:
    """TensorRT-LLM's release; None if it is not installed."""
    for name in ("tensorrt_llm", "tensorrt-llm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def base_classes() -> tuple[type, type]:
    """Scheduler and worker: the installed classes, or the stand-ins.

    Raises:
        ConfigError: TensorRT-LLM is installed and has no such classes where they were.
    """
    version = installed_version()
    if version is None:
        return SchedulerWithoutTensorRT, WorkerWithoutTensorRT
    reasons = []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
            return module.KvCacheConnectorScheduler, module.KvCacheConnectorWorker
        except (ImportError, AttributeError) as error:
            reasons.append(f"{name}: {error}")
    raise ConfigError(f"TensorRT-LLM {version}: its KV cache connector is not where this adapter looks for it ({'; '.join(reasons)})")


def process_rank() -> int:
    """Which rank this process is."""
    if installed_version() is None:
        return 0
    return int(importlib.import_module("tensorrt_llm._utils").mpi_rank())


def check_bases(pairs: Iterable[tuple[type, type]]) -> None:
    """Raise ConfigError with all differences unless each of our classes answers all that the installed class beside it declares."""
    version = installed_version()
    found = [] if version is None else [line for ours, theirs in pairs for line in differences(ours, theirs)]
    if found:
        raise ConfigError(f"TensorRT-LLM {version}: its KV cache connector is not the one this adapter was written for "
                          f"({'; '.join(found)}); see docs/attach/tensorrt-llm.md for the interface it knows")
