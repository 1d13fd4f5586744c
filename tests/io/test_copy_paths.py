"""Which way copies take: decided from measured times alone."""

from __future__ import annotations

import pytest

from kvtier.io.copy_paths import CopyPath, CopyPaths, Direction, decide

RUNS, BATCH, KERNEL = CopyPath.RUNS, CopyPath.BATCH, CopyPath.KERNEL
UP = Direction.UP
KIB = 1 << 10


def decided(*by_size: tuple[int, dict[CopyPath, float]]) -> tuple[tuple[int, CopyPath], ...]:
    return decide({UP: dict(by_size)}).chosen.get(UP, ())


def test_the_fastest_dma_path_is_taken() -> None:
    assert decided((4 * KIB, {RUNS: 3.0, BATCH: 1.0}), (64 * KIB, {RUNS: 1.0, BATCH: 2.0})) == ((4 * KIB, BATCH), (64 * KIB, RUNS))


def test_the_kernel_is_taken_only_where_it_is_much_faster() -> None:
    assert decided((4 * KIB, {RUNS: 3.0, BATCH: 1.2, KERNEL: 1.0})) == ((4 * KIB, BATCH),)
    assert decided((4 * KIB, {RUNS: 3.0, BATCH: 1.3, KERNEL: 1.0})) == ((4 * KIB, KERNEL),)


def test_the_kernel_is_for_small_units_only() -> None:
    slow, fast = {RUNS: 9.0, KERNEL: 1.0}, {RUNS: 1.0, KERNEL: 1.0}
    assert decided((4 * KIB, slow), (16 * KIB, slow), (64 * KIB, fast), (256 * KIB, slow)) == ((4 * KIB, KERNEL), (64 * KIB, RUNS))
    assert decided((4 * KIB, fast), (16 * KIB, slow)) == ((4 * KIB, RUNS),)


def test_what_does_not_work_is_not_chosen() -> None:
    assert decided((4 * KIB, {KERNEL: 1.0}), (16 * KIB, {KERNEL: 1.0, RUNS: 1.0})) == ((4 * KIB, KERNEL), (16 * KIB, RUNS))
    assert decided((4 * KIB, {})) == ()


@pytest.mark.parametrize(("unit_bytes", "path"), [
    (1, KERNEL), (4 * KIB, KERNEL), (64 * KIB - 1, KERNEL), (64 * KIB, BATCH), (1 << 30, BATCH),
])
def test_a_unit_takes_the_path_of_the_largest_size_below_it(unit_bytes: int, path: CopyPath) -> None:
    paths = CopyPaths({UP: ((4 * KIB, KERNEL), (64 * KIB, BATCH))})
    assert paths.path(UP, unit_bytes) is path
    assert paths.path(Direction.DOWN, unit_bytes) is RUNS, "nothing was measured there"
    assert paths.path(None, unit_bytes) is RUNS, "within the host"


def test_the_choice_is_said_in_words() -> None:
    paths = CopyPaths({UP: ((4 * KIB, KERNEL), (64 * KIB, BATCH)), Direction.DOWN: ((4 * KIB, RUNS),)})
    assert paths.describe() == {"host to device": "kernel, one batch from 64 KiB", "device to host": "a call for each"}
    assert CopyPaths(reason="no GPU").describe() == {}
