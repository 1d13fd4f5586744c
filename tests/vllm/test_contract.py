"""The adapter against the vLLM that is installed: its classes, its names, its messages between processes."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingManager, OffloadingSpec, OffloadingWorker
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from kvtier.errors import ConfigError
from kvtier.tiering.attach import vllm as adapter
from kvtier.tiering.attach import vllm_probe
from kvtier.tiering.attach.interface_differences import differences
from kvtier.tiering.attach.rank_facts import CRYPTOGRAPHIC, KNOWN_DTYPES, Facts
from kvtier.tiering.attach.vllm_interface import check_interface, installed_version
from kvtier.tiering.attach.vllm_manager import TieredManager, TierTransfer
from kvtier.tiering.attach.vllm_metrics import metric_definitions
from kvtier.tiering.attach.vllm_pages import Part
from kvtier.tiering.attach.vllm_worker import TieredWorker

PAIRS = [(adapter.TieredSpec, OffloadingSpec), (TieredManager, OffloadingManager), (TieredWorker, OffloadingWorker)]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda kind: kind.__name__)
def test_our_class_answers_all_that_the_installed_one_asks(ours: type, theirs: type) -> None:
    assert differences(ours, theirs) == []
    assert not ours.__abstractmethods__


def test_a_method_that_vllm_adds_or_changes_is_noticed_when_the_adapter_is_loaded() -> None:
    class Newer(OffloadingManager):
        def lookup(self, key: bytes, req_context: object, priority: int) -> None:  # type: ignore[override]
            ...

    with pytest.raises(ConfigError, match=r"Newer\.lookup.*Supported: vLLM 0\.32"):
        check_interface([(TieredManager, Newer)], installed_version())


def test_vllm_finds_the_adapter_by_the_line_of_the_documentation() -> None:
    line = {"spec_name": "TieredSpec", "spec_module_path": "kvtier.tiering.attach.vllm"}
    assert OffloadingSpecFactory.get_spec_cls(line) is adapter.TieredSpec


def test_metric_names_are_those_of_vllms_own_offloading() -> None:
    own = {value for names in (CPUOffloadingMetrics, TieringOffloadingMetrics) for value in vars(names).values() if isinstance(value, str)}
    assert {name for name in metric_definitions() if "kvtier" not in name} <= own


def test_hash_algorithms_and_dtypes_are_names_that_vllm_knows() -> None:
    from typing import get_args

    from vllm.config.cache import CacheDType, PrefixCachingHashAlgo
    assert set(CRYPTOGRAPHIC) <= set(get_args(PrefixCachingHashAlgo))
    assert set(KNOWN_DTYPES) - {"float32", "half", "float"} <= set(get_args(CacheDType))


def test_states_of_another_dtype_of_the_same_width_are_another_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recurrent(MambaBase):
        mamba_type = "mamba2"

        def __init__(self, dtype: torch.dtype) -> None:
            self.dtype = dtype

        def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
            return ((4,), (4,))

        def get_state_dtype(self) -> tuple[torch.dtype, ...]:
            return (torch.bfloat16, self.dtype)

    def facts(layer: object) -> Facts:
        engine = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
                                 cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"), lora_config=None)
        monkeypatch.setattr(vllm_probe, "get_current_vllm_config_or_none", lambda: engine)
        monkeypatch.setattr(vllm_probe, "_config_digest", lambda _config: "the same")
        parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, world_size=1)
        config = SimpleNamespace(model=SimpleNamespace(dtype="bfloat16"), kv_cache_layout="NHD", parallel=parallel,
                                 cache=SimpleNamespace(blocks_per_chunk=1, tokens_per_hash=16),
                                 groups=[SimpleNamespace(layer_names=["layer"], tokens_per_block=16, group_id=0)])
        pages = SimpleNamespace(group_data_refs=[[SimpleNamespace(page_size_bytes=16)]])
        return vllm_probe.facts_of(config, pages, SimpleNamespace(model="m@1:2", trusted_lora_names=False), "0.32.0")

    half, brain, attention = facts(Recurrent(torch.float16)), facts(Recurrent(torch.bfloat16)), facts(object())
    assert (half.page_bytes, half.is_state) == (brain.page_bytes, brain.is_state) == (((16,),), (True,))
    assert half.fingerprint() != brain.fingerprint()
    assert "state_dtypes" not in attention.identity, "stores of other models are found as before"


def test_a_transfer_reaches_a_worker_in_another_process() -> None:
    job = TransferJob("request", TierTransfer((Part(3, 1, (4, 5)),)), GPULoadStoreSpec([7, 8], [0, 2], [0, 6]))
    again = pickle.loads(pickle.dumps(job))
    assert again.src_spec == job.src_spec
    assert again.dst_spec.block_ids.tolist() == [7, 8]
