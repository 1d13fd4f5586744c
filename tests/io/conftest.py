"""Which of the two ways copies within the host go: by library calls, as in the plain build, or by the module in C."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from built_extension import host_copy

from kvtier.io import page_copier, piece_copier


@pytest.fixture(params=["library", "compiled"], scope="module")
def copies(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which way; for ``pytestmark``, or as an argument. Parametrize it indirectly for a test that is of one way only."""
    copy_runs = host_copy().copy_runs if request.param == "compiled" else None
    with pytest.MonkeyPatch.context() as patch:
        for module in (piece_copier, page_copier):
            patch.setattr(module, "copy_runs", copy_runs)
        yield request.param
