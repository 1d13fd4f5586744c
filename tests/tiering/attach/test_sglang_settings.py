"""SGLang's storage interface over a tier: ranks, folders, and settings that cannot be."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.tiering.attach.sglang import TieredHiCache

sys.path.append(str(Path(__file__).parent))
from sglang_double import Controller, HostPool, StorageConfig, chain, nvme, same_pages


def test_each_rank_has_its_own_bytes_under_the_same_keys(attach: Callable[..., Controller], tmp_path: Path) -> None:
    for life in range(2):
        pools = [HostPool(seed=10 + rank) for rank in range(2)]
        ranks = [attach(pool, rank=rank, ranks=2, **nvme(tmp_path / "kv")) for rank, pool in enumerate(pools)]
        if not life:
            assert [controller.backup(chain(3), [0, 1, 2]) for controller in ranks] == [3, 3]
        assert min(controller.hits(chain(3)) for controller in ranks) == 3
        for controller in ranks:
            assert controller.fetch(chain(3), [8, 9, 10]) == 3
            assert same_pages(controller.pool, [8, 9, 10], controller.pool, [0, 1, 2])
            controller.backend.close()


def test_sizes_in_bytes_are_of_all_ranks_together(attach: Callable[..., Controller]) -> None:
    one = attach(secondary="1MiB").backend._store.index.plan.host_slots[0]
    two = attach(secondary="1MiB", rank=1, ranks=2).backend._store.index.plan.host_slots[0]
    assert one == 2 * two


def test_rates_are_of_all_ranks_together_and_free_space_is_of_the_file_system(attach: Callable[..., Controller], tmp_path: Path) -> None:
    rates = {"nvme_write_bandwidth": "8MiB/s", "nvme_scrub_bandwidth": "1MiB/s", "nvme_free_space_reserve": "3MiB"}
    configs = [attach(rank=rank, ranks=4, **nvme(tmp_path / "kv", **rates)).backend._store.index.config for rank in range(4)]
    assert sum(config.nvme_write_bytes_per_second for config in configs) == 8 << 20
    assert sum(config.nvme_scrub_bytes_per_second for config in configs) == 1 << 20
    assert {config.nvme_free_space_reserve_bytes for config in configs} == {3 << 20}, "each rank leaves it on the file system of all"


def test_a_rate_of_fewer_bytes_than_ranks_is_still_a_rate(attach: Callable[..., Controller], tmp_path: Path) -> None:
    store = attach(rank=1, ranks=2, **nvme(tmp_path / "kv", nvme_write_bandwidth="1B/s")).backend._store
    assert store.index.config.nvme_write_bytes_per_second == 1.0


@pytest.mark.parametrize("change", [
    {"pool": {"page_size": 8}}, {"pool": {"dtype": torch.float16}}, {"pool": {"device_dtype": torch.float8_e5m2}},
    {"pool": {"layout": "layer_first"}}, {"model": "m@2:0"}])
def test_a_folder_of_another_page_size_dtype_layout_or_model_is_refused(attach: Callable[..., Controller], tmp_path: Path,
                                                                        change: dict[str, Any]) -> None:
    attach(**nvme(tmp_path / "kv")).backend.close()
    pool = HostPool(**change.get("pool", {}))
    with pytest.raises(ConfigError, match="kv"):
        attach(pool, **nvme(tmp_path / "kv") | {key: value for key, value in change.items() if key != "pool"})


def test_another_number_of_ranks_does_not_take_the_folder(attach: Callable[..., Controller], tmp_path: Path) -> None:
    attach(**nvme(tmp_path / "kv")).backend.close()
    with pytest.raises(ConfigError, match="rank"):
        attach(rank=0, ranks=2, **nvme(tmp_path / "kv"))


def test_mla_pages_of_several_ranks_are_refused_before_anything_is_opened() -> None:
    with pytest.raises(ConfigError, match="enable-dp-attention"):
        TieredHiCache(StorageConfig({"secondary": "8 blocks"}, tp_size=2, is_mla_model=True))


@pytest.mark.parametrize(("extra", "named"), [
    ({"secondry": "8 blocks"}, "did you mean 'secondary'"), ({"secondary": "8 blocks", "primary": "4 blocks"}, "has no meaning here"),
    ({}, "no host memory"), ({"secondary": "8"}, "unit"), ({"secondary": "50%"}, "different amounts"),
    ({"secondary": ["8 blocks", "4 blocks"]}, "one group"), ({"secondary": "1 B"}, "too little"),
    ({"secondary": "8 blocks", "lookup_timeout": 0}, "lookup_timeout"), ({"secondary": "8 blocks", "model": 7}, "model=7"),
    ({"secondary": "8 blocks", "nvme": "8 blocks", "nvme_directory": "/nowhere/at/all"}, "nothing says which weights")])
def test_a_misspelt_or_unusable_setting_fails_the_attachment(attach: Callable[..., Controller], extra: dict[str, Any], named: str) -> None:
    config = StorageConfig(extra)
    with pytest.raises(ConfigError, match=named):
        Controller(TieredHiCache(config, {}), HostPool(), config)


def test_a_model_that_is_a_folder_is_known_by_its_weights(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"weights")
    config = StorageConfig({"secondary": "8 blocks", "nvme": "8 blocks", "nvme_directory": str(tmp_path / "kv")},
                           model_name=str(tmp_path / "weights"))
    assert TieredHiCache(config)._model.startswith("weights@local:")


def test_without_interface_v1_a_warning_says_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        TieredHiCache(StorageConfig({"secondary": "8 blocks"}))
    assert "interface_v1" in caplog.text
