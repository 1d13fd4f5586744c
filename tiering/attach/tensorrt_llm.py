"""Attach TensorRT-LLM: its KV cache connector keeps blocks in a kvtier tier of host memory and NVMe (design: two ways to attach).

    export TRTLLM_KVTIER='{"secondary": "64GiB", "nvme": "500GiB", "nvme_directory": "/mnt/nvme/kv", "model": "name@revision:digest"}'

    LLM(..., kv_connector_config=KvCacheConnectorConfig(connector_module="kvtier.tiering.attach.tensorrt_llm",
        connector_scheduler_class="TieredScheduler", connector_worker_class="TieredWorker"))

docs/attach/tensorrt-llm.md has the rest. TensorRT-LLM makes a :class:`TieredWorker` on each rank and a :class:`TieredScheduler` on rank 0,
which has the ledger, the manifest and all NVMe I/O.
"""

from __future__ import annotations

from kvtier.tiering.attach.tensorrt_llm_interface import base_classes, check_bases
from kvtier.tiering.attach.tensorrt_llm_scheduler import TieredScheduler
from kvtier.tiering.attach.tensorrt_llm_worker import TieredWorker

__all__ = ["TieredScheduler", "TieredWorker"]

check_bases(zip((TieredScheduler, TieredWorker), base_classes(), strict=True))
