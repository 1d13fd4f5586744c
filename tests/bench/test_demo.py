"""``kvtier demo`` over a tiny random model with a tokenizer of its own: whole runs, their JSON, exit codes and bad input."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from kvtier.bench import demo, demo_model, demo_report
from kvtier.bench.demo_conversation import ChatFormat, common_prefix, stop_tokens
from kvtier.bench.demo_model import load_demo_model
from kvtier.bench.demo_plan import ANSWER_TOKENS, DEFAULT_USERS, TOKENS_PER_BLOCK, plan_demo, recompute_config, tiered_config
from kvtier.bench.demo_report import compare, first_difference
from kvtier.bench.demo_run import Turn
from kvtier.bench.demo_text import MAX_TURNS, MAX_USERS, SYSTEM_PROMPT, USERS
from kvtier.errors import ConfigError
from kvtier.tiering.attach.serving_sequence import Answer

SYSTEMLESS = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


@pytest.fixture
def run(chat_model_folder, tmp_path):
    def start(users=4, turns=2, **options):
        out = io.StringIO()
        file = tmp_path / "figures.json"
        code = demo.run_demo(model=chat_model_folder, users=users, turns=turns, threads=1, json_file=file,
                             console=Console(file=out, width=100), **options)
        figures = json.loads(file.read_text()) if file.exists() else None
        return SimpleNamespace(code=code, text=out.getvalue(), figures=figures)
    return start


@pytest.fixture(scope="module")
def chat(chat_model_folder):
    loaded = load_demo_model(chat_model_folder)
    return ChatFormat(loaded.tokenizer, stop_tokens(loaded.model, loaded.tokenizer))


def test_answers_are_the_same_and_come_from_the_tiers(run):
    result = run(users=8, turns=3)
    figures = result.figures
    assert result.code == 0
    assert figures["tokens_identical"] is True
    assert figures["near_tie_divergences"] == 0
    assert figures["answers"] == 24
    assert figures["reused_tokens"]["primary"] > 0
    assert figures["reused_tokens"]["nvme"] > 0
    assert "24 of 24 answers are identical" in result.text


def test_without_a_terminal_each_stage_is_a_line_on_the_standard_error(run, capsys):
    assert run().code == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "so far" not in line] == [
        "kvtier demo: loading the model", "kvtier demo: answers with kvtier", "kvtier demo: the same answers without reuse"]


@pytest.mark.parametrize("below_a_file", [False, True])
def test_a_folder_that_cannot_be_kept_is_refused_before_a_model_is_loaded(run, tmp_path, monkeypatch, below_a_file):
    def load(*_given, **_named):
        raise AssertionError("too late")

    monkeypatch.setattr(demo, "load_demo_model", load)
    (tmp_path / "file").write_text("")
    kept = tmp_path / "file" / "x" if below_a_file else "/proc/x/y"
    with pytest.raises(ConfigError, match=f"^--keep-nvme {kept}: cannot be written"):
        run(keep_nvme=demo.Path(kept))
    with pytest.raises(AssertionError, match="too late"):
        run(keep_nvme=tmp_path / "a" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "what can be made is not made yet"


def test_the_json_has_the_keys_that_were_promised(run):
    figures = run().figures
    assert {"tokens_identical", "near_tie_divergences", "reused_tokens", "ttft_seconds", "bytes", "gbps"} <= set(figures)
    assert set(figures["reused_tokens"]) == {"primary", "secondary", "nvme"}
    assert set(figures["ttft_seconds"]) == {"with", "without"}
    assert all(seconds > 0 for seconds in figures["ttft_seconds"].values())
    assert set(figures["gbps"]) <= set(figures["bytes"])
    assert figures["bytes"]["primary_to_secondary"] > 0
    assert figures["machine"]["torch_threads"] == 1
    assert sum(turn["reused_tokens"]["primary"] for turn in figures["turns"]) == figures["reused_tokens"]["primary"]


def test_the_report_has_a_row_per_turn_and_ends_with_the_next_command(run, chat_model_folder):
    lines = run(turns=3).text.splitlines()
    assert sum(line.split()[:1] == [number] for number in "123" for line in lines) == 3
    assert lines[-1].startswith(f"Next: kvtier demo --model {chat_model_folder} --users 4 --turns 3 --keep-nvme ~/kvtier-demo ")


def test_under_the_table_stands_what_faster_compares_and_where_it_is_measured(run):
    lines = run(turns=1).text.splitlines()
    [heading, *_more] = [number for number, line in enumerate(lines) if line.split()[-1:] == ["faster"]]
    [moved] = [number for number, line in enumerate(lines) if line.startswith("Moved between levels")]
    below = " ".join(" ".join(lines[heading + 3:moved]).split())
    assert below.startswith("faster: the median without reuse by the one with kvtier.")
    assert "kvtier bench load and kvtier bench serve measure it" in below


def test_the_next_command_is_the_same_run_again(run, chat_model_folder, tmp_path):
    file = tmp_path / "a tier.toml"
    file.write_text('primary = "300 blocks"\n')
    result = run(turns=1, quick=True, config=file)
    command = shlex.split(result.figures["next_command"])
    assert command == ["kvtier", "demo", "--model", str(chat_model_folder), "--config", str(file), "--users", "4", "--turns", "1",
                       "--quick", "--keep-nvme", "~/kvtier-demo"]


@pytest.mark.parametrize(("folder", "on_path", "spelling"), [
    (".venv/bin", None, ".venv/bin/kvtier"), (".venv/bin", ".venv/bin", "kvtier"), (".venv/bin", "other", ".venv/bin/kvtier"),
    (".", None, "./kvtier"), ("a folder", None, "'a folder/kvtier'")])
def test_the_next_command_names_this_program_as_a_shell_finds_it(tmp_path, monkeypatch, folder, on_path, spelling):
    for place in (folder, "other"):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "kvtier").write_text(f"#!/bin/sh\necho of {place}\n")
        (tmp_path / place / "kvtier").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / folder / "kvtier"), "demo"])
    monkeypatch.setenv("PATH", str(tmp_path / (on_path or "nothing there")))
    command, _why = demo._next_command([], None, None)
    assert command == f"{spelling} demo --keep-nvme ~/kvtier-demo"
    assert subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=True).stdout == f"of {folder}\n"


def test_a_far_program_is_named_by_its_whole_path(tmp_path, monkeypatch):
    (tmp_path / "kvtier").write_text("")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "kvtier"), "demo"])
    monkeypatch.setenv("PATH", str(tmp_path / "nothing there"))
    deep = tmp_path.joinpath(*["down"] * 40)
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert demo._program() == str(tmp_path / "kvtier")


def test_a_second_run_on_the_same_folder_hits_nvme_in_its_first_turn(run, chat_model_folder, tmp_path):
    first = run(turns=1, keep_nvme=tmp_path / "kept")
    second = run(turns=1, keep_nvme=tmp_path / "kept")
    assert first.figures["turns"][0]["reused_tokens"]["nvme"] == 0
    assert first.figures["next_command"] == (
        f"kvtier demo --model {chat_model_folder} --users 4 --turns 1 --keep-nvme {tmp_path / 'kept'}")
    assert second.figures["turns"][0]["reused_tokens"]["nvme"] > 0
    assert second.code == 0
    assert second.figures["next_command"] == f"kvtier bench nvme --directory {tmp_path}"


def test_an_answer_that_differs_is_a_failure(run, monkeypatch):
    repeat = demo.repeat

    def wrong(*arguments):
        result = repeat(*arguments)
        result.turns[1].answers[2].tokens[3] += 1
        result.turns[1].answers[2].top_gaps[3] = 0.5
        return result

    monkeypatch.setattr(demo, "repeat", wrong)
    result = run()
    assert result.code == 1
    assert result.figures["tokens_identical"] is False
    assert result.figures["wrong_answers"] == [{"turn": 1, "user": 2}]
    assert "1 of 8 answers differ" in result.text
    assert "turn 2 user 3" in result.text


def test_the_scratch_folder_is_removed(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    run(turns=1)
    assert not list((tmp_path / "scratch").iterdir())


def test_torch_threads_are_given_back(run):
    before = torch.get_num_threads()
    run(turns=1)
    assert torch.get_num_threads() == before


def test_a_file_replaces_the_demos_own_settings(run, tmp_path):
    file = tmp_path / "tier.toml"
    file.write_text('primary = "300 blocks"\nnvme = "500 blocks"\n')
    figures = run(config=file).figures
    assert figures["plan"]["level_blocks"]["primary"] == 300
    assert figures["plan"]["level_blocks"]["nvme"] == 500
    assert figures["config"]["chunk_size"] == 256


def test_a_file_may_switch_levels_off(run, tmp_path):
    file = tmp_path / "tier.yaml"
    file.write_text("secondary: 0 blocks\nnvme: 0 blocks\n")
    result = run(config=file)
    assert result.code == 0
    assert result.figures["nvme_writes_per_hit"] is None
    assert result.figures["bytes"] == {}


def test_a_pool_that_holds_no_request_stops_the_demo_with_the_reason(run, tmp_path):
    file = tmp_path / "tier.toml"
    file.write_text('primary = "5 blocks"\n')
    result = run(config=file)
    assert result.code == 1
    assert "serving stopped" in result.text
    assert "enlarge primary" in " ".join(result.text.split())


@pytest.mark.parametrize(("options", "message"), [
    ({"users": MAX_USERS + 1}, f"the demo has text for 1 to {MAX_USERS} users"),
    ({"turns": MAX_TURNS + 1}, f"the demo has text for 1 to {MAX_TURNS} turns"),
    ({"device": "tpu"}, "device='tpu'"),
    ({"device": "cuda:99"}, "device='cuda:99'|CUDA|cupy")])
def test_what_cannot_be_done_is_refused_before_the_model_is_loaded(run, options, message, monkeypatch):
    monkeypatch.setattr(demo, "load_demo_model", None)
    with pytest.raises(ConfigError, match=message):
        run(**options)


def test_a_file_for_the_figures_that_cannot_be_written_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "load_demo_model", None)
    with pytest.raises(ConfigError, match="cannot be written"):
        demo.run_demo(json_file=tmp_path / "missing" / "figures.json")


def test_an_unknown_key_in_the_file_is_refused(run, tmp_path):
    file = tmp_path / "tier.toml"
    file.write_text('primari = "5 blocks"\n')
    with pytest.raises(ConfigError, match="primary"):
        run(config=file)


def test_a_folder_of_another_model_is_refused(run, tmp_path, monkeypatch):
    run(turns=1, keep_nvme=tmp_path / "kept")
    monkeypatch.setattr(demo_model, "_local_identity", lambda folder: "another@model:0")
    with pytest.raises(ConfigError, match="another@model:0"):
        run(turns=1, keep_nvme=tmp_path / "kept")


# ---- the parts ----------------------------------------------------------------------------------------------------------


def test_by_default_the_primary_pool_is_at_most_a_quarter_of_the_working_set(chat):
    plan = plan_demo(chat, DEFAULT_USERS, MAX_TURNS)
    assert plan.is_quarter
    assert plan.primary_blocks > plan.largest_request_blocks
    assert plan.secondary_blocks * 4 <= plan.working_set_blocks
    assert plan.in_flight >= 2
    assert plan.working_set_blocks < plan.users * plan.largest_request_blocks


def test_the_pool_is_larger_when_a_quarter_would_hold_no_request(chat):
    plan = plan_demo(chat, 2, 1)
    assert not plan.is_quarter
    assert plan.primary_blocks > plan.largest_request_blocks


def test_the_run_it_is_compared_with_is_never_held_up_by_its_pool(chat, tmp_path):
    plan = plan_demo(chat, 4, 2)
    config = recompute_config(plan, tiered_config(plan, None, None, tmp_path / "nvme"))
    assert config.primary == f"{plan.in_flight * plan.largest_request_blocks} blocks"
    assert config.enable_block_reuse is False
    assert config.chunk_size == tiered_config(plan, None, None, tmp_path / "nvme").chunk_size


def test_a_turn_continues_the_tokens_of_the_one_before(chat):
    opening = chat.opening(SYSTEM_PROMPT, USERS[0].turns[0])
    answer = [700, 701, 2]
    following = chat.next_turn(opening, answer, USERS[0].turns[1])
    assert following[:len(opening) + 2] == opening + answer[:2]
    assert following[len(opening) + 2] == 2, "the template closes the answer itself: its stop token is not there twice"
    assert following[len(opening) + 3] != 2


def test_turns_joined_from_tokens_say_what_the_template_says(chat, chat_model_folder):
    tokenizer = load_demo_model(chat_model_folder).tokenizer
    opening = chat.opening("be brief", "hello there")
    answer = tokenizer.encode("good day", add_special_tokens=False)
    whole = tokenizer.apply_chat_template(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"},
         {"role": "assistant", "content": "good day"}, {"role": "user", "content": "bye"}], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(chat.next_turn(opening, answer, "bye")) == whole


def test_a_tokenizer_without_a_template_gets_plain_lines(chat_model_folder):
    tokenizer = load_demo_model(chat_model_folder).tokenizer
    tokenizer.chat_template = None
    chat = ChatFormat(tokenizer, frozenset())
    opening = chat.opening("be brief", "hello")
    assert tokenizer.decode(chat.next_turn(opening, [], "bye")) == (
        "System: be brief\n\nUser: hello\n\nAssistant:\n\nUser: bye\n\nAssistant:")


def test_a_template_without_a_system_role_takes_its_text_into_the_first_question(chat_model_folder):
    tokenizer = load_demo_model(chat_model_folder).tokenizer
    tokenizer.chat_template = SYSTEMLESS + tokenizer.chat_template
    text = tokenizer.decode(ChatFormat(tokenizer, frozenset()).opening("be brief", "hello"))
    assert text == "<|im_start|>user\nbe brief\n\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_forgets_answers_is_refused(chat_model_folder):
    tokenizer = load_demo_model(chat_model_folder).tokenizer
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ConfigError, match="does not show an earlier answer"):
        ChatFormat(tokenizer, frozenset()).next_turn([5], [6], "bye")


def test_the_demo_text_is_long_enough_and_nobody_repeats_anybody():
    assert MAX_USERS >= 12
    assert MAX_TURNS == 4
    turns = [turn for user in USERS for turn in user.turns]
    assert len(set(turns)) == len(turns)
    assert len(SYSTEM_PROMPT.split()) > 380


@pytest.mark.parametrize(("tokens", "reference", "position"), [
    ([1, 2, 3], [1, 2, 3], None), ([1, 9, 3], [1, 2, 3], 1), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2], 2), ([], [], None)])
def test_the_first_difference_is_found(tokens, reference, position):
    assert first_difference(tokens, reference) == position


def turn_of(tokens, gaps):
    return Turn(0, [0], {0: [1]}, {0: Answer(0, 1, tokens=tokens, top_gaps=gaps)})


@pytest.mark.parametrize(("gap", "near_ties", "wrong"), [(0.0009, 1, ()), (0.0011, 0, ((0, 0),))])
def test_a_difference_is_forgiven_only_at_a_near_tie(gap, near_ties, wrong):
    result = compare([turn_of([4, 5, 6], [1.0, 1.0, 1.0])], [turn_of([4, 7, 6], [1.0, gap, 1.0])])
    assert (result.near_ties, result.wrong, result.identical) == (near_ties, wrong, 0)


def test_what_comes_after_the_first_difference_is_not_looked_at():
    """After a near tie the two answers go different ways, and nothing can be compared any more."""
    assert compare([turn_of([4, 5, 1], [1.0] * 3)], [turn_of([4, 7, 9], [1.0, 0.0005, 2.0])]).passed


def test_an_answer_that_ends_early_is_wrong():
    assert not compare([turn_of([4], [1.0])], [turn_of([4, 5], [1.0, 1.0])]).passed


def test_common_prefix_of_prompts():
    assert common_prefix([[1, 2, 3, 4], [1, 2, 9, 4], [1, 2, 3]]) == 2


def test_answer_and_block_sizes_are_those_of_the_plan(chat):
    plan = plan_demo(chat, 1, 1)
    assert plan.longest_tokens == len(plan.openings[0]) + ANSWER_TOKENS
    assert plan.largest_request_blocks == -(-plan.longest_tokens // TOKENS_PER_BLOCK)
    assert demo_report.NEAR_TIE == 1e-3


@pytest.mark.parametrize("command", [["demo"], ["bench", "kernels"], ["bench", "nvme"], ["bench", "all"],
                                     ["bench", "serve", "--engine", "transformers"]], ids=" ".join)
def test_idle_openmp_threads_are_told_to_spin_briefly_before_torch_is_loaded(command, tmp_path):
    """Spinning ones starve the threads that copy; OpenMP reads the setting once, when torch loads it. The command ends there."""
    watch = ("import os, sys\n"
             "class Watch:\n"
             "    def find_spec(self, name, path=None, target=None):\n"
             "        if name == 'torch':\n"
             "            print('spins:', os.environ.get('GOMP_SPINCOUNT'), flush=True)\n"
             "            os._exit(0)\n"
             "sys.meta_path.insert(0, Watch())\n"
             "from kvtier.cli import main\n"
             f"sys.argv = {['kvtier', *command, '--quick']!r}\n"
             "main()\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    result = subprocess.run([sys.executable, "-c", watch], env=environment, capture_output=True, text=True, timeout=120, check=True,
                            cwd=tmp_path)
    assert result.stdout.split("spins:")[1:] == [" 3000\n"]


def test_a_setting_that_comes_too_late_is_not_reported_as_in_force():
    code = ("import sys, types; sys.modules['torch'] = types.ModuleType('torch')\n"
            "from kvtier.bench.openmp_waiting import openmp_waiting; import os\n"
            "print(openmp_waiting(), os.environ.get('GOMP_SPINCOUNT'))\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "OpenMP's own waiting None"
