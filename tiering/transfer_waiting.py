"""``TransferWaiting``: waiting for transfers, on the host and on the engine's stream (design: transfer rules).

Everything here asks how far a node of the transfer graph has got, and waits until it has got far enough. What is put on streams, and
what has ended, is the business of ``TransferManager``, which adds it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from kvtier.io.device import Device, EngineStream
from kvtier.io.layer_pieces import Layers
from kvtier.io.streams import Event, Stream
from kvtier.pools.pool_index import PRIMARY, PoolIndex, level_of
from kvtier.tiering.copy_batch import WHOLE, Piece
from kvtier.tiering.order_check import OrderCheck
from kvtier.tiering.transfer_graph import NodeState, TransferGraph, TransferNode


class TransferWaiting:
    """The order between transfers, and between them and the engine. One lock guards it; nothing is waited for while it is held."""

    _offload: Stream
    _onboard: Stream

    def __init__(self, device: Device, num_groups: int, check_order: bool) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._graph = TransferGraph(num_groups)
        self._check = OrderCheck() if check_order else None
        self._outstanding = 0
        self._closing = False
        self._abandoned = False

    # -- on the host -----------------------------------------------------------------------------------------------------

    def pending_files(self, group: int, indices: Iterable[PoolIndex]) -> bool:
        """Whether a file has to be read (or written) before what is pending on these slots can be put on a stream.

        While this is True no stream may be ordered behind these slots.
        """
        with self._lock:
            return any(waits_for_file(node) for node in self._graph.pending(group, indices))

    def wait(self, group: int, indices: Iterable[PoolIndex], timeout: float | None, num_layers: int = WHOLE) -> bool:
        """Wait until the writes pending on these slots now are over, file reads included, and their results can be drained.

        With ``num_layers`` of what comes up from a lower level only the first so many layers of the group are waited for, and the file
        reads. A Move that fails is waited for until it is over: nothing of it counts as there.

        Returns:
            False when ``timeout`` seconds were not enough, or when the manager was closed without them.
        """
        with self._lock:
            return self._wait_locked(self._graph.pending_writes(group, indices), _reached(num_layers), deadline_of(timeout))

    def wait_for_files(self, group: int, indices: Iterable[PoolIndex], timeout: float | None) -> bool:
        """Wait until ``pending_files`` is False: a copy out of such a slot that is held behind a file keeps the engine from
        writing to it, too.

        Returns:
            False when ``timeout`` seconds were not enough, or when the manager was closed without that.
        """
        with self._lock:
            return self._wait_locked(self._graph.pending(group, indices), is_past_files, deadline_of(timeout))

    def idle(self, timeout: float | None) -> bool:
        """Wait until everything issued has finished; False when ``timeout`` seconds were not enough."""
        deadline = deadline_of(timeout)
        with self._lock:
            while self._outstanding:
                left = seconds_left(deadline)
                if self._abandoned or (left is not None and left <= 0.0):
                    return False
                self._changed.wait(left)
            return True

    # -- on the engine's stream ------------------------------------------------------------------------------------------

    def order_before_engine(self, engine_stream: EngineStream | None, group: int, indices: Iterable[PoolIndex],
                            timeout: float | None) -> bool:
        """Let the engine use these slots only after every read and write pending on them now.

        On CUDA the engine's stream waits; on the CPU this call does, and the results can be drained when it returns. What
        still waits for a file is waited for on the host (``pending_files`` says so before).

        Returns:
            False when ``timeout`` seconds were not enough; the engine must not use the slots then.
        """
        return self.order_layers(engine_stream, group, indices, (0, WHOLE), timeout) is not None

    def order_layers(self, engine_stream: EngineStream | None, group: int, indices: Iterable[PoolIndex], layers: Layers,
                     timeout: float | None) -> list[PoolIndex] | None:
        """As :meth:`order_before_engine`, but of what comes up from a lower level only for some layers of the group.

        Args:
            layers: those that the engine uses from now on. It uses the ones before them already.

        Returns:
            the slots whose later layers are still arriving: before it uses these, the engine has to be ordered again. None when
            ``timeout`` seconds were not enough.
        """
        deadline = deadline_of(timeout)
        end = layers[1]
        with self._lock:
            indices = list(indices)
            nodes = self._graph.pending(group, indices)
            since = 0 if self._check is None else self._check.num_uses
            if not nodes:
                self._engine_begins((), group, indices, since, (layers[0], WHOLE))
                return []
            if not self._wait_locked(nodes, is_past_files, deadline):
                return None
            nodes = [node for node in nodes if node.state is not NodeState.DONE]
            # On one stream the last event stands for all before it.
            last: dict[Stream, Piece] = {}
            late: dict[int, None] = {}
            for node in nodes:
                if node.batch is None or node.stream is None:
                    continue
                piece = node.batch.piece_with(end if is_arrival(node) else WHOLE)
                if piece is not node.batch.pieces[-1]:
                    late[node.destination] = None
                if piece is not None and (node.stream not in last or last[node.stream].sequence < piece.sequence):
                    last[node.stream] = piece
            events = [piece.event for piece in last.values()]
            self._engine_begins(events, group, [index for index in indices if index not in late], since, (layers[0], WHOLE))
            if late:
                self._engine_begins(events, group, [PoolIndex(index) for index in late], since, layers)
        if not self._device.engine_waits(engine_stream, events, seconds_left(deadline)):
            return None
        if all(event.is_done() for event in events):  # otherwise the device waits for them
            with self._lock:
                if not self._wait_locked(nodes, _reached(end), deadline):
                    return None
        return [PoolIndex(index) for index in late]

    def order_after_engine(self, engine_stream: EngineStream | None) -> None:
        """Copies issued from now on wait for what the engine has enqueued so far."""
        event = self._device.engine_event(engine_stream)
        if self._check is not None:
            with self._lock:
                self._check.engine_ends((self._offload.name, self._onboard.name), event.is_done())
        if event.is_done():
            return
        with self._lock:
            if not self._closing:
                for stream in (self._offload, self._onboard):
                    stream.submit(_nothing, (event,))

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _engine_begins(self, events: Iterable[Event], group: int, indices: Iterable[PoolIndex], since: int, layers: Layers) -> None:
        if self._check is not None:
            self._check.engine_begins(events, [(group, index) for index in indices], since, layers)
            self._check.raise_if_violated()

    def _wait_locked(self, nodes: list[TransferNode], reached: Callable[[TransferNode], bool], deadline: float | None) -> bool:
        """Wait until all nodes have reached a state. Lock held, and given up while waiting."""
        while True:
            nodes = [node for node in nodes if not reached(node)]
            if not nodes:
                return True
            left = seconds_left(deadline)
            if self._abandoned or (left is not None and left <= 0.0):
                return False
            self._changed.wait(left)


def deadline_of(timeout: float | None) -> float | None:
    """The moment, by ``time.monotonic``, at which so many seconds are over; None for never."""
    return None if timeout is None else time.monotonic() + timeout


def seconds_left(deadline: float | None) -> float | None:
    """Seconds until then, 0.0 when it has passed."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def is_over(node: TransferNode) -> bool:
    """It has ended and been reported."""
    return node.state is NodeState.DONE


def is_past_files(node: TransferNode) -> bool:
    """No file keeps it any more: a stream may be ordered behind it."""
    return not waits_for_file(node)


def waits_for_file(node: TransferNode) -> bool:
    """Held back behind a file operation, or one itself."""
    return node.state is NodeState.HELD or node.state is NodeState.QUEUED


def is_arrival(node: TransferNode) -> bool:
    """It brings a block up from a lower level: nobody but the engine uses the slot until it is over, and layer by layer."""
    return node.source >= 0 and level_of(PoolIndex(node.source)) != PRIMARY and level_of(PoolIndex(node.destination)) == PRIMARY


def has_layers(node: TransferNode, num_layers: int) -> bool:
    """It has brought so many leading layers of its block, without an error so far; or it is over."""
    if node.state is NodeState.DONE:
        return True
    return (is_arrival(node) and node.state is NodeState.SUBMITTED and node.error is None and node.batch is not None
            and node.batch.arrived >= num_layers)


def _reached(num_layers: int) -> Callable[[TransferNode], bool]:
    return is_over if num_layers >= WHOLE else partial(has_layers, num_layers=num_layers)


def _nothing() -> None:
    """Work that only marks a place in a stream."""
