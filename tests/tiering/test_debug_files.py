"""Blocks of debugged requests travel through files of their own: readable, private, nowhere else, and never the only copy."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_engine import OTHER, PROMPT, MakeCache, ToyEngine, delays, fails, tokens_of, wait_until

from kvtier import ConfigError, CorruptBlock, KVCacheManager, Level, Request, RequestError, RetentionConfig, TransferError, TransferMode
from kvtier.io.faults import FaultOperation, Faults
from kvtier.tiering import debug_files, hang_watch
from kvtier.tiering.debug_files import read_debug_file
from kvtier.tiering.request_directory import RequestRoot

pytestmark = pytest.mark.usefixtures("no_failed_callbacks")

BLOCK_BYTES = 512
LINKS = ["link", "link/deeper", "folder/link"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "requests"


def debugged(directory: str = "mine") -> RetentionConfig:
    return RetentionConfig(transfer_mode=TransferMode.POSIX_DEBUG_FALLBACK, directory=directory)


def push_down(cache: KVCacheManager, engine: ToyEngine, retention: RetentionConfig | None = None) -> None:
    """PROMPT is stored and then pushed to the secondary level by another request with this retention."""
    engine.serve(Request(1, PROMPT))
    engine.serve(Request(2, tokens_of(7, 29), retention=retention))
    assert cache.transfers.idle(30.0)


def files_below(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_blocks_that_go_down_and_up_leave_files_and_are_right(make_cache: MakeCache, root: Path) -> None:
    cache = make_cache(8, 4, request_directory_root=root)
    engine = ToyEngine(cache)
    push_down(cache, engine, debugged("down"))
    down = files_below(root / "down")
    assert len(down) == cache.stats().offload_blocks[Level.PRIMARY, Level.SECONDARY] > 0
    assert engine.serve(Request(3, PROMPT, retention=debugged("up/deep"))) == 12  # checks every byte
    assert len(files_below(root / "up" / "deep")) == cache.stats().onboard_blocks[Level.SECONDARY, Level.PRIMARY] + (
        cache.stats().offload_blocks[Level.PRIMARY, Level.SECONDARY] - len(down)) > 0
    assert cache.stats().fallbacks == 0
    cache.verify()


def test_a_file_says_what_it_is(make_cache: MakeCache, root: Path) -> None:
    cache = make_cache(8, 4, request_directory_root=root)
    engine = ToyEngine(cache)
    engine.serve(Request(1, PROMPT))
    keys = set()
    with cache.locked() as ledger:
        for block in ledger.allocators[0].blocks:
            if block.node is not None and block.num_tokens == 4:
                keys.add(ledger.allocators[0].chain_key(block).hex())
    engine.serve(Request(2, tokens_of(7, 29), retention=debugged()))
    assert cache.transfers.idle(30.0)
    path = files_below(root)[0]
    first_line = path.read_bytes().partition(b"\n")[0]
    fields = json.loads(first_line)
    assert (fields["kind"], fields["version"], fields["group"], fields["bytes"]) == ("kvtier debug block", 1, 0, BLOCK_BYTES)
    assert fields["key"] in keys
    assert (fields["from"].split()[0], fields["to"].split()[0]) == ("primary", "secondary")
    assert [(part["name"], part["shape"], part["dtype"]) for part in fields["sections"]] == [("kv", [2, 2, 1, 4, 8], "float32")]
    found, payload = read_debug_file(path)
    assert found == fields
    assert payload == cache.read_block(fields["block_id"])


def test_folders_and_files_are_private(make_cache: MakeCache, root: Path) -> None:
    before = os.umask(0)
    try:
        cache = make_cache(8, 4, request_directory_root=root)
        push_down(cache, ToyEngine(cache), debugged("a/b"))
    finally:
        os.umask(before)
    for path in (root, root / "a", root / "a" / "b"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in files_below(root):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_blocks_from_nvme_go_through_files_too(make_cache: MakeCache, root: Path) -> None:
    cache = make_cache(8, 4, 16)
    ToyEngine(cache).serve(Request(1, PROMPT))
    assert cache.flush()
    cache.close()
    cache = make_cache(8, 4, 16, request_directory_root=root)
    engine = ToyEngine(cache)
    assert engine.serve(Request(1, PROMPT, retention=debugged(str(root / "absolute")))) == 12
    assert len(files_below(root / "absolute")) == 3
    assert cache.stats().onboard_blocks[Level.NVME, Level.PRIMARY] == 3
    assert cache.stats().loading.speeds[Level.NVME, Level.PRIMARY].bursts == 0  # no measure of anything
    cache.verify()


def test_a_bad_read_is_a_miss_here_too(make_cache: MakeCache, root: Path) -> None:
    cache = make_cache(8, 4, 16)
    ToyEngine(cache).serve(Request(1, PROMPT))
    assert cache.flush()
    cache.close()
    cache = make_cache(8, 4, 16, request_directory_root=root, faults=Faults([fails(FaultOperation.READ)]))
    engine = ToyEngine(cache)
    assert engine.serve(Request(1, PROMPT, retention=debugged())) == 0
    assert cache.stats().quarantined == 1
    cache.verify()


def test_other_requests_leave_no_files(make_cache: MakeCache, root: Path) -> None:
    cache = make_cache(8, 4, request_directory_root=root)
    push_down(cache, ToyEngine(cache))
    push_down(cache, ToyEngine(cache), RetentionConfig(directory="mine"))
    assert files_below(root) == []


# -- what goes wrong -----------------------------------------------------------------------------------------------------


def swap_for_link(root: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    (root.parent / "outside").mkdir()
    (root / "mine").symlink_to(root.parent / "outside")


def flip(_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_check = debug_files.check
    monkeypatch.setattr(debug_files, "check", lambda data, name: true_check(data[:-1] + bytes([data[-1] ^ 1]), name))


def fill_disk(_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_keywords: object) -> None:
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(debug_files.os, "rename", refuse)


@pytest.mark.parametrize("break_it", [swap_for_link, flip, fill_disk])
def test_where_the_file_fails_the_ordinary_way_is_taken(make_cache: MakeCache, root: Path, monkeypatch: pytest.MonkeyPatch,
                                                        caplog: pytest.LogCaptureFixture,
                                                        break_it: Callable[[Path, pytest.MonkeyPatch], None]) -> None:
    cache = make_cache(8, 4, request_directory_root=root)
    engine = ToyEngine(cache)
    engine.serve(Request(1, PROMPT))
    engine.admit(Request(2, tokens_of(7, 9), retention=debugged()))  # takes empty blocks: nothing travels yet
    engine.learn(2)
    engine.forward([2])
    break_it(root, monkeypatch)
    monkeypatch.setattr(cache, "_check_retention", lambda _retention: None)
    engine.serve(Request(3, tokens_of(8, 17), retention=debugged()))
    assert cache.transfers.idle(30.0)
    cache.refresh()
    moved = cache.stats().offload_blocks[Level.PRIMARY, Level.SECONDARY]
    assert cache.stats().fallbacks == moved > 0
    engine.remove(2)
    assert engine.serve(Request(4, PROMPT)) == 12  # checks every byte
    assert len([record for record in caplog.records if "ordinary way" in record.getMessage()]) == 1
    assert not list(root.parent.glob("outside/*"))
    assert not list(root.rglob("*.partial"))
    cache.verify()


def test_closing_ends_what_hangs_behind_a_file(make_cache: MakeCache, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(8, 4, 16, request_directory_root=root, faults=Faults([delays(FaultOperation.READ, 0.2)]))
    engine = ToyEngine(cache)
    engine.serve(Request(1, PROMPT))
    engine.serve(Request(2, OTHER))
    cache.flush()
    cache.close()
    cache = make_cache(8, 4, 16, request_directory_root=root, faults=Faults([delays(FaultOperation.READ, 0.2)]))
    cache.add_sequence(Request(1, PROMPT, retention=debugged()))
    cache.close(timeout=20)


def test_a_file_that_hangs_is_a_miss_and_keeps_nobody_waiting(make_cache: MakeCache, root: Path, monkeypatch: pytest.MonkeyPatch,
                                                              caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(hang_watch, "HANG_SECONDS", 0.1)
    cache = make_cache(8, 8, request_directory_root=root)
    engine = ToyEngine(cache)
    push_down(cache, engine)
    returns, true_rename = threading.Event(), os.rename

    def hang(*arguments: Any, **options: Any) -> None:
        returns.wait(120.0)
        true_rename(*arguments, **options)

    monkeypatch.setattr(debug_files.os, "rename", hang)
    engine.run([Request(3, PROMPT, retention=debugged())])  # several blocks: all behind the first file
    assert cache.transfers.idle(30.0)
    cache.verify()
    engine.run([Request(4, tokens_of(9, 29), retention=debugged())])  # what comes while it hangs is not kept waiting either
    assert cache.transfers.idle(30.0)
    assert len([record for record in caplog.records if "hangs; its block is computed again" in record.message]) == 1
    assert not cache._debug._names
    monkeypatch.undo()  # from now on nothing hangs, and what is slow need not be quick
    returns.set()
    wait_until(lambda: not cache._debug._watch.is_stuck)
    engine.serve(Request(5, PROMPT))
    engine.serve(Request(6, tokens_of(7, 29), retention=debugged("after")))
    assert cache.transfers.idle(30.0)
    assert files_below(root / "after")  # the thread works again, with all its buffers
    assert cache._debug.staging[0].take(0.0) is not None
    cache.verify()


def test_a_changed_file_is_found_out(make_cache: MakeCache, root: Path) -> None:
    cache = make_cache(8, 4, request_directory_root=root)
    push_down(cache, ToyEngine(cache), debugged())
    path = files_below(root)[0]
    good = path.read_bytes()
    changed = good[:-1] + bytes([good[-1] ^ 1])
    for bad in (good[:-1], changed, good + b"x", b"no header", b"", b"{}\n", good.replace(b'"version": 1', b'"version": 2')):
        path.write_bytes(bad)
        with pytest.raises(CorruptBlock):
            read_debug_file(path)


# -- where files may lie ---------------------------------------------------------------------------------------------------

def test_without_a_root_no_request_may_name_a_folder(make_cache: MakeCache) -> None:
    cache = make_cache()
    with pytest.raises(RequestError, match="set request_directory_root"):
        cache.add_sequence(Request(1, PROMPT, retention=debugged()))
    assert cache.stats().sequences == 0


@pytest.mark.parametrize("directory", ["..", "../other", "a/../../b", "/etc", "/", ".", "~/x", "$HOME/x", "a\0b", "${TMPDIR}",
                                       "x" * 300, "a/" + "x" * 300, "\ud800"])
def test_paths_that_lead_out_are_refused(make_cache: MakeCache, root: Path, directory: str) -> None:
    cache = make_cache(request_directory_root=root)
    with pytest.raises(RequestError, match="directory="):
        cache.add_sequence(Request(1, PROMPT, retention=debugged(directory)))
    assert cache.stats().sequences == 0
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("directory", LINKS)
def test_links_are_refused_at_the_door_and_behind_it(tmp_path: Path, root: Path, directory: str,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside"
    (outside / "deeper").mkdir(parents=True)
    opened = RequestRoot(root)
    (root / "folder").mkdir()
    (root / directory.replace("/deeper", "")).symlink_to(outside)
    with pytest.raises(RequestError, match="is a link"):
        opened.parts(directory)
    with pytest.raises(TransferError):
        opened.open(directory)
    monkeypatch.setattr(RequestRoot, "parts", lambda _self, text: tuple(text.split("/")))  # the link came after the check
    with pytest.raises(TransferError):
        opened.open(directory)
    assert list((outside / "deeper").iterdir()) == []
    opened.close()


def test_a_file_in_the_way_is_refused(root: Path) -> None:
    opened = RequestRoot(root)
    (root / "file").write_text("")
    with pytest.raises(RequestError, match="no folder"):
        opened.parts("file/below")
    opened.close()


def test_a_root_that_cannot_be_used_is_a_config_error(make_cache: MakeCache, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="request_directory_root"):
        make_cache(request_directory_root=tmp_path / "file" / "below")


def test_without_the_package_it_is_a_config_error(make_cache: MakeCache, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "aiofiles", None)
    with pytest.raises(ConfigError, match="pip install aiofiles"):
        make_cache(request_directory_root=root)


def test_ranks_that_get_the_same_request_have_files_of_their_own(make_cache: MakeCache, root: Path) -> None:
    for rank in range(2):
        cache = make_cache(8, 4, request_directory_root=root, rank=rank, num_ranks=2)
        push_down(cache, ToyEngine(cache), debugged())
        assert cache.stats().fallbacks == 0
    names = [path.name for path in files_below(root)]
    assert [name.partition("-group")[0] for name in names] == ["rank-0"] * (len(names) // 2) + ["rank-1"] * (len(names) // 2)
    assert len(names) > 0
