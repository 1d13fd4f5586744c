"""Profiles of the property tests: ``--hypothesis-profile=long`` looks much further than the default one."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # so that test modules can import property_examples: importlib mode puts no folder there

with suppress(ModuleNotFoundError):  # `make test-gpu` does without hypothesis
    from hypothesis import HealthCheck, Phase, settings

    _PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink)  # not explain: it traces every line, for minutes
    _SLOW_MACHINE = (HealthCheck.too_slow, HealthCheck.data_too_large)

    settings.register_profile("default", deadline=None, max_examples=60, stateful_step_count=40, phases=_PHASES,
                              suppress_health_check=_SLOW_MACHINE)
    settings.register_profile("long", deadline=None, max_examples=1000, stateful_step_count=100, phases=_PHASES,
                              suppress_health_check=_SLOW_MACHINE)
    settings.load_profile("default")
