"""fused_write against a model in float64: bias, rotation, storage, places; and the mistakes that give no error."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import RequestError
from kvtier.kernels.fused_write import fused_write
from kvtier.kernels.nvfp4 import dequantise_nvfp4
from kvtier.kernels.rotary import Rotary, RotaryStyle
from kvtier.kernels.write_plan import plan_write

LAYERS, BLOCKS, MAX_BLOCKS = 2, 12, 4
STORED = {"same": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8, "nvfp4": torch.uint8}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@dataclass
class Model:
    """One layer of a model with random projections, its poisoned pool, and what its keys and values should be in float64."""

    poison: object
    query_heads: int = 6
    kv_heads: int = 2
    dim: int = 16
    value_dim: int | None = None   # None: as keys, in one tensor
    rotary_dim: int | None = None
    style: RotaryStyle = RotaryStyle.HALF_SPLIT
    has_bias: bool = True
    storage: str = "same"
    dtype: torch.dtype = torch.float32
    tokens_per_block: int = 4
    tokens_first: bool = False
    sequences: int = 2
    seed: int = 0
    extra: dict = field(default_factory=dict)

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)
        self.width = self.value_dim or self.dim
        self.kv_factor = 2 if self.value_dim is None else 1
        self.scales = {"same": (1.0, 1.0), "nvfp4": (0.004, 0.001)}.get(self.storage, (0.1, 0.02))
        stored, packed = STORED[self.storage] or self.dtype, 2 if self.storage == "nvfp4" else 1

        def make(dim, dtype):
            page = (self.tokens_per_block, self.kv_heads) if self.tokens_first else (self.kv_heads, self.tokens_per_block)
            pages = self.poison((BLOCKS * LAYERS * self.kv_factor, *page, dim), dtype)
            return pages.transpose(1, 2) if self.tokens_first else pages

        self.pages, self.value_pages = make(self.dim // packed, stored), None
        self.scale_pages = make(self.dim // 16, torch.uint8) if packed == 2 else None
        self.value_scale_pages = None
        if self.value_dim is not None:
            self.value_pages = make(self.value_dim // packed, stored)
            self.value_scale_pages = make(self.value_dim // 16, torch.uint8) if packed == 2 else None
        slots = torch.randperm(BLOCKS, generator=self.generator)[:self.sequences * MAX_BLOCKS].view(self.sequences, MAX_BLOCKS)
        self.table = torch.stack([slots, slots], 1).int() * (LAYERS * self.kv_factor)
        self.table[:, 1] += self.kv_factor - 1
        self.rotary_dim = self.dim if self.rotary_dim is None else self.rotary_dim
        angles = torch.randn(64, self.rotary_dim // 2, generator=self.generator) * 3
        self.rotary = Rotary(angles.cos(), angles.sin(), self.style) if self.rotary_dim else None
        self.bias = self.draw(1)[0] if self.has_bias else None

    def draw(self, tokens):
        columns = (self.query_heads + self.kv_heads) * self.dim + self.kv_heads * self.width
        rows = torch.randn(tokens, columns, generator=self.generator)
        rows[:, columns - self.kv_heads * self.width:] /= 4   # values are smaller than keys
        return rows.to(self.dtype)

    def write(self, qkv, plan, **changes):
        call = {"query_heads": self.query_heads, "layer": 1, "num_layers": LAYERS, "kv_factor": self.kv_factor, "rotary": self.rotary,
                "bias": self.bias, "value_pages": self.value_pages, "scale_pages": self.scale_pages,
                "value_scale_pages": self.value_scale_pages, "key_scale": self.scales[0], "value_scale": self.scales[1]}
        return fused_write(qkv, self.pages, self.table, plan, **(call | self.extra | changes))

    def tensors(self):
        return [tensor for tensor in (self.pages, self.scale_pages, self.value_pages, self.value_scale_pages) if tensor is not None]

    def expect(self, qkv, rotary_positions):
        """Queries, keys and values of each token in float64, by rotation matrices."""
        rows = qkv.double() + (0 if self.bias is None else self.bias.double())
        split = (self.query_heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.width)
        queries, keys, values = (part.reshape(len(qkv), -1, dim) for part, dim in
                                 zip(rows.split(split, dim=1), (self.dim, self.dim, self.width), strict=True))
        for token, position in enumerate(rotary_positions.tolist() if self.rotary else []):
            matrix = torch.eye(self.dim, dtype=torch.float64)
            half = self.rotary_dim // 2
            for pair in range(half):
                cos, sin = float(self.rotary.cos[position, pair]), float(self.rotary.sin[position, pair])
                one, other = (pair, pair + half) if self.style is RotaryStyle.HALF_SPLIT else (2 * pair, 2 * pair + 1)
                matrix[one, one] = matrix[other, other] = cos
                matrix[one, other], matrix[other, one] = -sin, sin
            queries[token], keys[token] = queries[token] @ matrix.T, keys[token] @ matrix.T
        return queries, keys, values

    def read(self, kv_field, sequence, position):
        """One row out of the pages, found without a kernel, as numbers in float64."""
        block, inside = divmod(position, self.tokens_per_block)
        page = int(self.table[sequence, kv_field, block]) + self.kv_factor
        own = kv_field and self.value_pages is not None
        row = (self.value_pages if own else self.pages)[page, :, inside]
        if self.storage != "nvfp4":
            return row.double() * self.scales[kv_field]
        return dequantise_nvfp4(row, (self.value_scale_pages if own else self.scale_pages)[page, :, inside], self.scales[kv_field],
                                torch.float64)

    def limit(self):
        """Largest relative error that rounding to the storage type may make of many random numbers."""
        return {"same": TOLERANCE[self.dtype], "fp8": 0.04, "nvfp4": 0.15}[self.storage]


def relative_error(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


def assert_written(model, keys, values, sequences, positions):
    for rows, kv_field in ((keys, 0), (values, 1)):
        found = torch.stack([model.read(kv_field, s, p) for s, p in zip(sequences, positions, strict=True)])
        if model.storage == "int8" and len(found):  # half a step, however small the numbers are
            assert (found - rows).abs().max() <= 0.501 * model.scales[kv_field] + 1e-5
        else:
            assert relative_error(found, rows) < model.limit()


@examples(80)
@given(shape=st.fixed_dictionaries({
           "kv_heads": st.sampled_from([1, 2, 3]), "dim": st.sampled_from([16, 48, 64]), "value_dim": st.sampled_from([None, 16, 32]),
           "style": st.sampled_from(RotaryStyle), "has_bias": st.booleans(), "storage": st.sampled_from(list(STORED)),
           "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), "tokens_per_block": st.sampled_from([4, 16]),
           "tokens_first": st.booleans(), "seed": st.integers(0, 1000)}),
       ratio=st.sampled_from([1, 2, 7]), rotated=st.sampled_from([0, 0.5, 1]), past=st.tuples(st.integers(0, 7), st.integers(0, 7)),
       new=st.tuples(st.integers(0, 8), st.integers(1, 8)))
def test_queries_keys_and_values_are_those_of_the_model(poison, shape, ratio, rotated, past, new):
    model = Model(poison, query_heads=ratio * shape["kv_heads"], rotary_dim=int(shape["dim"] * rotated), **shape)
    before = [tensor.clone() for tensor in model.tensors()]
    qkv = model.draw(sum(new))
    plan = plan_write(torch.tensor(past) + torch.tensor(new), torch.tensor(new), sum(new))
    out = model.write(qkv, plan)
    positions = [past[s] + i for s in (0, 1) for i in range(new[s])]
    queries, keys, values = model.expect(qkv, torch.tensor(positions))
    assert out.dtype == model.dtype
    assert relative_error(out, queries) < TOLERANCE[model.dtype]
    assert_written(model, keys, values, [0] * new[0] + [1] * new[1], positions)
    rows = sum(new) * model.kv_heads * (2 if model.value_dim is None else 1)
    for tensor, old in zip(model.tensors(), before, strict=True):   # nothing but the rows of these tokens
        assert int((tensor.contiguous().view(torch.uint8) != old.contiguous().view(torch.uint8)).any(-1).sum()) <= rows


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("storage", list(STORED))
@pytest.mark.parametrize("style", list(RotaryStyle))
def test_the_reference_does_the_same(poison, storage, style):
    model = Model(poison, storage=storage, style=style, rotary_dim=8, value_dim=32 if storage == "nvfp4" else None)
    qkv = model.draw(7)
    out = torch.full((7, 6, 16), float("nan"))
    assert model.write(qkv, plan_write(torch.tensor([6, 5]), torch.tensor([4, 3]), 7), out=out) is out
    queries, keys, values = model.expect(qkv, torch.tensor([2, 3, 4, 5, 2, 3, 4]))
    assert relative_error(out, queries) < 1e-6
    assert_written(model, keys, values, [0] * 4 + [1] * 3, [2, 3, 4, 5, 2, 3, 4])


@pytest.mark.parametrize("query_heads", [1, 16, 71])
def test_any_number_of_query_heads(poison, query_heads):
    model = Model(poison, query_heads=query_heads, kv_heads=1, dim=64, sequences=1)
    qkv = model.draw(3)
    out = model.write(qkv, plan_write(torch.tensor([3]), torch.tensor([3]), 3))
    queries, keys, values = model.expect(qkv, torch.arange(3))
    assert relative_error(out, queries) < 1e-5
    assert_written(model, keys, values, [0] * 3, range(3))


# -- mistakes that give no error -------------------------------------------------------------------------------------------


def test_a_second_chunk_comes_behind_the_first(poison):
    """With i for past + i the second chunk would overwrite the first, and be rotated like it."""
    model = Model(poison, sequences=1)
    qkv = model.draw(11)
    for begin, end in ((0, 6), (6, 7), (7, 11)):
        model.write(qkv[begin:end], plan_write(torch.tensor([end]), torch.tensor([end - begin]), end - begin))
    _, keys, values = model.expect(qkv, torch.arange(11))
    assert_written(model, keys, values, [0] * 11, range(11))


def test_keys_and_values_have_scales_of_their_own(poison):
    for storage in ("fp8", "int8", "nvfp4"):
        model = Model(poison, storage=storage, sequences=1)
        qkv = model.draw(5)
        model.write(qkv, plan_write(torch.tensor([5]), torch.tensor([5]), 5), key_scale=model.scales[1], value_scale=model.scales[0])
        _, keys, values = model.expect(qkv, torch.arange(5))
        with pytest.raises(AssertionError):
            assert_written(model, keys, values, [0] * 5, range(5))


def test_a_bad_entry_of_one_of_several_sequences_leaves_everything_untouched(poison, same_bits):
    for bad in (-1, BLOCKS * LAYERS * 2, 2**31 - 1):
        model = Model(poison)
        model.table[1, 1, 0] = bad
        before, out = model.pages.clone(), torch.full((7, 6, 16), float("nan"))
        with pytest.raises(RequestError, match=r"fused_write: table\[1, 1, 0\].*sequence 1, values of positions 0 to 3"):
            model.write(model.draw(7), plan_write(torch.tensor([4, 3]), torch.tensor([4, 3]), 7), out=out)
        assert same_bits(model.pages, before)
        assert bool(out.isnan().all())
        model.write(model.draw(7), plan_write(torch.tensor([4, 3]), torch.tensor([4, 3]), 7), check_values=False)
        written = {int(page) for page in model.pages.isfinite().flatten(1).any(1).nonzero()}
        assert written == {int(model.table[0, kv_field, 0]) + 2 for kv_field in (0, 1)}


def test_a_reused_block_is_never_written(poison, same_bits):
    model = Model(poison, sequences=1)
    qkv = model.draw(8)
    model.write(qkv, plan_write(torch.tensor([8]), torch.tensor([8]), 8))
    before, first = model.pages.clone(), torch.tensor([8])
    call = (model.draw(6), plan_write(torch.tensor([10]), torch.tensor([6]), 6))
    with pytest.raises(RequestError, match=r"positions\[0\]=4 \(sequence 0\) lies in a block that others share \(allowed: 8 to 15\)"):
        model.write(*call, first_writable=first)
    assert same_bits(model.pages, before)
    out = model.write(*call, first_writable=first, check_values=False)
    assert bool(out.isfinite().all())   # their queries are prepared all the same
    shared = [int(model.table[0, kv_field, block]) + 2 for kv_field in (0, 1) for block in (0, 1)]
    assert same_bits(model.pages[shared], before[shared])
    assert bool(model.pages[int(model.table[0, 0, 2]) + 2, :, :2].isfinite().all())


def test_a_rotary_position_is_not_a_pool_position(poison):
    model = Model(poison, sequences=1)
    qkv = model.draw(4)
    cases = (({"rotary_positions": torch.tensor([40, 3, 0, 9])}, [40, 3, 0, 9]),
             ({"position_offsets": torch.tensor([0, 1, 1, 2])}, [5, 6, 6, 7]), ({"position_deltas": torch.tensor([-3])}, [2, 3, 4, 5]))
    for arguments, rotary_positions in cases:
        out = model.write(qkv, plan_write(torch.tensor([9]), torch.tensor([4]), 4, **arguments))
        queries, keys, values = model.expect(qkv, torch.tensor(rotary_positions))
        assert relative_error(out, queries) < 1e-5
        assert_written(model, keys, values, [0] * 4, range(5, 9))


# -- what is not written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_reference", [False, True])
@pytest.mark.parametrize("queries_only", [False, True])
def test_without_an_update_only_queries_are_prepared(request, poison, same_bits, queries_only, is_reference):
    if is_reference:
        request.getfixturevalue("reference_kernels")
    model = Model(poison, sequences=1)
    qkv, before = model.draw(4), model.pages.clone()
    queries, _, _ = model.expect(qkv, torch.arange(4))
    given = (qkv[:, :96].clone(), model.bias[:96].clone()) if queries_only else (qkv, model.bias)
    model.table[:] = -1   # and nobody looks for pages
    out = model.write(given[0], plan_write(torch.tensor([4]), torch.tensor([4]), 4), bias=given[1], update_kv_cache=False)
    assert relative_error(out, queries) < 1e-5
    assert same_bits(model.pages, before)


def test_tokens_of_another_rank_are_not_written_and_their_queries_are_prepared(poison):
    model = Model(poison, sequences=1)
    qkv = model.draw(6)
    owned = torch.tensor([True, False, True, True, False, False])
    out = model.write(qkv, plan_write(torch.tensor([6]), torch.tensor([6]), 6, is_owned=owned))
    queries, keys, values = model.expect(qkv, torch.arange(6))
    assert relative_error(out, queries) < 1e-5
    kept = owned.nonzero().flatten()
    assert_written(model, keys[kept], values[kept], [0] * len(kept), kept.tolist())
    assert all(bool(model.read(0, 0, position).isnan().all()) for position in (1, 4, 5))


def test_queries_in_eight_bits(poison):
    model = Model(poison, storage="fp8", sequences=1)
    qkv = model.draw(5)
    out = torch.full((5, 6, 16), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    model.write(qkv, plan_write(torch.tensor([5]), torch.tensor([5]), 5), out=out, query_scale=0.03)
    queries, _, _ = model.expect(qkv, torch.arange(5))
    assert relative_error(out.double() * 0.03, queries) < 0.04


# -- bad input -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "message"), [
    ({"query_heads": 5}, "qkv has shape (4, 160): pass [tokens, 5 query heads, 2 of keys and of values] = [any, 144]"),
    ({"bias": torch.zeros(96)}, "bias has shape (96,)"), ({"bias": torch.zeros(160, dtype=torch.float16)}, "bias has dtype float16"),
    ({"out": torch.zeros(4, 6, 15)}, "out has shape (4, 6, 15)"), ({"out": torch.zeros(4, 6, 16, dtype=torch.int8)}, "out has dtype int8"),
    ({"out": torch.zeros(6, 4, 16).transpose(0, 1)}, "all of out, must be contiguous"),
    ({"query_scale": 2.0}, "query_scale=2.0 with a floating-point dtype"),
    ({"rotary": Rotary(torch.zeros(64, 9), torch.zeros(64, 9))}, "rotary_dim is 18 (allowed: 2 to 16"),
    ({"rotary": Rotary(torch.zeros(64, 8), torch.zeros(63, 8))}, "rotary.sin has shape (63, 8)"),
    ({"rotary": Rotary(torch.zeros(64, 8, dtype=torch.float64), torch.zeros(64, 8))}, "rotary.cos has dtype float64"),
    ({"rotary": Rotary(torch.zeros(8, 64).T, torch.zeros(64, 8))}, "rotary.cos has strides"),
    ({"rotary": Rotary(torch.zeros(3, 8), torch.zeros(3, 8))}, "rotary position 3 of token 3: cos and sin have rows 0 to 2"),
    ({"kv_factor": 1}, "kv_factor=1 without value_pages"), ({"layer": 2}, "layer=2"), ({"key_scale": 3.0}, "key_scale=3.0"),
    ({"plan": plan_write(torch.tensor([3]), torch.tensor([3]), 3)}, "sequence_of_token has shape (3,)"),
    ({"plan": plan_write(torch.tensor([18]), torch.tensor([4]), 4)}, "positions[2]=16 (sequence 0): the table's 4 blocks of 4 tokens"),
    ({"plan": replace(plan_write(torch.tensor([4]), torch.tensor([4]), 4), rotary_positions=torch.zeros(4))}, "rotary_positions has dtype"),
    ({"qkv": torch.zeros(160, 4).T}, "the last axis of qkv"), ({"qkv": torch.zeros(4, 160, dtype=torch.float64)}, "qkv has dtype float64"),
    ({"first_writable": torch.zeros(2, dtype=torch.int32)}, "first_writable has shape (2,)"),
])
def test_a_bad_call_is_refused_before_anything_is_written(poison, same_bits, change, message):
    model = Model(poison, sequences=1)
    call = {"qkv": model.draw(4), "plan": plan_write(torch.tensor([4]), torch.tensor([4]), 4)} | change
    before = model.pages.clone()
    with pytest.raises(RequestError) as caught:
        model.write(**call)
    assert message in str(caught.value)
    assert same_bits(model.pages, before)


def test_a_model_in_training_writes_as_any_other(poison, same_bits):
    """An error from what requires a gradient would come with the queries written and the keys not."""
    plain, trained = Model(poison, sequences=1), Model(poison, sequences=1)
    qkv, plan = plain.draw(4), plan_write(torch.tensor([4]), torch.tensor([4]), 4)
    cos, sin = torch.rand(8, 8), torch.rand(8, 8)
    expected = plain.write(qkv=qkv, plan=plan, rotary=Rotary(cos, sin))
    out = torch.zeros_like(expected).requires_grad_()
    trained.write(qkv=qkv.clone().requires_grad_(), plan=plan, rotary=Rotary(cos.clone().requires_grad_(), sin), out=out)
    assert same_bits(out.detach(), expected.detach())
    assert same_bits(trained.pages, plain.pages)
