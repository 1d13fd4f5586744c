"""``call_within``: a call that may hang in the kernel, waited for no longer than a time (design: every wait has a deadline)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvtier.errors import ConfigError
from kvtier.io.threads import start_thread

_log = logging.getLogger(__name__)


def call_within(timeout: float, call: Callable[[], None], name: str, at_end: Callable[[], None]) -> bool:
    """Call it in a thread of its own, so that only that thread hangs with it; here when there is no thread to be had.

    Args:
        timeout: seconds to wait.
        call: what to do.
        name: the thread's name.
        at_end: called when it is over, however late and however it ended.

    Returns:
        False when it was not over in time. It goes on then, and an error of it is logged.

    Raises:
        Exception: what ``call`` raised in time.
    """
    lock = threading.Lock()
    errors: list[Exception] = []
    is_awaited = True

    def run() -> None:
        try:
            call()
        except Exception as error:
            with lock:
                errors.append(error)
                if not is_awaited:
                    _log.warning("%s: failed, long after anybody waited for it: %s", name, error)
        finally:
            at_end()

    is_over = True
    try:
        thread = start_thread(run, name)
    except ConfigError:
        run()
    else:
        thread.join(timeout)
        is_over = not thread.is_alive()
    with lock:
        if errors:
            raise errors[0]
        is_awaited = False
    return is_over
