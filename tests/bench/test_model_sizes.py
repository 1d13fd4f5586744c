"""How large a token's keys and values are: known models by name, others by their config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.bench.model_sizes import catalogue_lines, find_model, known_models
from kvtier.errors import ConfigError


@pytest.mark.parametrize(("name", "num_bytes"), [("llama-3.1-8b", 2 * 32 * 8 * 128 * 2), ("deepseek-v3", 61 * 576 * 2),
                                                 ("meta-llama/Llama-3.1-8B-Instruct", 131072), ("qwen2.5-7b", 2 * 28 * 4 * 128 * 2)])
def test_known_models_by_name(name: str, num_bytes: int) -> None:
    assert find_model(name).token_bytes() == num_bytes
    assert find_model(name).token_bytes("float8") == num_bytes // 2
    assert all(model.token_bytes() > 0 for model in known_models())


@pytest.mark.parametrize(("config", "width"), [
    ({"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}, 64),
    ({"num_hidden_layers": 3, "num_attention_heads": 8, "hidden_size": 64}, 128),
    ({"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 8}, 576),
    ({"text_config": {"num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8}}, 64)])
def test_other_models_by_their_configuration(tmp_path: Path, config: dict[str, object], width: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        assert find_model(name).token_bytes("float32") == 3 * width * 4


@pytest.mark.parametrize(("text", "said"), [("{", "cannot be read"), ("[]", "has no keys"),
                                            ('{"num_hidden_layers": 2}', "num_attention_heads"),
                                            ('{"num_hidden_layers": -2}', "num_hidden_layers=-2")])
def test_a_configuration_that_does_not_say_enough_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        find_model(str(tmp_path))


def test_the_catalogue_has_a_line_for_each_model_with_bytes_by_element_type() -> None:
    _, headings, *lines = catalogue_lines()
    assert headings.split("  ")[-2:] == ["bfloat16, float16", "float8, fp8, int8"]
    assert [line.split()[0] for line in lines] == [model.name for model in known_models()]
    assert "llama-3.1-8b 262144 131072 65536" in [" ".join(line.split()) for line in lines]
    assert len({len(line) for line in (headings, *lines)}) == 1, "columns"


def test_an_unknown_model_gets_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match=r"'lama-3\.1-8b'.*did you mean llama-3\.1-8b"):
        find_model("lama-3.1-8b")
    with pytest.raises(ConfigError, match=r"^--model='xyzzy': .* a config\.json; kvtier tune --list-models lists what is known$"):
        find_model("xyzzy")
    with pytest.raises(ConfigError, match="unknown; use one of"):
        find_model("llama-3.1-8b").token_bytes("bits")
