"""Tests in the real vLLM, on a CPU: ``make test-vllm``. Elsewhere they are left out (marker ``vllm``).

Models: SmolLM2 out of its PyPI package, and a tiny random one with windows (three KV groups). Engines run in processes of their own.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

sys.path.append(str(Path(__file__).parent))  # so that test modules can import engine: importlib mode puts no folder there

VOCABULARY = 512


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def smollm() -> Path:
    """A folder of SmolLM2 that vLLM loads: the demo's dequantised copy."""
    from kvtier.bench.demo_model import load_demo_model, user_cache_folder
    from kvtier.errors import ConfigError
    models = user_cache_folder() / "models"
    if not list(models.glob("SmolLM2*/config.json")):
        try:
            load_demo_model()
        except ConfigError as error:
            pytest.fail(f"SmolLM2 is not there: {error}")
    return sorted(models.glob("SmolLM2*/config.json"))[0].parent


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of six layers, four of them with a window of 96 tokens: three KV groups. Its answers are as varied as noise."""
    return make_hybrid(tmp_path_factory.mktemp("models") / "hybrid", seed=0)


@pytest.fixture(scope="session")
def uniform(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers of full attention: one KV group."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    folder = tmp_path_factory.mktemp("models") / "uniform"
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    _save_noise(LlamaForCausalLM(config), folder)
    return folder


def make_hybrid(folder: Path, seed: int) -> Path:
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    torch.manual_seed(seed)
    config = Gemma3TextConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
                              num_key_value_heads=2, head_dim=64, sliding_window=96, max_position_embeddings=4096,
                              layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, bos_token_id=1, eos_token_id=2,
                              pad_token_id=0, tie_word_embeddings=False)
    _save_noise(Gemma3ForCausalLM(config), folder)
    return folder


def _save_noise(model: PreTrainedModel, folder: Path) -> None:
    """Save the model in float32, with weights so large that its answers vary."""
    import torch
    for parameter in model.float().parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(folder)


def conversations(seed: int, count: int, *, families: int = 6, shortest: int = 100, longest: int = 700) -> list[list[int]]:
    """Random prompts that share beginnings, as requests of an agent or a chat do."""
    rng = random.Random(seed)
    stems = [[rng.randrange(3, VOCABULARY) for _ in range(longest)] for _ in range(families)]
    found = []
    for _ in range(count):
        stem = rng.choice(stems)
        shared = rng.randrange(shortest // 2, longest - 20)
        found.append(stem[:shared] + [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(5, max(shortest - shortest // 2, 60)))])
    return found


@pytest.fixture
def nvme(tmp_path: Path) -> dict[str, str]:
    """Settings of an NVMe level in a fresh folder."""
    return {"nvme": "512MiB", "nvme_directory": str(tmp_path / "store"), "nvme_free_space_reserve": "0MiB"}
