"""The cases' verbs, for layouts of one group and of several. What the cases share, ``case_cache``, is importable from here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from case_cache import CaseCache, Make


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes :class:`CaseCache` s, which are closed when the test ends."""
    made: list[CaseCache] = []

    def build(*arguments: object, **settings: object) -> CaseCache:
        made.append(CaseCache(*arguments, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for cache in made:
        cache.manager.close()
