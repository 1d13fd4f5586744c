"""``remove_folder``: a benchmark leaves nothing on the drive, also when it was ended while a thread or fio was just starting."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)
_PATIENCE: Final = 30.0
_PAUSE: Final = 0.05


def remove_folder(folder: Path, patience: float = _PATIENCE, calm: float = 0.0) -> None:
    """Remove a folder with what is in it. What is made in it meanwhile is removed too, as long as ``patience`` (seconds) lasts.

    Ctrl-C can strike between the start of a thread or a program and the line that keeps its handle: nobody can wait for its end
    then, and a file that it makes keeps the folder from being removed at the first attempt, or makes it anew (fio makes the folders
    of its files). It has to stay away for ``calm`` seconds. What stays is said in the log.
    """
    deadline = time.monotonic() + patience
    gone_since = time.monotonic()
    while True:
        if not folder.exists():
            if time.monotonic() - gone_since >= calm:
                return
            time.sleep(_PAUSE)
            continue
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue  # another one removes it too
        except OSError as error:
            if time.monotonic() >= deadline:
                _log.warning("%s could not be removed (%s); remove it by hand", folder, error)
                return
            time.sleep(_PAUSE)
        gone_since = time.monotonic()
