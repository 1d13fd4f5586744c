"""One benchmark of ``make test-gpu``, in a process of its own: prints its table, and writes what it found as JSON.

    python scripts/gpu_figures.py NAME FILE

The object has "report", in the form of every benchmark, or "missing" (why there are no figures, where that is nobody's fault), or
"error" (what nobody expected).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.bench.report import Report

NAMES = ("copies", "attention", "writes", "gds")


def measure(name: str) -> Report:
    """The benchmark with this name; imports what it needs and no more."""
    if name == "copies":
        from kvtier.bench.copy_gpu import measure_gpu_copies
        return measure_gpu_copies()
    if name == "attention":
        from kvtier.bench.kernels_gpu import measure_gpu_decode
        return measure_gpu_decode()
    if name == "writes":
        from kvtier.bench.kernels_write_gpu import measure_gpu_write
        return measure_gpu_write()
    from kvtier.bench.gds import measure_gds

    directory = os.environ.get("GPU_TEST_DIRECTORY")
    return measure_gds(Path(directory) if directory else None)


def found(name: str) -> dict[str, object]:
    """What is written."""
    from kvtier.errors import ConfigError, KVTierError

    try:
        report = measure(name)
    except ModuleNotFoundError as error:
        return {"missing": f"the package {error.name!r} is not installed"}
    except ConfigError as error:
        return {"missing": str(error)}
    except Exception as error:  # ours: a copy that hangs, a wrong byte; torch's, CuPy's, Triton's, the driver's
        return {"error": str(error) if isinstance(error, (KVTierError, RuntimeError)) else f"{type(error).__name__}: {error}"}
    report.finish(None)
    return {"report": report.as_json()}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(found(sys.argv[1])))
