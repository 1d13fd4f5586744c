"""Uses of prompts change only what weights say: with equal weights, blocks are given up as without any history."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvtier.errors import CapacityError
from kvtier.policies.eviction import GRADE_LISTS
from kvtier.tiering.ledger.group import FULL, GroupSpec
from kvtier.tiering.ledger.invariants import verify
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.rules import LedgerRules


@pytest.mark.parametrize("seed", [10, 15])
def test_with_equal_weights_a_history_changes_nothing(seed: int) -> None:
    """A run of blocks that are taken at once ends where a block of another grade would be next. (Seeds for which it once did not.)"""
    without, with_history = (_hits(seed, LedgerRules(policy="lru", history_stride=1, nvme_min_uses=uses)) for uses in (0, 1))
    assert without == with_history


def test_a_prompt_asked_for_under_one_salt_or_adapter_is_new_under_another() -> None:
    ledger = Ledger([GroupSpec((8, 0, 0), FULL)], 4, LedgerRules(policy="seen-first", history_stride=1))
    for number in range(3):  # until something has had to go
        _serve(ledger, [number] * 30)
    tokens = list(range(100, 117))
    assert _serve(ledger, tokens, cache_salt="a") == [0] * 4
    _serve(ledger, [7] * 30)
    assert _serve(ledger, tokens, cache_salt="a") == [GRADE_LISTS[1]] * 4, "given up meanwhile, and remembered"
    for keywords in ({"cache_salt": "b"}, {"lora_id": 1}, {}):
        assert _serve(ledger, tokens, **keywords) == [0] * 4


def _serve(ledger: Ledger, tokens: list[int], **keywords: Any) -> list[int]:
    """A whole request. Returns the grades of its full blocks."""
    ledger.add_sequences([Request(1, tokens, **keywords)])
    ledger.mark_computed(1, len(tokens))
    grades = [block.grade_list for block in ledger.sequence(1).rows[0].blocks[:(len(tokens) - 1) // 4]]
    ledger.remove_sequence(1, True)
    return grades


def _hits(seed: int, rules: LedgerRules) -> list[tuple[int, int]]:
    """Reused tokens of requests that often continue or repeat an earlier one, up to four at a time."""
    dice = random.Random(seed)
    ledger = Ledger([GroupSpec((40, 0, 0), FULL)], 4, rules)
    prompts: list[list[int]] = []
    active: list[int] = []
    hits: list[tuple[int, int]] = []
    number = 0
    for _ in range(400):
        if active and (dice.random() < 0.5 or len(active) > 3):
            ledger.remove_sequence(active.pop(dice.randrange(len(active))), True)
            continue
        if prompts and dice.random() < 0.7:
            tokens = dice.choice(prompts)
            tokens = [*tokens[:dice.randint(1, len(tokens))], *[dice.randint(0, 9) for _ in range(dice.randint(1, 8))]][:44]
        else:
            tokens = [dice.randint(0, 99) for _ in range(dice.randint(4, 40))]
        prompts = [*prompts, tokens][-30:]
        number += 1
        try:
            [sequence] = ledger.add_sequences([Request(number, tokens)])
        except CapacityError:
            continue
        hits.append((number, sequence.prepopulated))
        ledger.mark_computed(number, len(tokens))
        active.append(number)
    verify(ledger)
    return hits
