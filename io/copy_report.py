"""Which ways copies on a device take, asked of another process: ``kvtier doctor`` starts no CUDA and needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def measured_elsewhere(device: str, *, patience: float = 120.0,
                       command: Sequence[str] = (sys.executable, "-m", "kvtier.io.copy_calibration")) -> tuple[dict[str, str], str]:
    """Calibrate in another process, for somebody who must not start CUDA in this one. Blocks for some seconds, ``patience`` at most.

    Returns:
        what ``CopyPaths.describe`` gives, and why nothing was measured. Never raises.
    """
    try:
        done = subprocess.run([*command, device], capture_output=True, text=True, timeout=patience, check=False, stdin=subprocess.DEVNULL,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return dict(said["paths"]), str(said["reason"])
    except subprocess.TimeoutExpired:
        return {}, f"measuring did not end within {patience:.0f} s"
    except OSError as error:
        return {}, f"measuring cannot be started ({error})"
    except (IndexError, ValueError, KeyError, TypeError):
        last_words = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {}, f"measuring ended with exit code {done.returncode}: {last_words}"
