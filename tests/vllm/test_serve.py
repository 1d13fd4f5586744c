"""``vllm serve`` over HTTP, with concurrent clients, some of whom hang up in the middle of an answer."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine import Engine, differences, server

CLIENTS = 4
STOPPED_AT = 6
PROMPTS = [random.Random(number).choices(range(5, 40000), k=150 + 20 * number) for number in range(6)]


def test_concurrent_clients_get_right_answers_from_the_tier(smollm: Path, nvme: dict[str, str]) -> None:
    with Engine(smollm) as engine:
        right = engine.generate(prompts=PROMPTS, max_tokens=STOPPED_AT)
    port = _free_port()
    # 36 blocks of 32 tokens for six prompts of 150 to 250: what one client has left there, the others push out.
    with server(smollm, {"secondary": "96MiB", **nvme}, port, num_gpu_blocks_override=36), ThreadPoolExecutor(CLIENTS) as clients:
        for _ in range(3):
            for number in range(0, len(PROMPTS), 2):
                clients.submit(_hang_up, port, PROMPTS[number])
            answers = list(clients.map(lambda prompt: _ask(port, prompt), PROMPTS))
            assert differences(answers, right)[0] == []
        metrics = _metrics(port)
        assert metrics["vllm:external_prefix_cache_hits_total"] > 0
        assert metrics["vllm:kv_offload_load_bytes_total"] > 0
        assert metrics["vllm:kv_offload_tiering_write_bytes_total"] > 0
    with server(smollm, {"secondary": "96MiB", **nvme}, port):
        assert differences([_ask(port, prompt) for prompt in PROMPTS], right)[0] == []
        assert _metrics(port)["vllm:kv_offload_tiering_read_bytes_total"] > 0, "the first server's blocks are found on NVMe by the next"


def _ask(port: int, prompt: list[int]) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    try:
        connection.request("POST", "/v1/completions", json.dumps(_order(prompt, STOPPED_AT)), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return {"tokens": answer["choices"][0]["token_ids"], "aborted": False}


def _hang_up(port: int, prompt: list[int]) -> None:
    """Read the first bytes of a streamed answer and go: vLLM aborts the request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    try:
        order = json.dumps(_order(prompt, 200) | {"stream": True})
        connection.request("POST", "/v1/completions", order, {"Content-Type": "application/json"})
        connection.getresponse().read(10)
    finally:
        connection.close()


def _order(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def _metrics(port: int) -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found: dict[str, float] = {}
    for name, value in re.findall(r"^([\w:]+)(?:\{[^}]*\})? ([-+.\deE]+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
