"""Layers become groups, and a group knows what the ledger has to: kind, window, sinks, snapshots, blocks of a sequence."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.pools.layout import KVLayout, LayerSpec
from kvtier.pools.sequence_blocks import block_positions, blocks_per_sequence, sink_bubble


@pytest.mark.parametrize(("seq_len", "sinks", "window", "tokens_per_block", "blocks"), [
    (512, 0, 1024, 64, 8), (513, 0, 1024, 64, 9), (512, 0, 256, 64, 5), (512, 0, 257, 64, 6),
    (512, 64, 1024, 64, 8), (513, 64, 1024, 64, 9), (512, 64, 256, 64, 5), (512, 64, 257, 64, 6),
    (512, 65, 1024, 64, 9), (513, 65, 1024, 64, 9), (512, 65, 256, 64, 6), (512, 65, 257, 64, 6)])
def test_case_j1_blocks_that_a_sequence_holds(seq_len: int, sinks: int, window: int, tokens_per_block: int, blocks: int) -> None:
    assert blocks_per_sequence(seq_len, sinks, window, tokens_per_block) == blocks


@given(st.integers(0, 2000), st.integers(1, 300), st.sampled_from([1, 4, 64]))
def test_a_window_never_needs_more_than_full_attention_and_one_block(seq_len: int, window: int, tokens_per_block: int) -> None:
    full = blocks_per_sequence(seq_len, 0, None, tokens_per_block)
    held = blocks_per_sequence(seq_len, 0, window, tokens_per_block)
    assert full == -(-seq_len // tokens_per_block)
    assert held == full if seq_len <= window else held <= full + 1
    # Wherever the window begins inside a block, what it covers fits.
    first = max(0, seq_len - window) // tokens_per_block
    assert held >= full - first


@given(st.integers(0, 300), st.integers(0, 50), st.one_of(st.none(), st.integers(1, 100)), st.sampled_from([1, 4, 16]))
def test_every_token_has_a_place_in_the_row_of_the_table(seq_len: int, sinks: int, window: int | None, tokens_per_block: int) -> None:
    bubble = sink_bubble(sinks, window, tokens_per_block)
    places = [token if token < sinks else token + bubble for token in range(seq_len)]
    assert block_positions(seq_len, sinks, window, tokens_per_block) == (places[-1] // tokens_per_block + 1 if places else 0)
    if window is not None and seq_len > sinks:
        assert places[sinks] % tokens_per_block == 0, "behind the sinks a block begins"


def test_groups_are_numbered_by_window_then_full_attention_then_the_other_kinds() -> None:
    layout = KVLayout([LayerSpec.cross(2, 8), LayerSpec.recurrent(64, 8), LayerSpec.mla(16, 8), LayerSpec.attention(2, 8),
                       LayerSpec.attention(2, 8, window=30), LayerSpec.attention(2, 8, window=8), LayerSpec.attention(2, 8)], "float16", 4)
    assert [(group.number, group.kind, group.window) for group in layout.groups] == [
        (0, "attention", 8), (1, "attention", 30), (2, "attention", None), (3, "mla", None), (4, "recurrent", None), (5, "cross", None)]
    assert [group.layers for group in layout.groups] == [(5,), (4,), (3, 6), (2,), (1,), (0,)]
    assert [layout.place_of_layer(layer)[0].number for layer in range(7)] == [5, 4, 3, 2, 1, 0, 2]
    assert layout.place_of_layer(6)[1] == 1


def test_heads_dimensions_and_dtypes_that_differ_make_groups_of_their_own() -> None:
    layout = KVLayout([LayerSpec.attention(8, 16), LayerSpec.attention(4, 16), LayerSpec.attention(8, 32), LayerSpec.attention(8, 16),
                       LayerSpec.attention(8, 16, dtype="int8"), LayerSpec.attention(8, 16, value_dim=8),
                       LayerSpec.attention(8, 16, scale_bytes=1), LayerSpec.attention(8, 16, window=4, sinks=2),
                       LayerSpec.attention(8, 16, window=4)], "float16", 4)
    assert len(layout.groups) == 8
    assert layout.groups[2].layers == (0, 3)


def test_a_group_says_what_the_ledger_needs() -> None:
    layout = KVLayout([LayerSpec.attention(2, 8, window=10, sinks=5), LayerSpec.recurrent(64, 8), LayerSpec.attention(2, 8)],
                      "float16", 4)
    window, full, recurrent = layout.groups
    assert (window.window, window.sinks, window.sink_bubble) == (10, 5, 3)
    assert (full.window, full.sinks, full.sink_bubble) == (None, 0, 0)
    assert (recurrent.snapshot_interval, full.snapshot_interval) == (8, 0)
    assert [group.max_blocks(16) for group in layout.groups] == [5, 4, 4]
    assert window.max_blocks(4) == 1
    assert window.blocks_per_sequence(16) == -(-(10 + 3) // 4) + 1


@pytest.mark.parametrize("interval", [2, 6, 33])
def test_a_snapshot_interval_inside_a_block_is_refused(interval: int) -> None:
    with pytest.raises(ConfigError, match=rf"snapshot_interval={interval}: must be a multiple of tokens_per_block=4"):
        KVLayout([LayerSpec.recurrent(64, interval)], "float16", 4)


def test_a_window_that_is_no_multiple_of_the_block_is_fine() -> None:
    assert KVLayout([LayerSpec.attention(1, 8, window=3)], "float16", 4).groups[0].window == 3


@pytest.mark.parametrize(("make", "message"), [
    (lambda: LayerSpec.attention(1, 8, scale_bytes=-1), "scale_bytes=-1"),
    (lambda: LayerSpec.attention(1, 8, indexer_bytes=1.5), "indexer_bytes=1.5"),  # type: ignore[arg-type]
    (lambda: LayerSpec.mla(8, 8, scale_bytes=True), "scale_bytes=True"),
    (lambda: LayerSpec.attention(1, 8, sinks=-1), "sinks=-1"),
    (lambda: LayerSpec.attention(1, 8, sinks=4), "sinks=4 with window=None"),
    (lambda: LayerSpec.attention(1, 8, window=4, sinks=4), "sinks=4 with window=4"),
    (lambda: LayerSpec.attention(0, 8), "num_kv_heads=0")])
def test_a_number_outside_its_limits_names_itself(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_the_description_holds_every_group_and_names_side_data_only_where_there_is_any() -> None:
    plain = KVLayout.uniform(2, 1, 8, "float16", 4)
    assert "scale_bytes" not in plain.describe()
    specs = [LayerSpec.attention(1, 8), LayerSpec.attention(1, 8, scale_bytes=1), LayerSpec.attention(1, 8, indexer_bytes=12)]
    groups = json.loads(KVLayout(specs, "float16", 4).describe())["groups"]
    assert [(group.get("scale_bytes"), group.get("indexer_bytes")) for group in groups] == [(None, None), (1, None), (None, 12)]
    descriptions = {KVLayout([spec], "float16", 4).describe() for spec in (
        *specs, LayerSpec.attention(1, 8, window=4), LayerSpec.attention(1, 8, sinks=3, window=4), LayerSpec.cross(1, 8),
        LayerSpec.attention(1, 8, value_dim=4), LayerSpec.recurrent(64, 4), LayerSpec.recurrent(64, 8), LayerSpec.mla(8, 8))}
    assert len(descriptions) == 10, "another layout is another namespace"


def test_bytes_per_token_count_a_state_once_per_interval() -> None:
    layout = KVLayout([LayerSpec.recurrent(64, 8), LayerSpec.attention(1, 8)], "float16", 4)
    assert layout.bytes_per_token == 64 / 8 + 2 * 8 * 2


def test_torchs_dtypes_are_taken_as_their_names() -> None:
    named = KVLayout([LayerSpec.attention(8, 16, dtype="int8"), LayerSpec.mla(8, 8, "uint8"), LayerSpec.cross(8, 16)], "float16")
    layers = [LayerSpec.attention(8, 16, dtype=torch.int8), LayerSpec.mla(8, 8, torch.uint8), LayerSpec.cross(8, 16)]
    given = KVLayout(layers, torch.float16)
    assert given == named
    assert given.describe() == named.describe()
    assert KVLayout.uniform(2, 8, 16, torch.bfloat16) == KVLayout.uniform(2, 8, 16)
    assert LayerSpec.cross(8, 16, torch.float32) == LayerSpec.cross(8, 16, "float32")
    with pytest.raises(ConfigError, match="dtype='complex64': unknown; use one of"):
        KVLayout.uniform(2, 8, 16, torch.complex64)
