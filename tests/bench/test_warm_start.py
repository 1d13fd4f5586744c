"""The rows of a warm start: what they stand beside, that every block was found, and that nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.bench import warm_start
from kvtier.bench.warm_start import warm_start_rows
from kvtier.errors import TransferError


def test_a_start_stands_beside_its_limit_and_the_first_request_beside_an_empty_directory(tmp_path: Path) -> None:
    start, request = warm_start_rows(tmp_path, num_blocks=1000, rounds=3)
    assert (start.name, start.unit) == ("nvme/warm_start/1k", "s")
    assert start.limit is not None
    assert start.limit.value == pytest.approx(0.005)
    assert start.ratio == pytest.approx(0.005 / start.median)
    assert request.name == "nvme/warm_start/1k/first_request"
    assert request.limit is not None
    assert request.limit.value > 0.0
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_does_not_find_every_block_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = warm_start._Place.fill

    def forgetful(place: warm_start._Place) -> None:
        fill(place)
        place._expected += 1

    monkeypatch.setattr(warm_start._Place, "fill", forgetful)
    with pytest.raises(TransferError, match="found 1000 of 1001 blocks"):
        warm_start_rows(tmp_path, num_blocks=1000, rounds=3)
    assert list(tmp_path.iterdir()) == []
