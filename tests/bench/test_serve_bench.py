"""``kvtier bench serve``: what is served, that a point whose level did not serve is INVALID, and what it says where it cannot run."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier import cli
from kvtier.bench.build import compiled
from kvtier.bench.outputs import Outputs
from kvtier.bench.plot import plot_report
from kvtier.bench.report import Limit, ResultRow
from kvtier.bench.serve import CEILING, HOST_ONLY, RECOMPUTE, ServePlan, measure_serve
from kvtier.bench.serve_engine import BLOCK, HitTokens, ServeError, Sizes
from kvtier.bench.serve_plot import serve_panels
from kvtier.bench.serve_text import TextSource
from kvtier.bench.serve_vllm import VllmMaker, without_keys
from kvtier.bench.serve_workload import Asked, Played, Served, Shape, distinct_tokens, returning_users, strangers, trace_arrivals
from kvtier.errors import ConfigError

SHAPE = Shape(shared=64, per_turn=40, answer=4, turns=2)
TINY = ServePlan((1, 2), SHAPE, users=3, rounds=2)


class FakeEngine:
    """Finds prompts where ``FakeMaker.finds`` says, and computes none."""

    def __init__(self, maker: FakeMaker, has_tier: bool) -> None:
        self.maker, self.has_tier = maker, has_tier
        self.hits = HitTokens(0, 0, 0)

    def play(self, requests: Sequence[Asked], at_once: int) -> Played:
        self.maker.played.append((self.has_tier, len(requests)))
        if self.maker.fails:
            raise ServeError("the engine ended")
        if self.has_tier:
            self.hits += self.maker.finds
        return Played(0.5 if self.has_tier else 1.0, tuple(Served(0.25, 0.5, (1,) * asked.num_answer) for asked in requests))

    def hit_tokens(self) -> HitTokens:
        return self.hits

    def settle(self) -> None:
        self.maker.settled += 1

    def close(self) -> None:
        self.maker.open -= 1


class FakeMaker:
    max_tokens = 512

    def encode(self, text: str) -> list[int]:
        return list(text.encode()[:50_000])

    def __init__(self, finds: HitTokens = HitTokens(0, 0, 0), fails: bool = False) -> None:
        self.finds, self.fails = finds, fails
        self.played: list[tuple[bool, int]] = []
        self.open = self.settled = 0
        self.folders: list[Path] = []
        self.started: list[tuple[Sizes, bool]] = []

    def start(self, sizes: Sizes, folder: Path | None) -> FakeEngine:
        assert sizes.longest >= SHAPE.longest
        if folder is not None:
            self.folders.append(folder)
        self.started.append((sizes, folder is not None))
        self.open += 1
        return FakeEngine(self, folder is not None)

    def as_json(self) -> dict[str, object]:
        return {"name": "fake"}


def invalid(file: Path) -> set[str]:
    return {row["name"] for row in json.loads(file.read_text())["config"]["invalid"]}


def test_a_point_is_invalid_where_its_level_did_not_serve(tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    for finds, bad in ((HitTokens(0, 0, 0), {"returning", "restart"}), (HitTokens(0, 9, 0), {"none", "restart"}),
                       (HitTokens(0, 0, 9), {"none", "returning"}), (HitTokens(9, 0, 0), {"none", "returning", "restart"})):
        maker = FakeMaker(finds)
        assert measure_serve(maker, "fake", TINY, tmp_path).finish(file) == 1
        assert invalid(file) == {f"serve/fake/{kind}/{at_once}" for kind in bad for at_once in (1, 2)}
        assert maker.open == 0


def test_rows_notes_and_a_picture_of_a_valid_point(tmp_path: Path) -> None:
    file, picture = tmp_path / "serve.json", tmp_path / "serve.png"
    pytest.importorskip("matplotlib")
    maker = FakeMaker()
    assert Outputs(file, picture).finish(measure_serve(maker, "fake", replace(TINY, at_once=(2,)), tmp_path)) == 1
    found = json.loads(file.read_text())
    assert [row["name"] for row in found["results"]] == [
        f"serve/fake/none/2/{name}" for name in ("throughput", "noise", "ttft_p50", "ttft_p90", "ttft_p99")]
    throughput, noise, first_token = found["results"][:3]
    assert (throughput["ratio"], throughput["median"], throughput["limit"]) == (2.0, 64.0, {"name": "engine alone", "value": 32.0})
    assert noise["median"] == 1.0
    assert (first_token["unit"], first_token["median"], first_token["ratio"]) == ("ms", 250.0, 1.0)
    assert found["config"]["compiled"] is compiled()
    assert any("within 2%" in note for note in found["config"]["notes"])
    assert picture.stat().st_size > 1000
    assert len(set(maker.folders)) == 3, "a fresh store for each point, the same one after its restart"
    assert maker.settled == 1
    assert not list(tmp_path.glob("kvtier-bench-*"))


def test_what_else_one_could_have_takes_turns_too_and_losses_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, maker = tmp_path / "serve.json", FakeMaker(HitTokens(0, 9, 3))
    plan = replace(TINY, at_once=(2,), kinds=("returning", "restart"), more_engines=True)
    assert measure_serve(maker, "fake", plan, tmp_path).finish(file) == 0
    found = {row["name"]: row for row in json.loads(file.read_text())["results"]}
    # The fake takes half the time wherever there is a tier, so nothing is gained over the tier without NVMe.
    assert found["serve/fake/returning/2/throughput"]["peers"] == {CEILING: 2.0, HOST_ONLY: 1.0, RECOMPUTE: 2.0}
    assert found["serve/fake/restart/2/ttft_p50"]["peers"] == dict.fromkeys((CEILING, HOST_ONLY, RECOMPUTE), 1.0)
    assert found["serve/fake/restart/2/hit_tokens/host"]["median"] == 9.0
    assert found["serve/fake/restart/2/hit_tokens/nvme"]["median"] == 3.0
    sizes = {(has_tier, each.nvme > 0, each.pool) for each, has_tier in maker.started}
    assert len({pool for has_tier, _, pool in sizes if has_tier}) == 1, "with and without NVMe: the same device memory"
    assert {has_nvme for has_tier, has_nvme, _ in sizes if has_tier} == {True, False}
    assert len({pool for has_tier, _, pool in sizes if not has_tier}) == 2, "the ceiling has room for everything"
    assert "LOSES" not in capsys.readouterr().out
    slow = measure_serve(FakeMaker(HitTokens(0, 9, 3)), "fake", plan, tmp_path)
    slow.rows = [replace(row, ratio=0.5) for row in slow.rows if row.limit is not None]
    slow.finish(None)
    assert "serve/fake/restart/2/throughput LOSES to engine alone: 0.50" in " ".join(capsys.readouterr().out.split())


def test_prompts_are_passages_of_real_text_each_with_a_beginning_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("a real text")
    source = TextSource(FakeMaker().encode, file)
    assert bytes(source.passage("1. x", 30)).startswith(b"1. x\n")
    assert len(source.passage("1. x", 30)) == 30
    assert len(source.passage("1. x", 3)) == 3
    assert bytes(source.passage("1. x", 40)[5:]) in b"a real text" * 5
    assert b"statement" in bytes(TextSource(FakeMaker().encode).passage("1. x", 50_000)), "Python's language reference"
    for bad in (tmp_path, tmp_path / "missing.txt"):
        with pytest.raises(ConfigError, match="name a text file"):
            TextSource(FakeMaker().encode, bad)
    file.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="UTF-8"):
        TextSource(FakeMaker().encode, file)
    file.write_text("")
    with pytest.raises(ConfigError, match="longer text"):
        TextSource(FakeMaker().encode, file)


def test_an_engine_that_ends_is_an_invalid_point_and_everything_is_closed(tmp_path: Path) -> None:
    maker = FakeMaker(fails=True)
    assert measure_serve(maker, "fake", TINY, tmp_path).finish(tmp_path / "serve.json") == 1
    assert len(invalid(tmp_path / "serve.json")) == 6
    assert maker.open == 0


def test_users_come_back_with_all_they_have_said_and_strangers_never(tmp_path: Path) -> None:
    text = TextSource(FakeMaker().encode)
    back = returning_users(text, "round 1", SHAPE, 5)
    assert len(back.before) == len(back.timed) == 5
    assert all(any(asked.tokens[:len(first.tokens)] == first.tokens for first in back.before) for asked in back.timed)
    assert len({asked.tokens[:SHAPE.shared] for asked in (*back.before, *back.timed)}) == 1
    alone = strangers(text, "round 1", SHAPE, 5)
    assert not alone.before
    assert sorted(len(asked.tokens) for asked in alone.timed) == sorted(len(asked.tokens) for asked in back.timed)
    assert len({asked.tokens[:8] for asked in alone.timed}) == 5
    assert {asked.salt for asked in back.salted("x").timed} == {"x"}
    assert not back.recomputed("x").before
    assert len({asked.salt for asked in back.recomputed("x").timed}) == 5
    assert returning_users(text, "round 1", SHAPE, 5) == back, "every engine gets the same"
    assert returning_users(text, "round 2", SHAPE, 5).timed[0].tokens != back.timed[0].tokens
    assert distinct_tokens([Asked((1,) * 70, 1), Asked((1,) * 70, 1)], BLOCK) == 64


def test_a_trace_keeps_its_arrivals_and_its_shared_blocks(tmp_path: Path) -> None:
    file, text = tmp_path / "trace.jsonl", TextSource(FakeMaker().encode)
    lines = [{"timestamp": 1000, "input_length": 20, "output_length": 3, "hash_ids": [5, 6]},
             {"timestamp": 3000, "input_length": 40, "output_length": 900, "hash_ids": [5, 7, 8]},
             {"timestamp": 4000, "input_length": 16000, "output_length": 1, "hash_ids": list(range(100, 1100))}]
    file.write_text("\n".join(map(json.dumps, lines)))
    work = trace_arrivals(file, 16, text, 100, 10, speed=2.0)
    assert [(len(asked.tokens), asked.num_answer, asked.at) for asked in work.timed] == [(20, 3, 0.0), (40, 60, 1.0)]
    assert work.timed[0].tokens[:16] == work.timed[1].tokens[:16]
    assert work.timed[0].tokens[16:20] != work.timed[1].tokens[16:20]
    with pytest.raises(ConfigError, match="takes more"):
        trace_arrivals(file, 16, text, 10, 10, 1.0)
    maker = FakeMaker(HitTokens(0, 1, 0))
    assert measure_serve(maker, "fake", replace(TINY, trace=file, block=16), tmp_path).finish(tmp_path / "serve.json") == 0
    found = json.loads((tmp_path / "serve.json").read_text())
    assert found["config"]["hit_tokens"] == {"serve/fake/trace/2": {"device": 0, "host": 2, "nvme": 0}}, "of two rounds, not the warm-up"


@pytest.mark.parametrize("plan", [replace(TINY, at_once=()), replace(TINY, rounds=0), replace(TINY, speed=0.0),
                                  replace(TINY, shape=Shape(1, 1, 1, 1)), replace(TINY, shape=Shape(600, 1, 1, 2)),
                                  replace(TINY, trace=Path("/nonexistent.jsonl"))])
def test_a_plan_that_cannot_be_served_is_refused(plan: ServePlan, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        measure_serve(FakeMaker(), "fake", plan, tmp_path)


def test_a_device_that_is_none_is_refused_before_a_model_is_loaded() -> None:
    from kvtier.bench.serve_transformers import TransformersMaker
    with pytest.raises(ConfigError, match="nodevice"):
        TransformersMaker("/nonexistent", "nodevice")


def test_percentiles_are_of_the_nearest_rank() -> None:
    played = Played(1.0, tuple(Served(float(number), 1.0, ()) for number in range(1, 11)))
    assert [played.first_token(percent) for percent in (50, 90, 99)] == [5.0, 9.0, 10.0]


def test_the_engine_of_the_demo_serves_all_points(chat_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvtier.bench.serve_transformers import TransformersMaker
    maker = TransformersMaker(str(chat_model_folder), "cpu")
    file = tmp_path / "serve.json"
    plan = replace(TINY, at_once=(2,), users=8, rounds=1, more_engines=True, warm_up=0)
    assert measure_serve(maker, "transformers", plan, tmp_path).finish(file) == 0, capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["config"]["hit_tokens"]["serve/transformers/restart/2"]["nvme"] > 0
    assert found["config"]["hit_tokens"]["serve/transformers/returning/2"]["host"] > 0
    assert all("; 0 of" in note for note in found["config"]["notes"] if "answers differ" in note)


def test_the_short_form_finds_something_on_every_level_it_is_about(chat_model_folder: Path, tmp_path: Path,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    from kvtier.bench.serve_transformers import TransformersMaker
    maker = TransformersMaker(str(chat_model_folder), "cpu")
    assert measure_serve(maker, "transformers", replace(ServePlan.usual(quick=True), rounds=2), tmp_path).finish(None) == 0, \
        capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_it_is_one_line_and_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["kvtier", "bench", "serve", "--engine", "vllm"])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert leaving.value.code == 2
    said = capsys.readouterr().err
    assert "vLLM is not installed" in said
    assert len(said.strip().splitlines()) == 1


def test_only_rows_of_points_are_drawn(tmp_path: Path) -> None:
    row = ResultRow("serve/vllm/none/4/ttft_p50", "ms", 2.0, 1.0, 3.0, Limit("engine alone", 3.0), 1.5)
    assert list(serve_panels([row, replace(row, name="serve/vllm/none/4/noise"), replace(row, name="copy/a")])) == [("none", "ttft_p50")]
    pytest.importorskip("matplotlib")
    assert not plot_report(tmp_path / "plot.png", "title", [])
    assert plot_report(tmp_path / "plot.png", "title", [row])


def test_a_plan_takes_what_is_given_on_the_command_line_and_refuses_what_is_none() -> None:
    plan = ServePlan().changed("none,restart", "2,8", 5, None, "100,20,4,2")
    assert (plan.kinds, plan.at_once, plan.users, plan.rounds, plan.shape) == (("none", "restart"), (2, 8), 5, ServePlan().rounds,
                                                                              Shape(100, 20, 4, 2))
    assert ServePlan().changed(None, None, None, None, None) == ServePlan()
    for wrong in (("nobody", None, None), ("", None, None), (None, "two", None), (None, "", None), (None, None, "1,2,3"),
                  (None, None, "1,2,3,4,5"), (None, None, "1,2,x,4")):
        with pytest.raises(ConfigError, match=r"--points|--at-once"):
            ServePlan().changed(wrong[0], wrong[1], None, None, wrong[2])


def test_arguments_that_are_no_command_line_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=r"--vllm-arguments .*No closing quotation.*; close each quotation mark"):
        VllmMaker("model", "--seed '3")


def test_figures_have_no_keys_of_users() -> None:
    assert without_keys(["--seed", "3", "--api-key", "s3cret", "--hf-token=s3cret", "--api-key=s3cret", "--dtype=half"]) == [
        "--seed", "3", "--api-key", "***", "--hf-token=***", "--api-key=***", "--dtype=half"]
