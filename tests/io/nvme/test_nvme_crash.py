"""A process killed at any point of the write path loses entries at most, never correctness, and nothing that had been committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.bench.integrity_child import POINTS
from kvtier.bench.integrity_crash import ANY_MOMENT, CrashHistory
from kvtier.bench.integrity_outcome import Outcome


def no_wrong_block(outcome: Outcome) -> bool:
    """A rebuilt manifest may bring blocks back that had been given up (right or torn ones); nothing else may appear, and no slot
    may hold something else than its row says."""
    return outcome.wrong == outcome.unexplained == 0 and (outcome.rebuilt or outcome.came_back == outcome.quarantined == 0)


@pytest.mark.parametrize("point", POINTS)
def test_a_process_killed_at_this_point_of_the_write_path_costs_no_committed_block(tmp_path: Path, point: str) -> None:
    outcome = CrashHistory(tmp_path / "store", seed=POINTS.index(point)).kill(point)
    assert no_wrong_block(outcome)
    assert outcome.committed > 0
    assert outcome.lost == 0


def test_a_process_killed_at_any_moment_costs_no_committed_block(tmp_path: Path) -> None:
    history = CrashHistory(tmp_path / "store", seed=1)
    for _ in range(3):
        outcome = history.kill(ANY_MOMENT)
        assert no_wrong_block(outcome)
        assert outcome.lost == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_200_kills_in_a_row_keep_what_was_committed(tmp_path: Path) -> None:
    history = CrashHistory(tmp_path / "store", seed=2)
    points = [ANY_MOMENT if number % 3 == 0 else POINTS[number % len(POINTS)] for number in range(200)]
    outcomes = [history.kill(point) for point in points]
    assert all(map(no_wrong_block, outcomes))
    assert sum(outcome.lost for outcome in outcomes) <= 0.01 * sum(outcome.committed for outcome in outcomes)
