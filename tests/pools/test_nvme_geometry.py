"""Where slots lie in a slab file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.pools.nvme_geometry import HEADER_BYTES, PAGE_BYTES, NvmeGeometry


@given(st.integers(1, 1 << 30), st.integers(1, 1 << 20))
def test_slots_are_whole_pages_and_never_overlap(block_bytes: int, num_slots: int) -> None:
    geometry = NvmeGeometry(block_bytes, num_slots)
    assert geometry.payload_bytes % PAGE_BYTES == 0
    assert block_bytes <= geometry.payload_bytes < block_bytes + PAGE_BYTES
    assert geometry.offset(0) == 0
    last = num_slots - 1
    assert geometry.offset(last) + HEADER_BYTES + geometry.payload_bytes == geometry.file_bytes
    if last:
        assert geometry.offset(last) - geometry.offset(last - 1) == HEADER_BYTES + geometry.payload_bytes


def test_offsets_go_beyond_32_bits() -> None:
    geometry = NvmeGeometry(2 << 20, 1 << 20)
    assert geometry.offset((1 << 20) - 1) == ((2 << 20) + 4096) * ((1 << 20) - 1) > 1 << 40


def test_a_group_may_have_no_slots() -> None:
    assert NvmeGeometry(4096, 0).file_bytes == 0


@pytest.mark.parametrize(("block_bytes", "num_slots", "named"), [(0, 1, "block_bytes=0"), (-4, 1, "block_bytes=-4"),
                                                                (4096, -1, "num_slots=-1"), (1 << 40, 1 << 40, "num_slots=")])
def test_an_impossible_shape_is_a_config_error_that_names_the_value(block_bytes: int, num_slots: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        NvmeGeometry(block_bytes, num_slots)
