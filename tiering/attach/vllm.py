"""Attach vLLM: its OffloadingConnector keeps blocks in a kvtier tier of host memory and NVMe (design: two ways to attach).

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"spec_name": "TieredSpec",
        "spec_module_path": "kvtier.tiering.attach.vllm", "secondary": "8GiB", "nvme": "100GiB", "nvme_directory": "/mnt/nvme/kv"}}'

docs/attach/vllm.md has the rest. vLLM makes a :class:`TieredSpec` in each worker and one in the scheduler's process. The worker's
opens the arena and copies; the scheduler's has the ledger, the manifest and all NVMe I/O.
"""

from __future__ import annotations

import logging
from typing import IO, Any

from kvtier.errors import ConfigError
from kvtier.tiering.attach.rank_facts import collect_facts, leave_facts
from kvtier.tiering.attach.vllm_interface import check_interface, check_version, installed_version, supported
from kvtier.tiering.attach.vllm_settings import VllmSettings, read_settings
from kvtier.tiering.config import TierConfig
from kvtier.tiering.tier_index import TierIndex
from kvtier.tiering.tier_plan import TierPlan
from kvtier.tiering.tier_worker import TierWorker

_VERSION = installed_version()
check_version(_VERSION)

try:
    import torch
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        OffloadingManager,
        OffloadingMetricMetadata,
        OffloadingSpec,
        OffloadingWorker,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig

    from kvtier.tiering.attach.vllm_manager import TieredManager
    from kvtier.tiering.attach.vllm_metrics import metric_definitions
    from kvtier.tiering.attach.vllm_probe import facts_of, group_tensors
    from kvtier.tiering.attach.vllm_worker import TieredWorker
except ImportError as error:
    raise ConfigError(f"vLLM {_VERSION}: its offloading interface is not where this adapter looks for it ({error}). Supported: "
                      f"{supported()}") from error

_log = logging.getLogger(__name__)


class TieredSpec(OffloadingSpec):
    """What vLLM asks for a manager and for workers. See the module.

    Raises:
        ConfigError: a misspelt or unusable setting, before anything is allocated.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.settings: VllmSettings = read_settings(config.extra_config)
        self._manager: TieredManager | None = None
        self._worker: TieredWorker | None = None
        self._facts: IO[str] | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        read_settings(extra_config)
        return metric_definitions()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The transfers of this rank. vLLM makes the workers of all ranks before the manager.

        Raises:
            ConfigError: an unsupported KV-cache dtype, too little host memory (named per rank and in total).
        """
        if self._worker is None:
            facts = facts_of(self.config, kv_caches, self.settings, _VERSION)
            parallel = self.config.parallel
            plan = TierPlan.of(facts.layout(self.blocks_per_chunk, parallel.world_size), self._tier(), self.config.engine_id)
            tensors = group_tensors(kv_caches)
            worker = TierWorker(plan, str(_device(tensors)), parallel.rank, tensors, faults=self.settings.tier.faults)
            self._facts = leave_facts(self.config.engine_id, parallel.rank, facts)
            self._worker = TieredWorker(worker, self.blocks_per_chunk, self.settings.job_timeout)
        return self._worker

    def get_manager(self) -> OffloadingManager:
        """The tier's ledger and its NVMe level.

        Raises:
            ConfigError: the workers' facts are missing or differ; a folder that is in use, or was made by another model or block size.
        """
        if self._manager is None:
            facts = collect_facts(self.config.engine_id, self.config.parallel.world_size)
            tier = self._tier()
            if facts.without_nvme and tier.nvme_directory is not None:
                _log.warning("no NVMe level: %s. Blocks are kept in host memory only", facts.without_nvme)
                tier = tier.model_copy(update={"nvme": TierConfig.model_fields["nvme"].default, "nvme_directory": None})
            index = TierIndex(facts.layout(self.blocks_per_chunk, self.config.parallel.world_size), tier, model=facts.model or None,
                              engine_id=self.config.engine_id, fingerprint=facts.fingerprint(),
                              lookup_timeout=self.settings.lookup_timeout, job_timeout=self.settings.job_timeout)
            self._manager = TieredManager(index, [group.group_id for group in self.config.groups],
                                          takes_events=self.kv_events_config.enable_kv_cache_events)
        return self._manager

    def _tier(self) -> TierConfig:
        """The tier's settings, for this data-parallel replica: each has a store of its own, because one process owns a folder."""
        tier, parallel = self.settings.tier, self.config.parallel
        if not self.kv_events_config.enable_kv_cache_events:
            tier = tier.model_copy(update={"event_buffer_max_size": 0})
        if tier.nvme_directory is not None and parallel.data_parallel_size > 1:
            return tier.model_copy(update={"nvme_directory": tier.nvme_directory / f"replica-{parallel.data_parallel_index}"})
        return tier


def _device(tensors: list[list[torch.Tensor]]) -> torch.device:
    return tensors[0][0].device


check_interface([(TieredSpec, OffloadingSpec), (TieredManager, OffloadingManager), (TieredWorker, OffloadingWorker)], _VERSION)
