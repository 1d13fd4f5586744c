"""A small HTTP server that answers as ``vllm serve`` with a tier does, and misbehaves on demand. Every word of a prompt is a token."""

from __future__ import annotations

import http.server
import json
import threading
import time
import zlib
from dataclasses import dataclass, field
from typing import Any

CHUNK = 16
"""Tokens of a chunk, and of a block of the device."""


@dataclass
class Behaviour:
    """What the server does. ``serves_from``: where a tier hit is said to come from: "host", "nvme", "both" or "" (never)."""

    attached: bool = True
    metrics: bool = True
    dev_mode: bool = True
    device_blocks: int | None = 40
    host_chunks: int = 30
    max_tokens: int = 200
    models: tuple[str, ...] = ("fake",)
    serves_from: str | None = None
    wrong_from_tier: bool = False
    near_tie: bool = False
    logprob_shift: float = 0.0
    ignores_salt: bool = False
    refuses_reset: bool = False
    status: int = 200
    fails_after: int = 1_000_000
    hang: float = 0.0
    hangs_after: int = 0
    key: str | None = None
    others: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    stores: bool = True
    requests: int = 0


class FakeVllm(http.server.ThreadingHTTPServer):
    """One server; ``behaviour`` may be changed while it runs."""

    daemon_threads = True

    def __init__(self, **behaviour: Any) -> None:
        self.behaviour = Behaviour(**behaviour)
        self.device: dict[str, int] = {}
        self.host: dict[str, int] = {}
        self.nvme: set[str] = set()
        self.under_way: dict[str, int] = {}
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def restart(self) -> None:
        """What is on NVMe is all that is left."""
        self.device.clear()
        self.host.clear()

    def add(self, name: str, value: float) -> None:
        self.behaviour.counters[name] = self.behaviour.counters.get(name, 0.0) + value

    def complete(self, order: dict[str, Any]) -> dict[str, Any]:
        will = self.behaviour
        wishes = (order.get("kv_transfer_params") or {}).get("kvtier", {})
        words = order["prompt"].split()
        key = order["prompt"] + ("" if will.ignores_salt else order["cache_salt"])
        blocks = (len(words) - 1) // CHUNK
        self._end_stores()
        source = ""
        if key in self.device:
            source = "device"
        elif will.attached and not wishes.get("skip_read") and blocks:
            source = "host" if key in self.host else "nvme" if key in self.nvme else ""
            source = source and (will.serves_from if will.serves_from is not None else source)
        if source == "device":
            self.add("vllm:prefix_cache_hits_total", blocks * CHUNK)
        elif source:
            self.add("vllm:external_prefix_cache_hits_total", blocks * CHUNK)
            for level, tier in (("host", "0:primary"), ("nvme", "1:kvtier-nvme")):
                if source in (level, "both"):
                    self.add(f'vllm:kv_offload_tiering_chunk_hits_total{{tier="{tier}"}}', blocks if source == level else blocks / 2)
        self._keep(self.device, key, blocks, will.device_blocks)
        if will.attached and will.stores and not wishes.get("skip_write") and blocks and key not in self.host:
            self.under_way[key] = blocks
            self.add("vllm:kv_offload_cpu_allocation_size_sum", blocks)
        self.add("vllm:request_success_total", 1 + will.others)
        seed = zlib.crc32(order["prompt"].encode())
        tokens = [(seed + 7 * place) % 1000 for place in range(order["max_tokens"])]
        is_other = source not in ("", "device")
        if is_other and (will.wrong_from_tier or will.near_tie) and len(tokens) > 3:
            tokens[3] += 1
        gap = 0.001 if will.near_tie else 3.0
        logprobs = [-0.5 - (will.logprob_shift if is_other else 0.0)] * len(tokens)
        return {"choices": [{"token_ids": tokens, "logprobs": {"token_logprobs": logprobs,
                                                              "top_logprobs": [{"a": value, "b": value - gap} for value in logprobs]}}],
                "usage": {"prompt_tokens": len(words)}}

    def _end_stores(self) -> None:
        """As in vLLM, what a request stores is there, and counted, when the engine makes its next steps."""
        for key, blocks in self.under_way.items():
            self._keep(self.host, key, blocks, self.behaviour.host_chunks)
            self.nvme.add(key)
            self.add('vllm:kv_offload_tiering_write_bytes_total{tier="1:kvtier-nvme"}', blocks * 4096)
        self.under_way.clear()

    def _keep(self, level: dict[str, int], key: str, blocks: int, most: int | None) -> None:
        level[key] = blocks
        while most is not None and sum(level.values()) > most and len(level) > 1:
            level.pop(next(iter(level)))

    def page(self) -> str:
        will = self.behaviour
        if not will.metrics:
            return "# HELP process_cpu_seconds_total CPU\n# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total 1.0\n"
        lines = [f"{name} {value}" for name, value in will.counters.items()]
        lines += ["vllm:num_requests_running 0.0", "vllm:num_requests_waiting 0.0"]
        if will.device_blocks is not None:
            lines.append(f'vllm:cache_config_info{{block_size="{CHUNK}",engine="0",num_gpu_blocks="{will.device_blocks}"}} 1.0')
        if will.attached:
            lines += [f"vllm:kv_offload_kvtier_host_chunks {sum(self.host.values())}",
                      f"vllm:kv_offload_kvtier_nvme_chunks {len(self.nvme)}"]
        return "\n".join(lines) + "\n"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeVllm

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._say(200, self.server.page().encode())
        elif self.path == "/v1/models" and self._has_key():
            self._json(200, {"data": [{"id": name, "max_model_len": self.server.behaviour.max_tokens}
                                      for name in self.server.behaviour.models]})
        elif self.path != "/v1/models":
            self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        will = self.server.behaviour
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/reset_prefix_cache" and will.dev_mode:
            if not will.refuses_reset:
                self.server.device.clear()
            self._json(200, {"success": not will.refuses_reset})
        elif self.path == "/v1/completions" and self._has_key():
            will.requests += 1
            if will.hang and will.requests > will.hangs_after:
                time.sleep(will.hang)
            if will.status != 200 or will.requests > will.fails_after:
                self._json(will.status if will.status != 200 else 500, {"error": {"message": "the engine\nis dead"}})
                return
            with self.server.lock:
                answer = self.server.complete(order)
            self._json(200, answer)
        elif self.path != "/v1/completions":
            self._json(404, {"detail": "Not Found"})

    def _has_key(self) -> bool:
        key = self.server.behaviour.key
        if key is None or self.headers.get("Authorization") in (f"Bearer {key}", f"Basic {key}"):
            return True
        self._json(401, {"error": "Unauthorized"})
        return False

    def _json(self, status: int, answer: dict[str, Any]) -> None:
        self._say(status, json.dumps(answer).encode())

    def _say(self, status: int, body: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            pass  # the client has gone

    def log_message(self, format: str, *args: object) -> None:
        pass
