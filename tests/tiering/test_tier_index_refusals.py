"""What a ``TierIndex`` refuses: folders and names of others, settings and arguments that cannot be. Nothing has changed then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tier_rig import PLAIN, TierRig, keys, on_nvme

from kvtier import TierConfig, TierIndex
from kvtier.errors import ConfigError, RequestError
from kvtier.pools.page_layout import PageGroup, PageLayout

THREE_RANKS = PageLayout([PageGroup([1000], 2)], ranks=3)


def test_two_indexes_on_one_folder_are_refused(tmp_path: Path) -> None:
    settings = on_nvme(tmp_path)
    with TierRig(**settings) as rig, pytest.raises(ConfigError, match="in use"):
        TierIndex(PLAIN, rig.config, model="m@1:0", engine_id="test-another")


def test_two_indexes_of_one_engine_are_refused() -> None:
    config = TierConfig(secondary="2 blocks")
    with TierIndex(PLAIN, config, engine_id="test-twice"), pytest.raises(ConfigError, match="another index"):
        TierIndex(PLAIN, config, engine_id="test-twice")


@pytest.mark.parametrize("other", [{"model": "n@1:0"}, {"fingerprint": "fp8"}])
def test_a_folder_of_another_model_is_refused(tmp_path: Path, other: dict[str, str]) -> None:
    TierRig(**on_nvme(tmp_path)).close()
    with pytest.raises(ConfigError):
        TierRig(index=other, **on_nvme(tmp_path))


def test_a_folder_of_another_block_size_is_refused(tmp_path: Path) -> None:
    TierRig(**on_nvme(tmp_path)).close()
    with pytest.raises(ConfigError):
        TierRig(THREE_RANKS, **on_nvme(tmp_path))


def test_too_little_host_memory_is_named_per_rank_and_in_total() -> None:
    with pytest.raises(ConfigError, match=r"1.95 KiB .2000 bytes. on each of 3 ranks, 8.00 KiB .8192 bytes. in total"):
        TierIndex(THREE_RANKS, TierConfig(secondary="4KiB"))


@pytest.mark.parametrize(("settings", "message"), [
    ({"secondary": "50%"}, "different amounts free"),
    ({"secondary": "2 blocks", "primary": "8 blocks"}, "engine owns its pool"),
    ({"secondary": "2 blocks", "num_ranks": 2}, "engine owns its pool"),
    ({"secondary": "2 blocks", "gds": "required"}, "through host memory"),
    ({"secondary": ["2 blocks", "2 blocks"]}, "2 sizes for 1 groups"),
])
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TierIndex(PLAIN, TierConfig(**settings))


def test_nvme_wants_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs model="):
        TierIndex(PLAIN, TierConfig(secondary="2 blocks", **on_nvme(tmp_path)))


def test_bad_arguments_are_refused_and_change_nothing() -> None:
    with TierRig() as rig:
        index = rig.index
        for call in (lambda: index.lookup("r", keys(1), 3), lambda: index.lookup("r", [b""]), lambda: index.lookup("r", [b"x" * 28]),
                     lambda: index.lookup("r", b"x" * 32), lambda: index.plan_store(None, keys(1)),  # type: ignore[arg-type]
                     lambda: index.plan_store("r", keys(1), priority=101), lambda: index.begin_request("r", priority="URGENT"),
                     lambda: index.begin_request("r", duration_seconds=-1.0), lambda: index.complete(0), lambda: index.complete(True),
                     lambda: index.begin_request("r", skip_read=1),  # type: ignore[arg-type]
                     lambda: index.wait([], -1.0), lambda: index.end_request([]),  # type: ignore[arg-type]
                     lambda: index.key_state("r", "text")):  # type: ignore[arg-type]
            with pytest.raises(RequestError):
                call()
        assert index.stats().requests == 0
        index.begin_request("r")
        with pytest.raises(RequestError, match="active already"):
            index.begin_request("r")
