"""The end of a log counts as lost only where a finished transaction can have been there; beside it stands what SQLite believes."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvtier.io.wal_check import FRAME, HEADER, claimed_frames, frame_checksum

PAGE = 4096
SALTS, OLD_SALTS = (0x1234ABCD, 0x77777777), (0x1234ABCC, 0x0BADF00D)


def _database() -> bytes:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE t (a)")
        content = bytearray(connection.serialize())
    content[18] = content[19] = 2  # it keeps a write-ahead log
    return bytes(content)


DATABASE = _database()


@dataclass
class Log:
    """A log made by hand, over a database of one empty table. Frames: (page number, size after the transaction or 0)."""

    path: Path
    content: bytearray = field(default_factory=bytearray)
    order: str = ">"

    def begin(self, salts: tuple[int, int] = SALTS) -> Log:
        """The header, over whatever is there, as when SQLite writes a log over again."""
        start = HEADER.pack(0x377F0682 | (self.order == ">"), 3007000, PAGE, 5, *salts, 0, 0)[:24]
        self._salts, self._before, self._end = salts, frame_checksum(start, (0, 0), self.order), 0
        self._place(start + FRAME.pack(*self._before, 0, 0, 0, 0)[:8])
        return self

    def frame(self, number: int, size: int, fill: int = 0, cut: int = FRAME.size + PAGE) -> Log:
        """One more frame; ``cut`` bytes of it are written."""
        page = DATABASE[:PAGE // 2] + bytes([fill]) + DATABASE[PAGE // 2 + 1:PAGE] if number == 1 else bytes([fill or number]) * PAGE
        covered = FRAME.pack(number, size, 0, 0, 0, 0)[:8] + page
        self._before = frame_checksum(covered, self._before, self.order)
        self._place((FRAME.pack(number, size, *self._salts, *self._before) + page)[:cut])
        return self

    def flip(self, frame: int, byte: int, bit: int = 0) -> Log:
        self.content[HEADER.size + (frame - 1) * (FRAME.size + PAGE) + byte] ^= 1 << bit
        return self

    def _place(self, piece: bytes) -> None:
        self.content[self._end:self._end + len(piece)] = piece
        self._end += len(piece)

    def claimed(self) -> int:
        self.path.write_bytes(self.content)
        return claimed_frames(self.path)

    def believed(self) -> int:
        """By SQLite, which reads the log beside a database."""
        database = self.path.with_name(self.path.name.removesuffix("-wal"))
        database.write_bytes(DATABASE)
        database.with_name(database.name + "-shm").unlink(missing_ok=True)
        self.path.write_bytes(self.content)
        with contextlib.closing(sqlite3.connect(database)) as connection:
            try:
                connection.execute("SELECT * FROM sqlite_schema").fetchall()
                return connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1]
            except sqlite3.OperationalError:  # a version that it does not know
                return 0


@pytest.fixture(params=[">", "<"])
def log(tmp_path: Path, request: pytest.FixtureRequest) -> Log:
    """Two transactions of two frames each."""
    log = Log(tmp_path / "log" / "m.sqlite-wal", order=request.param)
    log.path.parent.mkdir()
    return log.begin().frame(1, 0).frame(2, 2).frame(3, 0).frame(1, 3)


def test_no_log_claims_nothing(tmp_path: Path) -> None:
    assert claimed_frames(tmp_path / "none") == 0
    for size in (0, 31, 32, 55):
        (tmp_path / "short").write_bytes(bytes(size))
        assert claimed_frames(tmp_path / "short") == 0


def test_a_sound_log_is_believed_whole(log: Log) -> None:
    assert log.claimed() == log.believed() == 4


def test_sound_frames_without_the_last_of_their_transaction_are_no_loss(log: Log) -> None:
    log.frame(5, 0).frame(6, 0).frame(7, 0)
    assert log.claimed() == log.believed() == 4
    assert Log(log.path, order=log.order).begin().frame(1, 0).frame(2, 0).claimed() == 0


@pytest.mark.parametrize("cut", [23, 24, 24 + PAGE // 2, 24 + PAGE - 1])
@pytest.mark.parametrize("size", [0, 6])
def test_a_frame_that_the_file_ends_in_is_no_loss(log: Log, cut: int, size: int) -> None:
    log.frame(5, 0).frame(6, size, cut=cut)
    assert log.claimed() == log.believed() == 4


@pytest.mark.parametrize("bit", range(0, 32, 5))
def test_a_flipped_bit_that_takes_the_end_of_the_last_transaction_away_is_a_loss(log: Log, bit: int) -> None:
    log.frame(5, 1 << bit).flip(5, 7 - bit // 8, bit % 8)  # the size is 0 now, as in a frame with others to come
    assert log.claimed() == 5 > log.believed()


@pytest.mark.parametrize("frame", [1, 2, 3, 4])
def test_a_flipped_bit_in_a_finished_transaction_is_a_loss(log: Log, frame: int) -> None:
    for byte in (*range(FRAME.size), FRAME.size, FRAME.size + 1000, FRAME.size + PAGE - 1):
        log.flip(frame, byte, bit=byte % 8)
        assert log.claimed() == 4 > log.believed(), f"byte {byte} of the frame"
        log.flip(frame, byte, bit=byte % 8)


def test_a_damaged_header_is_a_loss(log: Log) -> None:
    for byte in range(HEADER.size):
        log.content[byte] ^= 2
        assert log.claimed() > log.believed(), f"byte {byte}"
        log.content[byte] ^= 2


def test_the_remains_of_an_older_run_are_no_loss(log: Log) -> None:
    log.begin(OLD_SALTS)
    assert log.claimed() == 0
    log.frame(1, 2, fill=9)
    assert log.claimed() == log.believed() == 1
    log.frame(2, 0)
    assert log.claimed() == log.believed() == 1


def test_a_header_over_the_page_of_an_older_run_may_be_a_lost_end(log: Log) -> None:
    """Of a process killed between the two writes of a frame, where a flipped bit would look the same."""
    log.begin(OLD_SALTS).frame(1, 2, fill=9).frame(2, 2, fill=9, cut=FRAME.size)
    assert log.claimed() == 2
    assert log.believed() == 1


def test_a_log_of_sqlite_itself_is_claimed_up_to_its_last_transaction(tmp_path: Path) -> None:
    path = tmp_path / "m.sqlite"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        connection.execute("PRAGMA cache_size = 10").fetchall()  # so that an open transaction has frames in the log already
        connection.execute("CREATE TABLE t (a BLOB)")
        connection.execute("INSERT INTO t VALUES (zeroblob(20000))")
        [(_, before, _)] = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        log = path.with_name("m.sqlite-wal")
        assert claimed_frames(log) == before
        connection.execute("BEGIN")
        connection.execute("INSERT INTO t VALUES (zeroblob(200000))")
        whole = (log.stat().st_size - HEADER.size) // (FRAME.size + PAGE)
        assert whole > 20
        assert claimed_frames(log) in (0, before)  # 0: SQLite has begun the log anew, since all of it was in the database
        connection.execute("COMMIT")
        assert claimed_frames(log) > 20
