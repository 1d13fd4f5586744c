"""Files that are handed over: complete or not there, taken once by each rank, and never read where they are damaged."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from piece_rig import KEYS, LIFETIME, SHAPE, Clock, content, files, flip, hand_over, reader

from kvtier import CorruptBlock
from kvtier.io.handover_folder import HandoverFolder
from kvtier.io.handover_piece import PieceBusy, PieceGone, PieceWriter


def test_what_was_written_is_read_and_gone_once_it_is_acknowledged(folder: HandoverFolder) -> None:
    name, digest = hand_over(folder)
    piece = reader(folder, name, digest)
    for group in (0, 2):
        count = SHAPE.num_blocks[group]
        assert np.array_equal(piece.read(group, 0, KEYS[:count], range(count)), content(group))
    assert np.array_equal(piece.read(0, 3, KEYS[3:], [3, 4]), content(0)[3:])
    assert files(folder) == [name]
    piece.acknowledge()
    assert files(folder) == []
    with pytest.raises(PieceGone, match="taken already"):
        reader(folder, name, digest)


def test_a_file_is_not_seen_before_it_is_complete(folder: HandoverFolder) -> None:
    with PieceWriter(folder, SHAPE) as writer:
        assert files(folder) == [writer.name]
        for name in (writer.name, writer.name.replace(".part", ".kv")):
            with pytest.raises(PieceGone):
                reader(folder, name, bytes(16))
        assert folder.collect() == 0  # its writer lives
    assert files(folder) == []


def test_only_one_at_a_time_reads_for_a_rank_and_who_lets_go_has_taken_nothing(folder: HandoverFolder) -> None:
    name, digest = hand_over(folder)
    first = reader(folder, name, digest)
    with pytest.raises(PieceBusy):
        reader(folder, name, digest)
    first.release()
    reader(folder, name, digest).acknowledge()
    assert files(folder) == []


def test_every_rank_takes_it_once_and_the_last_one_removes_it(folder: HandoverFolder) -> None:
    name, digest = hand_over(folder)
    wanted = range(0, 4, 3)  # ranks 1 and 2 want nothing of this piece
    one, other = (reader(folder, name, digest, rank, 4, wanted) for rank in (0, 3))
    with pytest.raises(PieceGone, match="4 ranks, this is one of 2"):
        reader(folder, name, digest, 1, 2, range(2))
    one.acknowledge()
    assert files(folder) == [name]
    with pytest.raises(PieceGone, match="rank 0 has taken it already"):
        reader(folder, name, digest, 0, 4, wanted)
    other.acknowledge()
    assert files(folder) == []


def test_ranks_of_another_number_that_took_nothing_are_not_in_the_way(folder: HandoverFolder) -> None:
    name, digest = hand_over(folder)
    reader(folder, name, digest, 1, 4, range(4)).release()
    reader(folder, name, digest).acknowledge()
    assert files(folder) == []


def test_after_the_deadline_nothing_is_read_and_anybody_removes_it(folder: HandoverFolder, clock: Clock) -> None:
    name, digest = hand_over(folder)
    clock.now += LIFETIME + 1
    with pytest.raises(PieceGone, match="time is over"):
        reader(folder, name, digest)
    assert folder.collect() == 1
    assert files(folder) == []


def test_what_is_being_read_is_not_removed_at_its_deadline(folder: HandoverFolder, clock: Clock) -> None:
    name, digest = hand_over(folder)
    piece = reader(folder, name, digest)
    clock.now += LIFETIME + 1
    assert folder.collect() == 0
    assert not folder.remove(name)
    assert len(piece.read(0, 0, KEYS, range(5))) == 5
    piece.release()
    assert folder.collect() == 1


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_ends_what_is_good(folder: HandoverFolder, bit: int) -> None:
    name, digest = hand_over(folder)
    flip(folder, name, SHAPE.offset(0, 3) + 7 * bit, bit)
    piece = reader(folder, name, digest)
    assert np.array_equal(piece.read(0, 0, KEYS, range(5)), content(0)[:3])
    assert len(piece.read(0, 3, KEYS[3:], [3, 4])) == 0
    piece.release()


def test_a_damaged_table_or_another_file_is_no_piece_of_this_ticket(folder: HandoverFolder) -> None:
    name, digest = hand_over(folder)
    other, other_digest = hand_over(folder)
    assert digest == other_digest  # equal content
    with pytest.raises(CorruptBlock):
        reader(folder, other, bytes(16))
    flip(folder, name, 4096 + 17, 3)
    with pytest.raises(CorruptBlock, match="damaged"):
        reader(folder, name, digest)
    with (folder.directory / other).open("r+b") as file:
        file.truncate(SHAPE.num_bytes - 1)
    with pytest.raises(CorruptBlock):
        reader(folder, other, digest)


def test_right_bytes_in_the_wrong_place_are_not_good(folder: HandoverFolder) -> None:
    name, digest = hand_over(folder)
    piece = reader(folder, name, digest)
    assert len(piece.read(0, 0, [KEYS[1], KEYS[0]], [0, 1])) == 0
    assert len(piece.read(0, 0, KEYS[:2], [1, 2])) == 0
    assert len(piece.read(0, 1, KEYS[1:3], [1, 2])) == 2
    piece.release()


def test_of_many_that_want_it_at_once_one_has_it(folder: HandoverFolder) -> None:
    for _ in range(5):
        name, digest = hand_over(folder)
        taken: list[int] = []
        begin = threading.Barrier(6)

        def take(number: int, name: str = name, digest: bytes = digest, begin: threading.Barrier = begin, taken: list[int] = taken) -> None:
            begin.wait(30)
            while True:
                folder.collect()
                try:
                    piece = reader(folder, name, digest)
                except PieceBusy:
                    continue
                except PieceGone:
                    return
                assert len(piece.read(0, 0, KEYS, range(5))) == 5
                if number % 2:  # it has changed its mind
                    piece.release()
                    return
                piece.acknowledge()
                taken.append(number)

        threads = [threading.Thread(target=take, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 1
        assert files(folder) == []
