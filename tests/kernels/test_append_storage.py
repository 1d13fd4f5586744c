"""write_kv into quantised pages and pages of two widths: what is stored, with whose scale, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import RequestError
from kvtier.kernels import write_kv
from kvtier.kernels.dispatch import use_reference
from kvtier.kernels.nvfp4 import dequantise_nvfp4
from kvtier.kernels.quantise import from_storage, to_storage
from kvtier.kernels.storage import StoredPages

LAYERS, BLOCKS = 2, 9


class Pool:
    """Poisoned pages of one storage type, and a table of two sequences over them. Keys and values of one width share a tensor."""

    def __init__(self, poison, storage: str, heads=2, tokens=16, key_dim=32, value_dim=None, tokens_first=False, seed=0):
        self.storage, self.heads, self.tokens, self.key_dim = storage, heads, tokens, key_dim
        self.value_dim = value_dim or key_dim
        self.is_split = value_dim is not None and value_dim != key_dim
        self.kv_factor = 1 if self.is_split else 2
        self.key_scale, self.value_scale = (0.05, 0.0077) if storage != "nvfp4" else (0.0017, 0.0003)
        dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "nvfp4": torch.uint8}[storage]
        packed = 2 if storage == "nvfp4" else 1

        def make(dim, dtype):
            shape = (BLOCKS * LAYERS * self.kv_factor, *((tokens, heads) if tokens_first else (heads, tokens)), dim)
            return poison(shape, dtype).transpose(1, 2) if tokens_first else poison(shape, dtype)

        self.pages = make(key_dim // packed, dtype)
        self.scale_pages = make(key_dim // 16, torch.uint8) if packed == 2 else None
        self.value_pages = make(self.value_dim // packed, dtype) if self.is_split else None
        self.value_scale_pages = make(self.value_dim // 16, torch.uint8) if self.is_split and packed == 2 else None
        self.generator = torch.Generator().manual_seed(seed)
        slots = torch.randperm(BLOCKS, generator=self.generator)[:8].view(2, 4)
        self.table = torch.stack([slots, slots], 1).int() * (LAYERS * self.kv_factor)
        self.table[:, 1] += self.kv_factor - 1

    @property
    def address(self):
        pages = {"value_pages": self.value_pages, "scale_pages": self.scale_pages, "value_scale_pages": self.value_scale_pages}
        return {"layer": 1, "num_layers": LAYERS, "kv_factor": self.kv_factor, "key_scale": self.key_scale,
                "value_scale": self.value_scale, **{name: tensor for name, tensor in pages.items() if tensor is not None}}

    def tensors(self):
        return [tensor for tensor in (self.pages, self.scale_pages, self.value_pages, self.value_scale_pages) if tensor is not None]

    def write(self, lengths=(19, 5), dtype=torch.float32, **changes):
        """Write tokens of both sequences in a shuffled order, and return keys, values, sequences and positions."""
        sequences = torch.arange(2).repeat_interleave(torch.tensor(lengths))
        positions = torch.cat([torch.arange(length) for length in lengths])
        order = torch.randperm(len(positions), generator=self.generator)
        key, value = (torch.randn(len(order), self.heads, dim, generator=self.generator).to(dtype)
                      for dim in (self.key_dim, self.value_dim))
        value = value / 8
        write_kv(self.pages, key, value, self.table, sequences[order], positions[order], **(self.address | changes))
        return key, value, sequences[order], positions[order]

    def read(self, field, sequence, position):
        """One stored row, found without a kernel: [heads, dim] in float64, read with its own scale."""
        block, inside = divmod(position, self.tokens)
        page = int(self.table[sequence, field, block]) + self.kv_factor
        pages = self.value_pages if field and self.is_split else self.pages
        scale = (self.key_scale, self.value_scale)[field]
        if self.storage != "nvfp4":
            return pages[page, :, inside].double() * scale
        scales = self.value_scale_pages if field and self.is_split else self.scale_pages
        return dequantise_nvfp4(pages[page, :, inside], scales[page, :, inside], scale, torch.float64)


def largest_error(storage, rows, scale):
    """What rounding may cost each number: half a step of its format, plus a little for the division in float32."""
    rows = rows.double().abs()
    if storage == "fp8":   # three bits of mantissa; below 2**-6 the step is 2**-9
        return torch.maximum(rows / 16, torch.tensor(scale * 2**-10)) * (1 + 1e-6)
    if storage == "int8":
        return torch.full_like(rows, scale / 2 * (1 + 1e-5))
    return rows.unflatten(-1, (-1, 16)).amax(-1).repeat_interleave(16, -1) * (1 / 6 + 1 / 100)


@examples(60)
@given(storage=st.sampled_from(["fp8", "int8", "nvfp4"]), lengths=st.tuples(st.integers(0, 40), st.integers(0, 40)),
       heads=st.integers(1, 3), tokens=st.sampled_from([16, 32, 128]), key_dim=st.sampled_from([64, 80, 256]),
       value_dim=st.sampled_from([None, 64, 96]), tokens_first=st.booleans(), seed=st.integers(0, 1000),
       dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_what_is_read_back_is_what_was_written_within_its_format(poison, storage, lengths, heads, tokens, key_dim, value_dim, tokens_first,
                                                                 seed, dtype):
    pool = Pool(poison, storage, heads, tokens, key_dim, value_dim, tokens_first, seed)
    before = [tensor.clone() for tensor in pool.tensors()]
    key, value, sequences, positions = pool.write(lengths, dtype)
    for token, (sequence, position) in enumerate(zip(sequences.tolist(), positions.tolist(), strict=True)):
        for field, rows in enumerate((key, value)):
            found = pool.read(field, sequence, position)
            wanted = rows[token].double()
            assert bool(((found - wanted).abs() <= largest_error(storage, wanted, (pool.key_scale, pool.value_scale)[field])).all())
    rows = sum(lengths) * heads
    changed = [int((new.view(torch.uint8) != old.view(torch.uint8)).any(-1).sum()) for new, old in zip(pool.tensors(), before, strict=True)]
    assert all(count <= (rows if pool.is_split else 2 * rows) for count in changed)   # nothing but the rows that were written


@pytest.mark.parametrize("storage", ["fp8", "int8", "nvfp4"])
@pytest.mark.parametrize("value_dim", [None, 64])
@pytest.mark.usefixtures("reference_kernels")
def test_the_reference_stores_the_same_bytes(poison, same_bits, storage, value_dim):
    found = Pool(poison, storage, value_dim=value_dim)
    found.write()
    use_reference(False)
    wanted = Pool(poison, storage, value_dim=value_dim)
    wanted.write()
    assert all(map(same_bits, found.tensors(), wanted.tensors()))


@pytest.mark.parametrize("storage", ["fp8", "int8", "nvfp4"])
def test_values_are_stored_with_the_scale_of_values(poison, storage):
    """With the keys' scale they would be four times too coarse, or wrong by that factor when they are read: no error would say so."""
    pool = Pool(poison, storage)
    key, value, sequences, positions = pool.write()
    for rows, field in ((key, 0), (value, 1)):
        found = torch.stack([pool.read(field, s, p) for s, p in zip(sequences.tolist(), positions.tolist(), strict=True)])
        assert float((found - rows.double()).norm() / rows.double().norm()) < (0.12 if storage == "nvfp4" else 0.04)
    swapped = Pool(poison, storage)
    key, value, sequences, positions = swapped.write(key_scale=swapped.value_scale, value_scale=swapped.key_scale)
    found = torch.stack([swapped.read(1, s, p) for s, p in zip(sequences.tolist(), positions.tolist(), strict=True)])
    assert float((found - value.double()).norm() / value.double().norm()) > 0.5


@examples(60)
@given(numbers=st.lists(st.one_of(st.floats(-600, 600, width=32), st.integers(-512, 512).map(lambda n: n / 4)), min_size=1, max_size=8),
       scale=st.sampled_from([1.0, 0.5, 0.03, 7.0]))
def test_eight_bits_are_the_nearest_that_there_are(numbers, scale):
    rows = torch.tensor(numbers)
    quotients = (rows / torch.full_like(rows, scale)).double()
    for dtype, values in ((torch.int8, torch.arange(-128.0, 128.0)),
                          (torch.float8_e4m3fn, torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float())):
        stored = to_storage(rows, dtype, scale)
        candidates = values[values.isfinite()].double()
        distance = (candidates - quotients[:, None].clamp(candidates.min(), candidates.max())).abs()
        found = (stored.double() - quotients.clamp(candidates.min(), candidates.max())).abs()
        assert torch.equal(found, distance.amin(1))
        assert torch.equal(from_storage(stored, scale), stored.float() * torch.tensor(scale))
        assert torch.equal(to_storage(from_storage(stored, scale), dtype, scale).view(torch.uint8), stored.view(torch.uint8))


def test_ties_go_to_the_even_neighbour_and_nan_stays_or_is_nothing():
    assert to_storage(torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, math.nan, 1e9]), torch.int8, 1.0).tolist() == [0, 2, 2, 0, -2, 0, 127]
    stored = to_storage(torch.tensor([1.0625, 1.1875, 464.0, -1e9, math.inf, math.nan]), torch.float8_e4m3fn, 1.0).float()
    assert stored[:5].tolist() == [1.0, 1.25, 448.0, -448.0, 448.0]
    assert bool(stored[5].isnan())


@pytest.mark.parametrize("storage", ["fp8", "int8", "nvfp4"])
def test_a_bad_place_leaves_quantised_pages_and_scales_untouched(poison, same_bits, storage):
    pool = Pool(poison, storage)
    before = [tensor.clone() for tensor in pool.tensors()]
    pool.table[1, 1, 0] = -1
    with pytest.raises(RequestError, match="sequence 1, values of positions 0 to 15"):
        pool.write()
    assert all(map(same_bits, pool.tensors(), before))


@pytest.mark.parametrize(("storage", "change", "message"), [
    ("fp8", {"key_scale": 0.0}, "key_scale=0.0: must be finite and greater than 0"),
    ("fp8", {"value_scale": math.inf}, "value_scale=inf"),
    ("int8", {"value_scale": -1.0}, "value_scale=-1.0"),
    ("int8", {"key_scale": 1e-46}, "key_scale=1e-46"),
    ("int8", {"scale_pages": torch.zeros(36, 2, 16, 2, dtype=torch.uint8)}, "scale_pages belong to pages of uint8"),
    ("nvfp4", {"scale_pages": None}, "pages has dtype uint8: pass scale_pages with them"),
    ("nvfp4", {"scale_pages": torch.zeros(36, 2, 16, 3, dtype=torch.uint8)}, "scale_pages has shape (36, 2, 16, 3)"),
    ("nvfp4", {"scale_pages": torch.zeros(36, 2, 16, 2)}, "scale_pages has dtype float32: pass uint8"),
    ("nvfp4", {"value_scale_pages": torch.zeros(36, 2, 16, 2, dtype=torch.uint8)}, "value_scale_pages given"),
    ("nvfp4", {"key_scale": math.nan}, "key_scale=nan"),
    ("fp8", {"value_pages": torch.zeros(36, 2, 16, 32)}, "value_pages with kv_factor=2"),
    ("fp8", {"value_pages": torch.zeros(36, 2, 16, 32), "kv_factor": 1}, "value_pages has dtype float32: pass float8_e4m3fn"),
    ("fp8", {"value_pages": torch.zeros(35, 2, 16, 32), "kv_factor": 1}, "value_pages has shape (35, 2, 16, 32)"),
])
def test_scales_that_do_not_belong_to_the_pages_are_refused(poison, same_bits, storage, change, message):
    pool = Pool(poison, storage)
    before = [tensor.clone() for tensor in pool.tensors()]
    with pytest.raises(RequestError) as caught:
        pool.write(**change)
    assert message in str(caught.value)
    assert all(map(same_bits, pool.tensors(), before))


def test_pages_of_floating_point_numbers_take_no_scale_and_others_no_integers(poison):
    with pytest.raises(RequestError, match=r"key_scale=2\.0 with a floating-point dtype"):
        StoredPages.of("test", torch.zeros(4, 1, 4, 8), key_scale=2.0)
    with pytest.raises(RequestError, match="pages has dtype int32"):
        StoredPages.of("test", torch.zeros(4, 1, 4, 8, dtype=torch.int32))
    with pytest.raises(RequestError, match="groups of 16 numbers"):
        StoredPages.of("test", torch.zeros(4, 1, 4, 12, dtype=torch.uint8), scale_pages=torch.zeros(4, 1, 4, 1, dtype=torch.uint8))
    pool = Pool(poison, "fp8")
    with pytest.raises(RequestError, match="key has dtype int32"):
        write_kv(pool.pages, torch.zeros(1, 2, 32, dtype=torch.int32), torch.zeros(1, 2, 32), pool.table, torch.zeros(1, dtype=torch.int64),
                 torch.zeros(1, dtype=torch.int64), **pool.address)
