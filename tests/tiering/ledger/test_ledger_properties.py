"""The random machine over the whole ledger API, for every layout: ``ledger_machine``, ``serving_machine``, ``drafting_machine``.

A step is one call of a rule, followed by all checks; they are counted. `make test-compiled` takes 20,000 of them over all layouts, `make
test` fewer, since interpreted they take longer, and `make fuzz-ledger` a million.
"""

from __future__ import annotations

import os

import pytest
from drafting_machine import DraftingMachine
from group_layouts import LAYOUTS
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvtier.tiering.ledger import ledger

IS_COMPILED = not str(ledger.__file__).endswith(".py")
STEPS = int(os.environ.get("LEDGER_FUZZ_STEPS", 20_000 if IS_COMPILED else 5_000))  # over all layouts
STEPS_PER_LIFE = 40
MOST_SECONDS = 900 + STEPS // 1000
"""A failure is made small for up to five minutes. An alarm in the middle of that would be shown instead, as data generation that is not
deterministic."""


@pytest.mark.timeout(MOST_SECONDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_ledger_is_what_the_naive_model_says(name: str) -> None:
    class Machine(DraftingMachine):
        layout = name

    steps = -(-STEPS // len(LAYOUTS))
    while Machine.total_steps < steps:  # most lives end early
        lives = (steps - Machine.total_steps) // STEPS_PER_LIFE + 1
        run_state_machine_as_test(Machine, settings=settings(max_examples=lives, stateful_step_count=STEPS_PER_LIFE))
