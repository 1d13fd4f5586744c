"""Row moves: rows from anywhere arrive where they belong, on the host and in the interpreted kernel, and nothing else is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import RequestError
from kvtier.kernels.dispatch import kernel_paths
from kvtier.kernels.row_moves import RowPlaces, move_rows, move_rows_reference


@given(data=st.data(), num_bytes=st.integers(1, 40), layers=st.integers(1, 3), is_layer_first=st.booleans())
def test_rows_arrive_where_they_belong_and_the_others_stay(data: st.DataObject, num_bytes: int, layers: int, is_layer_first: bool) -> None:
    generator = torch.Generator().manual_seed(num_bytes)
    source = torch.randint(0, 256, (5, layers, num_bytes), dtype=torch.uint8, generator=generator)
    destination = torch.randint(0, 256, (layers, 6, num_bytes), dtype=torch.uint8, generator=generator).transpose(0, 1)
    if not is_layer_first:
        destination = destination.contiguous()
    chosen = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=6, unique_by=lambda pair: pair[1]))
    pairs = torch.tensor(chosen, dtype=torch.int64).view(-1, 2)
    wanted, before = move_rows_reference(destination, source, pairs), source.clone()
    move_rows(RowPlaces.of(destination), RowPlaces.of(source), pairs, layers, num_bytes)
    assert torch.equal(destination, wanted)
    assert torch.equal(source, before)


@pytest.mark.parametrize(("pairs", "layers", "num_bytes", "message"), [
    (torch.zeros(3, dtype=torch.int64), 1, 8, "pairs"),
    (torch.zeros(3, 3, dtype=torch.int64), 1, 8, "pairs"),
    (torch.zeros(3, 2, dtype=torch.int32), 1, 8, "int64"),
    (torch.zeros(3, 2, dtype=torch.int64), 0, 8, "num_layers=0"),
    (torch.zeros(3, 2, dtype=torch.int64), 1, 0, "num_bytes=0"),
])
def test_what_cannot_be_moved_is_refused(pairs: torch.Tensor, layers: int, num_bytes: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        move_rows(RowPlaces(0, 8, 8), RowPlaces(0, 8, 8), pairs, layers, num_bytes)


def test_interpreted_the_kernel_leaves_the_same_bytes_as_the_reference() -> None:
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    script = Path(__file__).with_name("interpreted_rows.py")
    done = subprocess.run([sys.executable, str(script)], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": same") == 6


def test_small_numbers_do_not_make_another_kernel() -> None:
    """Triton takes a stride below 2**31 for 32 bits, and 1 for a constant: it would compile again in the middle of serving."""
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    from kvtier.kernels.triton_row_moves import rows_kernel

    numbers = [parameter for parameter in rows_kernel.params if not parameter.is_constexpr and parameter.name != "pairs"]
    assert len(numbers) == 8
    assert {parameter.annotation_type for parameter in numbers} == {"i64"}
    assert all(parameter.do_not_specialize for parameter in numbers)


def test_a_gpu_gets_the_kernel_and_a_cpu_does_not() -> None:
    assert kernel_paths("cpu").rows.__module__ == "kvtier.kernels.row_moves"
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    assert kernel_paths("cuda").rows.__module__ == "kvtier.kernels.triton_row_moves"


def test_a_debugged_gpu_does_not_let_the_host_follow_its_addresses(reference_kernels: None) -> None:
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    assert kernel_paths("cuda").rows.__module__ == "kvtier.kernels.triton_row_moves"
    assert kernel_paths("cpu").rows.__module__ == "kvtier.kernels.row_moves"


def test_pairs_without_an_axis_are_refused() -> None:
    rows = RowPlaces.of(torch.zeros(1, 1, 1, dtype=torch.uint8))
    with pytest.raises(RequestError, match=r"pairs has shape \(\)"):
        move_rows(rows, rows, torch.tensor(0), 1, 1)
