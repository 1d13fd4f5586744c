"""Flipped bits, torn and misdirected writes: the damaged block is not served, and the index never becomes shorter without a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.bench.integrity_damage import DamagedStore
from kvtier.bench.integrity_outcome import Outcome

IN_SLAB = {"flip_in_payload": DamagedStore.flip_in_payload, "flip_in_header": DamagedStore.flip_in_header,
           "torn_write": DamagedStore.torn_write, "misdirected_write": DamagedStore.misdirected_write}
IN_INDEX = {"flip_in_index": DamagedStore.flip_in_index, "flip_in_log": DamagedStore.flip_in_log}
Damage = Callable[[DamagedStore], Outcome]


def require_sound(store: DamagedStore, damage: Damage, count: int) -> list[Outcome]:
    outcomes = [damage(store) for _ in range(count)]
    assert all(outcome.wrong == outcome.unexplained == outcome.silent == 0 for outcome in outcomes)
    return outcomes


@pytest.mark.parametrize("damage", IN_SLAB.values(), ids=list(IN_SLAB))
def test_damage_to_a_slot_costs_its_block_and_no_other(tmp_path: Path, damage: Damage) -> None:
    for outcome in require_sound(DamagedStore(tmp_path, seed=3), damage, 4):
        assert outcome.lost == 1
        assert not outcome.rebuilt


@pytest.mark.parametrize("damage", IN_INDEX.values(), ids=list(IN_INDEX))
def test_a_flipped_bit_in_the_index_costs_no_block(tmp_path: Path, damage: Damage) -> None:
    outcomes = require_sound(DamagedStore(tmp_path, seed=7), damage, 16)
    assert any(outcome.rebuilt for outcome in outcomes)
    assert all(outcome.lost == 0 for outcome in outcomes)


def test_a_full_drive_costs_no_block_and_is_written_to_again_when_it_has_room(tmp_path: Path) -> None:
    [outcome] = require_sound(DamagedStore(tmp_path, seed=5), DamagedStore.no_room, 1)
    assert outcome.lost == 0
    assert outcome.committed > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_1000_flipped_bits_serve_no_wrong_block_and_shorten_no_index_in_silence(tmp_path: Path) -> None:
    store = DamagedStore(tmp_path, seed=6)
    for damage in (DamagedStore.flip_in_payload, DamagedStore.flip_in_header):
        assert all(outcome.lost == 1 for outcome in require_sound(store, damage, 250))
    for damage in IN_INDEX.values():
        assert all(outcome.lost == 0 for outcome in require_sound(store, damage, 250))
