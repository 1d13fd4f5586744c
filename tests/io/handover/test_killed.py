"""A process that is killed in the middle of a handover leaves nothing that could be read wrongly, and nothing for ever."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from piece_rig import KEYS, SHAPE, Clock, files, hand_over, reader

from kvtier.io.handover_folder import HandoverFolder
from kvtier.io.handover_piece import PieceGone, PieceWriter, withdraw


def hang(directory: Path, what: str, name: str, digest: bytes, connection: Connection) -> None:
    folder = HandoverFolder(directory, "1MiB", Clock())
    if what == "write":
        held: object = PieceWriter(folder, SHAPE)
    else:
        held = reader(folder, name, digest)
    connection.send(what)
    connection.recv()
    del held


def killed(directory: Path, what: str, name: str, digest: bytes, folder: HandoverFolder) -> list[str]:
    """What lies in the folder while a process holds something there, which is then killed."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=hang, args=(directory, what, name, digest, theirs))
    process.start()
    assert ours.poll(60)
    assert ours.recv() == what
    found = files(folder)
    folder.collect()
    assert files(folder) == found  # it lives
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    return found


def test_a_writer_that_is_killed_leaves_a_file_that_the_next_one_removes(folder: HandoverFolder) -> None:
    [part] = killed(folder.directory, "write", "", b"", folder)
    assert part.endswith(".part")
    assert folder.collect() == 1
    assert files(folder) == []


def test_a_reader_that_is_killed_has_taken_nothing(folder: HandoverFolder) -> None:
    name, digest = hand_over(folder)
    assert killed(folder.directory, "read", name, digest, folder) == [name]
    piece = reader(folder, name, digest)
    assert len(piece.read(0, 0, KEYS, range(5))) == 5
    piece.acknowledge()
    assert files(folder) == []


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_that_is_killed_as_it_removes_the_file_leaves_it_to_another(folder: HandoverFolder, monkeypatch: pytest.MonkeyPatch,
                                                                          num_ranks: int) -> None:
    """A mark that everybody has taken it, in a file that is still there, would keep it there without anybody being able to use it."""
    name, digest = hand_over(folder)
    for rank in range(num_ranks - 1):
        reader(folder, name, digest, rank, num_ranks, range(num_ranks)).acknowledge()
    with monkeypatch.context() as patch:
        patch.setattr(HandoverFolder, "unlink", lambda *_given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            reader(folder, name, digest, num_ranks - 1, num_ranks, range(num_ranks)).acknowledge()
    assert files(folder) == [name]
    again = reader(folder, name, digest, num_ranks - 1, num_ranks, range(num_ranks))
    assert len(again.read(0, 0, KEYS, range(5))) == 5
    again.acknowledge()
    assert files(folder) == []


def test_a_file_that_cannot_be_removed_is_taken_once_all_the_same(folder: HandoverFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    name, digest = hand_over(folder)
    with monkeypatch.context() as patch:
        patch.setattr(HandoverFolder, "unlink", lambda *_given: None)
        reader(folder, name, digest).acknowledge()
    with pytest.raises(PieceGone, match="rank 0 has taken it already"):
        reader(folder, name, digest)
    assert not withdraw(folder, name)
