"""The reference of the settings is the model: nothing in it can be out of date."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from kvtier.errors import ConfigError
from kvtier.tiering.config import TierConfig
from kvtier.tiering.config_names import OTHER_NAMES
from kvtier.tiering.config_reference import example, json_schema, names_table, reference_table, sizes_in_words
from kvtier.tiering.config_sources import KEYWORD_ONLY

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVTIER_"):
            monkeypatch.delenv(name)


def of_files() -> set[str]:
    return set(TierConfig.model_fields) - KEYWORD_ONLY


def test_every_setting_says_what_it_is() -> None:
    assert [key for key, field in TierConfig.model_fields.items() if not field.description] == []


def test_the_schema_has_every_key_of_a_file_its_limits_and_no_other() -> None:
    schema: Any = json_schema()
    assert set(schema["properties"]) == of_files() | set(OTHER_NAMES)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["read_threads"]["maximum"] == 256
    assert schema["properties"]["gds"]["enum"] == ["required", "auto", "off"]
    assert {option.get("type") for option in schema["properties"]["faults"]["anyOf"]} == {"string", "array", "null"}
    for key in of_files():
        assert schema["properties"][key]["description"] == TierConfig.model_fields[key].description
        default = TierConfig.model_fields[key].default
        assert schema["properties"][key]["default"] == default


def test_pydantic_s_own_schema_is_the_same_and_another_model_with_a_tier_in_it_has_one() -> None:
    class Engine(BaseModel):
        tier: TierConfig

    schema: Any = json_schema()
    own = TierConfig.model_json_schema()
    assert own["properties"] == {key: schema["properties"][key] for key in of_files()}
    assert Engine.model_json_schema()["$defs"]["TierConfig"]["properties"] == own["properties"]


def test_the_example_changes_nothing_and_without_its_marks_says_every_default(tmp_path: Path) -> None:
    (tmp_path / "as-it-is.yaml").write_text(example())
    assert set(TierConfig.from_file(tmp_path / "as-it-is.yaml").sources.values()) == {"default"}
    settings = [line[1:] for line in example().splitlines() if line.startswith("#") and not line.startswith("# ")]
    assert yaml.safe_load("\n".join(settings)).keys() == of_files()
    (tmp_path / "all.yaml").write_text("\n".join(settings))
    config = TierConfig.from_file(tmp_path / "all.yaml")
    for key in of_files():
        assert getattr(config, key) == TierConfig.model_fields[key].default
        assert config.sources[key].startswith("file ")
    assert max(map(len, example().splitlines())) <= 120


def test_the_page_of_the_settings_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    for table in (reference_table(), names_table()):
        assert table in page, "paste: python -c 'from kvtier.tiering.config_reference import *; print(reference_table(), names_table())'"


# -- other names -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value", "key", "expected"), [
    ("host_cache_size", 1 << 30, "secondary", "1073741824B"), ("host_cache_size", "64GiB", "secondary", "64GiB"),
    ("host_cache_size", 0, "secondary", "0B"), ("max_gpu_total_bytes", 4096, "primary", "4096B"),
    ("free_gpu_memory_fraction", 0.85, "primary", "85%"), ("free_gpu_memory_fraction", 1, "primary", "100%"),
])
def test_names_of_tensorrt_llm_mean_the_same_thing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, key: str,
                                                       expected: str) -> None:
    config = TierConfig(**{name: value})
    assert getattr(config, key) == expected
    assert config.sources[key] == f"keyword, as {name}"
    (tmp_path / "tier.yaml").write_text(f"{name}: {json.dumps(value)}\n")
    assert getattr(TierConfig.from_file(tmp_path / "tier.yaml"), key) == expected
    monkeypatch.setenv(f"KVTIER_{name.upper()}", str(value))
    config = TierConfig()
    assert getattr(config, key) == expected
    assert config.sources[key] == f"environment KVTIER_{name.upper()}, as {name}"


def test_another_name_keeps_its_place_in_the_order_of_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tier.yaml").write_text("host_cache_size: 1000\n")
    monkeypatch.setenv("KVTIER_SECONDARY", "2 blocks")
    assert TierConfig.from_file(tmp_path / "tier.yaml").secondary == "2 blocks"
    assert TierConfig(host_cache_size=5000).secondary == "5000B"


@pytest.mark.parametrize(("settings", "message"), [
    ({"secondary": "1 blocks", "host_cache_size": 1}, r"secondary and host_cache_size \(keyword\): two names for secondary"),
    ({"max_gpu_total_bytes": 1, "free_gpu_memory_fraction": 0.5}, "two names for primary; give one of them"),
    ({"host_cache_size": -1}, "host_cache_size=-1: must be a number of bytes"),
    ({"host_cache_size": True}, "host_cache_size=True: must be a number of bytes"),
    ({"host_cache_size": 1.5}, r"host_cache_size=1\.5: must be a number of bytes"),
    ({"host_cache_size": "much"}, "secondary='much': not a size"),
    ({"free_gpu_memory_fraction": 90}, "free_gpu_memory_fraction=90: must be a share of what is free, above 0 and at most 1"),
    ({"free_gpu_memory_fraction": "half"}, "free_gpu_memory_fraction='half': must be a share"),
    ({"host_cache_sise": 1}, "did you mean 'host_cache_size'"),
])
def test_another_name_that_says_nothing_usable_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TierConfig(**settings)


# -- sizes -----------------------------------------------------------------------------------------------------------------------


def test_sizes_are_said_of_each_rank_and_of_all() -> None:
    sizes = {"secondary": "4GiB", "nvme": ["8 blocks", "1GiB"], "nvme_directory": "/nvme"}
    assert sizes_in_words(TierConfig(**sizes)) == [  # type: ignore[arg-type]
        "primary: 90% of what is free", "secondary: 4.00 GiB (4294967296 bytes)",
        "nvme: 8 blocks of each group; 1.00 GiB (1073741824 bytes)"]
    assert sizes_in_words(TierConfig(**sizes, num_ranks=2)) == [  # type: ignore[arg-type]
        "primary: 90% of what is free", "secondary: 4.00 GiB (4294967296 bytes) of each rank, 8.00 GiB (8589934592 bytes) of all 2",
        "nvme: 8 blocks of each group and rank; 1.00 GiB (1073741824 bytes) of each rank, 2.00 GiB (2147483648 bytes) of all 2"]
    assert sizes_in_words(TierConfig(secondary="50%", num_ranks=4, size_scope="total"))[1] == \
        "secondary: 50% of what is free, 1/4 of that for each rank"
    assert sizes_in_words(TierConfig(secondary="4GiB", num_ranks=4, size_scope="total"))[1] == \
        "secondary: 1.00 GiB (1073741824 bytes) of each rank, 4.00 GiB (4294967296 bytes) of all 4"
