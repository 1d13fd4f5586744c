"""Tensors whose memory does not hold their numbers, numbers that are not whole, writes that would land in two places: refused by name."""

from __future__ import annotations

import mmap
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from built_extension import host_copy

from kvtier.errors import ConfigError, RequestError
from kvtier.kernels import (
    DecodePlan,
    OffsetTable,
    PrefillPlan,
    RingMap,
    Visibility,
    append_mla,
    attention_decode,
    attention_prefill,
    copy_partial_blocks,
    dequantise_nvfp4,
    fill_block_offsets,
    fused_write,
    gather_tokens,
    mask_of_parents,
    mask_of_places,
    mla_decode,
    move_tokens,
    plan_write,
    quantise_nvfp4,
    scatter_indexer_keys,
    stored_rows,
    table_of_page_list,
    write_kv,
    zero_value_tail,
)
from kvtier.kernels.places import TokenPlaces

TABLE = torch.tensor([[[0, 2], [1, 3]]], dtype=torch.int32)
LATENT_TABLE = torch.tensor([[[0, 1], [0, 1]]], dtype=torch.int32)
LENGTHS = torch.tensor([6])
ROWS = torch.arange(48.0).view(6, 2, 4)
PAGES = torch.arange(128.0).view(4, 2, 4, 4)
BLOCKS = PAGES.view(2, 1, 2, 2, 4, 4)
BYTES = torch.zeros(2, 4, 1, 20, dtype=torch.uint8)
ZEROS = torch.zeros(6, dtype=torch.int64)
CODES = torch.zeros(3, 8, dtype=torch.uint8)

CALLS = {
    write_kv: {"pages": PAGES, "key": ROWS, "value": -ROWS, "table": TABLE, "sequence_of_token": ZEROS, "positions": torch.arange(6),
               "layer": 0},
    append_mla: {"pages": PAGES[:, :1], "ckv": torch.ones(6, 3), "kpe": torch.zeros(6, 1), "table": LATENT_TABLE,
                 "sequence_of_token": ZEROS, "positions": torch.arange(6), "layer": 0},
    fused_write: {"qkv": torch.arange(144.0).view(6, 24), "pages": PAGES, "table": TABLE, "plan": plan_write(LENGTHS, LENGTHS, 6),
                  "query_heads": 2, "layer": 0, "bias": torch.ones(24), "out": torch.zeros(6, 2, 4)},
    zero_value_tail: {"pages": PAGES, "table": TABLE, "lengths": LENGTHS, "num_layers": 1},
    attention_decode: {"query": torch.ones(1, 2, 4), "pages": PAGES, "table": TABLE, "lengths": LENGTHS, "layer": 0},
    attention_prefill: {"query": torch.ones(2, 2, 4), "pages": PAGES, "table_row": TABLE[0], "past": 4, "layer": 0},
    mla_decode: {"query_latent": torch.ones(1, 2, 3), "query_rope": torch.ones(1, 2, 1), "pages": PAGES[:, :1], "table": LATENT_TABLE,
                 "lengths": LENGTHS, "layer": 0, "scale": 1.0},
    gather_tokens: {"pages": PAGES, "table_row": TABLE[0], "num_tokens": 6, "layer": 0},
    copy_partial_blocks: {"destination": BLOCKS, "source": BLOCKS, "pairs": [(0, 1)], "num_tokens": 2},
    move_tokens: {"blocks": BLOCKS, "slots": [0, 1], "moves": [(5, 1)]},
    scatter_indexer_keys: {"cache": BYTES, "keys": torch.ones(2, 8, dtype=torch.uint8), "scales": torch.ones(2),
                           "key_slots": torch.tensor([0, 32]), "scale_slots": torch.tensor([16, 48])},
    quantise_nvfp4: {"numbers": torch.ones(3, 16), "global_scale": 1.0},
    dequantise_nvfp4: {"codes": CODES, "scales": CODES[:, :1], "global_scale": 1.0},
    fill_block_offsets: {"tables": torch.zeros(1, 2, 2, 3, dtype=torch.int32), "indptr": torch.tensor([0, 2, 3]),
                         "slots": torch.tensor([4, 2, 1]), "pages_per_block": [2], "value_fields": [1], "num_blocks": 5},
    table_of_page_list: {"indptr": torch.tensor([0, 2]), "indices": torch.tensor([3, 1]), "last_page_len": torch.tensor([2]),
                         "tokens_per_block": 4, "num_blocks": 4},
    plan_write: {"cache_lengths": LENGTHS, "sequence_lengths": LENGTHS, "num_tokens": 6},
    mask_of_places: {"places": torch.tensor([[3, -1], [3, 4]]), "past": 3},
}
EVERY_TENSOR = [(kernel, name) for kernel, call in CALLS.items() for name, given in call.items() if isinstance(given, torch.Tensor)]


def fresh(kernel):
    return {name: given.clone() if isinstance(given, torch.Tensor) else given for name, given in CALLS[kernel].items()}


def lazily_negated(tensor):
    """Numbers as they are, over memory that holds their negatives: what the imaginary part of a conjugate is."""
    return torch._neg_view(-tensor)


@pytest.mark.parametrize(("kernel", "name"), EVERY_TENSOR, ids=lambda given: getattr(given, "__name__", given))
@pytest.mark.parametrize(("make", "message"), [
    (lazily_negated, "is a view that negates or conjugates what it reads"), (torch.Tensor.to_sparse, "is stored as torch.sparse_coo"),
    (torch.Tensor.tolist, "is of type list: pass a tensor")], ids=["negated", "sparse", "list"])
def test_a_tensor_whose_memory_does_not_hold_its_numbers_is_refused_by_name(same_bits, kernel, name, make, message):
    """Through its address a GPU, or the copy in C, would take other numbers without an error."""
    call = fresh(kernel)
    before = {other: given.clone() for other, given in call.items() if isinstance(given, torch.Tensor)}
    with pytest.raises(RequestError) as caught:
        kernel(**call | {name: make(call[name])})
    assert f": {name} {message}" in str(caught.value)
    assert all(same_bits(call[other], given) for other, given in before.items() if other != name)


@pytest.mark.parametrize(("kernel", "change", "message"), [
    (write_kv, {"layer": 0.0}, "layer=0.0: pass a whole number"), (write_kv, {"layer": None}, "layer=None"),
    (write_kv, {"layer": torch.tensor(0.5)}, "layer=tensor"), (write_kv, {"num_layers": 1.0}, "num_layers=1.0"),
    (write_kv, {"kv_factor": 2.0}, "kv_factor=2.0"),
    (write_kv, {"key_scale": "much"}, "key_scale='much': pass one number"),
    (write_kv, {"key_scale": torch.ones(2)}, "key_scale=tensor"),
    (fused_write, {"query_heads": 2.0}, "query_heads=2.0"), (fused_write, {"query_heads": -1, "qkv": torch.zeros(6, 12)}, "query_heads=-1"),
    (zero_value_tail, {"num_layers": None}, "num_layers=None"), (zero_value_tail, {"layers": [0]}, r"layers=[0]: pass a range"),
    (attention_decode, {"scale": "small"}, "scale='small'"), (attention_decode, {"soft_cap": "high"}, "soft_cap='high'"),
    (attention_decode, {"soft_cap": torch.tensor(1j)}, "soft_cap=tensor"),
    (attention_decode, {"value_dim": 2.0}, "value_dim=2.0"), (attention_prefill, {"past": None}, "past=None"),
    (gather_tokens, {"num_tokens": 2.5}, "num_tokens=2.5"),
    (move_tokens, {"moves": [(1, 0), (5.0, 1)]}, "moves[1]=(5.0, 1): pass pairs of whole numbers"),
    (move_tokens, {"moves": None}, "moves=None"), (move_tokens, {"slots": [0, 1.0]}, "slots[1]=1.0"),
    (quantise_nvfp4, {"global_scale": None}, "global_scale=None"),
    (dequantise_nvfp4, {"global_scale": torch.ones(2)}, "global_scale=tensor"),
    (fill_block_offsets, {"num_blocks": 5.0}, "num_blocks=5.0"), (fill_block_offsets, {"pages_per_block": [2.0]}, "pages_per_block[0]=2.0"),
    (table_of_page_list, {"tokens_per_block": 3}, "tokens_per_block=3: must be a power of two"),
    (table_of_page_list, {"tokens_per_block": 0}, "tokens_per_block=0"), (table_of_page_list, {"num_blocks": 4.0}, "num_blocks=4.0"),
    (table_of_page_list, {"tokens_per_block": 2**31}, "tokens_per_block=2147483648"),
    (plan_write, {"num_tokens": -1, "check_values": False}, "num_tokens=-1: pass 0 or more"),
    (mask_of_places, {"places": torch.tensor([[3.0]])}, "places has dtype float32"), (mask_of_places, {"past": 3.0}, "past=3.0"),
    (mask_of_places, {"places": torch.tensor([3])}, "places has shape (1,)"),
], ids=lambda given: getattr(given, "__name__", None))
def test_a_number_that_cannot_be_is_refused_before_anything_is_written(same_bits, kernel, change, message):
    call = fresh(kernel)
    before = {name: given.clone() for name, given in call.items() if isinstance(given, torch.Tensor)}
    with pytest.raises(RequestError) as caught:
        kernel(**call | change)
    assert message in str(caught.value)
    assert all(same_bits(call[name], given) for name, given in before.items())


@pytest.mark.parametrize("make", [
    lambda: Visibility(window=2.5), lambda: Visibility(window=4, sinks=None), lambda: RingMap(4.5, 1, 4), lambda: RingMap(4, "1", 4),
    lambda: PrefillPlan([0.0, 3], [1]), lambda: PrefillPlan([0, None], [1]), lambda: mask_of_parents([-1, 0.0]),
    lambda: DecodePlan(max_sequences=1.5, max_tokens=8, query_heads=1, kv_heads=1, value_dim=1),
    lambda: OffsetTable(max_rows=1, max_blocks=1.0, num_layers=1, kv_factor=1, num_blocks=1)])
def test_plans_and_maps_are_made_of_whole_numbers(make):
    with pytest.raises((RequestError, ConfigError), match="pass a whole number"):
        make()


@pytest.mark.parametrize("rows", [[np.zeros((1, 2), np.int64)], [None], [3], None, [[0], [iter([1])]]])
def test_what_is_no_row_leaves_the_table_as_it_was(rows):
    table = OffsetTable(max_rows=3, max_blocks=4, num_layers=2, kv_factor=2, num_blocks=8)
    before = table.fill([[1, 2]]).clone()
    with pytest.raises(RequestError, match="OffsetTable"):
        table.fill(rows)
    assert torch.equal(table.tensor[:1], before)


def test_rows_of_one_array_are_rows():
    table = OffsetTable(max_rows=3, max_blocks=4, num_layers=2, kv_factor=2, num_blocks=8)
    assert torch.equal(table.fill(np.array([[1, 2], [3, -1]])).clone(), table.fill([[1, 2], [3, -1]]))


@pytest.mark.parametrize("as_given", [torch.tensor, np.array], ids=["tensor", "array"])
def test_pairs_may_be_elements_of_a_tensor_or_an_array(same_bits, as_given):
    """No two of a tensor's elements are one key of a dict, which made a copy of what had been overwritten."""
    expected, moved = BLOCKS.clone(), BLOCKS.clone()
    move_tokens(expected, [0, 1], [(1, 0), (0, 2), (2, 5)])
    move_tokens(moved, as_given([0, 1]), as_given([[1, 0], [0, 2], [2, 5]]))
    assert same_bits(moved, expected)
    copy_partial_blocks(expected, BLOCKS.clone(), [(0, 1)], 3)
    copy_partial_blocks(moved, BLOCKS.clone(), as_given([[0, 1]]), 3)
    assert same_bits(moved, expected)
    with pytest.raises(RequestError, match="slot 1 is written 2 times"):
        copy_partial_blocks(moved, BLOCKS.clone(), as_given([[0, 1], [1, 1]]), 3)


@pytest.mark.parametrize("as_given", [torch.tensor, np.array, np.int8])
def test_a_layer_and_the_factors_of_a_pool_may_be_elements_of_a_tensor_or_an_array(same_bits, as_given):
    """A pool of more pages than 8 bits count to."""
    pages = [torch.zeros(400, 2, 4, 4) for _ in range(2)]
    table = torch.tensor([[[0, 200], [1, 201]]], dtype=torch.int32)
    for pool, kind in zip(pages, (int, as_given), strict=True):
        write_kv(**fresh(write_kv) | {"pages": pool, "table": table, "layer": kind(90), "num_layers": kind(100), "kv_factor": kind(2)})
    assert same_bits(*pages)
    assert pages[0].any()


@pytest.mark.parametrize(("kernel", "name"), [
    (write_kv, "pages"), (append_mla, "pages"), (fused_write, "pages"), (zero_value_tail, "pages"), (copy_partial_blocks, "destination"),
    (move_tokens, "blocks"), (scatter_indexer_keys, "cache"), (fill_block_offsets, "tables")],
    ids=lambda given: getattr(given, "__name__", given))
def test_numbers_that_share_memory_are_never_written(kernel, name):
    call = fresh(kernel)
    call[name] = call[name][:1].expand(2, *call[name].shape[1:]) if call[name].shape[0] == 1 else call[name][:1].expand_as(call[name])
    call |= {"pages_per_block": [2, 2], "value_fields": [1, 1]} if kernel is fill_block_offsets else {}
    before = call[name].clone()
    with pytest.raises(RequestError, match=f"{name} has strides .* numbers share memory"):
        kernel(**call)
    assert torch.equal(call[name], before)


@pytest.mark.parametrize("strides", [(32, 16, 4, 3), (32, 16, 3, 1), (31, 16, 4, 1), (1, 16, 4, 1), (32, 15, 4, 1)], ids=str)
def test_rows_that_reach_into_one_another_are_never_written(strides):
    memory = torch.zeros(256)
    with pytest.raises(RequestError, match="numbers share memory"):
        write_kv(**fresh(write_kv) | {"pages": memory.as_strided((4, 2, 4, 4), strides)})
    assert not memory.any()


@pytest.mark.parametrize("over", ["qkv", "pages"])
def test_queries_are_not_written_over_what_is_still_to_be_read(over):
    """The last of a token's queries in the place of its keys would be stored as its keys."""
    call = fresh(fused_write) | {"qkv": torch.arange(24.0).view(1, 24), "plan": plan_write(torch.tensor([1]), torch.tensor([1]), 1)}
    call["out"] = call[over].view(-1)[6:14].view(1, 2, 4)
    before = call[over].clone()
    with pytest.raises(RequestError, match=f"out lies in the memory of {over}"):
        fused_write(**call)
    assert torch.equal(call[over], before)


def test_queries_may_lie_beside_what_is_read_in_one_buffer():
    call = fresh(fused_write)
    expected = fused_write(**call).clone()
    buffer = torch.zeros(144 + 48)
    buffer[:144] = call["qkv"].flatten()
    assert torch.equal(fused_write(**call | {"qkv": buffer[:144].view(6, 24), "out": buffer[144:].view(6, 2, 4)}), expected)


PATHS = SimpleNamespace(append=lambda stored, *_: stored.keys.zero_(), fused_write=lambda *given: given[4].zero_(),
                        decode=lambda query, context, *_: query * context.scale, scatter=lambda cache, *_: cache.zero_())


@pytest.mark.parametrize("kernel", [write_kv, append_mla, fused_write, attention_decode, mla_decode, scatter_indexer_keys, plan_write])
def test_no_check_ends_a_graph_that_torch_compile_makes(monkeypatch, kernel):
    """As on a GPU, where values are not checked. What kernels do there stands in for itself."""
    for name, module in list(sys.modules.items()):
        if name.startswith("kvtier.kernels.") and hasattr(module, "kernel_paths"):
            monkeypatch.setattr(module, "kernel_paths", lambda _kind: PATHS)
    call = fresh(kernel) | {"check_values": False}
    torch.compiler.reset()
    torch.compile(lambda: kernel(**call), backend="eager", fullgraph=True)()


def test_pointers_of_a_table_on_the_host_are_checked_even_where_slots_are_not():
    call = fresh(fill_block_offsets)
    before = call["tables"].clone()
    with pytest.raises(RequestError, match="row 0 has 4 blocks"):
        fill_block_offsets(**call | {"indptr": torch.tensor([0, 4]), "slots": torch.arange(4)}, check_values=False)
    assert torch.equal(call["tables"], before)


def test_a_skipped_token_needs_no_cache_that_could_hold_it():
    cache = torch.zeros(1, 1, 1, 8, dtype=torch.uint8)
    scatter_indexer_keys(cache, torch.ones(1, 16, dtype=torch.uint8), torch.ones(1), torch.tensor([-10]), torch.tensor([-1]))
    assert not cache.any()


# -- rows by address -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["in C", "in torch"])
def rows_are_written(request, monkeypatch):
    monkeypatch.setattr(stored_rows, "copy_runs", host_copy().copy_runs if request.param == "in C" else None)


@pytest.mark.usefixtures("rows_are_written")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_tokens_place_is_not_counted_in_32_bits(dtype):
    """Tokens outermost: three tokens on are more than 2**31 bytes, which positions of 32 bits must not make negative."""
    step, heads, dim = (3 << 28), 1, 4
    memory = mmap.mmap(-1, 4 * step + (1 << 12), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    pages = torch.frombuffer(memory, dtype=torch.int8).as_strided((4, heads, 4, dim), (heads * dim, dim, step, 1))
    rows = torch.tensor([[[1.0, 2, 3, 4]], [[5, 6, 7, 8]]])
    write_kv(pages, rows, -rows, TABLE, torch.zeros(2, dtype=dtype), torch.tensor([3, 6], dtype=dtype), layer=0)
    assert [pages[page, 0, inside].tolist() for page, inside in ((0, 3), (2, 2))] == rows[:, 0].tolist()
    assert [pages[page, 0, inside].tolist() for page, inside in ((1, 3), (3, 2))] == (-rows[:, 0]).tolist()


@pytest.mark.usefixtures("rows_are_written")
def test_what_is_written_to_is_what_was_checked(monkeypatch):
    """A table that is filled for the next step while this one's tokens are written sends none of them out of the pool."""
    memory = torch.full((6, 2, 4, 4), 7.0)
    pages, table = memory[1:5], TABLE.clone()
    resolve = TokenPlaces.resolve

    def after_the_table_has_changed(places, *limits):
        table.fill_(-1)
        return resolve(places, *limits)

    monkeypatch.setattr(TokenPlaces, "resolve", after_the_table_has_changed)
    write_kv(pages, ROWS, -ROWS, table, ZEROS, torch.arange(6), layer=0)
    assert torch.equal(memory[[0, 5]], torch.full((2, 2, 4, 4), 7.0))
    assert torch.equal(gather_tokens(pages, TABLE[0], 6, layer=0), ROWS)
    assert torch.equal(gather_tokens(pages, TABLE[0], 6, layer=0, is_value=True), -ROWS)


@pytest.mark.usefixtures("rows_are_written")
def test_values_of_no_width_are_refused_before_keys_are_written():
    pages = PAGES.clone()
    with pytest.raises(RequestError, match=r"value_pages has shape \(4, 2, 4, 0\): no axis may be empty"):
        write_kv(pages, ROWS, torch.zeros(6, 2, 0), LATENT_TABLE, ZEROS, torch.arange(6), layer=0, kv_factor=1,
                 value_pages=torch.zeros(4, 2, 4, 0))
    assert torch.equal(pages, PAGES)


@pytest.mark.usefixtures("rows_are_written")
@pytest.mark.parametrize("storage", ["as they are", "nvfp4"])
def test_latent_rows_without_a_rotary_part_are_written_and_read(storage):
    latent = torch.randn(6, 16)
    how = {"scale_pages": torch.zeros(4, 1, 4, 1, dtype=torch.uint8)} if storage == "nvfp4" else {}
    pages = torch.zeros(4, 1, 4, 8, dtype=torch.uint8) if how else torch.zeros(4, 1, 4, 16)
    append_mla(pages, latent, torch.zeros(6, 0), LATENT_TABLE, ZEROS, torch.arange(6), layer=0, **how)
    expected = dequantise_nvfp4(*quantise_nvfp4(latent, 1.0), 1.0) if how else latent
    assert torch.equal(gather_tokens(pages, LATENT_TABLE[0], 6, layer=0, kv_factor=1, **how)[:, 0], expected)
    query = torch.randn(1, 2, 16)
    out = mla_decode(query, torch.zeros(1, 2, 0), pages, LATENT_TABLE, LENGTHS, layer=0, scale=0.25, **how)
    weights = torch.softmax(query[0] @ expected.T * 0.25, dim=-1)
    assert torch.allclose(out[0], weights @ expected, atol=1e-5)


class Wrapped(torch.Tensor):
    """A tensor that has no memory itself, as those of ``torch.distributed`` have none."""

    @staticmethod
    def __new__(cls, inside):
        return torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype, device=inside.device, strides=inside.stride())

    def __init__(self, inside):
        self.inside = inside

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        def unwrap(given):
            return given.inside if isinstance(given, Wrapped) else given

        return operation(*torch.utils._pytree.tree_map(unwrap, args), **torch.utils._pytree.tree_map(unwrap, kwargs or {}))


@pytest.mark.usefixtures("rows_are_written")
@pytest.mark.parametrize("wrapped", ["pages", "key"])
def test_a_tensor_without_memory_of_its_own_is_not_followed_to_its_address(wrapped):
    pages = PAGES.clone()
    given = {"pages": pages, "key": ROWS}
    given[wrapped] = Wrapped(given[wrapped])
    assert given[wrapped].data_ptr() == 0
    write_kv(given["pages"], given["key"], -ROWS, TABLE, ZEROS, torch.arange(6), layer=0)
    assert torch.equal(gather_tokens(pages, TABLE[0], 6, layer=0), ROWS)
    assert torch.equal(gather_tokens(pages, TABLE[0], 6, layer=0, is_value=True), -ROWS)


def test_tensors_without_memory_of_their_own_are_not_taken_for_one_memory():
    call, out = fresh(fused_write), torch.zeros(6, 2, 4)
    fused_write(**call | {"qkv": Wrapped(call["qkv"]), "out": Wrapped(out)})
    assert torch.equal(out, fused_write(**fresh(fused_write)))


@pytest.mark.usefixtures("rows_are_written")
def test_strides_of_axes_of_one_mean_nothing():
    memory = torch.full((64,), 7.0)
    pages = memory.as_strided((1, 1, 1, 8), (12345, 777, 999, 1), 8)
    table = torch.zeros(1, 2, 1, dtype=torch.int32)
    write_kv(pages, torch.arange(8.0).as_strided((1, 1, 8), (99, 55, 1)), None, table, ZEROS[:1], ZEROS[:1], layer=0, kv_factor=1)
    assert memory.tolist() == [7.0] * 8 + [*range(8)] + [7.0] * 48
    thin = memory.as_strided((4, 1, 4, 1), (8, 9999, 2, 5))   # no neighbour of an element is an element
    before = memory.clone()
    rows = torch.arange(100.0, 130.0).as_strided((2, 1, 1), (3, 11, 13))
    write_kv(thin, rows, -rows, TABLE, ZEROS[:2], torch.tensor([1, 4]), layer=0)
    before[[2, 16]], before[[10, 24]] = rows[:, 0, 0], -rows[:, 0, 0]
    assert torch.equal(memory, before)


def test_threads_that_write_other_pages_of_one_pool_do_not_disturb_each_other(monkeypatch):
    monkeypatch.setattr(stored_rows, "copy_runs", host_copy().copy_runs)
    heads, tokens, dim, blocks = 4, 16, 64, 32
    pages = torch.zeros(4 * blocks * 2, heads, tokens, dim)
    rows = [torch.randn(blocks * tokens, heads, dim) for _ in range(4)]
    tables = [torch.arange(number * blocks * 2, (number + 1) * blocks * 2, dtype=torch.int32).view(1, blocks, 2).transpose(1, 2)
              for number in range(4)]
    positions, own = torch.arange(blocks * tokens), torch.zeros(blocks * tokens, dtype=torch.int64)

    def write(number):
        for _ in range(5):
            write_kv(pages, rows[number], -rows[number], tables[number], own, positions, layer=0)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(4):
        assert torch.equal(gather_tokens(pages, tables[number][0], blocks * tokens, layer=0), rows[number])


