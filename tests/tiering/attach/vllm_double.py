"""The few names of vLLM that the adapter's classes are built on, for an environment without vLLM.

Only shapes: what the classes say and do is tested against the installed vLLM in tests/vllm. Where vLLM is installed, it is used.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np


class LookupResult(enum.Enum):
    MISS = enum.auto()
    HIT = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()


class Medium(enum.Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(enum.Enum):
    LOCAL = "LOCAL"


class CacheHitSource(enum.Enum):
    HOST = "host"
    DISK = "disk"


@dataclass
class TierFilter:
    mediums: tuple[Medium, ...] = tuple(Medium)

    def allows(self, medium: Medium, locality: Locality) -> bool:
        return medium in self.mediums


@dataclass
class ReqContext:
    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    load_tier_filter: TierFilter = field(default_factory=TierFilter)
    states: dict[type, Any] = field(default_factory=dict)

    def set_state(self, state: Any) -> None:
        self.states[type(state)] = state

    def get_state(self, kind: type) -> Any:
        return self.states.get(kind)


class LoadStoreSpec:
    pass


class GPULoadStoreSpec(LoadStoreSpec):
    def __init__(self, block_ids: list[int], group_sizes: Sequence[int], block_indices: Sequence[int]) -> None:
        self.block_ids, self.group_sizes, self.block_indices = np.array(block_ids, dtype=np.int32), group_sizes, block_indices


@dataclass
class PrepareStoreOutput:
    keys_to_store: list[bytes]
    store_spec: LoadStoreSpec
    evicted_keys: list[bytes]


@dataclass
class OffloadingEvent:
    keys: list[bytes]
    medium: Medium
    removed: bool
    locality: Locality | None = None
    ownership: str | None = None
    removal_expected: bool = False


@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclass
class ScheduleEndContext:
    new_req_ids: Sequence[str] = ()
    preempted_req_ids: Sequence[str] = ()


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


class OffloadingManager(ABC):
    @abstractmethod
    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult: ...


class OffloadingWorker(ABC):
    @abstractmethod
    def get_finished(self) -> list[TransferResult]: ...


class OffloadingConnectorStats:
    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[str, ...]], Any] = {}

    def increase_counter(self, name: str, value: float = 1, labels: tuple[str, ...] = ()) -> None:
        self.values[name, labels] = self.values.get((name, labels), 0) + value

    def set_gauge(self, name: str, value: float, labels: tuple[str, ...] = ()) -> None:
        self.values[name, labels] = value

    def observe_histogram(self, name: str, value: float, labels: tuple[str, ...] = ()) -> None:
        self.values.setdefault((name, labels), []).append(value)


@dataclass
class OffloadingMetricMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()
    buckets: tuple[float, ...] | None = None


BASE = (LookupResult, Medium, Locality, TierFilter, ReqContext, LoadStoreSpec, GPULoadStoreSpec, PrepareStoreOutput, OffloadingEvent,
        RequestOffloadingContext, ScheduleEndContext, TransferResult, OffloadingManager, OffloadingWorker, OffloadingMetricMetadata)
ADAPTER = ("vllm_manager", "vllm_metrics", "vllm_worker")


def is_installed() -> bool:
    return "vllm" not in sys.modules and importlib.util.find_spec("vllm") is not None


@contextmanager
def in_place_of_vllm() -> Iterator[None]:
    """While this lasts, ``import vllm...`` finds the double. The adapter's modules that were built on it are forgotten afterwards."""
    base = ModuleType("vllm.v1.kv_offload.base")
    for kind in BASE:
        setattr(base, kind.__name__, kind)
    for name in ("OffloadingCounterMetadata", "OffloadingGaugeMetadata", "OffloadingHistogramMetadata"):
        setattr(base, name, OffloadingMetricMetadata)
    base.OffloadKey = bytes  # type: ignore[attr-defined]
    base.get_offload_group_idx = lambda key: int.from_bytes(key[-4:], "big")  # type: ignore[attr-defined]
    base.get_offload_block_hash = lambda key: key[:-4]  # type: ignore[attr-defined]
    base.make_offload_key = lambda name, group: name + group.to_bytes(4, "big")  # type: ignore[attr-defined]
    sources = ModuleType("vllm.v1.metrics.cache_hit_source")
    sources.CacheHitSource = CacheHitSource  # type: ignore[attr-defined]
    metrics = ModuleType("vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics")
    metrics.OffloadingConnectorStats = OffloadingConnectorStats  # type: ignore[attr-defined]
    added = {module.__name__: module for module in (base, sources, metrics)}
    for name in list(added):
        while "." in name:
            name = name.rpartition(".")[0]
            added.setdefault(name, ModuleType(name))
    added = {name: module for name, module in added.items() if name not in sys.modules}
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in [*added, *(f"kvtier.tiering.attach.{module}" for module in ADAPTER)]:
            sys.modules.pop(name, None)
