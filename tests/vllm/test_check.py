"""``kvtier check`` on the real engine: over HTTP and in process, host memory and NVMe, and an engine without a tier."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine import Engine, server


def check(port: int, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and what is said to people, of the command."""
    command = [sys.executable, "-m", "kvtier.cli", "check", "--url", f"http://127.0.0.1:{port}", "--json", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    return ended.returncode, json.loads(ended.stdout) if ended.stdout else {}, ended.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("dev_mode", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_a_server_passes_for_host_memory_and_after_a_restart_for_nvme(smollm: Path, nvme: dict[str, str], tmp_path: Path, dev_mode: str,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", dev_mode)
    tier, file = {"secondary": "96MiB", **nvme}, tmp_path / "cold.json"
    port = free_port()
    with server(smollm, tier, port, num_gpu_blocks_override=36):
        code, found, said = check(port, "--tokens", "300")
        assert code == 0, (found, said)
        assert found["flush"]["how"] == ("reset" if dev_mode == "1" else "traffic")
        assert found["warm"]["host_chunks"] >= 8
        assert found["warm"]["device_tokens"] == 0
        assert found["largest_logprob_difference"] < 0.05
        code, found, said = check(port, "--tokens", "300", "--level", "nvme", "--save", str(file))
        assert code == 0, (found, said)
    with server(smollm, tier, port, num_gpu_blocks_override=36):
        code, found, said = check(port, "--level", "nvme", "--resume", str(file))
        assert code == 0, (found, said)
        assert found["warm"]["nvme_chunks"] >= 8


def test_a_server_without_a_tier_is_told_so(smollm: Path) -> None:
    port = free_port()
    with server(smollm, None, port):
        code, _, said = check(port)
    assert code == 1
    assert "no kvtier tier is attached" in said


@pytest.mark.parametrize("own_core", [False, True])
def test_an_llm_passes_for_both_levels(hybrid: Path, nvme: dict[str, str], own_core: bool) -> None:
    with Engine(hybrid, {"secondary": "16MiB", **nvme}, own_core=own_core) as engine:
        for level in ("host", "nvme"):
            found = engine.check(level=level, num_tokens=400, seconds=600.0)
            assert found["ok"], found
