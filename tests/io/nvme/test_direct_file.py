"""Direct I/O: exact ranges, whatever the buffers, the kernel's mood or the mount."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import TransferError
from kvtier.io import direct_file
from kvtier.io.direct_file import DirectFile, aligned_buffer, is_aligned, refuses_direct

PAGE = 4096


@pytest.fixture(params=[True, False], ids=["direct", "page-cache"])
def file(request, tmp_path: Path):
    opened = DirectFile(tmp_path / "data", create=True, direct=request.param)
    opened.resize(16 * PAGE)
    yield opened
    opened.close()


def noise(num_bytes: int, aligned: bool = True) -> np.ndarray:
    buffer = aligned_buffer(num_bytes) if aligned else aligned_buffer(num_bytes + PAGE)[8:8 + num_bytes]
    buffer[:] = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)
    return buffer


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("sizes", [[PAGE], [PAGE, 3 * PAGE], [PAGE, 5000], [100], [1, 2, 3], [PAGE, PAGE, 2 * PAGE, 7]])
def test_what_is_written_is_read_back_whatever_the_buffers(file: DirectFile, sizes: list[int], aligned: bool) -> None:
    written = [noise(size, aligned) for size in sizes]
    file.write(2 * PAGE, written)
    read = [noise(size + 1, aligned)[:size] for size in sizes]
    file.read(2 * PAGE, read)
    for one, other in zip(written, read, strict=True):
        assert np.array_equal(one, other)
    assert file.path.read_bytes()[:2 * PAGE] == bytes(2 * PAGE)


def test_an_unaligned_write_leaves_the_pages_around_it_alone(file: DirectFile) -> None:
    file.write(0, [noise(16 * PAGE)])
    before = file.path.read_bytes()
    file.write(4 * PAGE, [noise(5000, aligned=False)])
    after = file.path.read_bytes()
    assert after[:4 * PAGE] == before[:4 * PAGE]
    assert after[6 * PAGE:] == before[6 * PAGE:]


def test_aligned_means_address_and_length() -> None:
    buffer = aligned_buffer(3 * PAGE)
    assert is_aligned(buffer)
    assert is_aligned(buffer[PAGE:])
    assert not is_aligned(buffer[8:PAGE + 8])
    assert not is_aligned(buffer[:100])


def test_a_vector_longer_than_the_system_takes_in_one_call_travels_whole(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "long", create=True)
    block = noise(1500 * PAGE)
    pieces = [block[start:start + PAGE] for start in range(0, block.size, PAGE)]
    file.write(0, pieces)
    back = aligned_buffer(block.size)
    file.read(0, [back[start:start + PAGE] for start in range(0, block.size, PAGE)])
    assert np.array_equal(block, back)
    file.close()


@pytest.mark.parametrize("most", [PAGE, 3 * PAGE, PAGE + 512, 5 * PAGE + 1])
@pytest.mark.parametrize("direct", [True, False])
def test_short_calls_are_continued_until_everything_has_travelled(tmp_path: Path, monkeypatch, most: int, direct: bool) -> None:
    file = DirectFile(tmp_path / "data", create=True, direct=direct)
    file.resize(16 * PAGE)

    def shortened(call):
        def wrapped(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            if direct:
                assert offset % PAGE == 0, "a direct call must start on a page boundary"
            left, cut = -(-most // PAGE) * PAGE, []
            for buffer in buffers:
                cut.append(buffer[:left])
                left -= len(cut[-1])
                if left == 0:
                    break
            return min(call(descriptor, cut, offset), most)  # the rest of the last page does not count as moved
        return wrapped

    monkeypatch.setattr(os, "pwritev", shortened(os.pwritev))
    block = noise(9 * PAGE)
    file.write(PAGE, [block[:PAGE], block[PAGE:]])
    monkeypatch.undo()
    monkeypatch.setattr(os, "preadv", shortened(os.preadv))
    back = aligned_buffer(9 * PAGE)
    file.read(PAGE, [back[:PAGE], back[PAGE:]])
    assert np.array_equal(block, back)
    file.close()


def test_a_read_beyond_the_end_is_an_error_that_names_both_sizes(file: DirectFile) -> None:
    with pytest.raises(TransferError, match=rf"offset {12 * PAGE}: {4 * PAGE} of {8 * PAGE} bytes"):
        file.read(12 * PAGE, [aligned_buffer(8 * PAGE)])
    with pytest.raises(TransferError, match="short read"):
        file.read(64 * PAGE, [aligned_buffer(PAGE)])


def test_a_file_cut_inside_a_page_is_a_short_read(file: DirectFile) -> None:
    os.truncate(file.path, 10 * PAGE + 100)
    with pytest.raises(TransferError, match="short read"):
        file.read(10 * PAGE, [aligned_buffer(PAGE)])


def test_a_write_that_moves_nothing_is_an_error_and_not_an_endless_loop(file: DirectFile, monkeypatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda descriptor, buffers, offset: 0)
    with pytest.raises(TransferError, match="short write"):
        file.write(0, [noise(PAGE)])


def test_offsets_are_64_bit(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "sparse", create=True)
    offset = (1 << 33) + 3 * PAGE
    block = noise(2 * PAGE)
    file.write(offset, [block])
    back = aligned_buffer(2 * PAGE)
    file.read(offset, [back])
    assert np.array_equal(block, back)
    assert file.size() == offset + 2 * PAGE
    file.close()


def test_a_mount_that_refuses_direct_open_is_used_through_the_page_cache_and_said_once(tmp_path: Path, monkeypatch, caplog) -> None:
    real = os.open

    def refusing(path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    assert refuses_direct(tmp_path) == "open with O_DIRECT: Invalid argument"
    assert list(tmp_path.iterdir()) == []
    with caplog.at_level(logging.WARNING):
        file = DirectFile(tmp_path / "data", create=True)
        block = noise(5000, aligned=False)
        for _ in range(3):
            file.write(0, [block])
    back = noise(5001)[:5000]
    file.read(0, [back])
    assert np.array_equal(block, back)
    assert not file.direct
    assert len(caplog.records) == 1
    assert "refuses direct I/O" in caplog.text
    file.close()


def test_a_mount_that_refuses_the_first_direct_call_is_used_through_the_page_cache_and_said_once(tmp_path: Path, monkeypatch,
                                                                                                 caplog) -> None:
    import fcntl

    real = os.pwritev

    def refusing(descriptor: int, buffers, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refusing)
    assert "Invalid argument" in str(refuses_direct(tmp_path))
    file = DirectFile(tmp_path / "data", create=True)
    if not file.direct:
        pytest.skip("the filesystem of the temporary directory knows no O_DIRECT")
    block = noise(3 * PAGE)
    with caplog.at_level(logging.WARNING):
        file.write(PAGE, [block])
        file.write(4 * PAGE, [block])
    assert file.path.read_bytes()[PAGE:7 * PAGE] == block.tobytes() * 2
    assert not file.direct
    assert len(caplog.records) == 1
    file.close()


def test_other_errors_are_not_taken_for_a_refusal(tmp_path: Path, monkeypatch) -> None:
    file = DirectFile(tmp_path / "data", create=True)

    def failing(descriptor: int, buffers, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    was_direct = file.direct
    monkeypatch.setattr(os, "pwritev", failing)
    with pytest.raises(OSError, match="Input/output error"):
        file.write(0, [noise(PAGE)])
    assert file.direct == was_direct
    file.close()


def test_the_probe_reads_back_what_it_wrote(tmp_path: Path, monkeypatch) -> None:
    def lying(descriptor: int, buffers, offset: int) -> int:
        return sum(map(len, buffers))

    monkeypatch.setattr(os, "preadv", lying)
    monkeypatch.setattr(direct_file.os, "pwritev", lying)
    assert refuses_direct(tmp_path) in ("a page written directly reads back differently", "open with O_DIRECT: Invalid argument")


def test_a_file_that_cannot_grow_keeps_its_length(file: DirectFile, monkeypatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        os.ftruncate(descriptor, 20 * PAGE)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        file.resize(1 << 30)
    assert file.size() == 16 * PAGE


def test_resizing_allocates_every_byte(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "data", create=True)
    file.resize(1 << 20)
    assert file.size() == 1 << 20
    assert file.allocated() >= 1 << 20
    file.resize(PAGE)
    assert file.size() == PAGE
    file.close()
    file.close()


def test_a_new_file_belongs_to_its_owner_only(file: DirectFile) -> None:
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_two_threads_that_find_out_together_that_direct_io_is_refused_both_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    file = DirectFile(path)
    real = os.preadv
    tried: list[int] = []

    def refusing(descriptor: int, views: list[memoryview], offset: int) -> int:
        tried.append(1)
        if len(tried) == 1:
            file._go_buffered("read of another thread")  # meanwhile
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    page = aligned_buffer(4096)
    file.read(0, [page])
    assert page.tobytes() == b"x" * 4096
    file.close()
