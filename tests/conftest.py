"""What no test may depend on: the caller's terminal, proxies and settings of kvtier; and the profiles of the property tests.

``--hypothesis-profile=long`` looks much further than the default one.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

# So that test modules can import property_examples. Not this folder itself: tests/vllm would be taken for vLLM.
sys.path.append(str(Path(__file__).parent / "support"))

_OF_THE_CALLER: Final = re.compile(
    r"COLUMNS|LINES|TERM|TERMINAL_WIDTH|COLORTERM|NO_COLOR|FORCE_COLOR|PY_COLORS|CLICOLOR\w*|TTY_\w+|GITHUB_ACTIONS"
    r"|\w+_proxy|\w+_PROXY|KVTIER_\w+")
"""Variables that change what is printed, how it is wrapped, whom a test on this machine asks, or how a cache is configured."""

for _name in filter(_OF_THE_CALLER.fullmatch, list(os.environ)):  # here: some are read when a package is imported
    del os.environ[_name]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background jobs so, and whatever the tests start would take it over
    signal.signal(signal.SIGINT, signal.default_int_handler)

with suppress(ModuleNotFoundError):  # `make test-gpu` does without hypothesis
    from hypothesis import HealthCheck, Phase, settings

    _PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink)  # not explain: it traces every line, for minutes
    _SLOW_MACHINE = (HealthCheck.too_slow, HealthCheck.data_too_large)

    settings.register_profile("default", deadline=None, max_examples=60, stateful_step_count=40, phases=_PHASES,
                              suppress_health_check=_SLOW_MACHINE)
    settings.register_profile("long", deadline=None, max_examples=1000, stateful_step_count=100, phases=_PHASES,
                              suppress_health_check=_SLOW_MACHINE)
    settings.load_profile("default")
