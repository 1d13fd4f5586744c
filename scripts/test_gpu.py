"""Run the tests marked ``gpu`` and print their figures as one JSON object on the last line. Needs pytest and torch only.

A test hands over a figure with pytest's ``record_property(name, value)``. Arguments are passed on to pytest.
"""

from __future__ import annotations

import json
import platform
import sys

import pytest


class Figures:
    """Pytest plugin that keeps outcomes and recorded properties."""

    def __init__(self) -> None:
        self.outcomes = {"passed": 0, "failed": 0, "skipped": 0}
        self.figures: dict[str, object] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
        if report.when == "call":
            self.figures.update(report.user_properties)


def main(arguments: list[str]) -> int:
    import torch

    if not torch.cuda.is_available():
        print("make test-gpu: torch sees no GPU; run it on a machine with one (nvidia-smi shows what the driver sees)",
              file=sys.stderr)
        return 2
    figures = Figures()
    code = int(pytest.main(["-m", "gpu", "-p", "no:cacheprovider", *arguments], plugins=[figures]))
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
               "gpu": torch.cuda.get_device_name(0)}
    print(json.dumps({"machine": machine, **figures.outcomes, "figures": figures.figures}))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
