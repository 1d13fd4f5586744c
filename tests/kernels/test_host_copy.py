"""Rows copied by the module in C: every byte where it belongs, no other byte touched, whatever the strides, threads and stores."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import built_extension
import numpy as np
import pytest
import torch
from built_extension import host_copy
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.kernels import compiled_copy, stored_rows, write_kv


@pytest.fixture(autouse=True)
def _built() -> None:
    host_copy()


@examples(150)
@given(data=st.data(), num_bytes=st.sampled_from([1, 3, 16, 48, 63, 64, 128, 192, 200, 256]), pieces=st.integers(1, 4),
       threads=st.integers(1, 3), past_cache=st.booleans(), shift=st.sampled_from([0, 1, 16, 64]))
def test_every_piece_is_copied_and_nothing_else(data, num_bytes, pieces, threads, past_cache, shift):
    """Slots of rows, in any order; between pieces, rows and slots there may be gaps."""
    def steps(name):
        piece = num_bytes + data.draw(st.sampled_from([0, 5, 64]), f"{name} gap")
        row = pieces * piece + data.draw(st.sampled_from([0, 64]), f"{name} row gap")
        return piece, row, 4 * row
    (to_piece, to_row, to_slot), (from_piece, from_row, from_slot) = steps("destination"), steps("source")
    slots = data.draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4)), max_size=8, unique_by=lambda run: run[0]), "runs")
    runs = np.array([(slot * to_slot, number * from_slot, rows) for number, (slot, rows) in enumerate(slots)], np.int64).reshape(-1, 3)
    generator = np.random.default_rng(len(slots) + num_bytes)
    source = generator.integers(0, 256, 8 * from_slot + 128, np.uint8)
    destination = generator.integers(0, 256, 8 * to_slot + 256, np.uint8)
    expected = destination.copy()
    for to, origin, rows in runs:
        for row in range(rows):
            for piece in range(pieces):
                begin, end = shift + to + row * to_row + piece * to_piece, 17 + origin + row * from_row + piece * from_piece
                expected[begin:begin + num_bytes] = source[end:end + num_bytes]
    host_copy().copy_runs(destination.ctypes.data + shift, source.ctypes.data + 17, runs, to_row, from_row, pieces, to_piece, from_piece,
                          num_bytes, threads, past_cache)
    assert np.array_equal(destination, expected)


@pytest.mark.parametrize("past_cache", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_much_is_shared_out_among_threads_and_all_of_it_arrives(threads, past_cache):
    """Pages of 16 tokens with 8 heads of 256 bytes, 48 MiB; some runs are long, most are not."""
    pages, heads, tokens, num_bytes = 1536, 8, 16, 256
    source = torch.randint(0, 256, (pages, tokens, heads, num_bytes), dtype=torch.uint8)
    destination = torch.zeros(pages, heads, tokens, num_bytes, dtype=torch.uint8)
    order = torch.randperm(pages)
    page = heads * tokens * num_bytes
    runs = np.stack([order.numpy() * page, np.arange(pages) * page, np.full(pages, tokens)], 1)
    host_copy().copy_runs(destination.data_ptr(), source.data_ptr(), runs, num_bytes, heads * num_bytes, heads, tokens * num_bytes,
                          num_bytes, num_bytes, threads, past_cache)
    assert torch.equal(destination[order].transpose(1, 2), source)


def test_threads_of_a_program_may_copy_at_the_same_time():
    source = torch.randint(0, 256, (64, 1 << 16), dtype=torch.uint8)
    destinations = [torch.zeros_like(source) for _ in range(4)]
    runs = np.array([(row << 16, row << 16, 256) for row in range(64)], np.int64)

    def copy(destination):
        for _ in range(20):
            host_copy().copy_runs(destination.data_ptr(), source.data_ptr(), runs, 256, 256, 1, 0, 0, 256, 2, True)

    threads = [threading.Thread(target=copy, args=(destination,)) for destination in destinations]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(destination, source) for destination in destinations)


def test_where_the_compiler_finds_no_headers_tests_of_the_module_are_skipped(monkeypatch, tmp_path):
    (tmp_path / "cc").write_text("#!/bin/sh\necho '<stdin>:1:10: fatal error: Python.h: No such file or directory' >&2\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "kvtier.kernels.host_copy", None)
    with pytest.raises(pytest.skip.Exception, match=r"does not find Python\.h.*fatal error"):
        host_copy.__wrapped__()


FORKED = """if True:
    import os, signal, sys, threading
    sys.path.append(sys.argv[1])
    import numpy as np, torch
    from built_extension import host_copy

    torch.set_num_threads(2)
    source = torch.randint(0, 256, (64, 1 << 16), dtype=torch.uint8)
    runs = np.array([(row << 16, row << 16, 256) for row in range(64)], np.int64)

    def copies():
        destination = np.zeros((64, 1 << 16), np.uint8)
        host_copy().copy_runs(destination.ctypes.data, source.data_ptr(), runs, 256, 256, 1, 0, 0, 256, 2, True)
        return np.array_equal(destination, source.numpy())

    assert copies()
    child = os.fork()
    if not child:
        signal.alarm(30)   # ends the process also where it hangs in C
        right = [copies()]
        other = threading.Thread(target=lambda: right.append(copies()))
        other.start()
        other.join()
        os._exit(0 if right == [True, True] else 1)
    assert copies()
    _, status = os.waitpid(child, 0)
    sys.exit(str(os.waitstatus_to_exitcode(status)) if status else 0)
"""


def test_a_forked_child_copies_without_the_threads_that_it_lacks():
    done = subprocess.run([sys.executable, "-c", FORKED, str(Path(built_extension.__file__).parent)], capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("runs", "pieces", "num_bytes", "threads"), [
    (np.zeros((1, 2), np.int64), 1, 8, 1), (np.zeros((1, 3), np.int64), 0, 8, 1), (np.zeros((1, 3), np.int64), 1, 0, 1),
    (np.zeros((1, 3), np.int64), 1, 8, 0), (np.zeros(25, np.uint8)[1:], 1, 8, 1)])
def test_what_cannot_be_runs_of_rows_is_refused(runs, pieces, num_bytes, threads):
    with pytest.raises(ValueError, match="runs are int64"):
        host_copy().copy_runs(0, 0, runs, 8, 8, pieces, 8, 8, num_bytes, threads, False)


def test_runs_with_gaps_are_refused():
    with pytest.raises((BufferError, ValueError), match="contiguous"):   # whose error it is depends on numpy
        host_copy().copy_runs(0, 0, np.zeros((2, 6), np.int64)[:, ::2], 8, 8, 1, 8, 8, 8, 1, False)


def test_no_runs_are_nothing_to_copy():
    host_copy().copy_runs(0, 0, np.zeros((0, 3), np.int64), 8, 8, 1, 8, 8, 8, 1, True)


@pytest.mark.parametrize(("error", "warnings"), [(ModuleNotFoundError("none"), 0), (ImportError("of another system"), 1)])
def test_without_the_module_copies_are_library_calls_and_a_damaged_one_is_said(monkeypatch, caplog, error, warnings):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "kvtier.kernels.host_copy":
                raise error

    monkeypatch.delitem(sys.modules, "kvtier.kernels.host_copy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert compiled_copy._load() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens_first", [False, True], ids=["heads-first", "tokens-first"])
@pytest.mark.parametrize("head_dim", [128, 72, 5])
@pytest.mark.parametrize("rows", ["whole", "columns", "every second number"])
def test_both_ways_to_write_tokens_leave_the_same_pool(paged, same_bits, monkeypatch, dtype, tokens_first, head_dim, rows):
    """Columns: keys and values out of one projection. The pool is poisoned with NaN, and what is not written stays so."""
    pools = []
    for copy_runs in (host_copy().copy_runs, None):
        monkeypatch.setattr(stored_rows, "copy_runs", copy_runs)
        batch = paged([700, 3, 90], tokens_first=tokens_first, dtype=dtype, head_dim=head_dim, tokens_per_block=16)
        key, value = torch.cat(batch.keys), torch.cat(batch.values)
        if rows == "columns":
            columns = torch.cat([key.flatten(1), value.flatten(1)], 1)
            key, value = columns[:, :key[0].numel()].view(key.shape), columns[:, -value[0].numel():].view(value.shape)
        elif rows == "every second number":
            key, value = (part.repeat_interleave(2, dim=2)[..., ::2] for part in (key, value))
        sequences = torch.cat([torch.full((length,), number) for number, length in enumerate([700, 3, 90])])
        sequences[5:8] = -1
        positions = torch.cat([torch.arange(length) for length in [700, 3, 90]])
        write_kv(batch.pages, key, value, batch.table, sequences, positions, **batch.address)
        pools.append(batch.blocks)
    assert same_bits(*pools)
