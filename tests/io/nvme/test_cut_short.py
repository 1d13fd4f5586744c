"""A call that Ctrl-C cuts short, wherever it lands, keeps the directory from nobody, and what it holds is whole for the next start."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from interrupting import cut_short

import kvtier.io
from kvtier.io import store_directory, store_gate, store_open
from kvtier.io.nvme_store import NvmeStore
from kvtier.io.store_commands import rebuild_store
from kvtier.io.store_gate import StoreGate

IO = Path(kvtier.io.__file__).parent


def file_of(module: ModuleType) -> Path:
    assert module.__file__ is not None
    return Path(module.__file__)


def damage(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_opening_that_is_cut_short_keeps_nobody_out(nvme: Any, caplog: pytest.LogCaptureFixture) -> None:
    written = nvme.fill(nvme.open())
    nvme.stores.pop().close(60.0)
    opened: list[NvmeStore] = []
    place = 0
    while cut_short(lambda: opened.append(nvme.open()), place, room=IO):
        if not opened:  # else nothing of it was cut short but the rest of the function here
            place += 5
            store = nvme.open()
            assert nvme.stored(store) == written
            assert not store.stats().rebuilt
            nvme.stores.pop().close(60.0)
    assert place > 100
    assert damage(caplog) == []
    assert sorted(os.listdir(nvme.directory)) == ["group-0.slab", "group-1.slab", "kvtier-store.json", "kvtier.lock", "manifest.sqlite",
                                                  "manifest.sqlite-shm", "manifest.sqlite-wal"]


def test_calls_that_are_cut_short_keep_no_store_from_closing_and_the_next_start_finds_it_whole(nvme: Any,
                                                                                             caplog: pytest.LogCaptureFixture) -> None:
    def live(store: NvmeStore) -> None:
        assert store.write_blocks([nvme.item(slot, ("new", slot)) for slot in (0, 1, 4)]) == [None] * 3
        assert nvme.reads_right(store, 0, 4, nvme.key(("new", 4)))
        store.quarantine(0, 2, "a trial")
        store.discard(0, [5, 6])

    place, was_cut = 0, True
    while was_cut:
        store = nvme.open()
        store.release()
        nvme.fill(store)
        caplog.clear()
        was_cut = cut_short(lambda store=store: live(store), place, room=IO)
        nvme.fill(store, slots=[3])
        assert nvme.stores.pop().close(20.0)
        store = nvme.open()
        assert not store.stats().rebuilt
        assert set(store.quarantined()) <= {(0, 2)}
        assert all(nvme.reads_right(store, *at, key) for at, key in nvme.stored(store).items())
        nvme.stores.pop().close(60.0)
        assert [text for text in damage(caplog) if "a trial" not in text] == []
        place += 23
    assert place > 200


def test_a_rebuild_that_is_cut_short_leaves_the_old_manifest_or_the_new_one(nvme: Any, caplog: pytest.LogCaptureFixture) -> None:
    written = nvme.fill(nvme.open(), slots=range(3))
    nvme.stores.pop().close(60.0)
    place = 0
    while cut_short(lambda: rebuild_store(nvme.directory), place, room=file_of(store_open)):
        store = nvme.open()
        assert nvme.stored(store) == written
        assert not store.stats().rebuilt
        nvme.stores.pop().close(60.0)
        place += 7
    assert place > 20
    assert damage(caplog) == []


def test_a_reset_whose_identity_is_in_place_but_not_yet_made_durable_is_the_one_that_counts(nvme: Any,
                                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    store = nvme.open()
    nvme.fill(store)

    def cut(_path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store_directory, "sync_directory", cut)
        with pytest.raises(KeyboardInterrupt):
            store.clear()
    written = nvme.fill(store, slots=[1])
    store = nvme.reopen()
    assert not store.stats().rebuilt
    assert nvme.stored(store) == written


def test_a_passage_that_is_cut_short_at_either_end_is_not_waited_for() -> None:
    def come_and_go(gate: StoreGate) -> None:
        with gate:
            pass

    place, was_cut = 0, True
    while was_cut:
        gate = StoreGate("/store")
        was_cut = cut_short(lambda gate=gate: come_and_go(gate), place, room=file_of(store_gate))
        assert gate.close(0.0)
        place += 1
    assert place > 3


def test_a_manifest_that_was_not_replaced_has_its_log_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, a log that has lost its end could not be told any more, and the manifest would be shortened without a word."""
    def cut(*_paths: Path) -> None:
        raise KeyboardInterrupt

    temporary, path, log = (tmp_path / name for name in ("manifest.sqlite.tmp", "manifest.sqlite", "manifest.sqlite-wal"))
    for file in (temporary, path, log):
        file.write_text(file.name)
    monkeypatch.setattr(os, "replace", cut)
    with pytest.raises(KeyboardInterrupt):
        store_open._put_in_place(temporary, path, logging.ERROR)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {file.name: file.name for file in (temporary, path, log)}
