"""fio as a second yardstick for ``kvtier bench nvme``, where it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import TransferError

_PATIENCE = 300.0
_DYING = 30.0  # seconds; a killed process ends when the kernel has finished what it does for it


@dataclass(frozen=True)
class Fio:
    """The fio program with the settings of one measurement.

    Attributes:
        program: path of the executable.
        num_blocks, block_bytes: the file; ``num_blocks`` is a multiple of the threads used.
        direct: with O_DIRECT.
    """

    program: str
    num_blocks: int
    block_bytes: int
    direct: bool

    def run(self, mode: str, path: Path, num_threads: int) -> float:
        """Write ("write") or read ("read") the whole file once, synchronously, and return fio's own seconds.

        fio counts in milliseconds and without its start. Writing makes a preallocated file; reading needs one.

        Raises:
            TransferError: fio failed, or said something that is no result.
        """
        share = self.num_blocks // num_threads * self.block_bytes
        command = [self.program, "--name=kvtier", f"--filename={path}", f"--rw={mode}", f"--bs={self.block_bytes}",
                   f"--size={share}", f"--offset_increment={share}", f"--numjobs={num_threads}", "--thread", "--ioengine=psync",
                   f"--direct={int(self.direct)}", "--fallocate=posix", "--group_reporting", "--output-format=json"]
        try:
            output = _output_of(command, path.parent)
            report = json.loads(output[output.index("{"):])  # fio may put a remark in front of its JSON
            return max(float(report["jobs"][0][mode]["runtime"]), 1.0) / 1000.0
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or error.stdout or "").strip().splitlines()
            raise TransferError(f"fio failed with code {error.returncode}: {lines[0] if lines else 'it said nothing'}") from error
        except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, IndexError, TypeError) as error:
            raise TransferError(f"fio gave no result: {error!r}") from error


def _output_of(command: list[str], folder: Path) -> str:
    """What a command prints. It is over when this returns or raises, also for Ctrl-C: it must not write into a folder being removed."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder) as process:
        try:
            output, errors = process.communicate(timeout=_PATIENCE)
        except BaseException:
            process.kill()
            process.wait(_DYING)
            raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, output, errors)
        return output


def find_fio() -> str | None:
    """The executable; None where fio is not installed."""
    return shutil.which("fio")
