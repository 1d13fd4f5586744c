"""Blocks of one number of ranks become those of another: compared with cutting the whole model's block into heads, naively."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import ConfigError, KVLayout, LayerSpec
from kvtier.pools.block_sections import INDEXER
from kvtier.pools.layer_spec import DTYPE_BYTES
from kvtier.tiering.handover.shards import Shard, heads_of, owned_heads, require_same_content

RANKS = [1, 2, 3, 4, 6, 8, 12]


def spec(kind: int, heads: int) -> LayerSpec:
    """Layers of several kinds, with this many heads on a rank."""
    return [LayerSpec.attention(heads, 4), LayerSpec.attention(heads, 4, value_dim=6, window=8),
            LayerSpec.attention(heads, 8, dtype="uint8", scale_bytes=2, indexer_bytes=5), LayerSpec.mla(6, 2, indexer_bytes=3),
            LayerSpec.attention(heads, 3, window=16, dtype="bfloat16")][kind]


def shards_of(kinds: list[int], total: int, num_ranks: int) -> list[Shard]:
    heads = len(heads_of(total, num_ranks, 0) or ())
    layout = KVLayout([spec(kind, heads) for kind in kinds], "float32", 4)
    return [Shard.of(layout, "m@1:x", rank, num_ranks, total) for rank in range(num_ranks)]


def whole_sections(shard: Shard, group: int, num_blocks: int, random: np.random.Generator) -> list[np.ndarray]:
    """The whole model's sections of a group: uint8 ``[blocks, outer, total heads, bytes]``."""
    made = []
    for section in shard.layout.groups[group].sections:
        if section.name == INDEXER:
            layers, tokens, width = section.shape
            shape = (num_blocks, layers, 1, tokens * width)
        else:
            layers, fields, _heads, tokens, width = section.shape
            shape = (num_blocks, layers * fields, shard.total_heads[group], tokens * width * DTYPE_BYTES[section.dtype])
        made.append(random.integers(0, 256, shape, dtype=np.uint8))
    return made


def naive_rows(shard: Shard, group: int, sections: list[np.ndarray]) -> np.ndarray:
    """A rank's blocks, cut out of the whole model's."""
    rows = []
    for whole in sections:
        total = whole.shape[2]
        heads = [head for head in range(total) if head * shard.num_ranks // total <= shard.rank < -(-(head + 1) * shard.num_ranks // total)]
        rows.append(np.stack([whole[:, :, head] for head in heads], axis=2).reshape(len(whole), -1))
    return np.concatenate(rows, axis=1)


@given(st.data())
def test_every_rank_gets_its_heads_whatever_the_numbers_of_ranks(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    total = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    possible = [count for count in RANKS if heads_of(total, count, 0) is not None]
    exporting = shards_of(kinds, total, data.draw(st.sampled_from(possible)))
    importing = shards_of(kinds, total, data.draw(st.sampled_from(possible)))
    num_blocks = data.draw(st.integers(1, 3))
    random = np.random.default_rng(data.draw(st.integers(0, 100)))
    if len(exporting[0].layout.groups) != len(importing[0].layout.groups):
        return
    assert exporting[0].content == importing[0].content
    for group in range(len(importing[0].layout.groups)):
        whole = whole_sections(importing[0], group, num_blocks, random)
        pieces = [shard.extract(group, naive_rows(shard, group, whole)) for shard in exporting]
        assert sum(piece.nbytes for piece in pieces) == sum(section.nbytes for section in whole), "each head is handed over once"
        for shard in importing:
            rows = np.zeros((num_blocks, shard.layout.groups[group].block_bytes), dtype=np.uint8)
            for rank, piece in enumerate(pieces):
                assert piece.shape[1] == shard.piece_bytes(rank, len(exporting))[group]
                if shard.rank in shard.readers(rank, len(exporting), len(importing)) and piece.shape[1]:
                    shard.place(group, piece, rank, len(exporting), rows)
            assert np.array_equal(rows, naive_rows(shard, group, whole))


@pytest.mark.parametrize(("total", "ranks", "expected"), [
    (8, 2, [range(4), range(4, 8)]), (1, 2, [range(1), range(1)]), (2, 4, [range(1), range(1), range(1, 2), range(1, 2)]),
])
def test_heads_are_divided_or_repeated(total: int, ranks: int, expected: list[range]) -> None:
    assert [heads_of(total, ranks, rank) for rank in range(ranks)] == expected
    owned = [head for rank in range(ranks) for head in owned_heads(total, ranks, rank)]
    assert owned == list(range(total)), "every head has one owner"


@pytest.mark.parametrize(("total", "ranks"), [(8, 3), (3, 2), (2, 3), (4, 6)])
def test_heads_that_cannot_be_divided_evenly_belong_to_nobody(total: int, ranks: int) -> None:
    assert heads_of(total, ranks, 0) is None


def test_what_only_one_rank_has_is_read_by_all_and_what_is_divided_by_those_who_want_it() -> None:
    [shard] = shards_of([0], 4, 1)
    assert [shard.readers(rank, 2, 4) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [shard.readers(rank, 4, 2) for rank in range(4)] == [[0], [0], [1], [1]]
    [latent] = shards_of([3], 4, 1)
    assert [latent.readers(rank, 4, 2) for rank in range(4)] == [[0, 1], [], [], []]


LAYOUT = KVLayout.uniform(2, 2, 8, "float32", 4)


@pytest.mark.parametrize(("layout", "model", "rank", "ranks", "total", "message"), [
    (LAYOUT, None, 0, 1, None, "model=None"),
    (LAYOUT, "", 0, 1, None, "model=''"),
    (KVLayout([LayerSpec.recurrent(16, 4), LayerSpec.attention(1, 8)], "float32", 4), "m", 0, 1, None, "recurrent not included"),
    (KVLayout([LayerSpec.cross(1, 8), LayerSpec.attention(1, 8)], "float32", 4), "m", 0, 1, None, "cross not included"),
    (KVLayout([LayerSpec.attention(1, 8, window=8, sinks=2)], "float32", 4), "m", 0, 1, None, "sinks that do not fill blocks of 4"),
    (LAYOUT, "m", 0, 2, 2, "has 2 heads on rank 0 of 2"),
    (LAYOUT, "m", 0, 1, [2, 2], "2 numbers for 1 groups"),
    (LAYOUT, "m", 0, 1, 0, "at least 1"), (LAYOUT, "m", 0, 1, True, "at least 1"), (LAYOUT, "m", 0, 1, "2", "at least 1"),
])
def test_what_cannot_be_handed_over_is_said_at_the_start(layout: KVLayout, model: Any, rank: int, ranks: int, total: Any,
                                                         message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Shard.of(layout, model, rank, ranks, total)


def other_layout(**changes: Any) -> KVLayout:
    settings = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32", "tokens_per_block": 4} | changes
    return KVLayout.uniform(**settings)


@pytest.mark.parametrize(("change", "message"), [
    ({"num_layers": 3}, r"layers=\[0, 1, 2\], this cache has \[0, 1\]"), ({"num_kv_heads": 4}, "heads=4, this cache has 2 .*total"),
    ({"head_dim": 4}, "head_dim=4"), ({"dtype": "bfloat16"}, "dtype='bfloat16'"),
    ({"tokens_per_block": 8}, "tokens_per_block=8, this cache has 4"),
])
def test_the_first_difference_is_named(change: dict[str, Any], message: str) -> None:
    mine = Shard.of(LAYOUT, "m@1:x", 0, 1, None).content
    with pytest.raises(ConfigError, match=message):
        require_same_content(mine, Shard.of(other_layout(**change), "m@1:x", 0, 1, None).content)
    require_same_content(mine, Shard.of(other_layout(num_kv_heads=1), "m@1:x", 1, 2, None).content)


@pytest.mark.parametrize("groups", [None, [], "x", [5], [{}], {}])
def test_groups_that_are_none_are_refused(groups: Any) -> None:
    mine = Shard.of(LAYOUT, "m@1:x", 0, 1, None).content
    with pytest.raises(ConfigError, match="ticket"):
        require_same_content(mine, mine | {"groups": groups})
    with pytest.raises(ConfigError, match="model='other'"):
        require_same_content(mine, mine | {"model": "other"})
