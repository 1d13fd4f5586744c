"""``kvtier top``: it shows what ``/metrics`` says, by the second, and tells what is no endpoint of ours in one line."""

from __future__ import annotations

import http.server
import inspect
import io
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import kvtier
from kvtier import cli_top
from kvtier.cli_top import NoMetrics, Picture, bar, fetch, full_address, growth, quantile, top, view
from kvtier.errors import ConfigError
from kvtier.tiering.metrics_server import serve_metrics
from kvtier.tiering.metrics_table import METRICS

app = typer.Typer()
app.command()(top)


@pytest.fixture
def cache() -> Iterator[kvtier.KVCacheManager]:
    layout = kvtier.KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", tokens_per_block=4)
    with kvtier.KVCacheManager(layout, kvtier.TierConfig(primary="8 blocks", secondary="4 blocks", max_seq_len=64)) as made:
        yield made


@pytest.fixture
def page() -> Iterator[Callable[[bytes, int], str]]:
    """``page(text, status)``: the address of a server that answers just that."""
    servers: list[http.server.HTTPServer] = []

    def serve(text: bytes, status: int = 200) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:
                pass

        servers.append(http.server.HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.05,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/metrics"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def serve_prompt(cache: kvtier.KVCacheManager, number: int) -> None:
    cache.add_sequence(kvtier.Request(id=number, tokens=list(range(number * 100, number * 100 + 14))))
    cache.wait_ready(number, timeout=20)
    cache.mark_computed(number, 14)
    cache.remove_sequence(number)


def shown(now: Picture, before: Picture | None = None, problem: str = "") -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view(now, before, "http://here/metrics", problem))
    return console.export_text()


def test_one_look_shows_levels_reuse_and_moves(cache: kvtier.KVCacheManager) -> None:
    for number in (1, 2, 3, 4, 3):
        serve_prompt(cache, number)
    assert cache.transfers.idle(20.0)
    with serve_metrics(cache) as server:
        result = CliRunner().invoke(app, [f"127.0.0.1:{server.port}", "--once"], catch_exceptions=False)
    assert result.exit_code == 0
    words = [line.split() for line in result.output.splitlines()]
    stats = cache.stats()
    assert ["primary", "8"] in [line[:2] for line in words]
    hits = next(line[-2:] for line in words if line[:1] == ["primary"])
    assert hits == [str(stats.hit_tokens.primary), str(stats.hit_blocks.primary)]
    assert any(line[:3] == ["primary", "→", "secondary"] for line in words)
    assert "nvme" not in result.output, "a level that there is none of is left out"
    assert "no failures" in result.output


def test_growth_is_by_the_second_and_starts_anew_after_a_restart() -> None:
    name, labels = "kvtier_hit_tokens_total", frozenset({("level", "nvme")})
    before = Picture(10.0, {(name, labels): 100.0})
    assert growth(Picture(12.0, {(name, labels): 300.0}), before, name) == 100.0
    assert growth(Picture(12.0, {(name, labels): 40.0}), before, name, level="nvme") == 20.0
    assert growth(before, None, name) == 100.0
    assert growth(Picture(12.0), before, name) == 0.0


def test_a_quantile_is_of_what_came_between_two_looks() -> None:
    def picture(at: float, *counts: float) -> Picture:
        bounds = zip(("0.1", "1.0", "+Inf"), counts, strict=True)
        return Picture(at, {("m_bucket", frozenset({("le", bound)})): count for bound, count in bounds})

    assert quantile(picture(1, 0, 0, 0), None, "m", 0.95) is None
    assert quantile(picture(1, 90, 100, 100), None, "m", 0.9) == 0.1
    assert quantile(picture(1, 90, 100, 100), None, "m", 0.95) == 1.0
    assert quantile(picture(2, 90, 110, 110), picture(1, 90, 100, 100), "m", 0.5) == 1.0
    assert quantile(picture(2, 90, 100, 100), picture(1, 90, 100, 100), "m", 0.5) is None


def test_a_bar_shows_every_state_that_is_there() -> None:
    assert bar({"used": 8.0, "cached": 0.0, "empty": 0.0}, 8) == "█" * 30
    assert bar({"used": 1.0, "cached": 5000.0, "empty": 4999.0}, 10000) == "█" + "▒" * 15 + "·" * 14
    assert len(bar(dict.fromkeys(("used", "busy", "cached", "backing"), 100.0), 400)) == 30


def test_trouble_is_named_and_a_lost_connection_is_said_over_what_was_seen_last(cache: kvtier.KVCacheManager) -> None:
    with serve_metrics(cache) as server:
        now = fetch(full_address(server.url))
        sick = Picture(now.at, {**now.values, ("kvtier_checksum_failures_total", frozenset()): 3.0})
        assert "checksum failures 3" in shown(sick)
        assert "no failures" not in shown(sick)
        assert "no answer" in shown(now, now, "no answer (refused)")
        cache.close()
        assert "the cache has been closed" in shown(fetch(full_address(server.url)))


def test_the_live_view_goes_on_while_nobody_answers_and_ends_with_ctrl_c(cache: kvtier.KVCacheManager,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("rich.console.Console", partial(Console, file=screen, force_terminal=True, width=100, height=30))
    looks = 0

    def sleep(_seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            server.close()
        if looks == 3:
            raise KeyboardInterrupt

    with serve_metrics(cache) as server:
        monkeypatch.setattr(cli_top.time, "sleep", sleep)
        with pytest.raises(KeyboardInterrupt):
            top(server.url, interval=1.0)
    assert "no failures" in screen.getvalue()
    assert "no answer" in screen.getvalue()


def test_every_metric_that_it_asks_for_exists() -> None:
    known = {metric.shown_name for metric in METRICS} | {"kvtier_up", "kvtier_info"}
    asked = set(re.findall(r"kvtier_[a-z_]+(?![a-z_]*\{)", inspect.getsource(cli_top)))
    built = {f"kvtier_{verb}_{what}_total" for verb in ("onboarded", "offloaded") for what in ("blocks", "bytes")} \
        | {f"kvtier_move_{kind}_seconds" for kind in ("duration", "queue")}
    assert {name for name in asked if not name.endswith("_")} | built <= known


@pytest.mark.parametrize(("text", "expected"), [
    ("localhost:9400", "http://localhost:9400/metrics"), ("http://[::1]:9400", "http://[::1]:9400/metrics"),
    ("https://engine/metrics", "https://engine/metrics"), ("engine:1/tier/metrics", "http://engine:1/tier/metrics"),
    ("http://engine:1/", "http://engine:1/metrics")])
def test_a_host_and_a_port_are_enough(text: str, expected: str) -> None:
    assert full_address(text).url == expected


@pytest.mark.parametrize("text", ["", "http://", "ftp://engine/metrics", "file:///etc/passwd", "two words", "engine:abc", "engine:99999", "http://[::1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no address of metrics; write for example"):
        full_address(text)


@pytest.mark.parametrize(("text", "status", "message"), [
    (b"<html>", 200, "but not with metrics of kvtier"), (b"", 200, "but not with metrics of kvtier"),
    (b"process_cpu_seconds_total 1.0\n", 200, "but not with metrics of kvtier"), (b"\xff\xfe{", 200, "but not with metrics"),
    (b"", 404, r"no answer \(Not Found\)")])
def test_an_endpoint_of_something_else_is_told_apart(page: Callable[[bytes, int], str], text: bytes, status: int, message: str) -> None:
    with pytest.raises(NoMetrics, match=message):
        fetch(full_address(page(text, status)))


def test_a_server_of_another_kind_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        def greet() -> None:
            client, _ = server.accept()
            with client:
                client.recv(1000)
                client.sendall(b"SSH-2.0-none\r\n")
        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(NoMetrics, match=r"no answer .*SSH"):
            fetch(full_address(f"http://127.0.0.1:{server.getsockname()[1]}/metrics"))
        thread.join(10)


def test_nobody_there_is_one_line_and_exit_code_1() -> None:
    command = [sys.executable, "-m", "kvtier.cli", "top", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kvtier: http://127.0.0.1:1/metrics: no answer (")
    assert done.stderr.count("\n") == 1


def test_a_terminal_that_cannot_move_its_cursor_gets_one_picture(cache: kvtier.KVCacheManager) -> None:
    with serve_metrics(cache) as server:
        done = subprocess.run([sys.executable, "-m", "kvtier.cli", "top", server.url], capture_output=True, text=True, timeout=120,
                              check=False, env=os.environ | {"TERM": "dumb", "FORCE_COLOR": "1"})
    assert done.returncode == 0
    assert "primary" in done.stdout


def test_nothing_of_a_password_or_key_is_shown(cache: kvtier.KVCacheManager, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("http://user:s3cret@127.0.0.1:1", "http://127.0.0.1:1/metrics?key=s3cret", "user:s3/cret@127.0.0.1:1"):
        with pytest.raises((NoMetrics, ConfigError)) as refused:
            top(text, once=True)
        assert "s3" not in str(refused.value)
    with serve_metrics(cache) as server:
        top(f"{server.url.replace('://', '://user:s3cret@')}?key=s3cret", once=True)
    printed = capsys.readouterr().out
    assert "primary" in printed
    assert "s3" not in printed


def test_no_proxy_is_asked(cache: kvtier.KVCacheManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert urllib.request.getproxies()["http"]
    with serve_metrics(cache) as server:
        assert fetch(full_address(server.url)).sum("kvtier_up") == 1
