"""``kvtier doctor``: what this machine can do for the tier, each line with the exact next step.

Only looks: it allocates nothing, and writes a temporary file into the directory that it is asked about, which it removes again.
It never opens the GDS driver itself, because that call may spin for ever: another process tries it, with a deadline.
"""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import kvtier
from kvtier.errors import ConfigError
from kvtier.io.copy_report import measured_elsewhere
from kvtier.io.direct_file import refuses_direct
from kvtier.io.gds_probe import MEMORY_FILE_SYSTEMS, NO_GDS_FILE_SYSTEMS, obstacle, try_directory
from kvtier.io.rank_directories import occupied_by_ranks, rank_directory, require_root
from kvtier.pools.host_memory import free_disk_bytes, host_memory, memlock_limit, mount_of, shared_memory, usable_cpus
from kvtier.pools.sizing import SizeKind, format_bytes, parse_sizes
from kvtier.tiering.build import host_copy_failure, is_compiled
from kvtier.tiering.config import TierConfig
from kvtier.tiering.config_reference import settings_as_json, sizes_in_words
from kvtier.tiering.config_sources import expand_path

_SMALL_SHARED_MEMORY: Final = 1 << 30


class Status(enum.Enum):
    """Verdict of one line."""

    OK = "ok"
    WARN = "warn"  #: works, with a limit that the next step lifts
    FAIL = "fail"  #: something that was asked for does not work


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``next_step`` is empty when there is nothing to do."""

    name: str
    status: Status
    found: str
    next_step: str = ""


@dataclass(frozen=True)
class Report:
    """All findings, and the configuration; None when it is bad."""

    findings: tuple[Finding, ...]
    configuration: TierConfig | None

    @property
    def ok(self) -> bool:
        """No line failed."""
        return all(finding.status is not Status.FAIL for finding in self.findings)

    def as_json(self) -> dict[str, object]:
        """The report as plain values."""
        return {
            "kvtier": kvtier.__version__, "ok": self.ok,
            "checks": [{"name": finding.name, "status": finding.status.value, "found": finding.found,
                        "next_step": finding.next_step} for finding in self.findings],
            "config": {} if self.configuration is None else settings_as_json(self.configuration),
        }


def examine(directory: Path | None = None, config_file: Path | None = None) -> Report:
    """Look at this machine.

    Args:
        directory: folder that the NVMe level would use; the configuration's ``nvme_directory`` when None.
        config_file: read this file instead of the one that ``KVTIER_CONFIG`` names.

    Raises:
        ConfigError: ``directory`` is empty, or names a variable or user that does not exist.
    """
    if directory is not None:
        directory = expand_path(directory, "directory")
    findings: list[Finding] = []
    config: TierConfig | None = None
    try:
        config = TierConfig.from_file(config_file) if config_file is not None else TierConfig()
        findings.append(Finding("configuration", Status.OK, str(config_file) if config_file is not None else "see below"))
    except ConfigError as error:
        findings.append(Finding("configuration", Status.FAIL, str(error), "correct this value, then run kvtier doctor again"))
    if config is not None and config.faults is not None:
        findings.append(Finding("faults", Status.WARN, f"injected into every cache ({config.sources['faults']}): {config.faults}",
                                "remove faults there: blocks are really lost and files really deleted"))
    if directory is None and config is not None:
        directory = config.nvme_directory
    gpu = _gpu()
    findings += [_python(), _kvtier(), _torch(gpu), gpu]
    findings += [_package(name, gpu, without) for name, without in
                 (("cupy", 'device="cuda" cannot run'), ("kvikio", "NVMe goes through the host (POSIX), not GPUDirect"))]
    findings += [_copies(gpu), _cpus(), _host_memory(), _memlock(gpu), _shared_memory()]
    findings += [*_ranks(directory, config), *_directory(directory, config, gpu)]
    return Report(tuple(findings), config)


def _python() -> Finding:
    return Finding("Python", Status.OK, f"{platform.python_version()} ({sys.executable})")


def _gpu() -> Finding:
    """Looks for the driver's own files: asking CUDA would need torch or cupy to be well."""
    version = Path("/proc/driver/nvidia/version")
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if devices and version.exists():
        first_line = version.read_text().splitlines()[0].removeprefix("NVRM version: ")
        return Finding("GPU", Status.OK, f"{len(devices)} NVIDIA device(s); driver {' '.join(first_line.split())}")
    if devices or version.exists():
        return Finding("GPU", Status.FAIL, "an NVIDIA driver without devices, or devices without a driver",
                       "run nvidia-smi and follow its message; in a container start it with --gpus all")
    return Finding("GPU", Status.WARN, 'no NVIDIA device; device="cpu" works',
                   "for CUDA: install the NVIDIA driver, or start the container with --gpus all")


def _torch(gpu: Finding) -> Finding:
    try:
        import torch
    except Exception as error:  # a half-installed torch raises almost anything, and that is what a doctor is for
        return Finding("torch", Status.FAIL, f"cannot be imported: {error}", "pip install -c constraints-cpu.txt torch")
    built_for = torch.version.cuda
    found = f"{torch.__version__} ({f'CUDA {built_for}' if built_for else 'CPU build'}, {torch.get_num_threads()} threads)"
    if gpu.status is not Status.OK:
        return Finding("torch", Status.OK, found)
    if built_for is None:
        return Finding("torch", Status.WARN, f"{found}, but there is a GPU",
                       "install a CUDA build: pip install --force-reinstall torch (without constraints-cpu.txt)")
    if not torch.cuda.is_available():
        return Finding("torch", Status.FAIL, f"{found}, but CUDA does not start",
                       "run nvidia-smi: the driver must support this CUDA version; else install a matching torch")
    return Finding("torch", Status.OK, f"{found}, {torch.cuda.get_device_name(0)}")


def _package(name: str, gpu: Finding, without: str) -> Finding:
    """Presence only: importing cupy or kvikio starts nothing here that a doctor should start."""
    present = importlib.util.find_spec(name) is not None
    version = next((importlib.metadata.version(distribution) for distribution in
                    importlib.metadata.packages_distributions().get(name, [])), "unknown version") if present else ""
    if gpu.status is not Status.OK:
        return Finding(name, Status.OK, f"{version or 'not installed'}; not needed without a GPU")
    if not present:
        return Finding(name, Status.WARN, f"not installed: {without}", "pip install 'kvtier[cuda]'")
    return Finding(name, Status.OK, version)


def _copies(gpu: Finding) -> Finding:
    """How copies of many small pieces go: another process measures it, as every process with a cache does when it starts."""
    if gpu.status is not Status.OK:
        return Finding("copies", Status.OK, "by the CPU; the ways of a GPU are measured where there is one")
    paths, reason = measured_elsewhere("cuda:0")
    if paths:
        return Finding("copies", Status.OK, "; ".join([f"{direction}: {path}" for direction, path in paths.items()]))
    return Finding("copies", Status.WARN, f"a call for each piece, nothing else was measured: {reason}",
                   "update the driver to 12.8 or later, and install triton, if many small blocks are moved")


def _kvtier() -> Finding:
    """Which of the two wheels this is, and whether its module in C can be loaded."""
    version = kvtier.__version__
    if not is_compiled():
        return Finding("kvtier", Status.OK, f"{version}, plain Python")
    failure = host_copy_failure()
    if failure is not None:
        return Finding("kvtier", Status.WARN, f"{version}, compiled, but copies on the host are library calls: {failure}",
                       "install the compiled wheel of this platform again")
    return Finding("kvtier", Status.OK, f"{version}, compiled")


def _cpus() -> Finding:
    count = usable_cpus()
    if count < 2:
        return Finding("CPUs", Status.WARN, f"{count} usable", "give the process 2 or more: copies run beside the engine")
    return Finding("CPUs", Status.OK, f"{count} usable")


def _host_memory() -> Finding:
    try:
        memory = host_memory()
    except ConfigError as error:
        return Finding("host memory", Status.FAIL, str(error), "run on Linux with /proc mounted")
    found = (f"{format_bytes(memory.available_bytes)} available of {format_bytes(memory.total_bytes)}, "
             f"bounded by {memory.limited_by}")
    if memory.cgroup is not None:
        found += f"; cgroup limit {format_bytes(memory.cgroup.limit_bytes)}"
    if memory.available_bytes < 1 << 30:
        return Finding("host memory", Status.WARN, found, "free memory or raise the container's memory limit (--memory)")
    return Finding("host memory", Status.OK, found)


def _memlock(gpu: Finding) -> Finding:
    limit = memlock_limit()
    if limit is None:
        return Finding("memlock", Status.OK, "unlimited")
    found = f"limit {format_bytes(limit)}"
    if gpu.status is Status.OK:
        return Finding("memlock", Status.WARN, f"{found}; pinning the secondary level may be refused",
                       "ulimit -l unlimited, or start the container with --ulimit memlock=-1")
    return Finding("memlock", Status.OK, f"{found}; nothing is pinned without a GPU")


def _shared_memory() -> Finding:
    found = shared_memory()
    if found is None:
        return Finding("/dev/shm", Status.WARN, "not mounted", "mount it; in a container: --shm-size=8g or --ipc=host")
    text = f"{format_bytes(found[0])} free of {format_bytes(found[1])}"
    if found[1] < _SMALL_SHARED_MEMORY:
        return Finding("/dev/shm", Status.WARN, f"{text}; an arena shared between processes would not fit",
                       "start the container with --shm-size=8g or --ipc=host")
    return Finding("/dev/shm", Status.OK, text)


def _ranks(directory: Path | None, config: TierConfig | None) -> list[Finding]:
    """Who this process is among several, what that makes of the sizes, and whether the directory is theirs. Nothing for a single rank."""
    if config is None:
        return []
    found = f"rank {config.rank} of {config.num_ranks}; {'; '.join(sizes_in_words(config))}"
    try:
        if directory is not None:
            require_root(directory, config.num_ranks)
            found += f"; its store is {rank_directory(directory, config.rank, config.num_ranks)}"
    except ConfigError as error:
        return [Finding("ranks", Status.FAIL, str(error), "set num_ranks to what the directory was made for, or choose another one")]
    return [Finding("ranks", Status.OK, found)] if config.num_ranks > 1 else []


def _directory(directory: Path | None, config: TierConfig | None, gpu: Finding) -> list[Finding]:
    """File system, free space, direct I/O and GPUDirect of the folder for the NVMe level."""
    if directory is None:
        found = [Finding("NVMe directory", Status.WARN, "none given: the NVMe level was not looked at",
                         "kvtier doctor --directory /path/on/nvme, or set nvme_directory")]
        return [*found, _gpudirect(None, config, gpu)] if config is not None and config.gds == "required" else found
    folder = directory.absolute()
    try:
        while not folder.is_dir() and folder != folder.parent:
            if folder.exists():
                return [Finding("NVMe directory", Status.FAIL, f"{folder} is not a folder", "choose another path")]
            folder = folder.parent
    except OSError as error:
        return [Finding("NVMe directory", Status.FAIL, f"{directory} cannot be looked into: {error.strerror}", "choose a folder that "
                        "this user may use")]
    findings = []
    if folder != directory.absolute():
        findings.append(Finding("NVMe directory", Status.WARN, f"{directory} does not exist; looked at {folder} instead",
                                f"mkdir -p -m 700 {directory}"))
    return [*findings, _file_system(folder), _free_space(folder, config), _direct(folder), _gpudirect(folder, config, gpu)]


def _file_system(folder: Path) -> Finding:
    kind, mount = mount_of(folder)
    found = f"{kind} mounted at {mount}"
    if kind in MEMORY_FILE_SYSTEMS:
        return Finding("file system", Status.WARN, f"{found}: this is memory, not NVMe", "choose a folder on an NVMe drive")
    if kind.split(".")[0] in NO_GDS_FILE_SYSTEMS:
        return Finding("file system", Status.WARN, f"{found}: no GPUDirect Storage there",
                       "for GPUDirect choose a folder on ext4 or xfs on a local NVMe drive")
    return Finding("file system", Status.OK, found)


def _free_space(folder: Path, config: TierConfig | None) -> Finding:
    free = free_disk_bytes(folder) + occupied_by_ranks(folder)
    reserve = config.nvme_free_space_reserve_bytes if config is not None else 0
    wanted = sum(int(size.amount) for size in parse_sizes(config.nvme, "nvme") if size.kind is SizeKind.BYTES) if config else 0
    if config is not None and config.size_scope == "rank":
        wanted *= config.num_ranks
    found = f"{format_bytes(free)} free (kvtier's own files count as free), of which {format_bytes(reserve)} are kept free"
    if free < reserve:
        return Finding("free space", Status.FAIL, found, "free space there, or lower nvme_free_space_reserve")
    if free - reserve < wanted:
        return Finding("free space", Status.FAIL, f"{found}; nvme wants {format_bytes(wanted)}",
                       "lower nvme, or choose a larger drive")
    return Finding("free space", Status.OK, found)


def _direct(folder: Path) -> Finding:
    """Writes a page with O_DIRECT, reads it back and compares: the only truth about a mount."""
    try:
        reason = refuses_direct(folder)
    except OSError as error:
        return Finding("direct I/O", Status.FAIL, f"{folder} cannot be written: {error.strerror}",
                       f"chown {os.getuid()} {folder}, or choose another folder")
    if reason is not None:
        return Finding("direct I/O", Status.WARN, f"{reason}; blocks would go through the page cache",
                       "choose a folder on ext4 or xfs on a local NVMe drive")
    return Finding("direct I/O", Status.OK, f"a page written and read back with O_DIRECT in {folder}")


def _gpudirect(folder: Path | None, config: TierConfig | None, gpu: Finding) -> Finding:
    """What ``gds`` in the configuration comes to: another process writes, reads back and compares through KvikIO."""
    wish = config.gds if config is not None else "auto"
    if wish == "off":
        return Finding("GPUDirect", Status.OK, 'gds="off": NVMe goes through the host (POSIX)')
    is_without_gpu = gpu.status is not Status.OK
    if folder is None:
        reason: str | None = "there is no folder to try it in; set nvme_directory"
    elif is_without_gpu:
        reason = "no NVIDIA device"
    else:
        reason = obstacle("cuda:0", folder)
        if reason is None:
            reason = try_directory(folder, "cuda:0")
    if reason is None:
        return Finding("GPUDirect", Status.OK, f"1 MiB written, read back and compared between cuda:0 and {folder} without the host")
    if wish == "required":
        return Finding("GPUDirect", Status.FAIL, f'gds="required": {reason}', 'remove the reason, or set gds="auto" to go through the host')
    if is_without_gpu:
        return Finding("GPUDirect", Status.OK, f"{reason}: NVMe goes through the host (POSIX)")
    return Finding("GPUDirect", Status.WARN, f"NVMe goes through the host (POSIX): {reason}", 'remove the reason, or set gds="off" to '
                   "stop looking for it")


def print_report(report: Report, say: Callable[[str], None]) -> None:
    """Write the report for people, one line per finding, the next step below it."""
    for finding in report.findings:
        say(f"{finding.status.value:5} {finding.name:15} {finding.found}")
        if finding.next_step:
            say(f"      {'':15} -> {finding.next_step}")
    if report.configuration is not None:
        say("\neffective configuration")
        for key, value, source in report.configuration.effective():
            say(f"      {key:31} {value:12} {source}")
