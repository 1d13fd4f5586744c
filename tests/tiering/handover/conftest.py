"""Two caches, and a folder between them: on a drive and in shared memory."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # so that test modules can import handover_rig


@pytest.fixture
def clock() -> Any:
    from handover_rig import Clock

    return Clock()


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, clock: Any) -> Iterator[Any]:
    """On a drive, or where a test says so (``handover_rig.both_folders``) in shared memory."""
    from kvtier import HandoverFolder

    if getattr(request, "param", "directory") == "directory":
        yield HandoverFolder(tmp_path / "handover", "64MiB", clock)
        return
    made = HandoverFolder.in_shared_memory(f"test-{uuid.uuid4().hex}", "64MiB", clock)
    yield made
    for path in made.directory.iterdir():
        path.unlink()
    made.directory.rmdir()


@pytest.fixture
def prefill(make_cache: Callable[..., Any], folder: Any) -> Callable[..., Any]:
    """``prefill(layout, **settings)``: the process that computes prompts."""
    from handover_rig import Prefill

    return lambda layout=None, **settings: Prefill(_made(make_cache, layout, settings), folder)


@pytest.fixture
def decode(make_cache: Callable[..., Any], folder: Any) -> Callable[..., Any]:
    """``decode(layout, **settings)``: the process that answers."""
    from handover_rig import Decode

    return lambda layout=None, **settings: Decode(_made(make_cache, layout, settings), folder)


def _made(make_cache: Callable[..., Any], layout: Any, settings: dict[str, Any]) -> Any:
    return make_cache(**({"primary": 40, "secondary": 10} | ({} if layout is None else {"layout": layout}) | settings))
