"""Windows: who sees whom, read off with one-hot values; one prefill, chunks and token by token; lines and rings; null pages."""

from __future__ import annotations

import math

import pytest
import torch
from attention_batch import AttentionBatch, relative_error

from kvtier.errors import RequestError
from kvtier.kernels import RingMap, Visibility, attention_decode, attention_prefill, write_kv
from kvtier.kernels.attention_reference import attention_reference
from kvtier.pools.layer_spec import LayerSpec

LENGTH = 40


class OneHot:
    """Keys of zeros, so that all that is seen has the same weight, and values that name their token: a row of the result is 1 / n at
    the n tokens that were seen."""

    def __init__(self, visibility: Visibility, tokens_per_block: int = 4) -> None:
        self.visibility, self.unit = visibility, tokens_per_block
        blocks = -(-visibility.num_places(LENGTH, tokens_per_block) // tokens_per_block)
        self.pages = torch.full((blocks * 2, 1, tokens_per_block, LENGTH), math.nan)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).int()
        self.table = torch.stack([order * 2, order * 2 + 1])[None]

    def write(self, begin: int, end: int, places: torch.Tensor | None = None) -> None:
        tokens = torch.arange(begin, end)
        places = self.visibility.places(tokens, self.unit) if places is None else places
        values = torch.eye(LENGTH)[tokens][:, None]
        write_kv(self.pages, torch.zeros_like(values), values, self.table, torch.zeros_like(tokens), places, layer=0)

    def prefill(self, begin: int, end: int) -> list[set[int]]:
        out = attention_prefill(torch.randn(end - begin, 1, LENGTH), self.pages, self.table[0], begin, layer=0, visibility=self.visibility)
        return [self.seen(row) for row in out[:, 0]]

    def decode(self, length: int) -> set[int]:
        out = attention_decode(torch.randn(1, 1, LENGTH), self.pages, self.table, torch.tensor([length]), layer=0,
                               visibility=self.visibility)
        return self.seen(out[0, 0])

    @staticmethod
    def seen(row: torch.Tensor) -> set[int]:
        found = row.nonzero().flatten().tolist()
        assert torch.allclose(row[found], torch.full((len(found),), 1 / len(found))), "seen, but not as much as the others"
        return set(found)


def members(position: int, window: int, sinks: int) -> set[int]:
    """A window counts its sinks: ``window`` tokens at most."""
    return {token for token in range(position + 1) if token < sinks or token > position - (window - sinks)}


WINDOWS = [(1, 0), (7, 0), (7, 3), (7, 4), (16, 5), (LENGTH, 3)]


@pytest.mark.parametrize(("window", "sinks"), WINDOWS)
def test_the_members_of_a_window_are_the_same_however_a_text_is_computed(window, sinks):
    expected = [members(position, window, sinks) for position in range(LENGTH)]
    whole = OneHot(Visibility(window, sinks))
    whole.write(0, LENGTH)
    assert whole.prefill(0, LENGTH) == expected
    chunks, found = OneHot(Visibility(window, sinks)), []
    for begin, end in ((0, 13), (13, 14), (14, 36), (36, LENGTH)):
        chunks.write(begin, end)
        found += chunks.prefill(begin, end)
    assert found == expected
    steps, found = OneHot(Visibility(window, sinks)), []
    for position in range(LENGTH):
        steps.write(position, position + 1)
        found.append(steps.decode(position + 1))
    assert found == expected


@pytest.mark.parametrize(("window", "sinks"), [(8, 0), (7, 3), (16, 5)])
@pytest.mark.parametrize("spare_block", [False, True])
def test_a_ring_has_the_same_members_though_tokens_overwrite_each_other(window, sinks, spare_block):
    ring = RingMap(window, sinks, 4, spare_block)
    expected = [members(position, window, sinks) for position in range(LENGTH)]
    steps, found = OneHot(Visibility(window, sinks, ring)), []
    for position in range(LENGTH):
        steps.write(position, position + 1)
        found.append(steps.decode(position + 1))
    assert found == expected
    size = ring.ring - (window - sinks) + 1
    chunks, found = OneHot(Visibility(window, sinks, ring)), []
    for begin in range(0, LENGTH, size):
        end = min(begin + size, LENGTH)
        chunks.write(begin, end)
        found += chunks.prefill(begin, end)
    assert found == expected
    with pytest.raises(RequestError, match=rf"a chunk of {size + 1} queries over a ring.*allowed: up to {size}"):
        chunks.prefill(LENGTH - size - 1, LENGTH)


def test_a_reader_with_another_map_than_the_writer_reads_other_tokens():
    """The mistake that gives no error: the writer leaves no bubble behind the sinks, or wraps, and the reader does not."""
    right = members(29, 16, 5)
    batch = OneHot(Visibility(16, 5))
    batch.write(0, 30)
    assert batch.decode(30) == right
    no_bubble = OneHot(Visibility(16, 5))
    no_bubble.write(0, 33, places=torch.arange(33))   # tokens at t, not at t + bubble
    assert no_bubble.decode(30) != right
    wrapped = OneHot(Visibility(16, 5))
    wrapped.write(0, 40, places=torch.arange(40))
    ring = RingMap(16, 5, 4)
    for begin in range(0, 30, 11):
        tokens = torch.arange(begin, min(begin + 11, 30))
        wrapped.write(begin, min(begin + 11, 30), places=ring.places(tokens))
    wrapped.visibility = Visibility(16, 5, ring)
    assert wrapped.decode(30) == right
    wrapped.visibility = Visibility(16, 5)
    assert wrapped.decode(30) != right
    with pytest.raises(RequestError, match=r"the ring was made for window=16 and sinks=5, this is window=16 and sinks=4"):
        Visibility(16, 4, ring)


@pytest.mark.parametrize(("window", "sinks"), [(6, 0), (6, 2), (9, 4)])
def test_pages_that_left_the_window_are_null_and_never_read(window, sinks):
    """Their table entries are null; what checks and kernels need is what is visible."""
    batch = AttentionBatch([61, 33], first=[50, 33], window=window, sinks=sinks)
    assert (batch.table[0, 0, :12] == -1).sum() >= 9, "most of them have left"
    query = batch.queries(11)
    out = attention_prefill(query, batch.pages, batch.table[0], 50, **batch.how)
    assert relative_error(out, batch.expected(0, query, range(50, 61))) < 1e-5
    with pytest.raises(RequestError, match=r"table\[0, 0, \d+\]=-1 \(sequence 0, keys of positions \d+ to \d+\): null"):
        attention_prefill(batch.queries(20), batch.pages, batch.table[0], 41, **batch.how)
    with pytest.raises(RequestError, match="null"):
        attention_reference(batch.queries(20), batch.pages, batch.table[0], 41, **batch.how)


def test_a_sink_that_is_null_is_an_error():
    batch = AttentionBatch([61], window=9, sinks=4)
    batch.table[0, 1, 0] = -1
    with pytest.raises(RequestError, match=r"table\[0, 1, 0\]=-1 \(sequence 0, values of positions 0 to 3\): null"):
        attention_decode(batch.queries(1), batch.pages, batch.table, torch.tensor([61]), **batch.how)


def test_a_bubble_counts_towards_the_table():
    batch = AttentionBatch([20], window=9, sinks=3)
    table = batch.table[:, :, :5]   # 20 places: the bubble's one makes 21
    with pytest.raises(RequestError, match=r"lengths\[0\]=20 \(sequence 0\): the table's 5 blocks of 4 tokens allow 0 to 19"):
        attention_decode(batch.queries(1), batch.pages, table, torch.tensor([20]), **batch.how)
    with pytest.raises(RequestError, match="past=19 and 1 queries"):
        attention_prefill(batch.queries(1), batch.pages, table[0], 19, **batch.how)


def test_visibility_is_what_a_layer_says():
    assert Visibility.of(LayerSpec.attention(2, 8, window=100, sinks=4)) == Visibility(100, 4)
    assert Visibility.of(LayerSpec.attention(2, 8)) == Visibility()
    assert Visibility.of(LayerSpec.mla(16, 8)) == Visibility()
    assert Visibility.of(LayerSpec.cross(2, 8)) == Visibility(is_causal=False)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"window": 0}, "window=0: a query sees itself at least"),
    ({"window": 4, "sinks": 4}, "sinks=4 with window=4"),
    ({"sinks": 2}, "sinks=2 with window=None"),
    ({"window": 4, "sinks": -1}, "sinks=-1"),
    ({"window": 4, "is_causal": False}, "window=4 without causality"),
])
def test_a_visibility_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(RequestError) as caught:
        Visibility(**arguments)
    assert message in str(caught.value)


def test_a_ring_of_other_pages_is_refused():
    batch = AttentionBatch([20], window=9, sinks=3)
    how = batch.how | {"visibility": Visibility(9, 3, RingMap(9, 3, 8))}
    with pytest.raises(RequestError, match="the ring was made for tokens_per_block=8, the pages have 4"):
        attention_decode(batch.queries(1), batch.pages, batch.table, torch.tensor([20]), **how)
