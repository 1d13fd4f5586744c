"""Reading a manifest in columns finds what reading row by row finds, whatever a row has become."""

from __future__ import annotations

import gc
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.io import manifest_reading
from kvtier.io.collector import collector_paused
from kvtier.io.manifest import Manifest
from kvtier.io.manifest_reading import sound_rows
from kvtier.io.manifest_rows import ManifestContents, ManifestRow

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
ROWS = st.builds(ManifestRow, INT64, INT64, st.binary(min_size=32, max_size=32), INT64, st.binary(min_size=16, max_size=16), INT64,
                 st.floats(allow_nan=False), INT64)
ANYTHING = st.one_of(st.none(), INT64, st.floats(allow_nan=False), st.binary(max_size=40))


@given(st.lists(ROWS, min_size=1, max_size=20, unique_by=lambda row: row[:2]))
def test_rows_that_match_their_digests_come_out_as_they_went_in(rows: list[ManifestRow]) -> None:
    raw = [(*row, row.digest()) for row in rows]
    found = sound_rows(raw)
    assert found is not None
    assert found[0] == {(row.group, row.slot): row for row in rows}
    assert all(type(row) is ManifestRow for row in found[0].values())
    assert list(found[1]) == [row.digest() for row in rows]


@given(st.lists(ROWS, min_size=1, max_size=9, unique_by=lambda row: row[:2]), st.integers(0, 8), st.integers(0, 8), ANYTHING)
def test_one_column_that_has_changed_is_noticed_and_costs_its_row_alone(rows: list[ManifestRow], which: int, column: int,
                                                                        value: Any) -> None:
    raw: list[list[Any]] = [[*row, row.digest()] for row in rows]
    bad = raw[which % len(raw)]
    if value == bad[column]:
        return
    bad[column] = value
    assert sound_rows([tuple(each) for each in raw]) is None
    contents = ManifestContents()
    sound, _digests = manifest_reading._sound_ones([tuple(each) for each in raw], contents)
    assert len(contents.bad_rows) == 1
    assert sorted(sound.values()) == sorted(row for number, row in enumerate(rows) if number != which % len(raw))


@pytest.fixture
def manifest_path(tmp_path: Path) -> Path:
    path = tmp_path / "manifest.sqlite"
    manifest = Manifest(path, bytes(32))
    manifest.create()
    manifest.put([ManifestRow(0, slot, bytes([slot % 256]) * 32, 8192, bytes(16), 35, 0.0, 0) for slot in range(2500)])
    manifest.close(60.0)
    return path


def test_a_bad_row_costs_none_of_those_that_are_read_with_it(manifest_path: Path) -> None:
    connection = sqlite3.connect(manifest_path)
    connection.execute("UPDATE blocks SET length = 4096 WHERE slot IN (3, 1500)")
    connection.execute("UPDATE blocks SET key = 'text' WHERE slot = 1501")
    connection.commit()
    connection.close()
    manifest = Manifest(manifest_path, bytes(32))
    contents = manifest.load()
    manifest.close(60.0)
    assert sorted(contents.bad_rows) == [(0, 3), (0, 1500), (0, 1501)]
    assert contents.damage == ["3 rows do not match their digest"]
    assert sorted(contents.rows) == [(0, slot) for slot in range(2500) if slot not in (3, 1500, 1501)]


def test_what_a_start_makes_is_not_walked_by_the_next_collection_and_what_somebody_froze_stays_frozen() -> None:
    gc.unfreeze()  # what others froze
    gc.collect()
    thresholds = gc.get_threshold()
    gc.set_threshold(1 << 30)  # no collection in between, which would make them old as well
    try:
        with collector_paused():
            made = [[number] for number in range(5000)]
        assert not {id(item) for item in made} & {id(item) for item in gc.get_objects(generation=0)}
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        with collector_paused():
            made = [[number] for number in range(5000)]
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
