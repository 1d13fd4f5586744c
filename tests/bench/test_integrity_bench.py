"""``kvtier bench integrity`` on few trials: its matrix, its rows, and that what must not happen is an exit code of 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.bench import integrity_damage
from kvtier.bench.build import compiled
from kvtier.bench.integrity import IntegrityPlan, measure_integrity
from kvtier.bench.integrity_child import POINTS
from kvtier.errors import ConfigError
from kvtier.io import manifest_reading
from kvtier.io.direct_file import Buffer
from kvtier.io.nvme_store import NvmeStore

ONE_OF_EACH = IntegrityPlan(kills_per_point=0, kills_at_any_moment=1, flips=1, writes=1, full_drives=1)


def measure(folder: Path, plan: IntegrityPlan) -> tuple[int, dict]:
    file = folder / "figures.json"
    code = measure_integrity(folder, plan=plan).finish(file)
    return code, json.loads(file.read_text())


def test_each_case_has_a_line_in_the_matrix_and_three_rows(tmp_path: Path) -> None:
    code, written = measure(tmp_path, ONE_OF_EACH)
    assert code == 0
    names = ["kill/any-moment", "flip/payload", "flip/header", "flip/index", "flip/log", "torn-write", "misdirected-write", "full-drive"]
    assert [line["name"] for line in written["config"]["matrix"]] == names
    assert all(line["wrong"] == line["unexplained"] == 0 for line in written["config"]["matrix"])
    assert [row["name"] for row in written["results"]] == [f"integrity/{name}/{what}" for name in names
                                                           for what in ("wrong", "lost", "recover")]
    assert written["config"]["invalid"] == []
    assert written["config"]["compiled"] is compiled()
    assert [entry.name for entry in tmp_path.iterdir()] == ["figures.json"]


def test_the_usual_plan_kills_200_processes_and_flips_1000_bits() -> None:
    plan = IntegrityPlan.usual(quick=False)
    assert plan.kills_per_point * len(POINTS) + plan.kills_at_any_moment == 200
    assert 4 * plan.flips == 1000


def test_a_wrong_byte_is_an_exit_code_of_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    read_block = NvmeStore.read_block

    def careless(store: NvmeStore, group: int, slot: int, key: bytes, out: Buffer) -> None:
        read_block(store, group, slot, key, out)
        out[7] ^= slot == 3

    monkeypatch.setattr(NvmeStore, "read_block", careless)
    code, written = measure(tmp_path, IntegrityPlan(0, 0, 1, 0, 0))
    assert code == 1
    assert "wrong bytes" in written["config"]["invalid"][0]["reason"]
    assert "INVALID integrity/flip/payload" in capsys.readouterr().out


def test_an_index_that_becomes_shorter_without_a_word_is_an_exit_code_of_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_reading, "claimed_frames", lambda path: 0)
    code, written = measure(tmp_path, IntegrityPlan(0, 0, 4, 0, 0))
    assert code == 1
    [entry] = written["config"]["invalid"]
    assert entry["name"] == "integrity/flip/log"
    assert "without a word" in entry["reason"]


def test_a_trial_that_cannot_be_made_is_an_exit_code_of_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity_damage, "Faults", lambda rules: None)  # the drive never becomes full
    code, written = measure(tmp_path, IntegrityPlan(0, 0, 0, 0, 1))
    assert code == 1
    assert "confirmed as stored all the same" in written["config"]["invalid"][0]["reason"]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; name a folder"):
        measure_integrity(tmp_path / "missing")
