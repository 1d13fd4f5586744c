"""``kvtier check`` against a small server: it passes only where the tier serves from the level asked for, and the right answers."""

from __future__ import annotations

import json
import math
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier import cli
from kvtier.bench import check_flush
from kvtier.bench.check import CheckOptions, run_check
from kvtier.bench.check_engine import Answer
from kvtier.bench.check_http import HttpEngine, server_address
from kvtier.bench.check_metrics import OURS, parse_metrics
from kvtier.bench.check_report import CheckResult, Verdict
from kvtier.errors import ConfigError

sys.path.append(str(Path(__file__).parent))  # importlib mode puts no folder there
from fake_vllm import FakeVllm

Serve = Callable[..., FakeVllm]
SMALL = {"num_tokens": 100, "answer_tokens": 6, "seconds": 30.0}


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[FakeVllm] = []

    def start(**behaviour: Any) -> FakeVllm:
        servers.append(FakeVllm(**behaviour))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_flush, "RESET_SECONDS", 0.3)
    monkeypatch.setattr(check_flush, "PAUSE", 0.001)


def checked(server: FakeVllm, level: str = "host", **options: Any) -> CheckResult:
    return run_check(HttpEngine(server.url), CheckOptions(level, **(SMALL | options)))


def verdicts(result: CheckResult) -> dict[str, Verdict]:
    return {finding.name: finding.verdict for finding in result.findings}


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and all that is printed."""
    monkeypatch.setattr(sys, "argv", ["kvtier", "check", "--tokens", "100", "--timeout", "20", *map(str, arguments)])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    printed = capsys.readouterr()
    return int(leaving.value.code or 0), printed.out + printed.err


@pytest.mark.parametrize("dev_mode", [True, False])
@pytest.mark.parametrize("level", ["host", "nvme"])
def test_it_passes_where_the_tier_serves_from_the_level_asked_for(serve: Serve, level: str, dev_mode: bool) -> None:
    result = checked(serve(dev_mode=dev_mode), level)
    assert result.ok, result.as_json()
    assert len(result.findings) == 6
    found = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert found["ok"] is True
    assert found["tokens_equal"] is True
    assert found["largest_logprob_difference"] == 0.0
    assert found["flush"]["how"] == ("reset" if dev_mode else "traffic")
    assert found["warm"]["device_tokens"] == 0
    assert found["warm"]["tier_tokens"] > 0
    assert (found["warm"]["host_chunks"] > 0, found["warm"]["nvme_chunks"] > 0) == (level == "host", level == "nvme")


def test_traffic_that_empties_the_device_passes_by_the_tier(serve: Serve) -> None:
    server = serve(dev_mode=False)
    assert checked(server).ok
    assert len(server.nvme) == 1, "the prompt, and nothing of what filled the device"


def test_after_a_restart_it_goes_on_with_what_was_saved(serve: Serve, tmp_path: Path) -> None:
    server, file = serve(), tmp_path / "cold.json"
    assert checked(server, "nvme", save=file).ok
    server.restart()
    result = checked(server, "nvme", resume=file)
    assert result.ok, result.as_json()
    assert "pushed_out" not in result.details
    server.restart()
    assert not checked(server, "host", resume=file).ok, "it came from NVMe"


@pytest.mark.parametrize(("behaviour", "finding", "verdict", "remedy"), [
    ({"serves_from": ""}, "the tier serves from host memory", Verdict.FAILED, "--tokens"),
    ({"serves_from": "nvme"}, "the tier serves from host memory", Verdict.FAILED, "raise secondary"),
    ({"stores": False}, "the tier serves from host memory", Verdict.FAILED, "chunk"),
    ({"wrong_from_tier": True}, "equal tokens", Verdict.FAILED, "do not use the tier"),
    ({"logprob_shift": 0.06}, "equal log-probabilities", Verdict.FAILED, "do not use the tier"),
    ({"near_tie": True}, "equal tokens", Verdict.NOT_SHOWN, "another prompt"),
    ({"ignores_salt": True}, "another salt is not served", Verdict.FAILED, "do not share"),
    ({"refuses_reset": True}, "the device's cache is out of the way", Verdict.NOT_SHOWN, "nobody else"),
    ({"dev_mode": False, "device_blocks": None}, "the device's cache is out of the way", Verdict.NOT_SHOWN, "VLLM_SERVER_DEV_MODE=1"),
    ({"others": 2}, "nobody else uses the engine", Verdict.NOT_SHOWN, "idle"),
    ({"fails_after": 2}, "the engine answers", Verdict.FAILED, "engine's log"),
])
def test_what_does_not_hold_is_named_with_what_to_do(serve: Serve, behaviour: dict[str, Any], finding: str, verdict: Verdict,
                                                      remedy: str) -> None:
    result = checked(serve(**behaviour))
    assert verdicts(result)[finding] is verdict, result.as_json()
    assert result.verdict is verdict
    assert not result.ok
    assert remedy in next(each.remedy for each in result.findings if each.name == finding)
    assert all(each.remedy for each in result.findings if each.verdict is not Verdict.PASSED)


def test_a_prompt_that_comes_from_both_levels_is_not_what_was_asked_for(serve: Serve) -> None:
    name, other = "the tier serves from host memory", "the tier serves from NVMe"
    assert verdicts(checked(serve(serves_from="both")))[name] is Verdict.FAILED
    result = checked(serve(serves_from="both"), "nvme")
    assert verdicts(result)[other] is Verdict.NOT_SHOWN
    assert "--save" in next(each.remedy for each in result.findings if each.name == other)


def test_a_device_that_still_serves_shows_nothing(serve: Serve) -> None:
    server = serve(dev_mode=False, device_blocks=40)
    server.behaviour.device_blocks = 1000

    class Deceived(HttpEngine):
        def metrics(self, seconds: float) -> Any:
            seen = super().metrics(seconds)
            return type(seen)(seen.values, seen.names, {"num_gpu_blocks": "2", "block_size": "16"})

    result = run_check(Deceived(server.url), CheckOptions("host", **SMALL))
    assert verdicts(result)["nothing comes from the device"] is Verdict.NOT_SHOWN
    assert result.verdict is Verdict.NOT_SHOWN


@pytest.mark.parametrize("level", ["host", "nvme"])
def test_a_flush_that_does_not_end_in_time_is_said(serve: Serve, level: str) -> None:
    server = serve(dev_mode=False, device_blocks=10**9, host_chunks=10**9)
    result = checked(server, level, seconds=1.5)
    assert result.verdict is Verdict.NOT_SHOWN
    assert "--timeout" in result.findings[-1].remedy


def test_the_counters_say_why_there_were_no_hits(serve: Serve) -> None:
    server = serve(serves_from="")
    answer = server.complete

    def counted(order: dict[str, Any]) -> dict[str, Any]:
        server.add("vllm:kv_offload_kvtier_expired_lookups_total", 1)
        return answer(order)

    server.complete = counted  # type: ignore[method-assign]
    assert "lookup_timeout" in next(each.remedy for each in checked(server).findings if "serves from" in each.name)


def test_the_command_ends_with_0_1_or_2(serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = command(monkeypatch, capsys, "--url", serve().url)
    assert code == 0
    assert text.rstrip().endswith("kvtier check --level host: PASSED")
    code, text = command(monkeypatch, capsys, "--url", serve(wrong_from_tier=True).url)
    assert code == 1
    assert "FAILED     equal tokens: token 3" in text
    code, text = command(monkeypatch, capsys, "--url", serve(wrong_from_tier=True).url, "--json")
    assert code == 1
    assert json.loads(text)["verdict"] == "failed"


@pytest.mark.parametrize(("behaviour", "code", "arguments", "message"), [
    ({"attached": False}, 1, [], "no kvtier tier is attached"),
    ({"metrics": False}, 1, [], "no metrics of vLLM"),
    ({"status": 500}, 1, [], "HTTP 500 Internal Server Error: the engine is dead"),
    ({"key": "secret"}, 1, [], "--api-key"),
    ({"models": ("a", "b")}, 2, ["--model", "c"], "serves a, b"),
    ({"models": ()}, 1, [], "no model is served"),
    ({}, 2, ["--resume", "missing.json"], "cannot be read"),
    ({}, 2, ["--save", "missing/file.json"], "cannot be written"),
    ({}, 2, ["--save", "a.json", "--resume", "b.json"], "one of them at a time"),
])
def test_what_the_engine_is_ends_with_1_and_what_the_user_wrote_with_2_in_one_line(
        serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], behaviour: dict[str, Any],
        code: int, arguments: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    ended, text = command(monkeypatch, capsys, "--url", serve(**behaviour).url, *arguments)
    assert ended == code
    assert message in text
    assert len(text.rstrip().splitlines()) == 1


def test_a_key_and_a_model_that_are_right_are_taken(serve: Serve, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(key="secret", models=("a", "b"))
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert command(monkeypatch, capsys, "--url", f"{server.url}/v1/", "--model", "b")[0] == 0


@pytest.mark.parametrize("address", ["http://user:s3cret@{}", "user:s3cret@{}", "http://{}/v1?api_key=s3cret", "http://user:s3/cret@{}",
                                     "http://user:s3cret@{}:x"])
def test_nothing_of_a_password_or_key_is_shown(serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                               address: str) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    host = serve(key="another").url.removeprefix("http://")
    for at in (host, "127.0.0.1:1"):  # a server that wants another key, and none
        code, text = command(monkeypatch, capsys, "--url", address.format(at))
        assert code in (1, 2)
        assert "s3" not in text
        assert "dXNlcjpzM2NyZXQ" not in text, "as it stands in the header"


def test_a_key_that_a_server_repeats_is_not_shown(serve: Serve, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kvtier.bench.check_http._message", lambda error: f": {'x' * 290} wrong key s3cret-and-long")
    code, text = command(monkeypatch, capsys, "--url", serve(key="right").url, "--api-key", "s3cret-and-long")
    assert code == 1
    assert "HTTP 401" in text
    assert "s3cret" not in text


def test_a_user_in_the_address_is_taken_and_beside_a_key_refused(serve: Serve) -> None:
    server = serve(key="dXNlcjpwYXNz")
    assert HttpEngine(f"http://user:pass@{server.url.removeprefix('http://')}").model == "fake"
    with pytest.raises(ConfigError, match="--url names a user, and --api-key or VLLM_API_KEY a key"):
        HttpEngine(f"http://user:pass@{server.url.removeprefix('http://')}", api_key="key")


def test_no_server_and_one_that_is_no_web_server_are_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        code, text = command(monkeypatch, capsys, "--url", url)
        assert code == 1
        assert "is the server running" in text
    code, text = command(monkeypatch, capsys, "--url", "no address")
    assert code == 2
    assert "write for example http://127.0.0.1:8000" in text


def test_an_engine_that_stops_answering_fails_the_check_in_time(serve: Serve, monkeypatch: pytest.MonkeyPatch,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kvtier.bench.check_http.FIRST_SECONDS", 0.05)
    code, text = command(monkeypatch, capsys, "--url", serve(hang=1.5).url)
    assert code == 1
    assert "no answer within" in text
    code, text = command(monkeypatch, capsys, "--url", serve(hang=3.0, hangs_after=1).url, "--timeout", "0.5")
    assert code == 1
    assert "no answer within" in text


@pytest.mark.parametrize("content", ["nonsense", "{}", json.dumps(
    {"model": "other", "prompt": "a", "salt": "b", "answer": {"tokens": [], "logprobs": [], "gaps": [], "prompt_tokens": 1}})])
def test_a_file_that_is_not_of_this_check_is_refused(serve: Serve, tmp_path: Path, content: str) -> None:
    file = tmp_path / "cold.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="--resume"):
        checked(serve(), "nvme", resume=file)


@pytest.mark.parametrize("options", [{"level": "device"}, {"num_tokens": 3}, {"answer_tokens": 0}, {"seconds": 0.0}])
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CheckOptions(**options).check()


@pytest.mark.parametrize("key", ["s3cret\n", "s3cret\r\n", "s3cret\0", "s3crét"], ids=ascii)
def test_a_key_that_can_be_none_is_refused_and_not_shown(serve: Serve, key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key or VLLM_API_KEY: holds a line end") as refused:
        HttpEngine(serve().url, api_key=key)
    assert "s3cr" not in str(refused.value)


def test_addresses() -> None:
    for text in ("127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1/"):
        assert server_address(text).url == "http://127.0.0.1:8000"
    for text in ("", "ftp://a", "http://", "a b", "a:b", "a:99999", "http://[::1"):
        with pytest.raises(ConfigError):
            server_address(text)


def test_metrics_are_added_up_over_engines_and_kept_apart_by_tier() -> None:
    seen = parse_metrics('a_total{engine="0",tier="x"} 1\na_total{engine="1",tier="x"} 2\na_total{engine="0",tier="y"} 4\n'
                         'h_sum 7\nh_count 3\nvllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="10"} 1\n')
    assert (seen.total("a"), seen.total("a", "x"), seen.total("h"), seen.num_engines, seen.pool_tokens) == (7, 3, 7, 2, 320)
    assert not seen.has_tier


def test_the_names_are_those_of_the_adapter() -> None:
    adapter = (Path(__file__).parents[2] / "tiering" / "attach" / "vllm_metrics.py").read_text()
    assert all(f'"{name}"' in adapter for name in OURS)


def test_an_answer_survives_its_json() -> None:
    answer = Answer((1, 2), (-0.5, -1.25), (3.0, math.inf), 7)
    again = Answer.from_json(json.loads(json.dumps(answer.as_json(), allow_nan=False)))
    assert (again.tokens, again.logprobs, again.gaps[0], again.prompt_tokens) == (answer.tokens, answer.logprobs, 3.0, 7)
