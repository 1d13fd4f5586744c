"""Rules of ``KeyLedger`` that hold in every order of events: see ``key_machine``."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from key_machine import KeyMachine, NoBackingMachine, WarmKeyMachine


@pytest.mark.parametrize("machine", [KeyMachine, WarmKeyMachine, NoBackingMachine])
def test_no_order_of_events_breaks_an_invariant_or_serves_wrong_bytes(machine: type[KeyMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None,
                                                         suppress_health_check=list(HealthCheck)))
