"""Fill the tables of docs/performance.md from the measurements committed in docs/measurements/.

Usage: python scripts/figures.py [--check]

Between ``<!-- figures: FILE -->`` and ``<!-- end -->`` goes what the named file says, or that there is none. ``--check`` changes nothing
and exits with 1 when the page and the files do not agree.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
MEASUREMENTS = ROOT / "docs" / "measurements"
TABLES = {name: runpy.run_path(str(Path(__file__).with_name(f"figures_{name}.py")))[f"{name}_table"] for name in ("integrity", "serve")}
"""Of commands whose rows are better read as a table of their own."""
COMPILED = {"ledger": ("The ledger's modules", "plain Python"), **dict.fromkeys(("copy", "kernels"), ("Copies", "library calls"))}
"""By command, what of its figures was compiled, and what it was otherwise."""
SECTION = re.compile(r"(<!-- figures: (?P<file>[\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, measurements: Path) -> str:
    """The page with every section made anew."""
    return SECTION.sub(lambda found: f"{found[1]}{section(measurements / found['file'])}{found[3]}", page)


def section(file: Path) -> str:
    """What one measurement says, as Markdown."""
    if not file.exists():
        return f"\nNot measured yet: there is no `{file.name}`.\n\n"
    document = json.loads(file.read_text(encoding="utf-8"))
    machine, config = document["machine"], document["config"]
    origin = (f"From `{file.name}`, kvtier {document['kvtier']}{', --quick' if config.get('quick') else ''}: {machine['cpu']}, "
              f"{machine['cores']} cores, {machine['kernel']}, Python {machine['python']}, GPU: {machine['gpu']}.")
    if "compiled" in config:
        what, otherwise = COMPILED.get(config.get("command"), ("The modules", "plain Python"))
        part = config["compiled"]
        origin += f" Compiled was {part}." if isinstance(part, str) else f" {what} were {'compiled' if part else otherwise}."
    own_table = TABLES.get(config.get("command"))
    lines = ["", origin, "", *(own_table(document) if own_table else table(document["results"])), ""]
    lines += [f"* {note}" for note in config.get("notes", [])]
    lines += [f"* {loss}" for loss in config.get("losses", [])]
    lines += [f"* INVALID {row['name']}: {row['reason']}" for row in config.get("invalid", [])]
    return "\n".join(lines).rstrip() + "\n\n"


def table(results: list[dict[str, Any]]) -> list[str]:
    """One line for each row."""
    lines = ["| row | median | low to high | limit | of the limit | times as fast as |", "|---|---|---|---|---|---|"]
    for row in results:
        limit = f"{figure(row['limit']['value'])} ({row['limit']['name']})" if row["limit"] else ""
        peers = ", ".join(f"{name} {figure(ratio)}" for name, ratio in row["peers"].items())
        ratio = f"{row['ratio']:.2f}" if row["ratio"] is not None else ""
        lines.append(f"| `{row['name']}` | {figure(row['median'])} {row['unit']} | {figure(row['low'])} to {figure(row['high'])} "
                     f"| {limit} | {ratio} | {peers} |")
    return lines


def figure(value: float) -> str:
    """Three significant digits, without an exponent."""
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 else f"{value:.4f}"


def main(arguments: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    wanted = filled(page, MEASUREMENTS)
    if "--check" in arguments:
        if page != wanted:
            print(f"{PAGE.relative_to(ROOT)} does not agree with {MEASUREMENTS.relative_to(ROOT)}; run python scripts/figures.py",
                  file=sys.stderr)
        return int(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
