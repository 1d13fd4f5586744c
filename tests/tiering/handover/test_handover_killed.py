"""Either side is a real process that is killed in the middle: nothing leaked, a miss at most, and the bytes are right for the next one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from handover_rig import files

from kvtier import BlockExporter, BlockImporter, HandoverFolder, KVCacheManager, KVLayout, Request, TierConfig
from kvtier.tiering.handover import exporting, importing

Make = Callable[..., Any]
PROMPT = list(range(100, 121))
LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", tokens_per_block=4)


def hang(directory: str, work: str, tokens: list[int], ticket: str, connection: Connection) -> None:
    """The process that will be killed while it copies."""
    def never_ends(*_arguments: Any) -> Any:
        connection.send("copying")
        time.sleep(1000)

    exporting.read_rows = importing.write_rows = never_ends
    folder = HandoverFolder(directory, "64MiB")
    with KVCacheManager(LAYOUT, TierConfig(primary="40 blocks", secondary="0 blocks", max_seq_len=512), model="toy@1:0123abcd") as cache:
        if work == "import":
            importer = BlockImporter(cache, folder)
            importer.offer(ticket)
            cache.add_sequence(Request(1, tokens))
            importer.fill(1)
        else:
            cache.add_sequence(Request(1, tokens))
            cache.mark_computed(1, len(tokens))
            BlockExporter(cache, folder).export(1)


@contextmanager
def killed_while_copying(folder: HandoverFolder, work: str, tokens: list[int], ticket: str = "") -> Iterator[None]:
    """Runs its body while the process is copying, and kills it then."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=hang, args=(str(folder.directory), work, tokens, ticket, theirs))
    process.start()
    try:
        assert ours.poll(120)
        assert ours.recv() == "copying"
        yield
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)


@pytest.fixture
def folder(tmp_path: Path) -> HandoverFolder:
    return HandoverFolder(tmp_path / "handover", "64MiB")


def test_an_importer_that_is_killed_before_it_acknowledges_leaves_the_blocks_to_another(prefill: Make, decode: Make,
                                                                                       folder: HandoverFolder) -> None:
    here, there = decode(), prefill()
    known, ticket = there.hand_over(PROMPT)
    here.importer.offer(ticket)
    with killed_while_copying(folder, "import", known, ticket.to_json()):
        assert here.fill(known) == 0, "it is the other one's now"
        here.engine.remove(1, store=False)
        assert not there.exporter.withdraw(ticket)
    assert here.serve(known) == 21
    assert files(folder) == []
    assert there.cache.stats().leases == 0


def test_an_exporter_that_is_killed_leaves_nothing_that_could_be_read(decode: Make, folder: HandoverFolder) -> None:
    here = decode()
    with killed_while_copying(folder, "export", PROMPT):
        [part] = files(folder)
        assert part.endswith(".part")
        here.importer.poll()
        assert files(folder) == [part], "it is being written"
    assert here.importer.poll() == 0
    assert files(folder) == []
    assert here.serve(PROMPT) == 0
