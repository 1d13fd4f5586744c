"""What a benchmark leaves on the drive: nothing, also when something still writes there."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.bench import removal
from kvtier.bench.removal import remove_folder


def test_a_folder_goes_though_a_file_is_made_in_it_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "old").touch()
    late = iter(["one", "two"])
    remove = os.rmdir

    def interfering(path: str, **where: int) -> None:
        for name in late:
            (folder / name).touch()
            break
        remove(path, **where)

    monkeypatch.setattr(os, "rmdir", interfering)
    remove_folder(folder)
    assert not folder.exists()
    assert list(late) == []


def test_a_folder_that_is_gone_is_fine(tmp_path: Path) -> None:
    remove_folder(tmp_path / "missing")


def test_a_folder_that_stays_is_said_and_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    def refuse(path: str, **where: int) -> None:
        raise PermissionError(1, "Operation not permitted", path)

    monkeypatch.setattr(os, "rmdir", refuse)
    with caplog.at_level(logging.WARNING):
        remove_folder(tmp_path, patience=0.1)
    assert tmp_path.exists()
    assert str(tmp_path) in caplog.text


def test_a_thread_that_is_still_writing_does_not_keep_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()

    def write() -> None:
        for number in range(1000):
            try:
                (folder / str(number)).touch()
            except FileNotFoundError:
                return

    writing = threading.Thread(target=write)
    writing.start()
    remove_folder(folder)
    writing.join()
    assert not folder.exists()


@pytest.mark.parametrize("late", [0.2, 0.9])
def test_a_folder_that_is_made_again_is_removed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: float) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    now, made_again = 100.0, False

    def sleep(seconds: float) -> None:
        nonlocal now, made_again
        now += seconds
        if now >= 100.0 + late and not made_again:
            folder.mkdir()
            (folder / "file").write_text("late")
            made_again = True

    monkeypatch.setattr(removal, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    remove_folder(folder, calm=1.0)
    assert made_again
    assert not folder.exists()
    assert now >= 101.0 + late, "it stayed away for as long after that"
