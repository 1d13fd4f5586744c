"""What the documentation points at is there: links, headings, paths of tests, and every page is in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs_pages import ROOT, anchors_of, links_of, pages, without_blocks

INDEX = ROOT / "docs" / "README.md"
_PATH = re.compile(r"`((?:tests|scripts|docs|bench|tiering|kernels|policies|pools|io)/[\w/.]+\.(?:py|md|json|jsonl|sh))`")


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in links_of(page):
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), f"{page.relative_to(ROOT)}: {target} is not there"
        assert found.is_relative_to(ROOT), f"{page.relative_to(ROOT)}: {target} leaves the repository"
        if anchor and found.suffix == ".md":
            assert anchor in anchors_of(found), f"{page.relative_to(ROOT)}: {target}: its headings are {sorted(anchors_of(found))}"


def test_the_paths_of_tests_that_claims_name_exist() -> None:
    """The last column of the tables: below tests/ where it is a test, in the repository otherwise."""
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/claims.md"))
    cells = [line.rstrip(" |").rpartition(" | ")[2] for line in text.splitlines() if line.startswith("| ")]
    named = [path for cell in cells for path in re.findall(r"`([\w/]+(?:\.py)?)`", cell)]
    named += re.findall(r"ARGS=\"?(tests/[\w/]+)", text)
    assert len(named) > 40
    for path in named:
        assert any((place / path).exists() for place in (ROOT / "tests", ROOT)), f"{path} is claimed to show something, and is not there"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_code_spans_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md" or "decisions" in page.parts:  # history: files move
        return
    for path in _PATH.findall(page.read_text(encoding="utf-8")):
        assert any((place / path).exists() for place in (ROOT, ROOT / "tests", ROOT / "tiering")), f"{page.relative_to(ROOT)}: {path}"


def test_the_index_names_every_page() -> None:
    linked = {(INDEX.parent / target.partition("#")[0]).resolve() for target in links_of(INDEX)}
    for page in (ROOT / "docs").rglob("*.md"):
        if page == INDEX or page.parent.name == "decisions" or page in linked:
            continue
        assert page.parent in linked or page.parent / "README.md" in linked, f"docs/README.md does not lead to {page.relative_to(ROOT)}"


def test_no_page_leads_nowhere_in_particular() -> None:
    for page in pages():
        assert "](http://" not in without_blocks(page), f"{page.relative_to(ROOT)}: a link without https"
