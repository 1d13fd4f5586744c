"""``Readiness``: which sequences have everything they need, and steps of the engine over those that do (design: transfer rules)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from kvtier.errors import CapacityError, TransferError
from kvtier.io.device import EngineStream
from kvtier.pools.layout import KVLayout
from kvtier.pools.pool_index import PoolIndex
from kvtier.tiering import arguments
from kvtier.tiering.config import TierConfig
from kvtier.tiering.copy_batch import WHOLE
from kvtier.tiering.core import TierCore
from kvtier.tiering.ledger.confirming import awaited_slots
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.sequence import ActiveSequence
from kvtier.tiering.step import Step, leading_layers
from kvtier.tiering.transfer_waiting import deadline_of, seconds_left

STEP_TIMEOUT: Final = 60.0  # seconds a step waits for copies between memories, which take milliseconds

Indices = list[list[PoolIndex]]
"""By group: slots that a sequence waits for."""


class Readiness(TierCore):
    """Waiting for a sequence's blocks, and steps."""

    def __init__(self, layout: KVLayout, config: TierConfig, device: str = "cpu", model: str | None = None) -> None:
        super().__init__(layout, config, device, model)
        # A sequence that loses blocks gets its running state back at once, as a copy of a kept one. No step may be writing it then.
        self._has_states = any(group.kind == "recurrent" for group in layout.groups)
        self._stepping: dict[int, int] = {}         # ids that take part in running steps, and in how many
        self._ended_in_step: dict[int, bool] = {}   # removed meanwhile: store or not

    def wait_ready(self, request_id: int, layer: int | None = None, timeout: float | None = None) -> int:
        """Wait until the sequence's reused blocks have arrived. Returns how many leading tokens are really there.

        That is fewer than promised after a bad read; the engine computes the rest. Later in the sequence's life, what the
        engine has computed since counts too.

        With ``layer``, only model layers 0 to ``layer`` have arrived when it returns, and everything that is read from files is verified:
        enough for ``step(stream, ids, layer)``. Should a copy of a later layer fail, fewer tokens are there than was said.

        Raises:
            TimeoutError: not ready after ``timeout`` seconds; the sequence is as before.
            CapacityError: a bad block could not be replaced; remove this sequence and admit it again.
            ConfigError: the layout has no such layer.
        """
        num_layers = leading_layers(self.layout, layer)
        deadline = deadline_of(None if timeout is None else arguments.seconds("timeout", timeout))
        while True:
            valid = self._ready_now(request_id, num_layers)
            if valid is not None:
                return valid
            with self.locked() as ledger:
                indices = _indices(ledger, ledger.sequence(request_id))
            if not all(self.transfers.wait(group, row, seconds_left(deadline), num_layers[group])
                       and self.transfers.wait_for_files(group, row, seconds_left(deadline)) for group, row in enumerate(indices)):
                self._require_open()
                raise TimeoutError(f"request {request_id}: not ready after {timeout} s; wait again, or remove the sequence")

    async def ready(self, request_id: int, layer: int | None = None) -> int:
        """Like :meth:`wait_ready` without blocking the event loop; cancel it or use ``asyncio.timeout`` for a deadline."""
        num_layers = leading_layers(self.layout, layer)
        loop = asyncio.get_running_loop()
        finished = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():  # a call that was under way when the listener was removed
                loop.call_soon_threadsafe(finished.set)

        self.transfers.add_listener(wake)
        try:
            while True:
                finished.clear()
                valid = self._ready_now(request_id, num_layers)
                if valid is not None:
                    return valid
                await finished.wait()
        finally:
            self.transfers.remove_listener(wake)

    def is_ready(self, request_id: int, layer: int | None = None) -> bool:
        """Whether :meth:`wait_ready` would return, or raise CapacityError, at once. Does not count as its report."""
        num_layers = leading_layers(self.layout, layer)
        self._submit()
        with self.locked() as ledger:
            sequence = ledger.sequence(request_id)
            return sequence.must_preempt or self._has_arrived(_indices(ledger, sequence), num_layers)

    def is_paused(self, request_id: int) -> bool:
        """Whether a sequence waits for the blocks of its next prompt chunk (``chunk_size`` with layers that have a window).

        It does while others hold the scratch blocks or no primary block is free. Each :meth:`step` that names it tries again. When all
        active sequences are paused for lack of free blocks nobody will free any: remove one of them, as after a CapacityError.
        """
        with self.locked() as ledger:
            return ledger.is_paused(request_id)

    @contextmanager
    def step(self, stream: EngineStream | None, ids: Sequence[int], layer: int | None = None) -> Iterator[Step]:
        """One forward pass over these sequences, ordered against our copies. Yields the ids that may take part.

        Left out are sequences that are not ready, those that are paused (see :meth:`is_paused`), and those that lost tokens to a bad
        read until :meth:`wait_ready` has said so. ``stream`` is the engine's CUDA stream; None on the CPU.

        With ``layer`` (0, as a rule) the engine is ordered behind model layers 0 to ``layer`` only, and before it uses a later one it calls
        ``wait_layer`` of what is yielded. Models with recurrent layers begin with everything there all the same::

            with cache.step(stream, ids, layer=0) as ready:
                for layer in range(num_layers):
                    lost = ready.wait_layer(layer)
                    ...

        Raises:
            UnknownRequest: an id that is not active.
            ConfigError: the layout has no such layer.
            TransferError: copies between memories did not end within a minute.
        """
        arguments.sequence_of("ids", ids)
        num_layers = leading_layers(self.layout, layer)
        if self._has_states:
            num_layers = [WHOLE] * len(num_layers)
        self._submit()
        with self.locked() as ledger:
            if ledger.paused:
                ledger.resume_prefills([request_id for request_id in ids if request_id not in self._stepping
                                        and not self._waits_for_files(_indices(ledger, ledger.sequence(request_id)))])
            candidates: dict[int, Indices] = {}
            for request_id in ids:
                sequence = ledger.sequence(request_id)
                indices = _indices(ledger, sequence)
                if not (request_id in ledger.paused or sequence.must_report or sequence.must_preempt or self._waits_for_files(indices)):
                    candidates[request_id] = indices
        slots = [[index for indices in candidates.values() for index in indices[group]] for group in range(len(self.layout.groups))]
        late = self._order(stream, slots, [0] * len(slots), num_layers, f"step: copies for requests {list(candidates)}")
        ready: list[int] = []
        unwritten: list[tuple[int, list[int]]] = []
        try:
            with self._filling:
                with self.locked() as ledger:
                    for request_id, indices in candidates.items():
                        found = ledger.sequences.get(request_id)
                        # While we waited a copy may have failed, or another thread may have ended the sequence: then it is left out.
                        if found is not None and not found.must_report and not found.must_preempt and _is_within(
                                _indices(ledger, found), indices):
                            if not any(late):
                                ledger.deliver(found)
                            ready.append(request_id)
                            self._stepping[request_id] = self._stepping.get(request_id, 0) + 1
                            if self._poison is not None:
                                unwritten += self._poison.unwritten(found)
                if self._poison is not None and unwritten:
                    with self._device.on_engine(stream):
                        self._poison.fill(unwritten)
            yield Step(ready, num_layers, late, partial(self._wait_layer, stream))
        finally:
            self.transfers.order_after_engine(stream)
            self._leave_step(ready)

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _wait_layer(self, stream: EngineStream | None, step: Step, layer: int) -> list[int]:
        """See ``Step.wait_layer``."""
        if not any(step.late):  # as a rule: asked for every layer
            self.layout.place_of_layer(layer)
            return step.lost
        num_layers = leading_layers(self.layout, layer)
        step.late = self._order(stream, step.late, step.num_layers, num_layers, f"wait_layer({layer}): copies for requests {list(step)}")
        step.num_layers = [max(before, now) for before, now in zip(step.num_layers, num_layers, strict=True)]
        with self.locked() as ledger:
            for request_id in step:
                sequence = ledger.sequences.get(request_id)
                if sequence is None or sequence.must_report or sequence.must_preempt:
                    if request_id not in step.lost:
                        step.lost.append(request_id)
                elif not any(step.late) and request_id not in step.lost:
                    ledger.deliver(sequence)
        return step.lost

    def _order(self, stream: EngineStream | None, slots: Sequence[list[PoolIndex]], before: Sequence[int], num_layers: Sequence[int],
               what: str) -> list[list[PoolIndex]]:
        """Order the engine behind more layers of these slots, by group. Returns the slots of which others are still arriving."""
        late: list[list[PoolIndex]] = []
        for group, indices in enumerate(slots):
            left: list[PoolIndex] | None = indices
            if indices and (before[group] < num_layers[group] or before[group] == 0):
                left = self.transfers.order_layers(stream, group, indices, (before[group], num_layers[group]), STEP_TIMEOUT)
            if left is None:
                self._require_open()
                raise TransferError(f"{what} did not end within {STEP_TIMEOUT:.0f} s")
            late.append(left)
        return late

    def _ready_now(self, request_id: int, num_layers: Sequence[int]) -> int | None:
        """Valid tokens when so many layers of everything have arrived, None while something is pending."""
        while True:
            self._submit()
            with self.locked() as ledger:
                sequence = ledger.sequence(request_id)
                indices = _indices(ledger, sequence)
                if not self._has_arrived(indices, num_layers):
                    return None
                self._drain()  # what ended between the first drain and now
                if sequence.must_preempt:
                    raise CapacityError(f"request {request_id}: a block that could not be read cannot be replaced, no primary block is "
                                        "free; remove this sequence and admit it again", 1, 0, [request_id])
                if _is_within(_indices(ledger, sequence), indices):
                    whole = [WHOLE] * len(num_layers)
                    if num_layers == whole or self._has_arrived(indices, whole):
                        ledger.deliver(sequence)
                    else:
                        ledger.report(sequence)
                    return sequence.computed

    def _leave_step(self, ids: Sequence[int]) -> None:
        """These ids have left a step; those that were removed meanwhile end now."""
        if self._closed or self._broken:  # the error that the step ends with is not to be hidden by another one
            return
        with self.locked() as ledger:
            for request_id in ids:
                self._stepping[request_id] -= 1
                if self._stepping[request_id] == 0:
                    del self._stepping[request_id]
                    store = self._ended_in_step.pop(request_id, None)
                    if store is not None:
                        ledger.remove_sequence(request_id, store)
                    else:
                        ledger.advance_prefill(request_id)

    def _has_arrived(self, indices: Indices, num_layers: Sequence[int]) -> bool:
        return (self._all_issued and all(self.transfers.wait(group, row, 0.0, num_layers[group]) for group, row in enumerate(indices))
                and not self._waits_for_files(indices))

    def _waits_for_files(self, indices: Indices) -> bool:
        return any(self.transfers.pending_files(group, row) for group, row in enumerate(indices))


def _indices(ledger: Ledger, sequence: ActiveSequence) -> Indices:
    """The sequence's blocks, and those that have to arrive before it is known whether what it reuses was computed from anything."""
    return [[block.index for beam in range(len(row.other_beams) + 1) for block in row.beam(beam) if block.id >= 0]
            + awaited_slots(ledger, sequence, row.group) for row in sequence.rows]


def _is_within(indices: Indices, others: Indices) -> bool:
    """Whether nothing has to be waited for but what was waited for already: what it depends on may have been confirmed meanwhile."""
    return indices == others or all(set(row) <= set(other) for row, other in zip(indices, others, strict=True))
