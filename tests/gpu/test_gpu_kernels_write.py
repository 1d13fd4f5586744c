"""The write path's kernels on a real device against the CPU: the same bytes, and within rounding where a GPU fuses multiply and add."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("cupy", reason="make test-gpu tests the CUDA twin as a whole, which needs CuPy: pip install 'kvtier[cuda]'")
pytest.importorskip("triton", reason="the kernels for GPUs need Triton")

import torch

from kvtier.errors import RequestError
from kvtier.kernels import (
    OffsetTable,
    Rotary,
    RotaryStyle,
    append_mla,
    copy_partial_blocks,
    dequantise_nvfp4,
    fused_write,
    gather_tokens,
    plan_write,
    quantise_nvfp4,
    scatter_indexer_keys,
    use_reference,
    write_kv,
    zero_value_tail,
)
from kvtier.kernels.block_offsets import ScratchWindow, fill_block_offsets

pytestmark = pytest.mark.gpu

LAYERS, BLOCKS, SEQUENCES, MAX_BLOCKS = 3, 40, 4, 8
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "nvfp4": torch.uint8, "bfloat16": torch.bfloat16, "float32": torch.float32}
STORED = list(DTYPES)


@dataclass
class Pool:
    """Poisoned pages on the CPU of one storage type; :meth:`on_device` gives their copies. Keys and values of one width share pages."""

    storage: str
    heads: int = 3
    key_dim: int = 128
    value_dim: int = 128
    tokens_per_block: int = 16
    tokens_first: bool = False

    def __post_init__(self) -> None:
        self.is_split = self.value_dim != self.key_dim
        self.kv_factor = 1 if self.is_split else 2
        packed = 2 if self.storage == "nvfp4" else 1
        dtype = DTYPES[self.storage]
        self.tensors: dict[str, torch.Tensor] = {"pages": self._make(self.key_dim // packed, dtype)}
        if packed == 2:
            self.tensors["scale_pages"] = self._make(self.key_dim // 16, dtype)
        if self.is_split:
            self.tensors["value_pages"] = self._make(self.value_dim // packed, dtype)
        if self.is_split and packed == 2:
            self.tensors["value_scale_pages"] = self._make(self.value_dim // 16, dtype)
        slots = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(4))[:SEQUENCES * MAX_BLOCKS].view(SEQUENCES, MAX_BLOCKS)
        self.table = torch.stack([slots, slots], 1).int() * (LAYERS * self.kv_factor)
        self.table[:, 1] += self.kv_factor - 1
        self.scales = {"bfloat16": (1.0, 1.0), "float32": (1.0, 1.0), "nvfp4": (0.003, 0.0007)}.get(self.storage, (0.06, 0.011))
        self.number = DTYPES[self.storage] if self.storage in ("float32", "bfloat16") else torch.bfloat16

    def _make(self, dim: int, dtype: torch.dtype) -> torch.Tensor:
        page = (self.tokens_per_block, self.heads) if self.tokens_first else (self.heads, self.tokens_per_block)
        pages = torch.full((BLOCKS * LAYERS * self.kv_factor, *page, dim * dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype)
        return pages.transpose(1, 2) if self.tokens_first else pages

    @property
    def address(self) -> dict[str, Any]:
        return {"layer": 1, "num_layers": LAYERS, "kv_factor": self.kv_factor, "key_scale": self.scales[0], "value_scale": self.scales[1]}

    def on_device(self) -> dict[str, torch.Tensor]:
        return {name: tensor.cuda() for name, tensor in self.tensors.items()}

    def agrees(self, found: dict[str, torch.Tensor]) -> bool:
        return all(same_bits(found[name], tensor) for name, tensor in self.tensors.items())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu().contiguous().view(torch.uint8), other.cpu().contiguous().view(torch.uint8))


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def every_token(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), torch.cat([torch.arange(length) for length in lengths])


# -- append ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("shape", [{}, {"tokens_first": True, "tokens_per_block": 32, "heads": 8}, {"key_dim": 192, "value_dim": 64},
                                   {"key_dim": 80, "value_dim": 80, "tokens_per_block": 128, "heads": 1}], ids=str)
def test_every_storage_type_has_the_bytes_of_the_cpu(storage: str, shape: dict[str, Any]) -> None:
    pool = Pool(storage, **shape)
    sequences, positions = every_token([37, 1, 90, 16])
    sequences[5], positions[60] = -1, 10**6
    first = torch.tensor([0, 0, 20, 0])
    key = draw(len(positions), pool.heads, pool.key_dim, dtype=pool.number)
    value = draw(len(positions), pool.heads, pool.value_dim, dtype=pool.number, seed=1) / 8
    found = pool.on_device()
    for tensors, move in ((found, torch.Tensor.cuda), (pool.tensors, torch.Tensor.cpu)):
        write_kv(key=move(key), value=move(value), table=move(pool.table), sequence_of_token=move(sequences), positions=move(positions),
                 first_writable=move(first), check_values=False, **tensors, **pool.address)
    assert pool.agrees(found)


@pytest.mark.parametrize("storage", STORED)
def test_latent_rows_have_the_bytes_of_the_cpu(storage: str) -> None:
    pool = Pool(storage, heads=1, key_dim=576, value_dim=576)
    sequences, positions = every_token([37, 1, 90, 16])
    rows = draw(len(positions), 576, dtype=pool.number)
    found = pool.on_device()
    table = pool.table[:, :1].expand(-1, 2, -1).contiguous()   # one row is key and value
    for tensors, move in ((found, torch.Tensor.cuda), (pool.tensors, torch.Tensor.cpu)):
        append_mla(ckv=move(rows)[:, :512], kpe=move(rows)[:, 512:], table=move(table), sequence_of_token=move(sequences),
                   positions=move(positions), layer=2, scale=pool.scales[0], **tensors)
    assert pool.agrees(found)


def test_a_bad_entry_is_an_error_when_asked_and_while_an_engine_is_debugged() -> None:
    pool = Pool("float32")
    sequences, positions = every_token([3, 2, 1, 4])
    pool.table[2, 1, 0] = -1
    rows, found = draw(10, 3, 128).cuda(), pool.on_device()
    call = {"key": rows, "value": rows, "table": pool.table.cuda(), "sequence_of_token": sequences.cuda(), "positions": positions.cuda()}
    with pytest.raises(RequestError, match="sequence 2, values of positions 0 to 15"):
        write_kv(**call, **found, **pool.address, check_values=True)
    use_reference(True)
    try:
        with pytest.raises(RequestError, match="sequence 2, values of positions 0 to 15"):
            write_kv(**call, **found, **pool.address)
    finally:
        use_reference(False)
    assert pool.agrees(found)


# -- fused write -----------------------------------------------------------------------------------------------------------


def numbers_of(pool: Pool, tensors: dict[str, torch.Tensor], field: int) -> torch.Tensor:
    """All pages of keys or of values as float32; what nobody wrote is NaN or a constant in both."""
    own = field == 1 and pool.is_split
    pages = tensors["value_pages" if own else "pages"].cpu()
    if pool.storage == "nvfp4":
        return dequantise_nvfp4(pages, tensors["value_scale_pages" if own else "scale_pages"].cpu(), pool.scales[field])
    return pages.float() * pool.scales[field]


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize(("style", "rotary_dim", "query_heads", "shape"), [
    (RotaryStyle.HALF_SPLIT, 128, 12, {}), (RotaryStyle.INTERLEAVED, 64, 71, {"heads": 1, "tokens_first": True}),
    (RotaryStyle.HALF_SPLIT, 64, 6, {"key_dim": 192, "value_dim": 64, "tokens_per_block": 64})])
def test_the_fused_write_does_what_the_cpu_does(storage: str, style: RotaryStyle, rotary_dim: int, query_heads: int,
                                               shape: dict[str, Any]) -> None:
    pool = Pool(storage, **shape)
    new, past = [9, 1, 30, 0], [5, 60, 0, 7]
    columns = (query_heads + pool.heads) * pool.key_dim + pool.heads * pool.value_dim
    qkv, bias = draw(40, columns, dtype=pool.number) / 2, draw(columns, dtype=pool.number, seed=1) / 4
    angles = draw(128, rotary_dim // 2, seed=2)
    query_dtype = torch.float8_e4m3fn if storage == "fp8" else pool.number
    found, queries = pool.on_device(), []
    for tensors, move in ((found, torch.Tensor.cuda), (pool.tensors, torch.Tensor.cpu)):
        plan = plan_write(move(torch.tensor(past) + torch.tensor(new)), move(torch.tensor(new)), 40, position_deltas=move(torch.arange(4)))
        out = move(torch.full((40, query_heads, pool.key_dim), float("nan"))).to(query_dtype)
        fused_write(move(qkv), table=move(pool.table), plan=plan, query_heads=query_heads, bias=move(bias), out=out,
                    rotary=Rotary(move(angles.cos()), move(angles.sin()), style), query_scale=0.03 if storage == "fp8" else 1.0,
                    **tensors, **pool.address)
        queries.append(out.float().cpu())
    limit = {"float32": 1e-5, "bfloat16": 1e-2}.get(storage, 2e-2)
    assert float((queries[0] - queries[1]).norm() / queries[1].norm()) < limit
    for field in (0, 1):
        one, other = numbers_of(pool, found, field), numbers_of(pool, pool.tensors, field)
        assert torch.equal(one.isnan(), other.isnan())
        assert float((one - other).nan_to_num(0.0).norm() / other.nan_to_num(0.0).norm()) < limit


def test_a_captured_step_writes_where_the_batch_of_the_moment_says() -> None:
    """The plan is part of the graph; lengths, table and input are buffers at fixed addresses."""
    pool = Pool("bfloat16")
    offsets = OffsetTable(max_rows=SEQUENCES, max_blocks=MAX_BLOCKS, num_layers=LAYERS, kv_factor=2, num_blocks=BLOCKS, device="cuda")
    cache_lengths = torch.zeros(SEQUENCES, dtype=torch.int32, device="cuda")
    new = torch.zeros(SEQUENCES, dtype=torch.int32, device="cuda")
    qkv = torch.zeros(SEQUENCES, 12 * 128, dtype=torch.bfloat16, device="cuda")
    pages, out = pool.tensors["pages"].cuda(), torch.zeros(SEQUENCES, 6, 128, dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        plan = plan_write(cache_lengths, new, SEQUENCES, is_padded=True)
        fused_write(qkv, pages, offsets.tensor, plan, query_heads=6, out=out, **pool.address)

    warm = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(warm):   # compiles the kernels; nothing is written while all rows are null
        offsets.fill([])
        step()
    warm.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    wanted = pool.tensors["pages"].clone()
    for number, batch in enumerate(([[3], [7, 8]], [[9, 1, 2]], [[5], [6], [0], [4]])):
        rows = draw(SEQUENCES, 12 * 128, dtype=torch.bfloat16, seed=number)
        lengths = [16 * len(slots) for slots in batch]   # the newest token is the last of its block
        offsets.fill(batch)
        qkv.copy_(rows)
        cache_lengths.copy_(torch.tensor(lengths + [0] * (SEQUENCES - len(batch)), dtype=torch.int32))
        new.copy_(torch.tensor([1] * len(batch) + [0] * (SEQUENCES - len(batch)), dtype=torch.int32))
        graph.replay()
        for row, slots in enumerate(batch):
            for field, columns in ((0, slice(6 * 128, 9 * 128)), (1, slice(9 * 128, 12 * 128))):
                wanted[(slots[-1] * LAYERS + 1) * 2 + field, :, 15] = rows[row, columns].view(3, 128)
        torch.cuda.synchronize()
        assert same_bits(pages, wanted)
        assert same_bits(out, rows[:, :6 * 128].view(SEQUENCES, 6, 128))


# -- the rest of the write path --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORED)
def test_tails_of_values_have_the_bytes_of_the_cpu(storage: str) -> None:
    pool = Pool(storage)
    found, lengths = pool.on_device(), torch.tensor([37, 16, 0, 90])
    for tensors, move in ((found, torch.Tensor.cuda), (pool.tensors, torch.Tensor.cpu)):
        zero_value_tail(table=move(pool.table), lengths=move(lengths), num_layers=LAYERS, layers=range(1, 3), **tensors)
    assert pool.agrees(found)
    assert not pool.agrees(Pool(storage).tensors)


def test_indexer_keys_land_in_a_strided_pool() -> None:
    memory = torch.zeros(8, 3, 16, 132, dtype=torch.uint8)
    keys = torch.randint(0, 256, (50, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    place = torch.randperm(128, generator=torch.Generator().manual_seed(1))[:50]
    key_slots = place // 16 * (16 * 132) + place % 16 * 128
    scale_slots = place // 16 * (16 * 132) + 16 * 128 + place % 16 * 4
    key_slots[3] = -1
    found = memory.cuda()
    for target, move in ((found, torch.Tensor.cuda), (memory, torch.Tensor.cpu)):
        scatter_indexer_keys(target[:, 1].unsqueeze(2), move(keys), move(draw(50)), move(key_slots), move(scale_slots))
    assert same_bits(found, memory)
    assert bool(memory.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_what_is_gathered_has_the_bytes_of_the_cpu(dtype: torch.dtype) -> None:
    """Pages with gaps between them, one of which is null; codes of 4 bits with a scale of 1 for every sixteen."""
    generator = torch.Generator().manual_seed(4)
    memory = torch.randint(0, 127, (12, 16, 5, 64 * dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype)
    how: dict[str, Any] = {"key_scale": 0.03, "value_scale": 0.01} if dtype.itemsize == 1 else {}
    table = torch.tensor([[4, -1, 8, 0], [5, -1, 9, 1]], dtype=torch.int32)
    for is_value in (False, True):
        found = []
        for place in (torch.Tensor.cpu, torch.Tensor.cuda):
            if dtype == torch.uint8:
                how["scale_pages"] = place(torch.full((12, 3, 16, 8), 0x38, dtype=torch.uint8))
            pages = place(memory)[:, :, 1:4].transpose(1, 2)
            found.append(gather_tokens(pages, place(table), 57, layer=1, num_layers=2, is_value=is_value, **how))
        assert same_bits(found[1], found[0])
        assert not found[0][16:32].any()
        assert bool(found[0][32:].any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.013, 0.0])
def test_nvfp4_has_the_bits_of_the_cpu_there_and_back(dtype: torch.dtype, scale: float) -> None:
    numbers = draw(300, 5, 128) * torch.exp2(torch.randint(-13, 10, (300, 5, 1), generator=torch.Generator().manual_seed(3)))
    numbers[0, 0, 3], numbers[0, 1, 16:32] = float("inf"), -0.0
    wanted, found = quantise_nvfp4(numbers.to(dtype), scale), quantise_nvfp4(numbers.to(dtype).cuda(), scale)
    assert all(map(same_bits, found, wanted))
    assert same_bits(dequantise_nvfp4(*found, scale, dtype), dequantise_nvfp4(*wanted, scale, dtype))


def test_a_group_with_a_nan_is_nan_on_the_device_too() -> None:
    numbers = torch.ones(2, 64)
    numbers[1, 20] = float("nan")
    codes, scales = quantise_nvfp4(numbers.cuda(), 0.5)
    assert dequantise_nvfp4(codes, scales, 0.5).isnan().nonzero().cpu().tolist() == [[1, place] for place in range(16, 32)]


# -- moving and tables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.clone], ids=["device", "pinned", "pageable"])
@pytest.mark.parametrize(("dtype", "tokens"), [(torch.bfloat16, 5), (torch.uint8, 31), (torch.float32, 0), (torch.float16, 64)])
def test_partial_copies_have_the_bytes_of_the_cpu(place: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, tokens: int) -> None:
    shape = (9, 3, 2, 4, 32, 96)
    generator = torch.Generator().manual_seed(tokens)
    source, destination = (torch.randint(0, 256, (*shape[:-1], 96 * dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype)
                           for _ in range(2))
    found, pairs = destination.cuda(), [(0, 8), (3, 1), (4, 4)]
    copy_partial_blocks(found, place(source), pairs, tokens)
    copy_partial_blocks(destination, source, pairs, tokens)
    assert same_bits(found, destination)


def test_tables_of_several_pools_with_scratch_are_those_of_the_cpu() -> None:
    indptr, slots = torch.tensor([0, 300, 300, 305]).int(), torch.randint(-2, 50, (305,)).int()
    scratch = ScratchWindow(torch.tensor([100, 0, 1]).int(), torch.tensor([103, 0, 3]).int(), torch.randint(0, 50, (3, 3)).int())
    wanted, found = torch.full((2, 5, 2, 310), 77, dtype=torch.int32), torch.full((2, 5, 2, 310), 77, dtype=torch.int32, device="cuda")
    for tables, move in ((wanted, torch.Tensor.cpu), (found, torch.Tensor.cuda)):
        moved = ScratchWindow(move(scratch.begin), move(scratch.end), move(scratch.slots))
        fill_block_offsets(tables, move(indptr), move(slots), pages_per_block=[6, 1], value_fields=[1, 0], num_blocks=50, scratch=moved)
    assert same_bits(found, wanted)


def test_tables_of_many_steps_planned_ahead_are_each_seen_by_their_own_step() -> None:
    """More steps than staging buffers, on a stream that is far behind the host."""
    table = OffsetTable(max_rows=2, max_blocks=4, num_layers=1, kv_factor=1, num_blocks=50, device="cuda")
    engine = torch.cuda.Stream()
    seen = torch.zeros(12, 2, 4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(engine):
        table.fill([])
        torch.cuda._sleep(100_000_000)
        for step in range(12):
            table.fill([[step, step + 1], [step + 2]] if step % 3 else [[step]])
            seen[step].copy_(table.tensor[:, 0])
    engine.synchronize()
    for step in range(12):
        rows = [[step, step + 1, -1, -1], [step + 2, -1, -1, -1]] if step % 3 else [[step, -1, -1, -1], [-1] * 4]
        assert seen[step].cpu().tolist() == rows
