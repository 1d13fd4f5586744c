"""Primary pools of every kind: what a block consists of, and which views lead to it."""

from __future__ import annotations

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.pools.group_pools import open_group_pools
from kvtier.pools.layout import KVLayout, LayerGroup, LayerSpec
from kvtier.pools.primary import PrimaryPool
from kvtier.pools.sizing import PoolSizes

BLOCKS = 5

SPECS = {
    "window": LayerSpec.attention(2, 8, window=10, sinks=4),
    "full": LayerSpec.attention(2, 8),
    "split": LayerSpec.attention(2, 8, value_dim=4),
    "wide-values": LayerSpec.attention(2, 4, value_dim=6, dtype="bfloat16"),
    "mla": LayerSpec.mla(16, 8),
    "cross": LayerSpec.cross(3, 8),
    "recurrent": LayerSpec.recurrent(100, 8),
    "scales": LayerSpec.attention(2, 32, dtype="uint8", scale_bytes=2),
    "indexer": LayerSpec.mla(16, 8, indexer_bytes=132),
    "all": LayerSpec.attention(2, 32, value_dim=16, dtype="int8", scale_bytes=3, indexer_bytes=7),
}


def group_of(name: str, layers: int = 3) -> LayerGroup:
    return KVLayout([SPECS[name]] * layers, "float32", 4).groups[0]


@pytest.fixture(params=SPECS)
def group(request: pytest.FixtureRequest) -> LayerGroup:
    return group_of(request.param)


def test_a_block_is_its_sections_behind_one_another(group: LayerGroup) -> None:
    pool = PrimaryPool(group, BLOCKS, "cpu")
    end = 0
    for section, memory in zip(group.sections, pool.sections, strict=True):
        assert section.offset == end
        end += section.num_bytes
        assert memory.rows.shape == (BLOCKS, section.num_bytes)
        assert memory.tensor.shape == (BLOCKS, *section.shape)
        assert memory.tensor.data_ptr() == memory.rows.data_ptr()
        assert memory.rows.data_ptr() % 4096 == 0
        assert memory.tensor.is_contiguous()
        assert not memory.rows.any()
    assert end == group.block_bytes


def test_what_is_written_as_a_block_is_read_as_that_block_and_nowhere_else(group: LayerGroup) -> None:
    pool = PrimaryPool(group, BLOCKS, "cpu")
    data = {slot: torch.randint(1, 256, (group.block_bytes,), dtype=torch.uint8) for slot in (0, 3, 4)}
    for slot, block in data.items():
        pool.write_block(slot, block)
    for slot in range(BLOCKS):
        assert torch.equal(pool.read_block(slot), data.get(slot, torch.zeros(group.block_bytes, dtype=torch.uint8)))


def test_sections_do_not_overlap(group: LayerGroup) -> None:
    pool = PrimaryPool(group, BLOCKS, "cpu")
    for number, memory in enumerate(pool.sections, start=1):
        memory.rows.fill_(number)
    for number, memory in enumerate(pool.sections, start=1):
        assert bool((memory.rows == number).all())


@pytest.mark.parametrize(("name", "num_bytes"), [
    ("full", 3 * 2 * 2 * 4 * 8 * 4), ("split", 3 * 2 * 4 * (8 + 4) * 4), ("wide-values", 3 * 2 * 4 * (4 + 6) * 2),
    ("mla", 3 * 4 * 24 * 4), ("cross", 3 * 2 * 3 * 4 * 8 * 4), ("recurrent", 3 * 100), ("scales", 3 * 2 * 2 * 4 * (32 + 2)),
    ("indexer", 3 * 4 * (24 * 4 + 132)), ("all", 3 * 4 * (2 * (32 + 16 + 2 * 3) + 7))])
def test_a_block_takes_not_a_byte_more_than_it_holds(name: str, num_bytes: int) -> None:
    assert group_of(name).block_bytes == num_bytes


@pytest.mark.parametrize("name", ["window", "full", "cross", "mla", "scales", "indexer"])
def test_a_layer_buffer_is_a_strided_view_of_the_layers_pages(name: str) -> None:
    group = group_of(name)
    pool = PrimaryPool(group, BLOCKS, "cpu")
    buffer = pool.layer_buffer(1)
    assert buffer.shape == (BLOCKS, *group.block_shape[1:])
    factor = group.kv_factor
    for slot in range(BLOCKS):
        for field in range(factor):
            page = pool.pages[slot * 3 * factor + factor + field]
            assert page.data_ptr() == buffer[slot, field].data_ptr()
            assert page.shape == buffer[slot, field].shape
    assert pool.key_pages.data_ptr() == pool.value_pages.data_ptr() == pool.pages.data_ptr()


def test_keys_and_values_of_different_widths_have_views_of_their_own() -> None:
    pool = PrimaryPool(group_of("split"), BLOCKS, "cpu")
    with pytest.raises(ConfigError, match=r"keys of 8 and values of 4 elements.*use key_buffer and value_buffer"):
        pool.layer_buffer(0)
    assert pool.key_buffer(2).shape == (BLOCKS, 2, 4, 8)
    assert pool.value_buffer(2).shape == (BLOCKS, 2, 4, 4)
    pool.key_buffer(2).fill_(1.0)
    pool.value_buffer(1).fill_(2.0)
    assert pool.sections[0].tensor[:, 2].eq(1.0).all()
    assert pool.sections[1].tensor[:, 1].eq(2.0).all()
    assert pool.sections[0].tensor.sum() == BLOCKS * 2 * 4 * 8
    assert pool.sections[1].tensor.sum() == BLOCKS * 2 * 4 * 4 * 2.0
    assert pool.key_pages[4 * 3 + 2].data_ptr() == pool.key_buffer(2)[4].data_ptr()
    assert pool.value_pages[4 * 3 + 1].data_ptr() == pool.value_buffer(1)[4].data_ptr()


def test_the_values_of_mla_are_the_latent_part_of_its_rows() -> None:
    pool = PrimaryPool(group_of("mla"), BLOCKS, "cpu")
    pool.key_buffer(1)[3] = torch.arange(24.0)
    assert torch.equal(pool.value_buffer(1)[3, 0, 2], torch.arange(16.0))
    assert pool.layer_buffer(1).shape == (BLOCKS, 1, 1, 4, 24)


def test_a_recurrent_layer_buffer_has_one_state_per_slot() -> None:
    pool = PrimaryPool(group_of("recurrent"), BLOCKS, "cpu")
    assert pool.layer_buffer(1).shape == (BLOCKS, 100)
    pool.layer_buffer(1)[4] = 9
    assert pool.rows[4, 100:200].eq(9).all()
    assert int(pool.rows.sum()) == 900
    with pytest.raises(ConfigError, match=r"recurrent.*no 'kv', only state"):
        pool.pages  # noqa: B018


def test_scales_have_the_page_numbers_of_what_they_scale() -> None:
    group = group_of("scales")
    pool = PrimaryPool(group, BLOCKS, "cpu")
    assert pool.scale_pages.shape == (BLOCKS * 3 * 2, 2, 4, 2)
    assert pool.scale_buffer(1).shape == (BLOCKS, 2, 2, 4, 2)
    page = 3 * 3 * 2 + 1 * 2 + 1
    assert pool.scale_pages[page].data_ptr() == pool.scale_buffer(1)[3, 1].data_ptr()
    assert pool.pages[page].data_ptr() == pool.layer_buffer(1)[3, 1].data_ptr()


def test_indexer_keys_are_a_four_dimensional_view_with_gaps_between_blocks() -> None:
    pool = PrimaryPool(group_of("indexer"), BLOCKS, "cpu")
    buffer = pool.indexer_buffer(2)
    assert buffer.shape == (BLOCKS, 4, 1, 132)
    assert buffer.stride() == (3 * 4 * 132, 132, 132, 1)
    buffer[1, 3] = 5
    assert int(pool.sections[1].rows.sum()) == 5 * 132
    assert pool.read_block(1)[-132:].eq(5).all()


@pytest.mark.parametrize(("name", "accessor"), [("full", "scale_buffer"), ("full", "indexer_buffer"), ("recurrent", "key_buffer")])
def test_what_a_group_does_not_hold_is_refused(name: str, accessor: str) -> None:
    pool = PrimaryPool(group_of(name), 1, "cpu")
    with pytest.raises(ConfigError, match=rf"group 0 \({'recurrent' if name == 'recurrent' else 'attention full'}.*its blocks hold no"):
        getattr(pool, accessor)(0)
    with pytest.raises(ConfigError, match=r"position=3.*0\.\.2"):
        getattr(pool, accessor)(3)


def test_a_partial_copy_counts_side_data_whole() -> None:
    group = group_of("all")
    side = 3 * 4 * (2 * 2 * 3 + 7)
    assert group.copied_bytes(1) == (group.block_bytes - side) // 4 + side
    assert [group.copied_bytes(tokens) for tokens in (0, 4, 9, -1)] == [group.block_bytes] * 4
    assert group_of("recurrent").copied_bytes(2) == 300


def test_all_groups_of_a_layout_get_their_memory_and_give_it_back() -> None:
    layout = KVLayout(list(SPECS.values()), "float32", 4)
    count = len(layout.groups)
    secondary = tuple(number % 3 for number in range(count))
    pools = open_group_pools(layout, PoolSizes(tuple(range(1, count + 1)), secondary, (0,) * count), "cpu")
    for number, made in enumerate(pools):
        assert made.group is layout.groups[number]
        assert made.primary.num_blocks == number + 1
        assert (made.secondary is None) == (secondary[number] == 0)
        if made.secondary is not None:
            assert made.secondary.rows.shape == (secondary[number], made.group.block_bytes)
        made.close()
        assert made.primary.rows.numel() == 0


def test_when_one_group_cannot_be_had_the_others_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    close = PrimaryPool.close

    def record(pool: PrimaryPool) -> None:
        closed.append(pool.group.number)
        close(pool)

    monkeypatch.setattr(PrimaryPool, "close", record)
    layout = KVLayout([SPECS["window"], SPECS["full"], SPECS["mla"]], "float32", 4)
    with pytest.raises(ConfigError, match="blocks of group 2 want"):
        open_group_pools(layout, PoolSizes((1, 1, 1 << 45), (0, 1, 0), (0, 0, 0)), "cpu")
    assert set(closed) == {0, 1}
