"""Mix all faults with real traffic, for as long as one likes: `make soak MINUTES=60`.

Usage: python scripts/soak.py [--minutes N] [--seed N] [--directory DIR] [--json FILE]

Several threads of requests share a cache of three levels while reads, writes, commits and copies fail, hang, lie and lose files. Caches are
closed and opened again on the same directory, processes are killed, files are damaged in between. Every byte that a step reads is compared
with what it has to be. Prints a JSON summary; exit code 1 when anything was wrong, and then what and with which seed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).resolve().parent.parent / "tests" / "tiering"  # the engine that checks bytes is that of the tests
KILLED_SHARE = 0.4  # of the processes
DAMAGED_SHARE = 0.4
PROCESS_SECONDS = (2.0, 12.0)


class Soak:
    """Runs processes one after the other and adds up what they say."""

    def __init__(self, directory: Path, seed: int) -> None:
        sys.path.append(str(ENGINE))
        import soak_life  # not before the options have been read: it brings torch
        self._life = soak_life
        self._directory = directory
        self._generator = random.Random(seed)
        self._processes = multiprocessing.get_context("fork")
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.warnings: Counter[str] = Counter()
        self.most_warnings = 0

    def run(self, seconds: float) -> None:
        """Until time is over or something was wrong."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.errors:
            self._process(min(self._generator.uniform(*PROCESS_SECONDS), max(end - time.monotonic(), 1.0)))

    def _process(self, seconds: float) -> None:
        generator = self._generator
        name = generator.choice(list(self._life.SOAKED))
        directory = self._directory / name.replace(" ", "-")
        if generator.random() < DAMAGED_SHARE:
            self.counts[f"damage {self._life.damage(directory, generator)}"] += 1
        receiver, sender = self._processes.Pipe(duplex=False)
        process = self._processes.Process(target=self._life.live, daemon=True,
                                          args=(directory, name, generator.randrange(1 << 30), seconds, sender.send))
        process.start()
        sender.close()
        self.counts["processes"] += 1
        is_killed = generator.random() < KILLED_SHARE
        deadline = time.monotonic() + (generator.uniform(0.5, seconds) if is_killed else seconds + 180.0)
        is_done = False
        while not is_done and receiver.poll(max(deadline - time.monotonic(), 0.0)):
            try:
                message: dict[str, Any] = receiver.recv()
            except EOFError:
                break
            is_done = "done" in message
            self.counts.update(message.get("counts", {}))
            self.errors += message.get("errors", [])
            self.warnings.update(message.get("warnings", {}))
            self.most_warnings = max(self.most_warnings, sum(message.get("warnings", {}).values()))
        if is_killed and not is_done:
            process.kill()
            self.counts["killed"] += 1
        elif not is_done:
            self.errors.append(f"{name}: the process {'hangs' if process.is_alive() else f'ended by itself with {process.exitcode}'}")
            process.kill()
        process.join()

    def summary(self, seconds: float) -> dict[str, Any]:
        """What happened, for people and for machines."""
        counts = self.counts
        prefixes = ("fault ", "damage ")
        return {"seconds": round(seconds, 1), "wrong_bytes": sum("WrongBytes" in error for error in self.errors), "errors": self.errors,
                **{name: counts[name] for name in ("processes", "killed", "lives", "requests", "tokens_checked")},
                "restarts": max(counts["lives"] + counts["killed"] - 1, 0), "blocks_reused": {
                    level: counts[f"{level} hits"] for level in ("primary", "secondary", "nvme")},
                "counters": {name: counts[name] for name in ("fallbacks", "checksum_failures", "transfer_failures", "lost", "quarantined")},
                "faults": {name.removeprefix("fault "): hits for name, hits in sorted(counts.items()) if name.startswith(prefixes[0])},
                "damage": {name.removeprefix("damage "): hits for name, hits in sorted(counts.items()) if name.startswith(prefixes[1])},
                "most_warnings_of_a_life": self.most_warnings, "warnings": dict(self.warnings.most_common())}


def main() -> int:
    """Run, print, and say by the exit code whether all was right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--seed", type=int, default=None, help="of everything that is drawn; threads still differ from run to run")
    parser.add_argument("--directory", type=Path, default=None, help="an empty or new folder to use; a temporary one otherwise")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the summary there too")
    options = parser.parse_args()
    if not 0.0 < options.minutes < float("inf"):
        parser.error(f"--minutes {options.minutes}: must be a number above 0")
    if options.directory is not None and options.directory.exists() and any(options.directory.iterdir()):
        parser.error(f"--directory {options.directory}: not empty; what is in it would be damaged")
    seed = options.seed if options.seed is not None else random.randrange(1 << 30)
    directory = Path(tempfile.mkdtemp(prefix="kvtier-soak-")) if options.directory is None else options.directory.absolute()
    soak = Soak(directory, seed)
    start = time.monotonic()
    try:
        soak.run(options.minutes * 60.0)
    finally:
        if options.directory is None and not soak.errors:
            shutil.rmtree(directory, ignore_errors=True)
    text = json.dumps({"seed": seed, **soak.summary(time.monotonic() - start)}, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    return 1 if soak.errors else 0


if __name__ == "__main__":
    sys.exit(main())
