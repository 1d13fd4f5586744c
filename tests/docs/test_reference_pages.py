"""The pages of docs/reference/ are what scripts/reference.py makes of the code."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
from docs_pages import ROOT

import kvtier
import kvtier.kernels


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvtier_reference", ROOT / "scripts" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_pages_agree_with_the_code(reference: ModuleType) -> None:
    for name, make in reference.PAGES.items():
        assert (reference.FOLDER / name).read_text(encoding="utf-8") == make(), f"docs/reference/{name}: run python scripts/reference.py"
    assert {path.name for path in reference.FOLDER.glob("*.md")} == set(reference.PAGES)


def test_a_page_that_does_not_agree_is_noticed_and_made_anew(reference: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(reference, "FOLDER", tmp_path / "reference")
    assert reference.main(["--check"]) == 1
    assert not (tmp_path / "reference").exists()
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    (tmp_path / "reference" / "errors.md").write_text("old")
    assert reference.main(["--check"]) == 1


def test_every_public_name_and_method_is_there(reference: ModuleType) -> None:
    python = reference.python_page() + reference.errors_page()
    assert [name for name in kvtier.__all__ if f"### {name}\n" not in python] == []
    assert [name for name in kvtier.kernels.__all__ if f"## {name}\n" not in reference.kernels_page()] == []
    for name in ("wait_ready", "match", "propose_drafts", "prefetch", "stats", "close"):
        assert f"#### KVCacheManager.{name}\n" in python
    assert "## kvtier store scrub\n" in reference.commands_page()


@pytest.mark.parametrize(("docstring", "page"), [
    ("One ``name``.\n\nArgs:\n    a: one\n        more.\n    b, c: two.\n\nBehind.",
     "One `name`.\n\n*Args*\n\n* `a`: one more.\n* `b, c`: two.\n\nBehind."),
    ("Returns:\n    int32 ``[n]``: how many.", "*Returns*\n\nint32 `[n]`: how many."),
    ("See :class:`~kvtier.tiering.manager.KVCacheManager` and :meth:`Place.of`.", "See `KVCacheManager` and `Place.of`."),
    (None, "")])
def test_docstrings_become_markdown(reference: ModuleType, docstring: str | None, page: str) -> None:
    assert reference.as_markdown(docstring) == page


def test_a_public_method_without_a_docstring_is_noticed(reference: ModuleType) -> None:
    """The reference is only as good as the docstrings: those of the front door say something."""
    silent = [f"{kind.__name__}.{name}" for kind in (kvtier.KVCacheManager, kvtier.TierIndex, kvtier.TierWorker)
              for name, member in reference.members_of(kind) if not getattr(member, "__doc__", None)]
    assert silent == []
