"""What ``kvtier check`` found: one line for each thing that was required, and what to do about the ones that did not hold."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import kvtier
from kvtier.bench.check_metrics import NVME_CHUNKS, Growth


class Verdict(enum.StrEnum):
    """Of one requirement, or of the whole check: the worst of its requirements."""

    PASSED = "passed"
    NOT_SHOWN = "not shown"
    """Neither right nor wrong: the circumstances did not let it be seen."""

    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """``name``: what was required; ``says``: what was seen; ``remedy``: what to do, empty where nothing is to be done."""

    name: str
    verdict: Verdict
    says: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "verdict": self.verdict.value, "says": self.says, "remedy": self.remedy}


@dataclass
class CheckResult:
    """The whole check.

    Attributes:
        level: asked for, "host" or "nvme".
        engine, model: what was checked.
        findings: in the order in which they were looked at.
        details: figures, for the JSON.
    """

    level: str
    engine: str
    model: str
    findings: list[Finding] = field(default_factory=list)
    details: dict[str, object] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        found = {finding.verdict for finding in self.findings}
        return next((worst for worst in (Verdict.FAILED, Verdict.NOT_SHOWN) if worst in found),
                    Verdict.PASSED if found else Verdict.NOT_SHOWN)

    @property
    def ok(self) -> bool:
        return self.verdict is Verdict.PASSED

    def as_json(self) -> dict[str, object]:
        return {"kvtier": kvtier.__version__, "ok": self.ok, "verdict": self.verdict.value, "level": self.level, "engine": self.engine,
                "model": self.model, "findings": [finding.as_json() for finding in self.findings], **self.details}

    def show(self, echo: Callable[[str], None]) -> None:
        """For people."""
        for finding in self.findings:
            echo(f"{finding.verdict.upper():<9}  {finding.name}: {finding.says}")
            if finding.remedy:
                echo(f"{'':<9}  -> {finding.remedy}")
        echo(f"kvtier check --level {self.level}: {self.verdict.upper()}")


LEVEL_NAMES: Final[Mapping[str, str]] = {"host": "host memory", "nvme": "NVMe"}


def why_no_hits(level: str, cold: Growth | None, warm: Growth, prompt_tokens: int) -> str:
    """What to do where the tier did not serve a prompt, out of what it counted meanwhile; ``cold`` is None after a restart."""
    seen, stored = warm.as_json(), cold.as_json() if cold is not None else {}
    if warm.after.cache.get("enable_prefix_caching") == "False":
        return "vLLM runs without prefix caching, so it never asks the tier: leave --no-enable-prefix-caching out"
    if seen["checksum_failures"] or seen["transfer_failures"]:
        return (f"{seen['checksum_failures']} chunks did not verify and {seen['transfer_failures']} transfers failed: look at the drive "
                "and the engine's log; kvtier store verify reads the folder when no engine runs")
    if seen["expired_lookups"]:
        return "the request stopped waiting for the tier: raise lookup_timeout in kv_connector_extra_config, or look at the drive's load"
    if stored.get("stores_skipped"):
        return (f"{stored['stores_skipped']} chunks of the prompt were not stored: secondary is too small for what is under way, or "
                "secondary_offload_min_priority is above 35")
    if level == "nvme" and warm.after.total(NVME_CHUNKS) == 0:
        return ("nothing is on NVMe: look for 'no NVMe level' in the engine's log, for nvme and nvme_directory in "
                "kv_connector_extra_config, and whether nvme_offload_min_priority is above 35")
    if warm.after.num_engines > 1:
        return (f"{warm.after.num_engines} engines are behind this address, each with a tier of its own: the second request may have "
                "gone to another one than the first; check each replica by itself")
    return (f"is a chunk (blocks_per_chunk x block_size) longer than this prompt of {prompt_tokens} tokens? Then use --tokens; after a "
            "restart: is PYTHONHASHSEED the same, and --prefix-caching-hash-algo sha256?")
