"""What a model loses by an 8-bit or 4-bit cache: rows for each, a float32 cache that must be the model's own, and bad input."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.bench import kernels_accuracy
from kvtier.bench.kernels_accuracy import main, measure_accuracy
from kvtier.bench.report import Report
from kvtier.errors import ConfigError
from kvtier.tiering.attach.transformers_forward import LayerPlace

STORAGES = ("fp8", "int8", "nvfp4")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(vocab_size=199, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                        num_key_value_heads=2, head_dim=16, initializer_range=0.4)).eval()


@pytest.fixture
def texts():
    return torch.randint(3, 199, (3, 25), generator=torch.Generator().manual_seed(1)).tolist()


def measure(model, texts):
    report = Report("accuracy", {})
    measure_accuracy(report, model, texts, range(3, 40))
    return report


def test_fewer_bits_are_further_from_the_float32_cache(model, texts):
    report = measure(model, texts)
    rows = {row.name.removeprefix("kernels/accuracy/"): row for row in report.rows}
    assert list(rows) == ["float32/perplexity", *(f"{storage}/{figure}" for storage in STORAGES
                                                  for figure in ("perplexity", "top1", "divergence"))]
    assert report.invalid == {}
    divergences = [rows[f"{storage}/divergence"].median for storage in STORAGES]
    assert 0 < divergences[0] < divergences[2], "e4m3 has more places than e2m1"
    assert rows["fp8/top1"].median > 50
    for storage in STORAGES:
        assert rows[f"{storage}/perplexity"].limit.value == rows["float32/perplexity"].median


def test_a_scale_that_does_not_belong_to_the_numbers_is_seen(model, texts, monkeypatch):
    right = {row.name: row.median for row in measure(model, texts).rows}
    monkeypatch.setattr(kernels_accuracy, "LARGEST", {storage: 100 * largest for storage, largest in kernels_accuracy.LARGEST.items()})
    wrong = {row.name: row.median for row in measure(model, texts).rows}
    for storage in ("fp8", "int8"):  # saturated
        assert wrong[f"kernels/accuracy/{storage}/divergence"] > 3 * right[f"kernels/accuracy/{storage}/divergence"]


def test_without_the_models_own_logits_there_is_no_figure(model, texts, monkeypatch):
    monkeypatch.setattr(LayerPlace, "write", lambda *_: None)
    report = measure(model, texts)
    assert list(report.invalid) == ["kernels/accuracy/float32"]
    assert report.rows == []


@pytest.mark.parametrize("texts", [[], [[1, 2, 3], [1, 2]], [[1], [2]]], ids=["none", "two lengths", "nothing to predict"])
def test_texts_that_cannot_be_compared_are_refused(model, texts):
    with pytest.raises(ConfigError, match="all texts need one length"):
        measure(model, texts)


def test_the_command_writes_its_figures(chat_model_folder, tmp_path, capsys):
    file, folder = tmp_path / "accuracy.json", tmp_path / "model"
    shutil.copytree(chat_model_folder, folder)
    LlamaForCausalLM(LlamaConfig(vocab_size=1500, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                 num_key_value_heads=2, head_dim=16)).save_pretrained(str(folder))
    assert main(["--quick", "--model", str(folder), "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["config"]["invalid"] == []
    assert report["config"]["tokens"] == 64
    assert len(report["results"]) == 10
    assert main(["--quick", "--model", str(chat_model_folder)]) == 2
    assert "a row of 8 numbers" in capsys.readouterr().err
    assert main(["--quick", "--model", str(tmp_path / "nowhere")]) == 2
    assert "no config.json there" in capsys.readouterr().err
