"""Profiles of the property tests: ``--hypothesis-profile=long`` looks much further than the default one."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_SLOW_MACHINE = (HealthCheck.too_slow, HealthCheck.data_too_large)

settings.register_profile("default", deadline=None, max_examples=60, stateful_step_count=40, suppress_health_check=_SLOW_MACHINE)
settings.register_profile("long", deadline=None, max_examples=2000, stateful_step_count=100, suppress_health_check=_SLOW_MACHINE)
settings.load_profile("default")
