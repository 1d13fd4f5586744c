"""Kernels on a real device against the CPU: the Triton append bit for bit, attention within rounding, the offset table."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("cupy", reason="make test-gpu tests the CUDA twin as a whole, which needs CuPy: pip install 'kvtier[cuda]'")
pytest.importorskip("triton", reason="the append kernel for GPUs needs Triton")

import torch

from kvtier.errors import RequestError
from kvtier.kernels import OffsetTable, attention_decode, attention_prefill, use_reference, write_kv
from kvtier.kernels.attention_reference import attention_reference
from kvtier.kernels.token_moves import move_tokens, move_tokens_reference

pytestmark = pytest.mark.gpu

LAYERS, LAYER = 3, 1
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative; of the CPU's tests as well. Half precision is rounded once, at the end."""


class Batch:
    """Sequences in scattered blocks of a small pool that is otherwise NaN. On the CPU; ``to_device`` copies what is needed."""

    def __init__(self, lengths: list[int], dtype: torch.dtype, heads: int = 3, head_dim: int = 64, tokens_per_block: int = 16,
                 kv_factor: int = 2, tokens_first: bool = False) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        counts = [-(-length // tokens_per_block) for length in lengths]
        num_blocks = sum(counts) + 3
        order = random.Random(3).sample(range(num_blocks), sum(counts))
        self.slots = [[order.pop() for _ in range(count)] for count in counts]
        self.lengths = lengths
        self.kv_factor = kv_factor
        self.offsets = {"max_rows": len(lengths), "max_blocks": max(counts) + 2, "num_layers": LAYERS, "kv_factor": kv_factor,
                        "num_blocks": num_blocks}
        self.table = OffsetTable(**self.offsets).fill(self.slots)
        page = (tokens_per_block, heads) if tokens_first else (heads, tokens_per_block)
        self.pages = torch.full((num_blocks * LAYERS * kv_factor, *page, head_dim), float("nan"), dtype=dtype)
        if tokens_first:
            self.pages = self.pages.transpose(1, 2)
        total = sum(lengths)
        self.key = torch.randn(total, heads, head_dim, generator=generator).to(dtype)
        self.value = torch.randn(total, heads, head_dim, generator=generator).to(dtype) if kv_factor == 2 else None
        self.sequence_of_token = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        self.positions = torch.cat([torch.arange(length) for length in lengths])
        self.query = torch.randn(total, 2 * heads, head_dim, generator=generator).to(dtype)

    def write_on_cpu(self) -> torch.Tensor:
        """The pool after all tokens, by the reference."""
        pages = self.pages.clone()
        use_reference(True)
        try:
            write_kv(pages, self.key, self.value, self.table, self.sequence_of_token, self.positions, **self.address)
        finally:
            use_reference(False)
        return pages

    @property
    def address(self) -> dict[str, int]:
        return {"layer": LAYER, "num_layers": LAYERS, "kv_factor": self.kv_factor}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equality in which NaN equals NaN."""
    return torch.equal(one.cpu().contiguous().view(torch.uint8), other.cpu().contiguous().view(torch.uint8))


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """NaN when anything is NaN, and NaN is below no limit."""
    return float((out.cpu().double() - reference.double()).norm() / reference.double().norm())


# -- append --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens_first", "kv_factor"), [(False, 2), (True, 2), (False, 1)], ids=["HND", "NHD", "latent"])
def test_the_append_kernel_leaves_the_bytes_of_the_reference(dtype: torch.dtype, tokens_first: bool, kv_factor: int) -> None:
    batch = Batch([37, 1, 16, 90], dtype, head_dim=80, kv_factor=kv_factor, tokens_first=tokens_first)
    pages = batch.pages.cuda()
    assert pages.stride() == batch.pages.stride()
    value = None if batch.value is None else batch.value.cuda()
    write_kv(pages, batch.key.cuda(), value, batch.table.cuda(), batch.sequence_of_token.cuda(), batch.positions.cuda(), **batch.address)
    assert same_bits(pages, batch.write_on_cpu())


def test_tokens_without_a_page_are_left_out_and_land_nowhere() -> None:
    batch = Batch([37, 16], torch.float32)
    table = batch.table.cuda()
    table[0, 1, 1] = -1  # the values of positions 16 to 31
    sequences = batch.sequence_of_token.clone()
    sequences[37:40] = -1
    positions = batch.positions.clone()
    positions[40] = 10_000
    kept = [token for token in range(53) if token not in range(16, 32) and token not in range(37, 41)]
    expected = batch.pages.clone()
    assert batch.value is not None
    write_kv(expected, batch.key[kept], batch.value[kept], batch.table, batch.sequence_of_token[kept], batch.positions[kept],
             **batch.address)
    pages = batch.pages.cuda()
    write_kv(pages, batch.key.cuda(), batch.value.cuda(), table, sequences.cuda(), positions.cuda(), **batch.address)
    assert same_bits(pages, expected)
    with pytest.raises(RequestError, match="positions"):
        write_kv(pages, batch.key.cuda(), batch.value.cuda(), batch.table.cuda(), sequences.cuda(), positions.cuda(),
                 check_values=True, **batch.address)


def test_pages_beyond_two_to_the_31_elements_are_found() -> None:
    page_elements = 8 * 32 * 128
    num_pages = (1 << 31) // page_elements + 8
    if torch.cuda.mem_get_info()[0] < 2 * num_pages * page_elements + (4 << 30):
        pytest.skip("less than 8 GiB of device memory are free")
    pages = torch.zeros(num_pages, 8, 32, 128, dtype=torch.bfloat16, device="cuda")
    table = torch.tensor([[[num_pages - 2], [num_pages - 1]]], dtype=torch.int32, device="cuda")
    key, value = torch.randn(2, 1, 8, 128, device="cuda").bfloat16()
    write_kv(pages, key, value, table, torch.zeros(1, dtype=torch.int32, device="cuda"), torch.full((1,), 5, device="cuda"), layer=0)
    assert torch.equal(pages[num_pages - 2, :, 5], key[0])
    assert torch.equal(pages[num_pages - 1, :, 5], value[0])
    assert int(pages.count_nonzero()) == int(key.count_nonzero() + value.count_nonzero())
    out = attention_decode(key, pages, table, torch.tensor([6], device="cuda"), layer=0)
    assert bool(out.isfinite().all())
    del pages
    torch.cuda.empty_cache()


# -- attention -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens_first", [False, True], ids=["HND", "NHD"])
def test_prefill_on_the_device_agrees_with_the_reference_on_the_cpu(dtype: torch.dtype, tokens_first: bool) -> None:
    batch = Batch([75], dtype, tokens_first=tokens_first)
    pages = batch.write_on_cpu()
    for past in (0, 40, 74):
        query = batch.query[past:]
        out = attention_prefill(query.cuda(), pages.cuda(), batch.table[0].cuda(), past, **batch.address)
        assert out.dtype == dtype
        reference = attention_reference(query, pages, batch.table[0], past, layer=LAYER)
        assert relative_error(out, reference) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens_first", [False, True], ids=["HND", "NHD"])
def test_decode_on_the_device_agrees_with_the_reference_on_the_cpu(dtype: torch.dtype, tokens_first: bool) -> None:
    lengths = [75, 1, 33]
    batch = Batch(lengths, dtype, tokens_first=tokens_first)
    pages = batch.write_on_cpu()
    query = batch.query[:3]
    out = attention_decode(query.cuda(), pages.cuda(), batch.table.cuda(), torch.tensor(lengths).cuda(), **batch.address)
    reference = torch.cat([attention_reference(query[i:i + 1], pages, batch.table[i], length - 1, layer=LAYER)
                           for i, length in enumerate(lengths)])
    assert relative_error(out, reference) < TOLERANCE[dtype]


def test_what_is_appended_on_the_device_is_what_attention_reads_there() -> None:
    batch = Batch([75, 20], torch.float32)
    assert batch.value is not None
    pages = batch.pages.cuda()
    table = batch.table.cuda()
    for start, end in ((0, 30), (30, 95)):
        write_kv(pages, batch.key[start:end].cuda(), batch.value[start:end].cuda(), table, batch.sequence_of_token[start:end].cuda(),
                 batch.positions[start:end].cuda(), **batch.address)
    out = attention_decode(batch.query[:2].cuda(), pages, table, torch.tensor(batch.lengths).cuda(), **batch.address)
    expected = attention_decode(batch.query[:2], batch.write_on_cpu(), batch.table, torch.tensor(batch.lengths), **batch.address)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


# -- offset table --------------------------------------------------------------------------------------------------------


def test_the_offset_table_holds_what_the_cpu_table_holds_and_never_moves() -> None:
    sizes = {"max_rows": 4, "max_blocks": 6, "num_layers": LAYERS, "kv_factor": 2, "num_blocks": 50}
    on_device, on_host = OffsetTable(**sizes, device="cuda"), OffsetTable(**sizes)
    address = on_device.tensor.data_ptr()
    for rows in ([[1, 2, 3], [49]], [[5]], [], [[0], [7, 8, 9, 10, 11, 12], [3], [4, 2]]):
        view = on_device.fill(rows)
        assert torch.equal(view.cpu(), on_host.fill(rows))
        assert torch.equal(on_device.tensor.cpu(), on_host.tensor), "rows of sequences that have ended are null"
        assert on_device.tensor.data_ptr() == address
        assert not rows or view.data_ptr() == address
    with pytest.raises(RequestError, match="slot 50"):
        on_device.fill([[50]])
    assert torch.equal(on_device.tensor.cpu(), on_host.tensor)


def test_a_captured_graph_reads_the_batch_that_was_filled_in_last() -> None:
    table = OffsetTable(max_rows=2, max_blocks=4, num_layers=LAYERS, kv_factor=2, num_blocks=50, device="cuda")
    seen = torch.empty_like(table.tensor)
    table.fill([[1, 2], [3]])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen.copy_(table.tensor)
    for rows in ([[4], [5, 6, 7]], [[9, 9]]):
        table.fill(rows)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(seen, table.tensor)
        assert int(seen[0, 0, 0]) == rows[0][0] * LAYERS * 2


def test_filling_waits_for_the_kernels_that_still_read_the_table_on_the_same_stream() -> None:
    table = OffsetTable(max_rows=1, max_blocks=4, num_layers=LAYERS, kv_factor=2, num_blocks=50, device="cuda")
    engine = torch.cuda.Stream()
    with torch.cuda.stream(engine):
        table.fill([[1]])
        torch.cuda._sleep(200_000_000)
        seen = table.tensor.clone()
        table.fill([[2]])
    engine.synchronize()
    assert int(seen[0, 0, 0]) == LAYERS * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("fields", [1, 2])
def test_tokens_move_on_the_device_as_one_after_the_other(dtype: torch.dtype, fields: int) -> None:
    generator = torch.Generator().manual_seed(7)
    blocks = torch.randint(0, 256, (6, LAYERS, fields, 2, 16, 8 * dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype)
    on_device = blocks.to("cuda")
    moves = [(33, 30), (36, 31), (40, 32), (31, 33)]
    move_tokens(on_device, [4, 0, 2], moves)
    move_tokens_reference(blocks.view(torch.uint8), [4, 0, 2], moves)
    assert torch.equal(on_device.cpu().view(torch.uint8), blocks.view(torch.uint8))
