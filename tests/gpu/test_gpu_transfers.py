"""The order of transfers on a real device: between Moves, and between Moves and what the engine computes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cupy", reason="the CUDA twin needs CuPy: pip install 'kvtier[cuda]'")

import torch
from gpu_rig import DENSE, LARGE, PATIENCE, STRIDED, GpuRig, busy, first_tokens

from kvtier.pools.layout import LayerGroup
from kvtier.pools.nvme_geometry import NvmeGeometry
from kvtier.pools.pool_index import PoolIndex, pool_index, slot_of
from kvtier.tiering.ledger.moves import Move

pytestmark = pytest.mark.gpu

P, S, N = ([pool_index(level, slot) for slot in range(8)] for level in range(3))

MakeRig = Callable[..., GpuRig]


def rows_of(rig: GpuRig, index: PoolIndex) -> torch.Tensor:
    """A primary slot, uint8 [block_bytes] on the device."""
    return rig.primary.rows[slot_of(index)]


def constant(group: LayerGroup, value: int) -> np.ndarray:
    return np.full(group.block_bytes, value, np.uint8)


def test_case_G1_offload_then_onboard_then_offload_gives_zeros(make_rig: MakeRig, engine: torch.cuda.Stream) -> None:
    rig = make_rig(LARGE)
    rig.put(P[0], constant(LARGE, 0))
    rig.put(S[0], constant(LARGE, 1))
    rig.transfers.issue([rig.move(P[0], S[0])])
    rig.transfers.issue([rig.move(S[0], P[0])])
    assert rig.transfers.order_before_engine(engine, 0, [P[0], S[0]], PATIENCE)
    engine.synchronize()
    rig.transfers.issue([rig.move(P[0], S[0])])
    rig.settle()
    assert (rig.fill_of(S[0]), rig.fill_of(P[0])) == (0, 0)


def test_a_chain_of_moves_over_both_streams_keeps_its_order(make_rig: MakeRig, engine: torch.cuda.Stream) -> None:
    """All of it is enqueued while the device is held up: only events keep the order then."""
    rig = make_rig(LARGE)
    rig.put(P[0], constant(LARGE, 5))
    rig.put(S[5], constant(LARGE, 6))
    with busy(engine):
        rig.transfers.order_after_engine(engine)
    rig.transfers.issue([rig.move(P[0], S[0]), rig.move(S[0], P[1]), rig.move(P[1], S[1]), rig.move(S[1], P[2])])
    rig.transfers.issue([rig.move(S[5], P[0]), rig.move(P[0], S[2])])  # writes a slot that a Move before it reads
    assert not engine.query(), "the host waited for the device"
    assert not rig.transfers.idle(0.01)
    rig.settle()
    assert [rig.fill_of(index) for index in (P[0], P[1], P[2], S[0], S[1], S[2])] == [6, 5, 5, 5, 5, 6]


def test_a_copy_issued_after_the_engine_is_ordered_behind_what_it_still_computes(make_rig: MakeRig, engine: torch.cuda.Stream) -> None:
    rig = make_rig(DENSE)
    for index in (P[0], P[1]):
        rig.put(index, constant(DENSE, 1))
    with busy(engine):
        rows_of(rig, P[0]).fill_(7)
        rows_of(rig, P[1]).fill_(8)
    rig.transfers.order_after_engine(engine)
    rig.transfers.issue([rig.move(P[0], S[0]), rig.move(P[1], P[2])])
    assert not engine.query(), "the host waited for the engine"
    rig.settle()
    assert (rig.fill_of(S[0]), rig.fill_of(P[2])) == (7, 8)


def test_a_copy_does_not_overwrite_a_slot_that_the_engine_still_reads(make_rig: MakeRig, engine: torch.cuda.Stream) -> None:
    rig = make_rig(DENSE)
    rig.put(P[0], constant(DENSE, 3))
    rig.put(S[0], constant(DENSE, 4))
    seen = torch.empty_like(rows_of(rig, P[0]))
    with busy(engine):
        seen.copy_(rows_of(rig, P[0]))
    rig.transfers.order_after_engine(engine)
    rig.transfers.issue([rig.move(S[0], P[0])])
    rig.settle()
    engine.synchronize()
    assert bool((seen == 3).all())
    assert rig.fill_of(P[0]) == 4


def test_the_engine_uses_a_slot_only_after_the_copies_from_and_into_it(make_rig: MakeRig, engine: torch.cuda.Stream) -> None:
    rig = make_rig(DENSE)
    rig.put(P[0], constant(DENSE, 1))
    rig.put(P[1], constant(DENSE, 2))
    rig.put(S[0], constant(DENSE, 3))
    holds_up = torch.cuda.Stream()
    seen = torch.empty_like(rows_of(rig, P[0]))
    with busy(holds_up):
        rig.transfers.order_after_engine(holds_up)
    rig.transfers.issue([rig.move(S[0], P[0]), rig.move(P[1], S[1])])
    assert rig.transfers.order_before_engine(engine, 0, [P[0], P[1]], PATIENCE)
    with torch.cuda.stream(engine):
        seen.copy_(rows_of(rig, P[0]))
        rows_of(rig, P[1]).fill_(9)
    assert not holds_up.query(), "the host waited instead of the engine's stream"
    engine.synchronize()
    assert bool((seen == 3).all())
    rig.settle()
    assert (rig.fill_of(S[1]), rig.fill_of(P[1])) == (2, 9)


def test_whoever_waits_is_woken_when_the_device_is_done(make_rig: MakeRig, engine: torch.cuda.Stream) -> None:
    rig = make_rig(DENSE)
    rig.put(P[0], constant(DENSE, 5))
    told = threading.Event()
    rig.transfers.add_listener(told.set)
    with busy(engine):
        rig.transfers.order_after_engine(engine)
    rig.transfers.issue([rig.move(P[0], S[0])])
    assert not rig.transfers.wait(0, [S[0]], 0.01)
    assert rig.transfers.wait(0, [S[0]], PATIENCE)
    assert (rig.secondary.rows[0] == 5).all()
    assert told.wait(PATIENCE)
    assert [result.error for result in rig.transfers.drain()] == [None]


def test_a_graph_is_captured_while_copies_are_looked_after(make_rig: MakeRig, engine: torch.cuda.Stream) -> None:
    """Our threads ask after their events all the time. In CUDA's default mode that would break the capture of this one."""
    rig = make_rig(DENSE)
    rig.put(P[0], constant(DENSE, 5))
    source, target = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with busy(engine):
        rig.transfers.order_after_engine(engine)
    rig.transfers.issue([rig.move(P[0], S[0])])
    with torch.cuda.stream(side):  # not torch.cuda.graph, which waits for the device first
        graph.capture_begin()
        target.copy_(source)
        time.sleep(0.05)  # for the watcher to have looked; nothing depends on it
        graph.capture_end()
    assert not target.any()
    graph.replay()
    torch.cuda.synchronize()
    assert target.all()
    rig.settle()
    assert rig.fill_of(S[0]) == 5


def random_steps(rig: GpuRig, seed: int, count: int, with_files: bool) -> list[tuple[PoolIndex | None, PoolIndex, int]]:
    """(source, destination, tokens). Without a source the engine writes the slot, which is primary then."""
    generator = np.random.default_rng(seed)
    memory = [index for index in P + S if slot_of(index) < rig.num_blocks]
    written: list[PoolIndex] = []
    steps: list[tuple[PoolIndex | None, PoolIndex, int]] = []
    while len(steps) < count:
        kind = int(generator.integers(0, 10))
        if kind == 0:
            steps.append((None, P[int(generator.integers(rig.num_blocks))], 0))
        elif with_files and kind < 3:
            index = N[int(generator.integers(rig.num_blocks))]
            steps.append((S[int(generator.integers(rig.num_blocks))], index, 0))
            written.append(index)
        elif with_files and kind < 5 and written:
            steps.append((written[int(generator.integers(len(written)))], memory[int(generator.integers(len(memory)))], 0))
        else:
            source, destination = (memory[int(number)] for number in generator.choice(len(memory), 2, replace=False))
            steps.append((source, destination, int(generator.choice([0, 0, 0, 1, 3]))))
    return steps


def check_random_moves(rig: GpuRig, engine: torch.cuda.Stream, seed: int, with_files: bool) -> None:
    """Carry out Moves and engine steps without ever waiting in between; compare with one after another on the host."""
    model = rig.put_random(seed)
    keys: dict[PoolIndex, bytes] = {}
    generator = np.random.default_rng(seed + 1)
    waiting: list[Move] = []
    for number, (source, destination, num_tokens) in enumerate(random_steps(rig, seed, 250, with_files)):
        if source is None:
            rig.transfers.issue(waiting)
            waiting = []
            assert rig.transfers.order_before_engine(engine, 0, [destination], PATIENCE)
            with torch.cuda.stream(engine):
                torch.cuda._sleep(int(generator.integers(0, 2_000_000)))
                rows_of(rig, destination).fill_(number % 256)
            rig.transfers.order_after_engine(engine)
            model[destination] = constant(rig.group, number % 256)
            continue
        if destination in N:
            keys[destination] = number.to_bytes(32, "big")
        waiting.append(rig.move(source, destination, num_tokens, keys.get(destination, b"") or keys.get(source, b"")))
        data = model[source]
        model[destination] = first_tokens(data, model[destination], rig.group, num_tokens) if num_tokens else data
        if generator.integers(0, 4) == 0:
            rig.transfers.issue(waiting)
            waiting = []
    rig.transfers.issue(waiting)
    rig.settle()
    for index, expected in model.items():
        if index not in N:
            np.testing.assert_array_equal(rig.get(index), expected, err_msg=f"slot {index & 3}:{slot_of(index)}")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("group", [STRIDED, DENSE], ids=["strided", "dense"])
def test_random_moves_and_engine_steps_equal_sequential_execution(
        make_rig: MakeRig, engine: torch.cuda.Stream, group: LayerGroup, seed: int) -> None:
    check_random_moves(make_rig(group, num_blocks=5), engine, seed, with_files=False)


@pytest.mark.parametrize("seed", range(2))
def test_random_moves_over_three_levels_equal_sequential_execution(
        make_rig: MakeRig, engine: torch.cuda.Stream, tmp_path: Path, seed: int) -> None:
    pytest.importorskip("xxhash", reason="the NVMe level needs xxhash")
    from kvtier.io.nvme_store import NvmeStore

    store = NvmeStore.open(tmp_path / "store", '{"test": "gpu"}', [NvmeGeometry(DENSE.block_bytes, 8)], free_space_reserve=1 << 20)
    rig = make_rig(DENSE, num_blocks=5, store=store)
    check_random_moves(rig, engine, seed, with_files=True)
    routes = rig.transfers.stats()
    assert routes["secondary->nvme"].blocks > 0
    assert routes["nvme->primary"].blocks > 0
    assert rig.transfers.close(PATIENCE)
    assert store.close(PATIENCE)


BROKEN_DEVICE = """
import torch
from gpu_rig import DENSE, GpuRig, busy
from kvtier.pools.pool_index import pool_index

rig = GpuRig(DENSE)
engine = torch.cuda.Stream()
nowhere = torch.full((1,), 9, device="cuda")
one = torch.zeros(1, device="cuda")
torch.cuda.synchronize()
with busy(engine):
    one[nowhere]   # an index out of range: the device refuses everything from then on
rig.transfers.order_after_engine(engine)
rig.transfers.issue([rig.move(pool_index(0, 0), pool_index(1, 0)), rig.move(pool_index(1, 1), pool_index(0, 1))])
assert rig.transfers.idle(20.0), "what was pending never ended"
results = rig.transfers.drain()
assert len(results) == 2
assert all(result.error is not None for result in results), results
rig.transfers.issue([rig.move(pool_index(0, 2), pool_index(1, 2))])
assert rig.transfers.idle(20.0), "what came later never ended"
assert all(result.error is not None for result in rig.transfers.drain())
assert rig.transfers.close(20.0), "close found something running"
rig.pools.close()
print("ended as it should", flush=True)
"""


def test_an_error_of_the_device_fails_what_is_pending_and_nothing_hangs() -> None:
    """In a process of its own: such an error stays until the process ends."""
    done = subprocess.run([sys.executable, "-c", BROKEN_DEVICE], capture_output=True, text=True, timeout=180, check=False,
                          cwd=Path(__file__).parent)
    assert "ended as it should" in done.stdout, done.stdout + done.stderr
