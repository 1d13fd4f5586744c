"""Stores of several ranks that are made at the same moment on one drive never take more than there is."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.io import space_turn, store_open
from kvtier.io.byte_locks import lock_whole
from kvtier.io.direct_file import DirectFile
from kvtier.io.space_turn import alone_on
from kvtier.io.store_open import open_store
from kvtier.pools.nvme_geometry import NvmeGeometry

GEOMETRIES = [NvmeGeometry(8192, 16)]
SIZE = GEOMETRIES[0].file_bytes
RESERVE = 1 << 20


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_start_together_find_room_for_as_many_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    capacity = RESERVE + (num_ranks - 1) * SIZE

    def statvfs(_path: object) -> SimpleNamespace:
        taken = sum(file.stat().st_blocks * 512 for file in tmp_path.glob("rank-*/*.slab"))
        return SimpleNamespace(f_bavail=capacity - taken, f_frsize=1, f_blocks=capacity)

    resize = DirectFile.resize

    def slow_resize(self: DirectFile, num_bytes: int) -> None:
        time.sleep(0.05)  # long enough for the others to look, if nobody keeps them from it
        resize(self, num_bytes)

    monkeypatch.setattr(store_open.os, "statvfs", statvfs)
    monkeypatch.setattr(DirectFile, "resize", slow_resize)
    opened, refused = [], []
    together = threading.Barrier(num_ranks)

    def start(rank: int) -> None:
        together.wait()
        try:
            opened.append(open_store(tmp_path / f"rank-{rank}", "{}", GEOMETRIES, free_space_reserve=RESERVE))
        except ConfigError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in opened:
        store.manifest.close(10.0)
        store.home.close()
    assert (len(opened), len(refused)) == (num_ranks - 1, 1)
    assert f"needs {SIZE} more bytes" in refused[0]


def test_a_turn_that_is_not_to_be_had_is_not_waited_for_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                       caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(space_turn, "mount_of", lambda _folder: ("ext4", str(tmp_path)))
    file = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_EX)
    with alone_on(tmp_path, timeout=0.02):
        assert "still preallocating" in caplog.text
    os.close(file)


def test_a_turn_that_is_waited_for_is_said_and_then_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                          caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(space_turn, "mount_of", lambda _folder: ("ext4", str(tmp_path)))
    monkeypatch.setattr(space_turn, "SAID_AFTER", 0.01)
    file = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_EX)

    class EndsTheOtherOne(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            fcntl.flock(file, fcntl.LOCK_UN)

    handler = EndsTheOtherOne()
    logging.getLogger(space_turn.__name__).addHandler(handler)
    try:
        with alone_on(tmp_path):
            [record] = caplog.records
            assert f"up to 300 s more (it holds a lock on {tmp_path}" in record.getMessage()
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        logging.getLogger(space_turn.__name__).removeHandler(handler)
        os.close(file)


def test_where_the_mount_point_cannot_be_opened_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_turn, "mount_of", lambda _folder: ("ext4", str(tmp_path / "missing")))
    with alone_on(tmp_path):
        pass


def test_a_child_that_was_forked_during_a_turn_does_not_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(space_turn, "mount_of", lambda _folder: ("ext4", str(tmp_path)))
    copies: list[int] = []
    open_file = os.open

    def shared(*arguments: Any) -> int:
        file = open_file(*arguments)
        copies.append(os.dup(file))  # as a child has it
        return file

    try:
        with monkeypatch.context() as patch:
            patch.setattr(space_turn.os, "open", shared)
            with alone_on(tmp_path):
                assert len(copies) == 1
        with alone_on(tmp_path, timeout=0.0):
            assert not caplog.text
    finally:
        for copy in copies:
            os.close(copy)


def test_a_turn_that_ctrl_c_cuts_short_is_over_though_the_process_lives_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise everybody who starts on this file system waits for as long as they may. It comes in each function of Python's in turn."""
    monkeypatch.setattr(space_turn, "mount_of", lambda _folder: ("ext4", str(tmp_path)))

    def is_cut_short(place: int) -> bool:
        left = place

        def strike(_frame: object, event: str, _argument: object) -> None:
            nonlocal left
            left -= event == "call"
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

        sys.setprofile(strike)
        try:
            with alone_on(tmp_path):
                pass
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False

    place = 0
    while is_cut_short(place):
        file = os.open(tmp_path, os.O_RDONLY)
        assert lock_whole(file), place
        os.close(file)
        place += 1
    assert place > 5


def test_a_store_that_has_its_space_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for is_first in (True, False):
        store = open_store(tmp_path, "{}", GEOMETRIES, free_space_reserve=0)
        store.manifest.close(10.0)
        for slab in store.slabs:
            slab.file.close()
        store.home.close()
        if is_first:
            monkeypatch.setattr(store_open, "alone_on", lambda _folder: pytest.fail("it took a turn"))
