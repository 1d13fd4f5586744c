"""Blocks as rows of pieces: any two memories whose blocks can be taken for such are copied right, and no others are taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.io import row_copier
from kvtier.io.piece_copier import piece_copier

pytestmark = pytest.mark.usefixtures("copies")
ONLY_COMPILED = pytest.mark.parametrize("copies", ["compiled"], indirect=True)


def memory(data: st.DataObject, slots: int, shape: list[int], name: str) -> np.ndarray:
    """uint8 ``[slots, *shape]``: axes in any order in memory, parts of larger ones."""
    wide = [slots, *(length + data.draw(st.integers(0, 2), f"{name}: more") for length in shape)]
    order = data.draw(st.permutations(range(len(wide))), f"{name}: order")
    numbers = np.random.default_rng(len(name)).integers(0, 256, [wide[axis] for axis in order], np.uint8)
    return numbers.transpose(np.argsort(order))[tuple(slice(length) for length in [slots, *shape])]


@ONLY_COMPILED
@given(data=st.data())
def test_what_it_takes_it_copies_byte_for_byte(data: st.DataObject) -> None:
    slots = 5
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 64]), min_size=1, max_size=4), "shape")
    source, destination = memory(data, slots, shape, "source"), memory(data, slots, shape, "destination")
    pairs = data.draw(st.lists(st.tuples(st.integers(0, slots - 1), st.integers(0, slots - 1)), min_size=1, max_size=slots,
                               unique_by=lambda pair: pair[1]), "pairs")
    copier = piece_copier(source, destination)
    if copier is None:
        return
    expected = destination.copy()
    for from_slot, to_slot in pairs:
        expected[to_slot] = source[from_slot]
    slot_pairs = np.array(pairs, np.intp)
    for call in copier.plan(slot_pairs[:, 0], slot_pairs[:, 1]):
        call()
    assert np.array_equal(destination, expected)


@ONLY_COMPILED
@pytest.mark.parametrize("source", [np.zeros((4, 3, 2, 64), np.uint8), np.zeros((3, 4, 2, 64), np.uint8).transpose(1, 0, 2, 3)],
                         ids=["block-first", "layer-first"])
def test_the_layouts_that_there_are_are_taken(source: np.ndarray) -> None:
    """Blocks, layers, heads, bytes."""
    assert piece_copier(source, np.zeros(source.shape, np.uint8)) is not None
    assert piece_copier(source[..., :32], np.zeros(source.shape, np.uint8)[..., :32]) is not None


@ONLY_COMPILED
def test_bytes_that_do_not_lie_side_by_side_are_left_to_library_calls() -> None:
    assert piece_copier(np.zeros((4, 64, 2), np.uint8)[..., 0], np.zeros((4, 64), np.uint8)) is None
    assert piece_copier(np.zeros((4, 3, 5, 7, 11), np.uint8)[:, :2, :4, :6, :10], np.zeros((4, 2, 4, 6, 10), np.uint8)) is None


@ONLY_COMPILED
def test_no_call_copies_so_much_that_a_stream_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.io.piece_copier.CALL_BYTES", 256)
    source, destination = np.arange(640, dtype=np.uint8).reshape(10, 64), np.zeros((10, 64), np.uint8)
    copier = piece_copier(source, destination)
    assert copier is not None
    calls = copier.plan(np.arange(10), np.arange(10)[::-1])
    assert len(calls) == 3
    for call in reversed(calls):
        call()
    assert np.array_equal(destination, source[::-1])


@pytest.mark.parametrize("copies", ["library"], indirect=True)
def test_the_plain_build_has_none() -> None:
    assert piece_copier(np.zeros((4, 64), np.uint8), np.zeros((4, 64), np.uint8)) is None
    assert row_copier.RowCopier(np.zeros((4, 64), np.uint8), np.zeros((4, 64), np.uint8)).plan(np.arange(4), np.arange(4))
