"""``start_thread``: a daemon thread, or an error that says what to do (a container's limit on processes counts threads)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvtier.errors import ConfigError


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon: work that hangs in the kernel must not keep the process from ending.

    Raises:
        ConfigError: the system starts no more threads for this process.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ConfigError(f"thread {name!r} cannot be started ({error}); raise the limit on processes (ulimit -u, the container's "
                          "limit on pids), or run fewer threads in this process") from error
    return thread
