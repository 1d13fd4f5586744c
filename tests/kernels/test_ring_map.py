"""The windowed position map: sinks stay, all others take turns, and a reader that maps as the writer does sees exactly the window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import ConfigError
from kvtier.kernels import write_kv
from kvtier.kernels.ring_map import RingMap

maps = st.integers(1, 20).flatmap(lambda window: st.builds(
    RingMap, st.just(window), st.integers(0, window - 1), st.sampled_from([1, 2, 4, 8]), st.booleans()))


@examples(100)
@given(ring=maps, length=st.integers(1, 60))
def test_tokens_of_a_window_and_sinks_have_different_places_and_the_sinks_block_is_theirs_alone(ring, length):
    tokens = torch.arange(length)
    places = ring.places(tokens)
    assert places.tolist() == [ring.place(token) for token in range(length)]
    assert int(places.max()) < ring.capacity
    kept = places[ring.is_kept(tokens, torch.tensor(length))]
    assert len(set(kept.tolist())) == len(kept) == min(length, ring.sinks + ring.ring)
    window_behind_sinks = ring.window - ring.sinks
    assert bool(ring.is_kept(tokens, torch.tensor(length))[max(ring.sinks, length - window_behind_sinks):].all())
    if length > ring.sinks:
        first = ring.place(ring.sinks)
        assert first % ring.tokens_per_block == 0 or not ring.sinks
        assert bool((places[ring.sinks:] >= first).all())


@examples(60)
@given(ring=maps, length=st.integers(1, 40), chunk=st.sampled_from([1, 3, None]), data=st.data())
def test_membership_read_off_with_one_hot_keys(ring, length, chunk, data):
    """However a prompt came, at once, in chunks or token by token, the pool holds the sinks and the newest tokens, each at its place."""
    blocks = -(-ring.capacity // ring.tokens_per_block)
    pages = torch.full((2 * blocks, 1, ring.tokens_per_block, length), float("nan"))
    slots = torch.tensor(data.draw(st.permutations(range(blocks))))
    table = torch.stack([slots * 2, slots * 2 + 1])[None].int()
    one_hot = torch.eye(length)[:, None]
    step = chunk or length
    for begin in range(0, length, step):
        tokens = torch.arange(begin, min(begin + step, length))
        sequence = torch.where(ring.is_kept(tokens, torch.tensor(len(tokens) + begin)), 0, -1)
        write_kv(pages, one_hot[tokens], one_hot[tokens], table, sequence, ring.places(tokens), layer=0, num_layers=1)
    visible = [token for token in range(length) if token < ring.sinks or token >= length - (ring.window - ring.sinks)]
    for token in visible:   # the reader: the same function
        block, inside = divmod(ring.place(token), ring.tokens_per_block)
        for field in (0, 1):
            row = pages[int(table[0, field, block]), 0, inside]
            assert int(row.argmax()) == token
            assert float(row.sum()) == 1.0
    held = {int(row.argmax()) for row in pages[:, 0].reshape(-1, length) if not row.isnan().any()}
    assert held == {token for token in range(length) if token < ring.sinks or token >= length - ring.ring}


def test_a_map_that_forgets_the_bubble_is_seen():
    """What a reader with another map than the writer's would find: a wrong token, and no error."""
    ring, forgetful = RingMap(8, 3, 4), RingMap(8, 3, 1)
    assert ring.places(torch.arange(12)).tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 4, 5, 6, 7]
    assert forgetful.place(3) == 3 != ring.place(3)


@pytest.mark.parametrize(("arguments", "message"), [
    ((4, 4, 4), "sinks=4 with window=4: sinks are a part of the window, so allowed are 0 to 3"),
    ((4, -1, 4), "sinks=-1"), ((0, 0, 4), "window=0"),
    ((4, 1, 3), "tokens_per_block=3: must be a power of two"), ((4, 1, 0), "tokens_per_block=0"),
])
def test_a_map_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ConfigError) as caught:
        RingMap(*arguments)
    assert message in str(caught.value)
