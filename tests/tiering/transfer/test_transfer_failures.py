"""Bad days: a failed Move fails what depends on its bytes, nobody else, and the process goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from gate import Gate

from kvtier.errors import ConfigError, CorruptBlock, TransferError
from kvtier.io.faults import FaultKind, FaultOperation, FaultRule, Faults
from kvtier.pools.pool_index import pool_index
from kvtier.tiering import file_lane
from kvtier.tiering.transfer_results import MoveResult

P, S, N = ([pool_index(level, slot) for slot in range(8)] for level in range(3))

Make = Callable[..., Any]


def test_a_failed_read_fails_what_copies_its_bytes_on_and_nobody_else(rig: Any, corrupt: CorruptBlock) -> None:
    rig.fill(N[0], 5)
    rig.fill(S[7], 7)
    rig.fill(P[1], 6)
    rig.store.fail_reads[0, 0] = corrupt
    rig.store.read_gate.clear()
    bad = rig.move(N[0], P[0])
    dependent, second, file_write = rig.move(P[0], S[0]), rig.move(S[0], P[3]), rig.move(S[0], N[3])
    independent, overwrite, reader = rig.move(P[1], S[1]), rig.move(S[7], P[0]), rig.move(P[0], S[2])
    rig.transfers.issue([bad, dependent, second, file_write, independent, overwrite, reader])
    rig.store.read_gate.set()
    results = rig.settle()
    failed = {number for number, result in results.items() if result.error is not None}
    assert failed == {move.number for move in (bad, dependent, second, file_write)}
    assert results[bad.number].error is corrupt
    assert (rig.value(S[1]), rig.value(P[0]), rig.value(S[2])) == (6, 7, 7)


def test_a_dependents_error_names_the_original(rig: Any, corrupt: CorruptBlock) -> None:
    rig.fill(N[0], 5)
    rig.store.fail_reads[0, 0] = corrupt
    bad, dependent, second = rig.move(N[0], P[0]), rig.move(P[0], S[0]), rig.move(S[0], P[3])
    rig.transfers.issue([bad, dependent, second])
    results = rig.settle()
    for move in (dependent, second):
        error = results[move.number].error
        assert isinstance(error, TransferError)
        assert str(corrupt) in str(error)
        assert repr(bad) in str(error)


def test_nothing_is_copied_from_a_slot_whose_write_failed(rig: Any, corrupt: CorruptBlock) -> None:
    rig.fill(N[0], 5)
    rig.fill(P[0], 1)
    rig.fill(S[0], 2)
    rig.fill(N[1], 3)
    rig.store.fail_reads[0, 0] = corrupt
    rig.transfers.issue([rig.move(N[0], P[0]), rig.move(P[0], S[0]), rig.move(S[0], N[1])])
    rig.settle()
    assert (rig.value(P[0]), rig.value(S[0]), rig.value(N[1])) == (1, 2, 3)


@pytest.mark.parametrize("error", [CorruptBlock("flipped"), TransferError("short read"), OSError(5, "EIO")])
def test_a_bad_read_is_quarantined_and_the_move_fails(rig: Any, error: Exception) -> None:
    rig.fill(N[2], 5)
    rig.store.fail_reads[0, 2] = error
    rig.transfers.issue([rig.move(N[2], P[0])])
    result = rig.settle()[0]
    assert result.error is error
    assert result.num_bytes == 0
    assert [(group, slot) for group, slot, _ in rig.store.quarantines] == [(0, 2)]
    assert str(error) in rig.store.quarantines[0][2]


def test_a_quarantine_that_fails_is_told_with_the_error_of_the_read(rig: Any, corrupt: CorruptBlock) -> None:
    rig.fill(N[0], 5)
    rig.store.fail_reads[0, 0] = corrupt
    rig.store.quarantine_error = TransferError("manifest is read-only")
    rig.transfers.issue([rig.move(N[0], P[0])])
    assert rig.settle()[0].error is corrupt
    assert any("manifest is read-only" in note for note in corrupt.__notes__)


def test_a_failed_copy_fails_alone_in_its_batch(make_rig: Make) -> None:
    rig = make_rig(faults=Faults([FaultRule(FaultKind.FAILURE, FaultOperation.COPY, count=1)]))
    for slot in range(4):
        rig.fill(P[slot], slot + 1)
    rig.transfers.issue([rig.move(P[slot], S[slot]) for slot in range(4)])
    results = rig.settle()
    assert [result.error is None for result in results.values()] == [False, True, True, True]
    assert [rig.value(S[slot]) for slot in range(1, 4)] == [2, 3, 4]
    assert rig.transfers.stats()["primary->secondary"].failures == 1


def test_a_failed_copy_out_of_the_staging_buffer_fails_the_move_and_frees_the_buffer(make_rig: Make) -> None:
    rig = make_rig(staging_blocks=1, faults=Faults([FaultRule(FaultKind.FAILURE, FaultOperation.COPY, count=1)]))
    for slot in range(3):
        rig.fill(N[slot], slot + 1)
    rig.transfers.issue([rig.move(N[slot], P[slot]) for slot in range(3)])
    results = rig.settle()
    assert [results[number].error is None for number in range(3)] == [False, True, True]
    assert rig.store.quarantines == [], "the file was right"


def test_a_copier_that_raises_fails_its_whole_batch(rig: Any) -> None:
    rig.transfers.issue([rig.move(P[0], S[0]), rig.move(P[1], pool_index(1, 99)), rig.move(P[2], P[3])])
    results = rig.settle()
    assert [result.move.number for result in results.values() if isinstance(result.error, IndexError)] == [0, 1]
    assert results[2].error is None


def test_the_failure_is_remembered_after_it_was_reported(rig: Any, corrupt: CorruptBlock) -> None:
    """The ledger may have planned a Move from the slot before it heard of the failure, and issue it after."""
    rig.fill(N[0], 5)
    rig.store.fail_reads[0, 0] = corrupt
    rig.transfers.issue([rig.move(N[0], P[0])])
    rig.settle()
    late = rig.move(P[0], S[0])
    rig.transfers.issue([late])
    assert rig.settle()[late.number].error is not None


def test_the_failure_does_not_follow_the_slot_to_its_next_owner(rig: Any, corrupt: CorruptBlock) -> None:
    """The engine wrote the slot under a new generation; no Move did. Its bytes are good."""
    rig.fill(N[0], 5)
    rig.store.fail_reads[0, 0] = corrupt
    rig.store.read_gate.clear()
    rig.transfers.issue([rig.move(N[0], P[0])])
    rig.generations[0, P[0]] += 1
    pending = rig.move(P[0], S[0])
    rig.transfers.issue([pending])
    rig.store.read_gate.set()
    results = rig.settle()
    rig.fill(P[0], 8)
    late = rig.move(P[0], S[1])
    rig.transfers.issue([late])
    results = rig.settle()
    assert results[pending.number].error is None
    assert results[late.number].error is None
    assert rig.value(S[1]) == 8


def test_a_successful_write_ends_the_memory_of_a_failure(rig: Any, corrupt: CorruptBlock) -> None:
    rig.fill(N[0], 5)
    rig.fill(N[1], 6)
    rig.store.fail_reads[0, 0] = corrupt
    rig.transfers.issue([rig.move(N[0], P[0]), rig.move(N[1], P[0]), rig.move(P[0], S[0])])
    assert [rig.settle()[number].error is None for number in range(3)] == [False, True, True]
    assert rig.value(S[0]) == 6
    assert rig.transfers._graph.size() == 0


def test_a_failed_read_still_keeps_the_order_of_writes_behind_it(make_rig: Make, until: Make, corrupt: CorruptBlock) -> None:
    """The read fails at once while the offload before it is slow: the next write must still wait for the offload."""
    gate = Gate(FaultOperation.COPY)
    rig = make_rig(faults=gate)
    rig.fill(P[0], 5)
    rig.fill(S[1], 6)
    rig.fill(N[0], 7)
    rig.store.fail_reads[0, 0] = corrupt
    rig.transfers.issue([rig.move(P[0], S[0]), rig.move(N[0], P[0]), rig.move(S[1], P[0])])
    until(lambda: gate.arrived > 0)
    time.sleep(0.03)  # whatever does not wait has had its time
    gate.open()
    rig.settle()
    assert (rig.value(S[0]), rig.value(P[0])) == (5, 6)


@pytest.mark.parametrize("options", [{"read_threads": 0}, {"staging_blocks": 0}])
def test_nothing_to_read_with_is_a_configuration_error(make_rig: Make, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        make_rig(**options)


def test_a_manager_that_cannot_be_made_leaves_nothing_behind(make_rig: Make, cuda_device: Make) -> None:
    device = cuda_device(1)
    make_stream = device.stream
    before = threading.active_count()

    def stream(name: str) -> Any:
        if name == "onboard":
            raise RuntimeError("cudaErrorMemoryAllocation")
        return make_stream(name)

    device.stream = stream
    with pytest.raises(RuntimeError):
        make_rig(device=device)
    assert device._cuda.runtime.registered == {}
    assert threading.active_count() == before


# -- writes --------------------------------------------------------------------------------------------------------------


def test_a_failed_file_write_fails_its_move_only(rig: Any) -> None:
    for slot in range(3):
        rig.fill(S[slot], slot + 1)
    rig.store.fail_writes[0, 1] = OSError(28, "ENOSPC")
    rig.transfers.issue([rig.move(S[slot], N[slot]) for slot in range(3)])
    results = rig.settle()
    assert [results[number].error is None for number in range(3)] == [True, False, True]


def test_a_store_that_raises_fails_the_batch_and_the_writer_lives_on(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(items: Any) -> Any:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "write_blocks", broken)
        rig.transfers.issue([rig.move(S[0], N[0]), rig.move(S[1], N[1])])
        results = rig.settle()
        assert all(isinstance(result.error, RuntimeError) for result in results.values())
    last = rig.move(S[0], N[0])
    rig.transfers.issue([last])
    assert rig.settle()[last.number].error is None


def test_a_store_that_answers_for_too_few_blocks_fails_the_batch(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.store, "write_blocks", lambda items: [])
    rig.transfers.issue([rig.move(S[0], N[0])])
    assert isinstance(rig.settle()[0].error, ValueError)


def test_writes_are_shed_at_once_while_the_store_accepts_none_and_loads_are_not(make_rig: Make, until: Make) -> None:
    gate = Gate(FaultOperation.COPY)
    rig = make_rig(faults=gate)
    rig.fill(N[0], 5)
    rig.store.accepting = False
    rig.transfers.issue([rig.move(P[0], S[0]), rig.move(S[0], N[1])])
    shed: list[MoveResult] = []
    until(lambda: shed.extend(rig.transfers.drain()) or shed)
    gate.open()
    assert [result.move.number for result in shed] == [1], "it does not even wait for the copy into its source"
    assert "takes no writes for a while" in str(shed[0].error)
    rig.transfers.issue([rig.move(N[0], P[1])])
    assert rig.settle()[2].error is None
    assert rig.store.write_batches == []


def test_a_discard_that_fails_is_said_and_counted_and_the_next_write_goes_on(rig: Any, caplog: Any) -> None:
    rig.store.discard_error = TransferError("database is locked")
    rig.fill(S[0], 4)
    with caplog.at_level(logging.WARNING):
        rig.transfers.issue([rig.discard(3), rig.discard(4), rig.move(S[0], N[3])])
        assert rig.settle()[2].error is None
    assert "2 NVMe rows could not be deleted" in caplog.text
    assert rig.transfers.failed_discards == 2
    assert rig.value(N[3]) == 4


def test_a_write_gives_up_when_the_copy_into_its_source_hangs(make_rig: Make, until: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lane, "PATIENCE", 0.05)
    monkeypatch.setattr(file_lane, "LOOK_UP", 0.01)
    gate = Gate(FaultOperation.COPY)
    rig = make_rig(faults=gate)
    rig.transfers.issue([rig.move(P[0], S[0]), rig.move(S[0], N[0])])
    until(lambda: rig.results.extend(rig.transfers.drain()) or rig.results)
    gate.open()
    results = rig.settle()
    assert "was not over within" in str(results[1].error)
    assert results[0].error is None
    assert rig.store.write_batches == []


def test_a_read_gives_up_when_no_staging_buffer_comes_free(make_rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lane, "PATIENCE", 0.05)
    monkeypatch.setattr(file_lane, "LOOK_UP", 0.01)
    rig = make_rig(staging_blocks=1, read_threads=2)
    rig.fill(N[0], 1)
    rig.fill(N[1], 2)
    rig.store.read_gate.clear()
    rig.transfers.issue([rig.move(N[0], P[0]), rig.move(N[1], P[1])])
    assert rig.transfers.wait(0, [P[1]], 10.0)
    rig.store.read_gate.set()
    results = rig.settle()
    assert "no staging buffer came free" in str(results[1].error)
    assert results[0].error is None
    assert rig.store.quarantines == [], "the file was not even looked at"
