"""A folder of handovers: on a drive and in shared memory."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # so that test modules can import piece_rig


@pytest.fixture
def clock() -> Any:
    from piece_rig import Clock

    return Clock()


@pytest.fixture(params=["directory", "shared memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, clock: Any) -> Iterator[Any]:
    from kvtier.io.handover_folder import HandoverFolder

    if request.param == "directory":
        yield HandoverFolder(tmp_path / "handover", "1MiB", clock)
        return
    made = HandoverFolder.in_shared_memory(f"test-{uuid.uuid4().hex}", "1MiB", clock)
    yield made
    for path in made.directory.iterdir():
        path.unlink()
    made.directory.rmdir()
