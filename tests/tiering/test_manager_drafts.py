"""Drafts through the front door, with real bytes: every layer of every group, by the places that the tables name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import pytest
import torch
from toy_engine import PROMPT, MakeCache, ToyEngine, tokens_of

from kvtier import CapacityError, KVCacheManager, KVLayout, LayerSpec, Level, Request, RequestError, UnknownRequest
from kvtier.kernels import attention_decode, write_kv

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")

TOKENS, PARENTS = [20, 21, 22, 23, 24], [-1, -1, 0, 1, 2]

LAYOUTS = {
    "one group": KVLayout.uniform(2, 2, 8, "float32", 4),
    "bfloat16": KVLayout.uniform(3, 1, 8, "bfloat16", 4),
    "latent rows": KVLayout([LayerSpec.mla(latent_dim=8, rope_dim=4)] * 2, "float32", 4),
    "keys and values of two widths": KVLayout([LayerSpec.attention(2, 8, value_dim=4)] * 2, "bfloat16", 4),
    "block scales and indexer keys": KVLayout([LayerSpec.attention(2, 8, dtype="uint8", scale_bytes=2, indexer_bytes=5)] * 2, "float32", 4),
    "a window with sinks": KVLayout([LayerSpec.attention(1, 8, window=6, sinks=2), LayerSpec.attention(1, 8)], "float32", 4),
    "target and draft model": KVLayout([LayerSpec.attention(2, 8)] * 3 + [LayerSpec.attention(1, 4)], "float32", 4),
}


def cells_of(cache: KVCacheManager, request_id: int, place: int) -> list[torch.Tensor]:
    """Views of all that one token has in the primary pools, of every group and section; the place is that of a group without sinks."""
    found: list[torch.Tensor] = []
    for group in cache.layout.groups:
        in_group = place + (group.sink_bubble if place >= group.sinks else 0)
        block_id = cache.block_ids(request_id, group=group.number)[in_group // 4]
        view = cache.block(block_id, group.number)
        assert view.level == Level.PRIMARY
        for pool in cache.pool(group.number).primary.sections:
            block = pool.tensor[view.slot]
            found.append(block[:, in_group % 4] if block.dim() == 3 else block[:, :, :, in_group % 4])
    return found


def write(cache: KVCacheManager, request_id: int, place: int, stamp: int) -> None:
    for cell in cells_of(cache, request_id, place):
        cell.copy_(torch.full(cell.shape, stamp % 251, dtype=torch.uint8).to(cell.dtype))


def stamps(cache: KVCacheManager, request_id: int, num_tokens: int) -> list[int]:
    """What stands at each of the first places, the same in every layer."""
    found: list[int] = []
    for place in range(num_tokens):
        values = {float(value) for cell in cells_of(cache, request_id, place) for value in cell.flatten().float()}
        assert len(values) == 1, f"place {place} holds {values}"
        found.append(int(values.pop()))
    return found


def drafting(cache: KVCacheManager, num_tokens: int = 6) -> None:
    """A sequence of stamped tokens, with stamped drafts."""
    cache.add_sequence(Request(1, tokens_of(1, num_tokens)))
    cache.propose_drafts(1, TOKENS, PARENTS)
    with cache.step(None, [1]) as ids:
        assert ids == [1]
        for place in range(num_tokens):
            write(cache, 1, place, 100 + place)
        for draft, token in enumerate(TOKENS):
            write(cache, 1, num_tokens + draft, token)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("path", "tokens"), [([0, 2, 4], [20, 22, 24]), ([1, 3], [21, 23]), ([0], [20]), ([], [])])
def test_the_accepted_path_stands_behind_the_sequence_in_every_layer(make_cache: MakeCache, name: str, path: list[int],
                                                                     tokens: list[int]) -> None:
    cache = make_cache(8, 0, layout=LAYOUTS[name])
    drafting(cache)
    moves = cache.accept_drafts(1, path)
    assert moves == [(6 + draft, 6 + depth) for depth, draft in enumerate(path) if draft != depth]
    assert stamps(cache, 1, 6 + len(path)) == [*range(100, 106), *tokens]
    assert cache.wait_ready(1) == 6 + len(path)
    for group in range(len(cache.layout.groups)):
        assert len(cache.block_ids(1, group=group)) == cache.layout.groups[group].max_blocks(6 + len(path))
    cache.verify()
    cache.append_tokens(1, [7])
    cache.remove_sequence(1)
    cache.verify()


def test_tables_say_who_sees_whom_and_where(make_cache: MakeCache) -> None:
    cache = make_cache(8, 0)
    drafting(cache)
    table = cache.draft_table(1)
    assert table.places.dtype == table.depths.dtype == torch.int32
    assert table.places.tolist() == [[6, -1, -1], [7, -1, -1], [6, 8, -1], [7, 9, -1], [6, 8, 10]]
    assert table.depths.tolist() == [0, 0, 1, 1, 2]
    assert cache.draft_positions(1).tolist() == [6, 6, 7, 7, 8]
    assert cache.draft_positions(1).dtype == torch.int32
    assert (cache.block_table([1])[0, 0] >= 0).sum() == 3
    cache.drop_drafts(1)
    for ask in (cache.draft_table, cache.draft_positions):
        with pytest.raises(RequestError, match="no drafts are pending"):
            ask(1)


def test_attention_over_a_path_is_that_of_a_sequence_with_the_same_tokens(make_cache: MakeCache) -> None:
    """Each draft attends to the prefix and to its own path, through the places of the table; compared with the path in a line."""
    cache = make_cache(16, 0, layout=KVLayout.uniform(1, 2, 8, "float32", 4))
    draw = torch.Generator().manual_seed(3)
    known = {node: torch.randn(3, 1, 2, 8, generator=draw) for node in range(-6, 5)}  # query, key, value of prompt tokens and drafts
    cache.add_sequence(Request(1, tokens_of(1, 6)))
    cache.propose_drafts(1, TOKENS, PARENTS)
    pages = cache.pool(0).primary.pages
    with cache.step(None, [1]) as ids:
        table, drafts = cache.block_table(ids).clone(), cache.draft_table(1)
        for place, node in enumerate([*range(-6, 0), *range(5)]):
            _query, key, value = known[node]
            write_kv(pages, key, value, table, torch.tensor([0]), torch.tensor([place]), layer=0)
        found = []
        for node, row in enumerate(drafts.places.tolist()):
            places = [*range(6), *(place for place in row if place >= 0)]
            keys, values = (pages[table[0, field, torch.tensor(places) // 4].long(), :, torch.tensor(places) % 4] for field in (0, 1))
            weights = torch.softmax(torch.einsum("hd,thd->ht", known[node][0, 0], keys) / 8 ** 0.5, dim=1)
            found.append(torch.einsum("ht,thd->hd", weights, values))
    for last in range(5):
        path = [last]
        while PARENTS[path[0]] >= 0:
            path.insert(0, PARENTS[path[0]])
        line = [*range(-6, 0), *path]
        cache.add_sequence(Request(2, tokens_of(2, len(line))))
        with cache.step(None, [2]) as ids:
            table = cache.block_table(ids)
            for place, node in enumerate(line):
                _query, key, value = known[node]
                write_kv(pages, key, value, table, torch.tensor([0]), torch.tensor([place]), layer=0)
            expected = attention_decode(known[last][0], pages, table, torch.tensor([len(line)]), layer=0)[0]
        cache.remove_sequence(2, store=False)
        torch.testing.assert_close(found[last], expected)


def test_what_was_accepted_is_stored_moved_down_and_read_back_like_any_other_token(make_cache: MakeCache) -> None:
    cache = make_cache(6, 8)
    engine = ToyEngine(cache)
    request = Request(1, PROMPT)
    engine.admit(request)
    engine.learn(1)
    for _ in range(6):
        sequence = engine.sequences[1]
        cache.propose_drafts(1, [5, 6, 7, 8], [-1, -1, 1, 2])
        with cache.step(None, [1]) as ids:
            row = cache.block_table(ids).numpy().copy()[0]
            sequence.extend_states(engine.model)
            for layer in range(len(cache.layout.layers)):
                engine._attend(1, sequence, row, layer)
                engine._compute(sequence, row, len(sequence.tokens), layer)
            end = len(sequence.tokens)
            states = [sequence.state] * 4
            for draft, (token, parent) in enumerate(((5, -1), (6, -1), (7, 1), (8, 2))):
                states[draft] = engine.model.advance(sequence.state if parent < 0 else states[parent], token)
                bytes_of = engine.model.bytes_of([states[draft]])
                slot = engine._slots(row, end + draft + 1)[(end + draft) // 4]
                for layer, buffer in enumerate(engine._layers):
                    buffer[slot, :, :, (end + draft) % 4] = bytes_of[layer, :, :, 0]
        cache.accept_drafts(1, [1, 2])
        sequence.tokens += [6, 7]
        sequence.extend_states(engine.model)
        sequence.computed = len(sequence.tokens)
        cache.append_tokens(1, [9])
        sequence.tokens.append(9)
        if len(sequence.tokens) > 20:
            break
    assert engine.forward([1]) == [1]  # attends to every byte
    answer = list(engine.sequences[1].tokens)
    engine.remove(1)
    engine.serve(Request(2, tokens_of(2, 21)))  # pushes it down
    assert cache.stats().offload_blocks
    assert engine.serve(Request(3, [*answer, 1])) == len(answer) - 1
    cache.verify()


def test_accepting_takes_no_block_and_copies_none(make_cache: MakeCache) -> None:
    cache = make_cache(8, 4)
    drafting(cache)
    before = cache.stats()
    cache.accept_drafts(1, [1, 3])
    after = cache.stats()
    assert (after.alloc_total, after.copied_blocks, after.offload_blocks) == (before.alloc_total, 0, before.offload_blocks)


# -- the target and its draft model ------------------------------------------------------------------------------------


def test_a_draft_model_of_the_same_shape_shares_the_targets_blocks() -> None:
    target, draft = [LayerSpec.attention(2, 8)] * 3, [LayerSpec.attention(2, 8)] * 2
    layout = KVLayout(target + draft, "float32", 4)
    assert [group.layers for group in layout.groups] == [(0, 1, 2, 3, 4)]


def test_a_draft_model_of_another_shape_has_a_group_that_grows_in_step_with_the_targets(make_cache: MakeCache) -> None:
    cache = make_cache(10, 10, layout=LAYOUTS["target and draft model"])
    assert [group.layers for group in cache.layout.groups] == [(0, 1, 2), (3,)]
    cache.add_sequence(Request(1, tokens_of(1, 6)))

    def lengths() -> list[int]:
        return [len(cache.block_ids(1, group=group)) for group in range(2)]

    assert lengths() == [2, 2]
    cache.mark_computed(1, 6)
    cache.append_tokens(1, [1, 2, 3])  # the draft model writes its own layers of these
    assert lengths() == [3, 3]
    cache.rewind(1, 2)
    assert lengths() == [2, 2]
    cache.propose_drafts(1, TOKENS, PARENTS)
    assert lengths() == [3, 3]
    cache.accept_drafts(1, [1, 3])
    assert lengths() == [3, 3]
    cache.remove_sequence(1)
    assert cache.add_sequence(Request(2, [*tokens_of(1, 6), 1, 21, 23, 9])).prepopulated_tokens == 8  # both models' keys and values
    cache.verify()


# -- when it may be called ---------------------------------------------------------------------------------------------


def test_drafts_are_accepted_and_dropped_outside_a_running_step(make_cache: MakeCache) -> None:
    cache = make_cache(8, 0)
    drafting(cache)
    with cache.step(None, [1]):
        for call in (lambda: cache.accept_drafts(1, [1]), lambda: cache.drop_drafts(1)):
            with pytest.raises(RequestError, match="running step"):
                call()
    cache.accept_drafts(1, [1])


def test_two_threads_that_accept_the_same_drafts_never_move_tokens_over_accepted_ones(
        make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread comes between planning the moves and the step in which they are made."""
    cache = make_cache(8, 0)
    drafting(cache)
    step = cache.step

    def meanwhile(stream: None, ids: list[int]) -> AbstractContextManager[list[int]]:
        monkeypatch.undo()
        cache.accept_drafts(1, [0, 2])
        return step(stream, ids)

    monkeypatch.setattr(cache, "step", meanwhile)
    with pytest.raises(RequestError, match="no drafts are pending"):
        cache.accept_drafts(1, [1, 3])
    assert stamps(cache, 1, 8) == [*range(100, 106), 20, 22]
    cache.append_tokens(1, [1])
    cache.verify()


def test_a_sequence_removed_within_the_verifying_step_is_gone_behind_it(make_cache: MakeCache) -> None:
    cache = make_cache(8, 0)
    drafting(cache)
    with cache.step(None, [1]):
        cache.remove_sequence(1)
        assert cache.num_free_blocks(Level.PRIMARY) == 5, "the engine may still be writing drafts"
    assert cache.num_free_blocks(Level.PRIMARY) == 8
    with pytest.raises(UnknownRequest):
        cache.accept_drafts(1, [0])
    cache.verify()


@pytest.mark.parametrize(("tokens", "parents", "message"), [
    ([], [], "drafts"), ([1, 2], [-1], "2 drafts with 1 parents"), ([1], [0], r"parents\[0\]=0"), ([1], "x", "parents='x'"),
    ([1] * 507, [-1] * 507, "513 with 507 drafts|513 tokens with 507 drafts"), ([1.5], [-1], "token"),
])
def test_bad_drafts_change_nothing(make_cache: MakeCache, tokens: Sequence[int], parents: Sequence[int], message: str) -> None:
    cache = make_cache(8, 0)
    cache.add_sequence(Request(1, tokens_of(1, 6)))
    with pytest.raises(RequestError, match=message):
        cache.propose_drafts(1, tokens, parents)
    with pytest.raises(CapacityError):
        cache.propose_drafts(1, [1] * 40, [-1] * 40)
    cache.append_tokens(1, [1])
    cache.verify()


@pytest.mark.parametrize("nodes", [[2], [0, 1], [9], [-1], "0", 0])
def test_a_bad_path_leaves_bytes_and_drafts_alone(make_cache: MakeCache, nodes: Sequence[int]) -> None:
    cache = make_cache(8, 0)
    drafting(cache)
    with pytest.raises(RequestError):
        cache.accept_drafts(1, nodes)
    assert stamps(cache, 1, 11) == [*range(100, 106), *TOKENS]
    cache.accept_drafts(1, [1, 3])
    assert stamps(cache, 1, 8)[6:] == [21, 23]
