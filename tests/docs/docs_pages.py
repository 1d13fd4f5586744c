"""The documentation as tests see it: pages, their fenced blocks, links and marks.

A mark is a comment on the line before a block; nobody sees it on the rendered page:

* ``<!-- test: not run, REASON -->``: needs a GPU, vLLM, somebody's server. Commands and code are still parsed.
* ``<!-- test: slow -->``: takes minutes: run by the slow tests only, parsed by the others.
* ``<!-- test: exit code 1 -->``: how the last command of the block ends; 0 without a mark.
* ``<!-- test: file NAME -->``: the block is written to this file, for the commands behind it.
* ``<!-- test: figures vary -->``: of a ``text`` block behind a command: any number stands for any other.
* ``<!-- test: no output of ours -->``: a ``text`` block behind a command that is not what it prints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = {"python", "sh", "text", "yaml", "json", "promql", "mermaid"}
_FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"<!-- test: (.+?) -->\s*$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block. ``line``: where its first line stands in the page, from 1."""

    page: Path
    line: int
    language: str
    text: str
    marks: tuple[str, ...]

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_run(self) -> bool:
        return not any(mark.startswith("not run") for mark in self.marks)

    @property
    def is_slow(self) -> bool:
        return "slow" in self.marks

    def marked(self, start: str) -> str | None:
        """What stands behind the start of a mark; None where there is no such mark."""
        return next((mark.removeprefix(start).strip() for mark in self.marks if mark.startswith(start)), None)


def pages() -> list[Path]:
    """Every page, the oldest folder first."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def is_walked(page: Path) -> bool:
    """Whether the blocks of a page are run one after the other by ``test_every_block_runs``.

    Code of the adapters' pages is run by the adapters' own tests. Decisions are history: what they show need not work any more.
    """
    folder = page.relative_to(ROOT).parts
    return folder[:2] not in (("docs", "attach"), ("docs", "decisions")) and folder[0] != "CHANGELOG.md"


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        marks, before = [], text[:fence.start()].rstrip("\n")
        while mark := _MARK.search(before.rpartition("\n")[2]):
            marks.append(mark[1])
            before = before.rpartition("\n")[0]
        body = re.sub(f"^{fence[1]}", "", fence[3], flags=re.MULTILINE)
        found.append(Block(page, text[:fence.start(3)].count("\n") + 1, fence[2], body, tuple(marks)))
    return found


def without_blocks(page: Path) -> str:
    """The page's prose: no fenced blocks, no code spans."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text(encoding="utf-8")))


def spans_of(page: Path) -> list[str]:
    """Code spans in the page's prose."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", _FENCE.sub("", page.read_text(encoding="utf-8")))


def links_of(page: Path) -> list[str]:
    """Targets of the page's links that stay in the repository."""
    return [target for target in _LINK.findall(without_blocks(page)) if "://" not in target and not target.startswith("mailto:")]


def anchors_of(page: Path) -> set[str]:
    """The anchors that the page's headings get on a code host."""
    names: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        number = 0
        while (unique := name if not number else f"{name}-{number}") in names:
            number += 1
        names.add(unique)
    return names
