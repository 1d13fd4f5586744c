"""What ``kvtier store`` does to a directory: it needs no model, says what is there, and changes only what it says."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.io import store_view
from kvtier.io.nvme_store import NvmeStore
from kvtier.io.scrub import Scrubber, saved_place
from kvtier.io.store_commands import clear_store, collect_garbage, list_store, rebuild_store, scrub_store, verify_store
from kvtier.io.store_view import find_stores


@pytest.fixture
def filled(nvme):
    """A closed store of two groups with 8 blocks each; ``nvme.keys`` has them by place."""
    store = nvme.open()
    nvme.keys = nvme.fill(store, 0) | nvme.fill(store, 1)
    assert store.close(60.0)
    return nvme


def state(directory: Path) -> dict[str, bytes]:
    """All files but the lock."""
    return {entry.name: hashlib.sha256(entry.read_bytes()).digest() for entry in directory.iterdir() if entry.name != "kvtier.lock"}


def spoil(nvme, group: int, slot: int) -> None:
    nvme.flip(nvme.slab(group), nvme.geometries[group].offset(slot) + 4096 + 17)


COMMANDS = {"ls": list_store, "verify": verify_store, "scrub": lambda path: scrub_store(path, None), "rebuild": rebuild_store,
            "gc": collect_garbage, "clear": clear_store}
every_command = pytest.mark.parametrize("command", COMMANDS.values(), ids=list(COMMANDS))


# Directories that are not as they should be


@every_command
def test_a_store_in_use_is_refused_with_the_process_that_uses_it(filled, command) -> None:
    filled.open()
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}.*stop that one"):
        command(filled.directory)


@every_command
def test_a_store_of_another_version_is_refused_with_both_versions(filled, command) -> None:
    file = filled.directory / "kvtier-store.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"kvtier_store": 0}))
    before = state(filled.directory)
    with pytest.raises(ConfigError, match="format version is 0, this kvtier reads and writes 1"):
        command(filled.directory)
    assert state(filled.directory) == before


@every_command
def test_a_damaged_identity_is_refused_with_the_remedies(filled, command) -> None:
    filled.flip(filled.directory / "kvtier-store.json", 40)
    with pytest.raises(ConfigError, match=r"kvtier-store\.json cannot be used: .*Restore it.*or delete"):
        command(filled.directory)


@every_command
def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path, command) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    (tmp_path / "draft.tmp").write_text("x")
    with pytest.raises(ConfigError, match="is not a kvtier store"):
        command(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"thesis.tex", "draft.tmp"}


@pytest.mark.parametrize("name", ["scrub", "rebuild", "gc", "clear"])
def test_a_truncated_slab_is_refused_with_both_sizes(filled, name: str) -> None:
    os.truncate(filled.slab(), 5 * filled.geometries[0].stride)
    with pytest.raises(ConfigError, match=r"has 61440 bytes but its 8 slots need 98304: the file was truncated\. Restore it, or delete"):
        COMMANDS[name](filled.directory)


@pytest.mark.parametrize(("damage", "words"), [
    (lambda nvme: os.truncate(nvme.slab(), 61440), "has 61440 bytes but its 8 slots need 98304"),
    (lambda nvme: nvme.slab().unlink(), "group-0.slab is missing: the blocks of group 0 are gone"),
    (lambda nvme: nvme.sql("DELETE FROM blocks WHERE slot = 4"), "should hold 16 blocks and 0 quarantined slots, it holds 14 and 0"),
    (lambda nvme: (nvme.directory / "manifest.sqlite").unlink(), "manifest.sqlite is missing or empty")])
def test_ls_and_verify_say_what_is_damaged_and_repair_nothing(filled, damage, words: str) -> None:
    damage(filled)
    before = state(filled.directory)
    assert words in " ".join(list_store(filled.directory).damage)
    verified = verify_store(filled.directory)
    assert words in " ".join(verified.damage)
    assert not verified.ok
    assert state(filled.directory) == before


def test_stores_are_found_in_the_directory_or_right_below_the_root_of_several_ranks(filled, tmp_path: Path) -> None:
    assert find_stores(filled.directory) == [filled.directory]
    root = tmp_path / "root"
    for rank in ("rank-1", "rank-0"):
        filled.open(directory=root / rank).close(60.0)
    (root / "notes").mkdir()
    assert find_stores(root) == [root / "rank-0", root / "rank-1"]
    with pytest.raises(ConfigError, match="does not exist"):
        find_stores(tmp_path / "missing")
    with pytest.raises(ConfigError, match="is not a folder"):
        find_stores(filled.slab())
    with pytest.raises(ConfigError, match=r"it holds 0 entries.*nvme_directory"):
        find_stores(root / "notes")


# ls, verify


def test_ls_needs_no_model_and_shows_namespace_groups_and_bytes(filled, clock) -> None:
    store = filled.open(clock=clock)
    store.discard(1, [0, 1, 2])
    store.quarantine(0, 6, "x")
    assert store.write_blocks([filled.item(0, "soon over", group=1, expiry=clock.now + 5)]) == [None]
    store.close(60.0)
    listing = list_store(filled.directory, clock=lambda: clock.now + 5)
    assert listing.namespace == json.loads(filled.namespace)
    assert [(group.slots, group.blocks, group.num_bytes, group.expired, group.quarantined) for group in listing.groups] == \
        [(8, 7, 7 * 8192, 0, 1), (8, 6, 6 * 5000, 1, 0)]
    assert (listing.damage, listing.leftovers, listing.generation) == ((), (), 0)


def test_ls_and_verify_read_what_a_killed_process_left_and_leave_it_so(filled, tmp_path: Path) -> None:
    store = filled.open()
    store.discard(0, [0])
    copy = tmp_path / "killed"
    shutil.copytree(filled.directory, copy)  # the log is not folded in
    before = state(copy)
    assert [group.blocks for group in list_store(copy).groups] == [7, 8]
    assert verify_store(copy).ok
    assert state(copy) == before


def test_verify_finds_each_bad_block_and_quarantines_none(filled) -> None:
    assert verify_store(filled.directory).ok
    spoil(filled, 0, 3)
    spoil(filled, 1, 7)
    before = state(filled.directory)
    seen: list[tuple[int, int]] = []
    found = verify_store(filled.directory, lambda done, total: seen.append((done, total)))
    assert [(group, slot) for group, slot, _ in found.bad] == [(0, 3), (1, 7)]
    assert "checksum of the block" in found.bad[0][2]
    assert found.blocks == 16
    assert seen[-1] == (16, 16)
    assert not found.ok
    assert state(filled.directory) == before


# scrub


def test_scrub_quarantines_the_bad_blocks_for_good_and_counts_no_hit(filled) -> None:
    spoil(filled, 0, 3)
    done = scrub_store(filled.directory, None)
    assert [place for place, _ in done.bad] == [(0, 3)]
    assert (done.verified, done.next_place) == (16, None)
    assert scrub_store(filled.directory, None).bad == ()
    store = filled.open()
    assert store.quarantined() == [(0, 3)]
    assert sum(block.hits for block in store.stored_blocks()) == 0
    assert store.stats().read_blocks == 0


def test_scrub_goes_on_where_it_was_stopped_and_begins_anew_at_the_end(filled) -> None:
    with NvmeStore.open(filled.directory, filled.namespace, filled.geometries, free_space_reserve=0) as store:
        verified: list[tuple[int, int]] = []
        real = store.why_bad

        def watched(group, slot, key, out):
            verified.append((group, slot))
            return real(group, slot, key, out)

        store.why_bad = watched
        first = Scrubber(store, None).run(lambda: len(verified) == 5)
        assert first.next_place == saved_place(filled.directory) == (0, 5)
        second = Scrubber(store, None).run(lambda: len(verified) == 11)
        assert (second.verified, second.next_place) == (6, (1, 3))
        third = Scrubber(store, None).run()
        assert third.next_place is None
        assert verified == sorted(filled.keys)  # each once
        assert Scrubber(store, None).run().verified == 16


def test_scrub_sees_what_is_stored_while_it_runs_and_passes_over_what_is_gone(filled) -> None:
    with NvmeStore.open(filled.directory, filled.namespace, filled.geometries, free_space_reserve=0) as store:
        store.discard(0, [6])
        verified: list[tuple[int, int]] = []
        real = store.why_bad

        def meanwhile(group, slot, key, out):
            verified.append((group, slot))
            if (group, slot) == (0, 1):
                store.discard(0, [2])
                assert store.write_blocks([filled.item(6, "new")]) == [None]
            return real(group, slot, key, out)

        store.why_bad = meanwhile
        assert Scrubber(store, None).run().verified == 15
        assert (0, 2) not in verified
        assert (0, 6) in verified


def test_scrub_of_a_store_without_blocks_stops_when_told_to(nvme) -> None:
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 1

    with nvme.open() as store:
        assert Scrubber(store, None).run(stop).next_place == (1, 0)


@pytest.mark.parametrize("content", ["", "[]", '{"next": 7}', '{"next": ["a", 1]}', "\0"])
def test_a_damaged_place_begins_a_new_pass(filled, content: str) -> None:
    (filled.directory / "scrub.json").write_text(content)
    assert scrub_store(filled.directory, None).verified == 16


def test_scrub_keeps_to_its_bandwidth(filled) -> None:
    now = 0.0
    longest = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now, longest
        now += seconds
        longest = max(longest, seconds)

    with NvmeStore.open(filled.directory, filled.namespace, filled.geometries, free_space_reserve=0) as store:
        done = Scrubber(store, 10_000.0, clock=lambda: now, sleep=sleep).run()
    last = filled.geometries[1].stride
    assert done.num_bytes == 8 * sum(geometry.stride for geometry in filled.geometries)
    assert now == pytest.approx((done.num_bytes - last) / 10_000.0)  # nothing waits behind the last block
    assert longest <= 0.2  # a stop is obeyed soon


def test_a_block_that_goes_away_while_it_is_verified_is_not_bad(filled) -> None:
    spoil(filled, 0, 3)
    with NvmeStore.open(filled.directory, filled.namespace, filled.geometries, free_space_reserve=0) as store:
        real = store._slabs[0].read

        def overtaken(slot, key, out):
            store.discard(0, [slot])
            return real(slot, key, out)

        store._slabs[0].read = overtaken
        done = Scrubber(store, None).run()
        assert done.bad == ()
        assert store.quarantined() == []


# rebuild, gc, clear


def test_rebuild_makes_a_sound_manifest_anew_and_keeps_hits_and_quarantine(filled, caplog) -> None:
    store = filled.open()
    filled.read(store, 0, 2, filled.keys[0, 2])
    store.quarantine(0, 5, "x")
    store.discard(1, [4])
    store.close(60.0)
    caplog.set_level(logging.WARNING)
    caplog.clear()
    made = rebuild_store(filled.directory)
    assert (made.blocks, made.recovered, made.dropped, made.quarantined) == (15, 1, 0, 1)  # what was discarded is back
    assert caplog.text == ""
    store = filled.open()
    assert filled.stored(store) == {place: key for place, key in filled.keys.items() if place != (0, 5)}
    assert {block.slot: block.hits for block in store.stored_blocks() if block.group == 0}[2] == 1
    assert store.quarantined() == [(0, 5)]


def test_rebuild_brings_back_what_a_lost_manifest_held(filled) -> None:
    (filled.directory / "manifest.sqlite").unlink()
    assert rebuild_store(filled.directory).blocks == 16
    assert verify_store(filled.directory).ok


def test_gc_removes_expired_blocks_and_leftover_files_and_nothing_else(filled, clock) -> None:
    store = filled.open(clock=clock)
    assert store.write_blocks([filled.item(0, "over", expiry=clock.now), filled.item(1, "not yet", expiry=clock.now + 60)]) == [None, None]
    store.close(60.0)
    rebuild_store(filled.directory)
    (filled.directory / "manifest.sqlite.tmp").write_text("half")
    files = {entry.name for entry in filled.directory.iterdir() if ".damaged-" in entry.name or ".tmp" in entry.name}
    assert len(files) >= 2
    assert set(list_store(filled.directory).leftovers) == files
    gone = collect_garbage(filled.directory, clock=clock)
    assert gone.expired == 1
    assert set(gone.files) == files
    assert gone.num_bytes > 4
    listing = list_store(filled.directory)
    assert [group.blocks for group in listing.groups] == [7, 8]
    assert listing.leftovers == ()
    assert verify_store(filled.directory).ok


def test_a_released_slot_holds_nothing_and_takes_blocks_again(filled) -> None:
    store = filled.open()
    store.quarantine(0, 3, "x")
    store.quarantine(1, 3, "y")
    store.close(60.0)
    assert collect_garbage(filled.directory).released == 0
    assert collect_garbage(filled.directory, release=True).released == 2
    store = filled.open()
    assert store.quarantined() == []
    assert filled.stored(store) == {place: key for place, key in filled.keys.items() if place[1] != 3}
    assert store.write_blocks([filled.item(3, "new")]) == [None]
    assert len(filled.reopen().stored_blocks()) == 15


def test_clear_forgets_all_blocks_for_good(filled) -> None:
    scrub_store(filled.directory, None, seconds=0.0)
    assert clear_store(filled.directory) == 16
    assert sum(group.blocks for group in list_store(filled.directory).groups) == 0
    assert rebuild_store(filled.directory).blocks == 0


def test_ls_tells_a_full_folder_for_copies_from_a_full_store(filled, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    def full(source, destination):
        raise OSError(errno.ENOSPC, "No space left on device", str(source))

    monkeypatch.setattr(store_view.shutil, "copyfile", full)
    with pytest.raises(ConfigError, match=r"manifest.sqlite \(\d+ bytes\) cannot be copied into .*kvtier-view-.*, which is full.*TMPDIR"):
        list_store(filled.directory)
    monkeypatch.setattr(store_view.tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"no folder for a copy of the manifest can be made .*nowhere.*TMPDIR"):
        list_store(filled.directory)
