"""TierConfig by way of pydantic (``model_validate``, JSON, a field of another model): what is given counts as keywords."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from kvtier.errors import ConfigError
from kvtier.tiering.config import TierConfig


class _Engine(BaseModel):
    """Somebody's settings, of which the tier's are a part."""

    tier: TierConfig | None
    name: str = ""


_WAYS_IN_PYDANTIC: dict[str, Callable[[dict[str, object]], TierConfig | None]] = {
    "model_validate": TierConfig.model_validate,
    "model_validate_json": lambda settings: TierConfig.model_validate_json(json.dumps(settings)),
    "field": lambda settings: _Engine.model_validate({"tier": settings}).tier,
    "field from JSON": lambda settings: _Engine.model_validate_json(json.dumps({"tier": settings})).tier}


@pytest.mark.parametrize("way", _WAYS_IN_PYDANTIC)
def test_settings_that_come_by_way_of_pydantic_are_keywords(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setenv("KVTIER_MAX_SEQ_LEN", "100")
    config = _WAYS_IN_PYDANTIC[way]({"max_gpu_total_bytes": 4096, "nvme_directory": "~/kv"})
    assert config is not None
    assert (config.primary, config.nvme_directory, config.max_seq_len) == ("4096B", Path.home() / "kv", 100)
    assert config.sources["primary"] == "keyword, as max_gpu_total_bytes"
    assert config.sources["max_seq_len"] == "environment KVTIER_MAX_SEQ_LEN"
    assert config.sources["secondary"] == "default"
    nothing_given = _WAYS_IN_PYDANTIC[way]({})
    assert nothing_given is not None
    assert nothing_given.sources["max_seq_len"] == "environment KVTIER_MAX_SEQ_LEN"


@pytest.mark.parametrize("way", _WAYS_IN_PYDANTIC)
@pytest.mark.parametrize(("settings", "message"), [
    ({"max_batch_size": 0}, r"max_batch_size=0 \(keyword\): must be at least 1"),
    ({"max_batch_size": "64"}, r"max_batch_size='64' \(keyword\): must be a whole number"),
    ({"primary": "8"}, "primary='8': a size needs a unit"),
    ({"primry": "8 blocks"}, r"'primry' \(keyword\): unknown key; did you mean 'primary'"),
    ({"primary": "8 blocks", "max_gpu_total_bytes": 3}, "two names for primary"),
    ({"clock": 3}, "must be a function")], ids=["limit", "type", "size", "unknown", "twice", "clock"])
def test_a_bad_setting_that_comes_by_way_of_pydantic_is_a_config_error(way: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _WAYS_IN_PYDANTIC[way](settings)


def test_what_cannot_be_settings_at_all_is_pydantics_error() -> None:
    for given in ("8 blocks", 3, [1]):
        with pytest.raises(ValidationError, match="should be a valid dictionary or instance of TierConfig"):
            TierConfig.model_validate(given)
        with pytest.raises(ValidationError, match="should be a valid dictionary or instance of TierConfig"):
            _Engine(tier=given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"\{1: 2\}: a setting's key is text"):
        TierConfig.model_validate({1: 2})


def test_a_config_is_a_field_as_it_is() -> None:
    config = TierConfig(primary="8 blocks")
    assert _Engine(tier=config).tier is config
    assert TierConfig.model_validate(config) is config
    assert _Engine(tier=None).tier is None
