"""Into which layer pieces a load is cut: as many as are worth their calls, and none where they are not."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.io.copiers import open_copiers
from kvtier.io.layer_pieces import LEAST_CALL_BYTES, LEAST_UNIT_BYTES, piece_ends, pieces_on_device, pieces_on_host
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.host_arena import HostArena
from kvtier.pools.layout import KVLayout
from kvtier.pools.pool_index import PRIMARY, SECONDARY
from kvtier.pools.primary import PrimaryPool

MIB = 1 << 20
RUN = [(slot, slot) for slot in range(8)]
SCATTERED = [(slot, 7 - slot) for slot in range(8)]


@given(layers=st.integers(1, 200), most=st.integers(1, 300))
def test_pieces_cover_all_layers_and_differ_by_one_at_most(layers: int, most: int) -> None:
    ends = piece_ends(layers, most)
    sizes = [end - start for start, end in pairwise((0, *ends))]
    assert ends[-1] == layers
    assert len(ends) == min(layers, most)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("num_bytes", "calls", "pieces"), [
    (LEAST_CALL_BYTES, 1, 1),
    (3 * LEAST_CALL_BYTES, 1, 3),
    (100 * LEAST_CALL_BYTES, 1, 4),   # no more than asked for
    (100 * LEAST_CALL_BYTES, 50, 2),  # scattered blocks: a call for each of them and piece
    (100 * LEAST_CALL_BYTES, 100, 1),
])
def test_on_the_host_a_piece_is_worth_it_while_its_calls_move_enough(num_bytes: int, calls: int, pieces: int) -> None:
    assert pieces_on_host(4, num_bytes, calls) == pieces


@pytest.mark.parametrize(("blocks", "block_bytes", "pieces"), [
    (64, 4 * LEAST_UNIT_BYTES, 4),
    (64, 2 * LEAST_UNIT_BYTES, 2),    # smaller units would not fill the link
    (64, LEAST_UNIT_BYTES, 1),
    (2, 4 * MIB, 2),                  # nobody would notice
    (1, 4 * MIB, 1),
    (64, 16 * MIB, 4),
])
def test_on_a_device_a_piece_is_worth_it_while_its_units_are_large(blocks: int, block_bytes: int, pieces: int) -> None:
    assert pieces_on_device(4, blocks * block_bytes, block_bytes) == pieces


@pytest.mark.parametrize(("copies", "layer_first", "pairs", "ends"), [
    ("library", False, RUN, (2, 4, 6, 8)),
    ("library", False, SCATTERED, (8,)),         # 8 blocks of 1 MiB: whole blocks in one call are faster
    ("library", False, RUN[:1], (8,)),
    ("library", True, RUN, (2, 4, 6, 8)),        # a call for each layer, 1 MiB each
    ("library", True, RUN[:4], (8,)),            # half as much
    ("compiled", False, RUN, (2, 4, 6, 8)),
    ("compiled", False, SCATTERED, (2, 4, 6, 8)),   # one call for each piece, whatever the slots and the layout
    ("compiled", True, SCATTERED[:4], (2, 4, 6, 8)),
    ("compiled", True, RUN[:2], (4, 8)),
    ("compiled", False, RUN[:1], (8,)),
], indirect=["copies"], ids=str)
@pytest.mark.usefixtures("copies")
def test_large_loads_of_neighbours_are_cut(layer_first: bool, pairs: list[tuple[int, int]], ends: tuple[int, ...]) -> None:
    group = KVLayout.uniform(8, 8, 128, "bfloat16", 32).groups[0]  # 1 MiB
    pools = GroupPools(group, PrimaryPool(group, 8, "cpu", layer_first), HostArena(8, group.block_bytes, pin=False))
    assert open_copiers(pools, None, "cpu")[PRIMARY, SECONDARY].layer_ends(pairs, 4) == ends


def test_between_host_memories_nothing_is_cut() -> None:
    group = KVLayout.uniform(8, 8, 128, "bfloat16", 32).groups[0]
    pools = GroupPools(group, PrimaryPool(group, 8, "cpu"), HostArena(8, group.block_bytes, pin=False))
    staging = HostArena(8, group.block_bytes, pin=False)
    assert open_copiers(pools, staging, "cpu")[SECONDARY, SECONDARY].layer_ends(RUN, 4) == (8,)
