"""Whose directory it is: ours alone, one process at a time, one model; everything else is a ConfigError with a remedy."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.io import store_directory
from kvtier.io.store_directory import StoreDirectory, expand

NAMESPACE = '{"model": "tiny@1", "dtype": "float32"}'


def open_home(path: Path | str, namespace: str = NAMESPACE, block_bytes: tuple[int, ...] = (8192,)) -> StoreDirectory:
    return StoreDirectory.open(path, namespace, block_bytes)


def test_a_new_directory_is_private_and_says_in_clear_what_it_belongs_to(tmp_path: Path) -> None:
    home = open_home(tmp_path / "a" / "store")
    assert home.path.stat().st_mode & 0o777 == 0o700
    identity = json.loads((home.path / "kvtier-store.json").read_text())
    assert identity["namespace"] == json.loads(NAMESPACE)
    assert identity["kvtier_store"] == 1
    assert all(entry.stat().st_mode & 0o777 == 0o600 for entry in home.path.iterdir())
    home.close()


def test_an_empty_directory_of_the_user_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    tmp_path.chmod(0o755)
    open_home(tmp_path).close()
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_is_not_ours_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"thesis\.tex.* not a kvtier store. Give an empty directory"):
        open_home(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_another_model_is_refused_and_both_are_named(tmp_path: Path) -> None:
    open_home(tmp_path).close()
    with pytest.raises(ConfigError, match=r'model is "tiny@1", configured is "tiny@2".*Give another directory'):
        open_home(tmp_path, '{"model": "tiny@2", "dtype": "float32"}')
    with pytest.raises(ConfigError, match=r'dtype is "float32", configured is null'):
        open_home(tmp_path, '{"model": "tiny@1"}')
    open_home(tmp_path, '{"dtype": "float32",   "model": "tiny@1"}').close()  # the order of the keys means nothing


def test_another_block_size_or_number_of_groups_is_refused_and_both_are_named(tmp_path: Path) -> None:
    open_home(tmp_path).close()
    with pytest.raises(ConfigError, match=r"bytes per block of each group are \[8192\], configured are \[4096, 8192\]"):
        open_home(tmp_path, block_bytes=(4096, 8192))


def test_another_format_version_is_refused_and_both_are_named(tmp_path: Path) -> None:
    open_home(tmp_path).close()
    file = tmp_path / "kvtier-store.json"
    file.write_text(file.read_text().replace('"kvtier_store": 1', '"kvtier_store": 7'))
    with pytest.raises(ConfigError, match="format version is 7, this kvtier reads and writes 1"):
        open_home(tmp_path)


@pytest.mark.parametrize("damage", [lambda text: text.replace("tiny@1", "tiny@3"), lambda text: text[:40], lambda text: "",
                                    lambda text: "[]", lambda text: text.replace('"generation": 0', '"generation": 1')])
def test_a_damaged_identity_is_refused_and_never_written_over(tmp_path: Path, damage) -> None:
    open_home(tmp_path).close()
    file = tmp_path / "kvtier-store.json"
    damaged = damage(file.read_text())
    file.write_text(damaged)
    with pytest.raises(ConfigError, match=r"kvtier-store\.json cannot be used"):
        open_home(tmp_path)
    assert file.read_text() == damaged


def test_a_second_owner_in_this_process_is_refused(tmp_path: Path) -> None:
    home = open_home(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on "):
        open_home(tmp_path)
    home.close()
    home.close()
    open_home(tmp_path).close()


def test_a_directory_in_use_by_another_process_is_refused_with_its_pid_and_free_when_that_dies(tmp_path: Path) -> None:
    program = ("import sys; from kvtier.io.store_directory import StoreDirectory\n"
               f"home = StoreDirectory.open({str(tmp_path)!r}, {NAMESPACE!r}, [8192]); print('ready', flush=True); sys.stdin.read()")
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        with pytest.raises(ConfigError, match=f"in use by process {child.pid} on .*stop that one or give each its own directory"):
            open_home(tmp_path)
    finally:
        child.kill()
        child.communicate()
    open_home(tmp_path).close()


@pytest.mark.parametrize(("path", "use", "remedy"), [
    ("/proc/kvtier", "created", "Give a directory that this user may write to"), ("file/store", "created", "A file is in the way"),
    ("file", "used", "A file is in the way")])
def test_a_directory_that_cannot_be_made_or_written_is_a_config_error(tmp_path: Path, path: str, use: str, remedy: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"nvme_directory=.* cannot be {use}: .*{remedy}"):
        open_home(tmp_path / path)


def test_a_directory_on_a_read_only_mount_is_a_config_error(tmp_path: Path, monkeypatch) -> None:
    real = os.open

    def refusing(path, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(ConfigError, match="Read-only file system"):
        open_home(tmp_path)


def test_leftovers_of_an_interrupted_run_are_removed_and_nothing_else(tmp_path: Path) -> None:
    open_home(tmp_path).close()
    for name in ("kvtier-store.json.tmp", "manifest.sqlite.tmp", "manifest.sqlite.tmp-wal", "manifest.sqlite.tmp-shm",
                 "group-0.slab", "manifest.sqlite.damaged-20260101-000000"):
        (tmp_path / name).write_text("x")
    open_home(tmp_path).close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["group-0.slab", "kvtier-store.json", "kvtier.lock",
                                                                  "manifest.sqlite.damaged-20260101-000000"]


def test_a_first_start_that_was_interrupted_before_the_identity_was_written_goes_through(tmp_path: Path) -> None:
    (tmp_path / "kvtier.lock").write_text("1234 on host")
    (tmp_path / "kvtier-store.json.tmp").write_text("{")
    open_home(tmp_path).close()


def test_home_and_variables_are_expanded_or_refused_and_never_taken_literally(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KV_TEST_PLACE", "nvme0")
    monkeypatch.chdir(tmp_path)
    assert expand("~/$KV_TEST_PLACE/kv") == tmp_path / "nvme0" / "kv"
    assert expand("kv") == tmp_path / "kv"
    for path in ("$KV_TEST_UNSET/kv", "${KV_TEST_UNSET}", "~nobody-of-this-name/kv", ""):
        with pytest.raises(ConfigError, match="variable or user that does not exist"):
            open_home(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("namespace", ["", "model", "[1]", '"model"', "{"])
def test_a_namespace_that_is_no_json_object_is_a_config_error(tmp_path: Path, namespace: str) -> None:
    with pytest.raises(ConfigError, match="must be a JSON object"):
        open_home(tmp_path / "store", namespace)
    assert not (tmp_path / "store").exists()


def test_a_new_generation_has_another_digest_that_survives_a_restart(tmp_path: Path) -> None:
    home = open_home(tmp_path)
    before = home.identity.namespace_digest
    home.start_generation()
    after = home.identity.namespace_digest
    assert before != after
    home.record_slots([3])
    home.close()
    home = open_home(tmp_path)
    assert home.identity.namespace_digest == after
    assert home.identity.num_slots == (3,)
    home.close()


def test_an_identity_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch) -> None:
    home = open_home(tmp_path)
    text = (tmp_path / "kvtier-store.json").read_text()

    def failing(source: object, target: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store_directory.os, "replace", failing)
    with pytest.raises(OSError, match="Input/output"):
        home.start_generation()
    monkeypatch.undo()
    assert home.identity.generation == 0
    assert (tmp_path / "kvtier-store.json").read_text() == text
    home.close()
