"""``kvtier store`` from the command line: what it prints, its exit codes, several ranks under one root."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvtier.cli_store import store
from kvtier.errors import ConfigError, TransferError
from kvtier.io import store_commands
from kvtier.io.nvme_store import NvmeStore
from kvtier.io.store_messages import BlockWrite
from kvtier.pools.nvme_geometry import NvmeGeometry

NAMESPACE = '{"model": "tiny@1", "ranks": 1}'
GEOMETRIES = [NvmeGeometry(8192, 4), NvmeGeometry(5000, 2)]


def make_store(directory: Path, namespace: str = NAMESPACE) -> None:
    with NvmeStore.open(directory, namespace, GEOMETRIES, free_space_reserve=0) as opened:
        items = [BlockWrite(0, slot, hashlib.sha256(b"%d" % slot).digest(), np.full(8192, slot, np.uint8), 35, 0.0) for slot in range(3)]
        assert opened.write_blocks(items) == [None] * 3


def spoil(directory: Path) -> None:
    """One block of the first group."""
    with (directory / "group-0.slab").open("r+b") as file:
        file.seek(GEOMETRIES[0].offset(1) + 5000)
        file.write(b"\xff")


def contents(root: Path) -> dict[Path, bytes]:
    """Of all files but the locks."""
    return {file: file.read_bytes() for file in root.rglob("*") if file.is_file() and file.name != "kvtier.lock"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_store(tmp_path / "store")
    return tmp_path / "store"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(store, [str(argument) for argument in arguments], catch_exceptions=False)
    return result.exit_code, result.output


def test_ls_shows_the_namespace_in_clear_and_a_line_for_each_group(directory: Path) -> None:
    code, output = run("ls", directory)
    assert code == 0
    assert 'model: "tiny@1"' in output
    assert [line.split() for line in output.splitlines()[-2:]] == [["0", "4", "3", "24576", "8192", "0", "0"],
                                                                   ["1", "2", "0", "0", "5000", "0", "0"]]
    code, output = run("ls", directory, "--json")
    [listing] = json.loads(output)
    assert listing["namespace"] == json.loads(NAMESPACE)
    assert [group["blocks"] for group in listing["groups"]] == [3, 0]


def test_verify_and_scrub_end_with_1_when_a_block_is_bad_and_scrub_takes_it_away(directory: Path) -> None:
    assert run("verify", directory) == (0, f"{directory}: 3 blocks read, 0 bad\n")
    spoil(directory)
    for _ in range(2):
        code, output = run("verify", directory)
        assert code == 1
        assert "3 blocks read, 1 bad" in output
        assert "group 0, slot 1" in output
    code, output = run("scrub", directory, "--bandwidth", "200MiB/s", "--json")
    assert code == 1
    assert json.loads(output)[0]["quarantined"][0]["slot"] == 1
    assert run("scrub", directory) == (0, f"{directory}: 2 blocks verified, 0 quarantined; the pass is complete\n")
    assert run("verify", directory)[0] == 0
    assert run("ls", directory)[1].splitlines()[-2].split()[-1] == "1"


def test_scrub_says_where_the_next_run_goes_on(directory: Path) -> None:
    assert run("scrub", directory, "--seconds", "0")[1].endswith("the next run goes on at group 0, slot 0\n")


def test_rebuild_and_gc(directory: Path) -> None:
    (directory / "manifest.sqlite").write_bytes(b"no database")
    assert "DAMAGED" in run("ls", directory)[1]
    code, output = run("rebuild", directory)
    assert code == 0
    assert "3 blocks, 3 of them not in the old manifest" in output
    assert "kvtier store gc removes" in run("ls", directory)[1]
    assert "0 expired blocks and 1 files removed (11 bytes)" in run("gc", directory)[1]
    assert json.loads(run("gc", directory, "--json")[1]) == [
        {"directory": str(directory), "expired": 0, "released": 0, "files": [], "num_bytes": 0}]


def test_gc_puts_quarantined_slots_back_into_service_only_when_told_to(directory: Path) -> None:
    spoil(directory)
    assert run("scrub", directory)[0] == 1
    assert "in service" not in run("gc", directory)[1]
    assert "1 quarantined slots are in service again" in run("gc", directory, "--release-quarantine")[1]
    assert run("ls", directory)[1].splitlines()[-2].split() == ["0", "4", "2", "16384", "8192", "0", "0"]


def test_clear_asks_for_yes_and_names_what_would_go(directory: Path) -> None:
    with pytest.raises(ConfigError, match="holds 3 blocks, which would all be forgotten; repeat the command with --yes"):
        run("clear", directory)
    assert run("verify", directory)[1].startswith(f"{directory}: 3 blocks")
    assert run("clear", directory, "--yes")[0] == 0
    assert run("verify", directory) == (0, f"{directory}: 0 blocks read, 0 bad\n")


def test_under_a_root_each_rank_has_its_turn_and_the_worst_exit_code_counts(tmp_path: Path) -> None:
    for rank in range(3):
        make_store(tmp_path / f"rank-{rank}")
    spoil(tmp_path / "rank-1")
    code, output = run("verify", tmp_path)
    assert code == 1
    assert [f"rank-{rank}: 3 blocks read, {bad} bad" in output for rank, bad in enumerate((0, 1, 0))] == [True] * 3
    with NvmeStore.open(tmp_path / "rank-0", NAMESPACE, GEOMETRIES, free_space_reserve=0):
        code, output = run("verify", tmp_path)
    assert code == 2
    assert "in use by process" in output
    assert "rank-2: 3 blocks read, 0 bad" in output


@pytest.mark.parametrize("error", [TransferError("no room for the commit"), OSError(28, "no space left")], ids=["commit", "system"])
def test_one_that_fails_halfway_does_not_keep_the_others_from_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                        error: Exception) -> None:
    for rank in range(2):
        make_store(tmp_path / f"rank-{rank}-of-2")
    clear_store = store_commands.clear_store

    def clear_all_but_the_first(path: Path) -> int:
        if path.name == "rank-0-of-2":
            raise error
        return clear_store(path)

    monkeypatch.setattr(store_commands, "clear_store", clear_all_but_the_first)
    code, output = run("clear", tmp_path, "--yes")
    assert code == 1
    assert str(error) in output
    assert "rank-1-of-2: 3 blocks forgotten" in output


def test_ranks_under_a_root_come_in_order_and_a_missing_one_is_named(tmp_path: Path) -> None:
    for rank in (0, 2, 10):
        make_store(tmp_path / f"rank-{rank}-of-11")
    code, output = run("ls", tmp_path)
    assert code == 0
    at = [output.index(f"rank-{rank}-of-11: format") for rank in (0, 2, 10)]
    assert at == sorted(at)
    assert "rank-1-of-11 is missing; that rank starts without stored blocks" in output
    assert "is missing" not in run("ls", tmp_path / "rank-0-of-11")[1]


OTHER = '{"model": "large@7", "ranks": 1}'
CHANGING = {"clear": ("clear", "--yes"), "clear without yes": ("clear",), "gc": ("gc",), "rebuild": ("rebuild",), "scrub": ("scrub",)}


@pytest.mark.parametrize("arguments", CHANGING.values(), ids=list(CHANGING))
@pytest.mark.parametrize("below", [{"a": NAMESPACE, "b": OTHER}, {"a": NAMESPACE}, {"rank-0-of-2": NAMESPACE, "other": NAMESPACE},
                                   {"rank-0-of-2": NAMESPACE, "rank-0-of-3": NAMESPACE},
                                   {"rank-0-of-2": NAMESPACE, "rank-1-of-2": OTHER}],
                         ids=["two stores", "one that was not named", "a rank and another", "two numbers of ranks", "two models"])
def test_what_changes_stores_refuses_a_folder_whose_stores_are_not_the_ranks_of_one(tmp_path: Path, below: dict[str, str],
                                                                                   arguments: tuple[str, ...]) -> None:
    for name, namespace in below.items():
        make_store(tmp_path / name, namespace)
        spoil(tmp_path / name)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="Name one of them") as refused:
        run(arguments[0], tmp_path, *arguments[1:])
    assert all(str(tmp_path / name) in str(refused.value) for name in below)
    assert contents(tmp_path) == before
    assert run("verify", tmp_path)[1].count("3 blocks read, 1 bad") == len(below)


@pytest.mark.parametrize("arguments", [("clear", "--yes"), ("gc",), ("rebuild",), ("scrub",)], ids=["clear", "gc", "rebuild", "scrub"])
def test_what_changes_stores_takes_the_ranks_of_one_whose_namespaces_name_their_rank(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    for rank in range(2):
        make_store(tmp_path / f"rank-{rank}-of-2", json.dumps({"model": "tiny@1", "ranks": 2, "rank": rank}))
    code, output = run(arguments[0], tmp_path, *arguments[1:])
    assert code == 0
    assert [f"rank-{rank}-of-2: " in output for rank in range(2)] == [True] * 2
