"""Rules of ``page_runs``: every page goes to its own place, in as few copies as neighbours allow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))  # importlib mode puts no folder there

from cuda_stand_in import StandInBatch, StandInCuda, StandInKernel

from kvtier.io import page_copier
from kvtier.io.copy_paths import CopyPath, CopyPaths, Direction
from kvtier.io.copy_runs import MAX_PITCH
from kvtier.io.copy_tools import CopyTools
from kvtier.io.cuda_stream import CudaStream
from kvtier.io.page_copier import CudaPageCopier, HostPageCopier, PagePlaces, PageRun, page_runs
from kvtier.pools.host_arena import HostArena

pytestmark = pytest.mark.usefixtures("copies")

PLACES = PagePlaces(stride=4096, first=512, page_bytes=100, pages_per_block=4, slots_per_piece=1 << 20)


def test_neighbouring_pages_of_one_block_are_one_run() -> None:
    assert page_runs(PLACES, [7, 8, 9, 10], [2], 0) == [PageRun(7, 4, 2 * 4096 + 512, 100)]


def test_pages_left_out_at_the_front_move_the_first_place() -> None:
    assert page_runs(PLACES, [7, 8], [2], 1) == [PageRun(7, 2, 2 * 4096 + 512 + 100, 100)]


def test_neighbouring_pages_in_neighbouring_slots_are_one_run_where_a_block_is_one_page() -> None:
    places = PLACES._replace(pages_per_block=1)
    assert page_runs(places, [3, 4, 5], [1, 2, 3], 0) == [PageRun(3, 3, 4096 + 512, 4096)]
    assert page_runs(places, [3, 4, 5], [3, 2, 1], 0) == [PageRun(3, 1, 3 * 4096 + 512, 100), PageRun(4, 1, 2 * 4096 + 512, 100),
                                                          PageRun(5, 1, 4096 + 512, 100)]


def test_a_run_ends_where_memory_is_registered_in_pieces() -> None:
    places = PLACES._replace(pages_per_block=1, slots_per_piece=2)
    assert [run.length for run in page_runs(places, [3, 4, 5, 6], [0, 1, 2, 3], 0)] == [2, 2]


def test_places_too_far_apart_for_one_copy_on_cuda_are_copies_of_their_own() -> None:
    places = PLACES._replace(pages_per_block=1)
    far = MAX_PITCH // 4096 + 1
    assert [run.length for run in page_runs(places, [3, 4, 5], [0, far - 1, 2 * (far - 1)], 0)] == [3]
    assert [run.length for run in page_runs(places, [3, 4, 5], [0, far, 2 * far], 0)] == [1, 1, 1]


@pytest.mark.parametrize("copies", ["library"], indirect=True)
@pytest.mark.parametrize("num_pages", [1, 3])
def test_wide_pages_are_copied_in_items_that_fit_the_caches(num_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    width, longest = 2 << 20, []
    arena = HostArena(4, width, pin=False)
    pages = torch.randint(0, 256, (4, width), dtype=torch.uint8)
    before = pages.clone()
    copyto = np.copyto

    def watched(destination: np.ndarray, source: np.ndarray) -> None:
        assert destination.strides[-2] > destination.shape[-1], "items that lie side by side would be moved as one"
        longest.append(destination.shape[-1])
        copyto(destination, source)

    monkeypatch.setattr(np, "copyto", watched)
    copier = HostPageCopier([pages], arena)
    copier.store([PageRun(1, num_pages, 0, arena.stride)])
    pages[1:1 + num_pages] = 0
    copier.load([PageRun(1, num_pages, 0, arena.stride)])
    assert torch.equal(pages, before)
    assert max(longest) <= 256 << 10
    assert len(longest) == 4, "each call is a wait for the GIL"


@pytest.mark.parametrize("copies", ["compiled"], indirect=True)
def test_compiled_each_tensor_takes_one_call_whatever_the_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbouring pages in scattered slots make a run for every two of them, and hardly two of those have one distance."""
    calls: list[int] = []
    copy_runs = page_copier.copy_runs
    assert copy_runs is not None
    monkeypatch.setattr(page_copier, "copy_runs", lambda *given: (calls.append(len(given[2])), copy_runs(*given)))
    arena = HostArena(64, 300, pin=False)
    tensors = [torch.randint(0, 256, (40, width), dtype=torch.uint8) for width in (100, 200)]
    slots = np.random.default_rng(0).permutation(64)[:40].tolist()
    runs = page_runs(PagePlaces(arena.stride, 0, 300, 1, arena.slots_per_piece), range(40), slots, 0)
    assert len({run.step for run in runs}) > 8
    HostPageCopier(tensors, arena).store(runs)
    assert calls == [40, 40]
    assert np.array_equal(arena.rows[slots], torch.cat(tensors, 1).numpy())


@pytest.mark.parametrize("run", [PageRun(2, 2, 0, 4096), PageRun(-1, 1, 0, 4096), PageRun(0, 2, 4096, 4096), PageRun(0, 1, -100, 4096)],
                         ids=["behind the tensor", "before the tensor", "behind the arena", "before the arena"])
@pytest.mark.parametrize("call", [HostPageCopier.store, HostPageCopier.load], ids=["store", "load"])
def test_a_page_that_is_not_there_copies_nothing(call: Callable[[HostPageCopier, list[PageRun]], None], run: PageRun) -> None:
    arena, pages = HostArena(2, 4096, pin=False), torch.full((3, 4096), 7, dtype=torch.uint8)
    with pytest.raises(IndexError, match="the tensors have 3 pages of 4096 bytes, the arena has 8192 bytes"):
        call(HostPageCopier([pages], arena), [run])
    assert not arena.rows.any()
    assert bool((pages == 7).all())


def test_no_runs_are_nothing_to_copy() -> None:
    HostPageCopier([torch.zeros(2, 8, dtype=torch.uint8)], HostArena(2, 8, pin=False)).store([])


@given(st.data())
def test_every_page_comes_back_from_its_place(data: st.DataObject) -> None:
    per_block, num_slots, num_pages = data.draw(st.integers(1, 4)), 5, 24
    count = data.draw(st.integers(1, num_slots))
    slots = data.draw(st.permutations(range(num_slots)))[:count]
    skip = data.draw(st.integers(0, per_block - 1))
    short = data.draw(st.integers(0, per_block - 1 if count > 1 else per_block - 1 - skip))
    pages = data.draw(st.one_of(st.permutations(range(num_pages)), st.just(list(range(num_pages)))))[:count * per_block - skip - short]
    widths = data.draw(st.lists(st.sampled_from([1, 7, 64]), min_size=1, max_size=3))
    page_bytes = sum(widths)
    arena = HostArena(num_slots, 2 * per_block * page_bytes, pin=False)
    places = PagePlaces(arena.stride, per_block * page_bytes, page_bytes, per_block, arena.slots_per_piece)
    tensors = [torch.randint(0, 256, (num_pages, width), dtype=torch.uint8) for width in widths]
    before = [tensor.clone() for tensor in tensors]
    runs = page_runs(places, pages, slots, skip)
    copier = HostPageCopier(tensors, arena)
    copier.store(runs)
    for position, page in enumerate(pages, skip):  # the plainest way to say where a page lies
        block, within = divmod(position, per_block)
        start = places.first + within * page_bytes
        expected = np.concatenate([tensor[page].numpy() for tensor in before])
        assert (arena.padded_rows[slots[block]][start:start + page_bytes] == expected).all()
    for tensor in tensors:
        tensor.zero_()
    copier.load(runs)
    for tensor, original in zip(tensors, before, strict=True):
        wanted = torch.zeros_like(original)
        wanted[pages] = original[pages]
        assert torch.equal(tensor, wanted)


@pytest.mark.parametrize("path", CopyPath)
@settings(deadline=None, suppress_health_check=[*settings().suppress_health_check, HealthCheck.function_scoped_fixture])
@given(st.data())
def test_on_cuda_every_path_brings_what_the_host_brings(path: CopyPath, data: st.DataObject) -> None:
    per_block, num_slots, num_pages = data.draw(st.integers(1, 3)), 4, 12
    slots = data.draw(st.permutations(range(num_slots)))[:data.draw(st.integers(1, num_slots))]
    pages = data.draw(st.one_of(st.permutations(range(num_pages)), st.just(list(range(num_pages)))))[:len(slots) * per_block]
    widths = data.draw(st.lists(st.sampled_from([8, 24, 7]), min_size=1, max_size=3))
    tensors = [torch.randint(0, 256, (num_pages, width), dtype=torch.uint8) for width in widths]
    twins = [torch.zeros_like(tensor) for tensor in tensors]
    arenas = [HostArena(num_slots, per_block * sum(widths), pin=False) for _ in range(2)]
    runs = page_runs(PagePlaces(arenas[0].stride, 0, sum(widths), per_block, arenas[0].slots_per_piece), pages, slots, 0)
    cuda = StandInCuda(len(pages))
    tools = CopyTools(cuda.runtime, StandInBatch(cuda.runtime), StandInKernel(cuda.runtime),
                      CopyPaths(dict.fromkeys(Direction, ((1, path),))))
    stream = CudaStream(cuda, 0, "test")
    HostPageCopier(tensors, arenas[0]).store(runs)
    assert stream.submit(lambda: CudaPageCopier(tools, tensors, arenas[1]).store(runs)).wait(60.0)
    np.testing.assert_array_equal(arenas[1].padded_rows, arenas[0].padded_rows)
    assert stream.submit(lambda: CudaPageCopier(tools, twins, arenas[1]).load(runs)).wait(60.0)
    for tensor, twin in zip(tensors, twins, strict=True):
        assert torch.equal(twin[pages], tensor[pages])
        assert not twin[[page for page in range(num_pages) if page not in pages]].any()
    used = set(cuda.runtime.calls)
    assert used == {path.name.lower()} if path is not CopyPath.RUNS and len(runs) * len(widths) > 1 else used <= {
        "memcpyAsync", "memcpy2DAsync"}
    assert not tools.missing
    assert stream.close(60.0)
