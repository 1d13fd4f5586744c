"""``DebugPath``: the thread on which blocks of debugged requests travel through files of their own (design: a request's own path).

A Move whose request asks for it is read into a buffer, written to a file, read back from there, and only then copied to where it was to
go. To the transfer manager it is a read from a file, so no stream waits for it. Whatever goes wrong with the file, the bytes go
on from the buffer: it is a way to look at blocks, not to lose them. A file that hangs makes its block a miss, and all that wait behind it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

import numpy as np
import torch

from kvtier.errors import ConfigError, TransferError
from kvtier.io.incident import Incident
from kvtier.io.threads import start_thread
from kvtier.pools.group_pools import GroupPools
from kvtier.pools.pool_index import NVME, PRIMARY, level_of, slot_of
from kvtier.tiering import hang_watch
from kvtier.tiering.block_store import BlockStore
from kvtier.tiering.debug_files import file_name, header, write_and_read_back
from kvtier.tiering.file_lane import LOOK_UP, PATIENCE, cancelled, hand_back, hung, take_all, take_buffer
from kvtier.tiering.hang_watch import HangWatch
from kvtier.tiering.ledger.moves import Discard, Move
from kvtier.tiering.read_lane import Read
from kvtier.tiering.request_directory import RequestRoot
from kvtier.tiering.staging import StagingPool
from kvtier.tiering.transfer_graph import TransferNode
from kvtier.types import TransferMode

_log = logging.getLogger(__name__)

MODE: Final = TransferMode.POSIX_DEBUG_FALLBACK.value
BUFFERS: Final = 2
BLOCK_OPERATIONS: Final = 3  # that one block takes: into the buffer, into the file, out of the file


class DebugPath:
    """One thread, and buffers of its own.

    Args:
        root: the folder under which requests have theirs.
        pools: by group.
        store: the NVMe level; None without one.
        pin: whether buffers are pinned, for a CUDA device.
        file_prefix: begins the names of files. Ranks of one engine get the same requests, so each has its own.

    Raises:
        ConfigError: the folder cannot be used, or aiofiles is not installed.
    """

    def __init__(self, root: Path, pools: Sequence[GroupPools], store: BlockStore | None, pin: bool,
                 file_prefix: str = "") -> None:
        try:
            import aiofiles  # type: ignore[import-untyped]  # noqa: F401 (only whether it is there)
        except ImportError as error:
            raise ConfigError(f"request_directory_root={str(root)!r} needs the package aiofiles; pip install aiofiles, or leave it out") \
                from error
        self.root = RequestRoot(root)
        self.staging = [StagingPool(BUFFERS, pool.group.block_bytes, pin) for pool in pools]
        self._pools = pools
        self._file_prefix = file_prefix
        self._store = store
        self._nodes: SimpleQueue[TransferNode | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._watch = HangWatch(1)
        self._hanging = Incident(_log)
        self._ends = threading.Event()
        self._reads_over: Callable[[list[Read]], None] | None = None
        self._closing = False
        self._fallbacks: SimpleQueue[None] = SimpleQueue()
        self._has_said = False
        self._names: dict[int, bytes] = {}

    def start(self, reads_over: Callable[[list[Read]], None]) -> None:
        """``reads_over`` is called by our threads, no lock held, with each node and its buffer (-1: none), which it takes over.

        Raises:
            ConfigError: a thread cannot be started; ``close`` ends the other one.
        """
        self._reads_over = reads_over
        for target, name in ((self._run, "kvtier-debug"), (self._run_watch, "kvtier-debug-watch")):
            self._threads.append(start_thread(target, name))

    @staticmethod
    def takes(record: Move | Discard) -> bool:
        """Whole blocks of a debugged request: down from the primary level, and up from any."""
        return (isinstance(record, Move) and record.mode == MODE and not record.num_tokens and level_of(record.destination) != NVME
                and level_of(record.source) != level_of(record.destination))

    def name(self, move: Move, key: bytes) -> None:
        """What a Move between memories carries, which it does not say itself, for whoever looks at its file. Before it is put here."""
        self._names[move.number] = key

    def put(self, node: TransferNode) -> None:
        self._nodes.put(node)

    def take_fallbacks(self) -> int:
        """Blocks that went on without their file since the last call."""
        count = 0
        while True:
            try:
                self._fallbacks.get_nowait()
            except Empty:
                return count
            count += 1

    def cancel_queued(self) -> list[TransferNode]:
        """Stop beginning files, and give back what was queued."""
        self._closing = True
        return take_all(self._nodes)

    def close(self, timeout: float) -> bool:
        """End the threads; False when one is still inside a file operation after ``timeout`` seconds."""
        self._closing = True
        deadline = time.monotonic() + timeout
        self._ends.set()
        self._nodes.put(None)
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def let_go(self) -> None:
        """Give back buffers and the folder, once nothing uses them."""
        for pool in self.staging:
            pool.arena.close()
        self.root.close()

    # -- the thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            while (node := self._nodes.get()) is not None:
                buffer: int | None = -1
                try:
                    buffer = self._read(node, runner)
                except Exception as error:
                    node.error = node.error or error
                if buffer is not None:
                    self._hand_back(node, buffer)
                del node

    def _hand_back(self, node: TransferNode, buffer: int) -> None:
        assert self._reads_over is not None
        hand_back(self._reads_over, [(node, buffer)])

    def _read(self, node: TransferNode, runner: asyncio.Runner) -> int | None:
        """The buffer with the block; None when it hung, and the node has been handed back long since."""
        move = node.move
        assert move is not None
        key = self._names.pop(move.number, move.key)
        self._wait_for_source(node)
        lost = node.source_failure()
        if lost is not None:
            raise lost
        buffer = take_buffer(self.staging[node.group], node, lambda: self._closing)
        failure: Exception | None = None
        start = time.perf_counter()
        self._watch.begin(node, BLOCK_OPERATIONS)
        try:
            self._fill(node, buffer)
        except Exception as error:
            failure = error
        else:
            if self._watch.is_awaited(node):  # otherwise the slot may have held something else by then
                self._detour(move, key, buffer, runner)
        if not self._watch.end(node):
            self.staging[node.group].give_back(buffer)
            return None
        node.error = failure
        node.seconds = time.perf_counter() - start
        return buffer

    def _run_watch(self) -> None:
        """What hangs is a miss, and so is what is queued behind it until it comes back."""
        while not self._ends.wait(LOOK_UP if self._watch.is_stuck else hang_watch.HANG_SECONDS / 4):
            for node in self._watch.overdue():
                self._hanging.warn("%s: the file of a debugged request hangs; its block is computed again", node.move)
                node.error = hung(node)
                self._hand_back(node, -1)
            if self._watch.is_stuck:
                for node in take_all(self._nodes):
                    assert node.move is not None
                    self._names.pop(node.move.number, None)
                    node.error = hung(node)
                    self._hand_back(node, -1)

    def _wait_for_source(self, node: TransferNode) -> None:
        """What stands before this node is on a stream by now; the host has to wait until it is over."""
        deadline = time.monotonic() + PATIENCE
        for earlier in list(node.depends):
            event = earlier.event
            while event is not None and not event.wait(LOOK_UP):
                if self._closing:
                    raise cancelled(node)
                if time.monotonic() > deadline:
                    raise TransferError(f"{node.move}: what comes before it was not over within {PATIENCE:.0f} s; a copy hangs")
            if event is not None and event.error is not None and earlier is node.writer:
                raise TransferError(f"{node.move}: the copy into its source failed: {event.error}")

    def _fill(self, node: TransferNode, buffer: int) -> None:
        """The source's bytes into the buffer. An error there is the Move's, as on every other way."""
        move = node.move
        assert move is not None
        arena = self.staging[node.group].arena
        level, slot = level_of(move.source), slot_of(move.source)
        pools = self._pools[node.group]
        if level == PRIMARY:
            device = pools.primary.sections[0].rows.device
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the engine may still be writing on its own stream
            arena.rows[buffer] = pools.primary.read_block(slot).numpy()
        elif level == NVME:
            assert self._store is not None
            try:
                self._store.read_block(node.group, slot, move.key, arena.padded_rows[buffer])
            except Exception as error:
                if self._watch.is_awaited(node):
                    self._store.quarantine(node.group, slot, f"{type(error).__name__}: {error}")
                raise
        else:
            assert pools.secondary is not None
            arena.rows[buffer] = pools.secondary.rows[slot]

    def _detour(self, move: Move, key: bytes, buffer: int, runner: asyncio.Runner) -> None:
        """Through the file, if that can be done."""
        row = self.staging[move.group].arena.rows[buffer]
        try:
            folder = self.root.open(move.directory)
            try:
                line = header(move, key, self._pools[move.group].group, row)
                found = runner.run(write_and_read_back(folder, self._file_prefix + file_name(move), line, row))
            finally:
                os.close(folder)
            row[:] = np.frombuffer(found, dtype=np.uint8)
        except Exception as error:
            self._fallbacks.put(None)
            if not self._has_said:
                self._has_said = True
                _log.warning("%s: its block did not go through a file (%s) and took the ordinary way. Said once; stats().fallbacks counts",
                             move, error)
