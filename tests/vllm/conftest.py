"""Tests in the real vLLM, on a CPU: ``make test-vllm``. Elsewhere they are left out (marker ``vllm``).

Models: SmolLM2 out of its PyPI package, and a tiny random one with windows (three KV groups). Engines run in processes of their own.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # so that test modules can import engine: importlib mode puts no folder there
from inputs import make_hybrid, make_uniform

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


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
    return make_uniform(tmp_path_factory.mktemp("models") / "uniform")


@pytest.fixture
def nvme(tmp_path: Path) -> dict[str, str]:
    """Settings of an NVMe level in a fresh folder."""
    return {"nvme": "512MiB", "nvme_directory": str(tmp_path / "store"), "nvme_free_space_reserve": "0MiB"}
