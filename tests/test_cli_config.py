"""``kvtier config``: what it prints and its exit codes; bad settings end in one line and exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.cli_config import config
from kvtier.errors import ConfigError
from kvtier.tiering.config_reference import example


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVTIER_"):
            monkeypatch.delenv(name)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(config, [str(argument) for argument in arguments], catch_exceptions=False)
    return result.exit_code, result.output


def test_show_says_every_value_and_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tier.yaml"
    file.write_text("host_cache_size: 1024\nmax_seq_len: 99\n")
    monkeypatch.setenv("KVTIER_NUM_RANKS", "2")
    code, output = run("show", "--config", file)
    assert code == 0
    lines = {line.split()[0]: line.split()[1:] for line in output.splitlines() if line}
    assert lines["secondary"] == ["1024B", "file", f"{file},", "as", "host_cache_size"]
    assert lines["num_ranks"] == ["2", "environment", "KVTIER_NUM_RANKS"]
    assert lines["gds"] == ["auto", "default"]
    assert lines["max_tokens"] == ["not", "set", "default"]
    assert lines["keep_backing"] == ["true", "default"]
    assert " ".join(lines["secondary:"]) == "1.00 KiB (1024 bytes) of each rank, 2.00 KiB (2048 bytes) of all 2"
    found = json.loads(run("show", "--config", file, "--json")[1])
    assert found["settings"]["max_seq_len"] == {"value": 99, "source": f"file {file}"}
    assert found["settings"]["max_tokens"] == {"value": None, "source": "default"}
    assert len(found["sizes"]) == 3


def test_values_that_show_prints_as_json_can_be_read_back(tmp_path: Path) -> None:
    (tmp_path / "tier.yaml").write_text('primary: [8 blocks, 50%]\ngroup_shares: [1, 0.5]\nnvme_directory: ~/kv\nnvme_sync: true\n'
                                        'faults: "nvme.read.bit_flip=0.01, seed=3"\nmax_tokens: 99\n')
    shown = json.loads(run("show", "--config", tmp_path / "tier.yaml", "--json")[1])["settings"]
    (tmp_path / "again.yaml").write_text("".join(f"{key}: {json.dumps(each['value'])}\n" for key, each in shown.items()))
    again = json.loads(run("show", "--config", tmp_path / "again.yaml", "--json")[1])["settings"]
    assert {key: each["value"] for key, each in again.items()} == {key: each["value"] for key, each in shown.items()}
    assert shown["nvme_directory"]["value"] == str(Path.home() / "kv")
    assert (shown["primary"]["value"], shown["nvme_sync"]["value"]) == (["8 blocks", "50%"], True)


def test_check_says_what_files_set_and_what_the_environment_overrules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text("primary: 4 blocks\n")
    (tmp_path / "b.toml").write_text("")
    monkeypatch.setenv("KVTIER_GDS", "off")
    assert run("check", tmp_path / "a.yaml", tmp_path / "b.toml")[1].splitlines() == [
        f"{tmp_path}/{name}: good; it sets {what}; the environment sets gds, and wins" for name, what in (("a.yaml", "primary"),
                                                                                                         ("b.toml", "nothing"))]
    (tmp_path / "c.yaml").write_text("primery: 4 blocks\n")
    with pytest.raises(ConfigError, match=r"'primery' \(file .*c\.yaml\): unknown key; did you mean 'primary'"):
        run("check", tmp_path / "a.yaml", tmp_path / "c.yaml")


@pytest.mark.parametrize(("text", "reason"), [("primary: 8\n", "a size needs a unit"), ("rank: 3\n", "rank=3 with num_ranks=1"),
                                              ("- a\n", "must hold keys and values"),
                                              ("a: [", "line 1, column 5: while parsing a flow node, expected the node content")])
def test_a_bad_file_is_refused_by_each_command(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    for arguments in (["check", tmp_path / "bad.yaml"], ["show", "--config", tmp_path / "bad.yaml"]):
        with pytest.raises(ConfigError, match=reason) as refused:
            run(*arguments)
        assert "bad.yaml: " in str(refused.value) or arguments[0] == "show"


def test_what_is_wrong_is_one_line_on_stderr_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("primary: 8\n")
    done = subprocess.run([sys.executable, "-m", "kvtier.cli", "config", "check", "bad.yaml"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvtier: file bad.yaml: primary=8: a size needs a unit")
    assert done.stderr.count("\n") == 1


def test_schema_and_example_are_what_the_model_says() -> None:
    assert json.loads(run("schema")[1])["properties"]["rank"]["minimum"] == 0
    assert run("schema", "--example") == (0, example() + "\n")
