"""Whatever goes wrong on one side is a miss on the other: never a wrong byte, nothing leaked, nothing changed by what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from group_engine import LAYOUTS
from handover_rig import Clock, both_folders, files, flip

from kvtier import CapacityError, ConfigError, HandoverFolder, KVLayout, Request, RequestError, TransferError, UnknownRequest
from kvtier.tiering.handover import importing
from kvtier.tiering.handover.ticket import HandoverPiece

Make = Callable[..., Any]
PROMPT = list(range(100, 121))  # five blocks and a token


@both_folders
def test_a_ticket_is_used_once(prefill: Make, decode: Make, folder: HandoverFolder) -> None:
    here, elsewhere = decode(), decode()
    known, ticket = prefill().hand_over(PROMPT)
    for side in (here, elsewhere):
        side.importer.offer(ticket)
    assert here.fill(known) == 21
    assert elsewhere.serve(known) == 0, "a miss, computed there"
    assert elsewhere.importer.stats().gone == 1
    assert here.importer.offer(ticket)  # it is not over yet
    assert here.serve([*known, 1], 2) == 0
    here.finish()


@both_folders
def test_a_ticket_that_is_over_is_a_miss_and_its_bytes_go(prefill: Make, decode: Make, folder: HandoverFolder, clock: Clock) -> None:
    here, there = decode(), prefill()
    known, ticket = there.hand_over(PROMPT)
    here.importer.offer(ticket)
    clock.now += 61
    [admission] = here.engine.admit(Request(1, known))
    assert admission.external_tokens == 0
    assert here.importer.fill(1) == 0
    here.finish()
    assert not here.importer.offer(ticket)
    assert here.importer.poll() == 0
    assert here.importer.stats().gone == 1
    assert files(folder) == []
    [ended] = there.exporter.poll()
    assert not ended.was_taken
    assert there.exporter.outstanding == 0


def test_a_ticket_that_ends_between_admission_and_fill_is_a_miss(prefill: Make, decode: Make, clock: Clock) -> None:
    here = decode()
    known, ticket = prefill().hand_over(PROMPT)
    here.importer.offer(ticket)
    [admission] = here.engine.admit(Request(1, known))
    assert admission.external_tokens == 20
    clock.now += 61
    assert here.importer.fill(1) == 0
    here.finish()


@both_folders
@pytest.mark.parametrize("block", range(6))
def test_a_flipped_bit_costs_what_lies_behind_it(block: int, prefill: Make, decode: Make, folder: HandoverFolder) -> None:
    here, there = decode(), prefill()
    known, ticket = there.hand_over(PROMPT)
    here.importer.offer(ticket)
    flip(folder, 8192 + block * there.cache.pool(0).group.block_bytes + 13)
    assert here.serve(known) == 4 * block
    assert here.importer.stats().failures == 1
    assert here.importer.stats().taken == (block > 0)
    assert files(folder) == [], "nobody will want it any more"


@pytest.mark.parametrize("kind", ["window and full", "sinks", "side data", "values of another width"])
@pytest.mark.parametrize("place", [-1, -3000, 8200])
def test_a_flipped_bit_in_any_group_is_never_read(kind: str, place: int, prefill: Make, decode: Make, folder: HandoverFolder) -> None:
    here = decode(LAYOUTS[kind])
    known, ticket = prefill(LAYOUTS[kind]).hand_over(PROMPT)
    here.importer.offer(ticket)
    flip(folder, place)
    assert here.serve(known) < 21
    assert here.importer.stats().failures == 1


@both_folders
@pytest.mark.parametrize("place", [4096, 4100, 4096 + 5 * 16])
def test_a_damaged_table_is_a_miss(place: int, prefill: Make, decode: Make, folder: HandoverFolder) -> None:
    here = decode()
    known, ticket = prefill().hand_over(PROMPT)
    here.importer.offer(ticket)
    flip(folder, place)
    assert here.serve(known) == 0
    assert here.importer.stats().failures == 1


@both_folders
def test_a_file_that_was_cut_or_removed_is_a_miss(prefill: Make, decode: Make, folder: HandoverFolder) -> None:
    here, there = decode(), prefill()
    known, ticket = there.hand_over(PROMPT)
    here.importer.offer(ticket)
    [name] = files(folder)
    with (folder.directory / name).open("r+b") as file:
        file.truncate(10_000)
    assert here.serve(known) == 0
    known, ticket = there.hand_over(PROMPT, 2)
    here.importer.offer(ticket)
    (folder.directory / ticket.pieces[0].file).unlink()
    here.cache.reset()
    assert here.serve(known) == 0


def test_another_files_bytes_are_not_taken_for_these(prefill: Make, decode: Make) -> None:
    """A ticket whose file name leads to other blocks of the same shape."""
    here, there = decode(), prefill()
    known, ticket = there.hand_over(PROMPT)
    _other, other = there.hand_over([5, *PROMPT[1:]], 2)
    [piece], [wrong] = ticket.pieces, other.pieces
    here.importer.offer(replace(ticket, pieces=(HandoverPiece(0, wrong.file, piece.digest),)))
    assert here.serve(known) == 0
    here.importer.offer(replace(ticket, pieces=(wrong,)))  # even with the other's digest
    here.cache.reset()
    assert here.serve(known) == 0


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_layers": 3}, "layers"), ({"num_kv_heads": 2}, "heads"), ({"head_dim": 16}, "head_dim"), ({"dtype": "bfloat16"}, "dtype"),
    ({"tokens_per_block": 8}, "tokens_per_block=4, this cache has 8"),
])
def test_a_foreign_layout_is_refused_before_anything_changes(changes: dict[str, Any], message: str, prefill: Make, decode: Make,
                                                             folder: HandoverFolder) -> None:
    settings = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "dtype": "float32", "tokens_per_block": 4} | changes
    here = decode(KVLayout.uniform(**settings))
    known, ticket = prefill().hand_over(PROMPT)
    with pytest.raises(ConfigError, match=message):
        here.importer.offer(ticket)
    assert here.importer.stats().offered == 0
    assert here.serve(known) == 0
    assert len(files(folder)) == 1
    right = decode()
    right.importer.offer(ticket)
    assert right.serve(known) == 21, "it is still there for whom it fits"


def test_another_model_is_refused(prefill: Make, decode: Make) -> None:
    _known, ticket = prefill().hand_over(PROMPT)
    with pytest.raises(ConfigError, match="model='toy@1:0123abcd', this cache has 'toy@2:0'"):
        decode(model="toy@2:0").importer.offer(ticket)


@pytest.mark.parametrize("ticket", [None, 5, {}, "", "{}", b"[]"])
def test_what_is_no_ticket_is_refused(ticket: Any, decode: Make) -> None:
    with pytest.raises(RequestError, match="ticket"):
        decode().importer.offer(ticket)


def test_an_importer_that_fails_before_it_acknowledges_has_taken_nothing(prefill: Make, decode: Make, folder: HandoverFolder,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    here = decode()
    known, ticket = prefill().hand_over(PROMPT)
    here.importer.offer(ticket)
    write_rows = importing.write_rows

    def fail(*_arguments: Any) -> None:
        raise RuntimeError("the device has gone")

    monkeypatch.setattr(importing, "write_rows", fail)
    here.engine.admit(Request(1, known))
    with pytest.raises(RuntimeError):
        here.importer.fill(1)
    with pytest.raises(RuntimeError):
        here.importer.take_in(Request(2, known))
    assert here.cache.stats().sequences == 1, "take_in leaves nothing behind"
    monkeypatch.setattr(importing, "write_rows", write_rows)
    assert len(files(folder)) == 1
    assert here.importer.fill(1) == 21, "it can be tried again"
    here.engine.sequences[1].computed = 21
    here.finish()
    assert files(folder) == []


def test_a_request_that_is_removed_while_it_is_filled_leaves_the_ticket(prefill: Make, decode: Make, folder: HandoverFolder,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    here = decode()
    known, ticket = prefill().hand_over(PROMPT)
    here.importer.offer(ticket)
    write_rows = importing.write_rows

    def removed(*arguments: Any) -> None:
        here.cache.remove_sequence(1)
        write_rows(*arguments)

    here.cache.add_sequence(Request(1, known))
    monkeypatch.setattr(importing, "write_rows", removed)
    with pytest.raises(UnknownRequest):
        here.importer.fill(1)
    monkeypatch.setattr(importing, "write_rows", write_rows)
    here.cache.verify()
    assert here.cache.probe_prefix_tokens(Request(3, known)) == 0, "nothing of it counts as computed"
    assert len(files(folder)) == 1
    assert here.serve(known, 2) == 21


def test_blocks_that_somebody_else_holds_are_not_written(prefill: Make, decode: Make, folder: HandoverFolder) -> None:
    here = decode()
    known, ticket = prefill().hand_over(PROMPT)
    here.importer.offer(ticket)
    here.engine.admit(Request(1, known))
    with here.cache.pin(1):
        assert here.importer.fill(1) == 0
    assert len(files(folder)) == 1
    assert here.importer.fill(1) == 21
    here.engine.sequences[1].computed = 21
    here.finish()


def test_two_that_want_the_same_ticket_at_the_same_time(prefill: Make, decode: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    here, elsewhere = decode(), decode()
    known, ticket = prefill().hand_over(PROMPT)
    for side in (here, elsewhere):
        side.importer.offer(ticket)
        side.engine.admit(Request(1, known))
    write_rows, begun, go_on = importing.write_rows, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(30)
        write_rows(*arguments)

    monkeypatch.setattr(importing, "write_rows", slow)
    taken: list[int] = []
    thread = threading.Thread(target=lambda: taken.append(here.importer.fill(1)))
    thread.start()
    assert begun.wait(30)
    assert elsewhere.importer.fill(1) == 0
    assert elsewhere.importer.poll() == 1, "it may still come back"
    go_on.set()
    thread.join()
    assert taken == [21]
    here.engine.sequences[1].computed = 21
    here.finish()
    elsewhere.finish()


def test_a_full_folder_is_an_error_of_capacity_and_the_prompt_goes_on(make_cache: Make, tmp_path: Any) -> None:
    from handover_rig import Prefill

    there = Prefill(make_cache(40, 10), HandoverFolder(tmp_path / "small", "5000B"))
    there.compute(PROMPT)
    with pytest.raises(CapacityError, match="raise capacity"):
        there.exporter.export(1)
    assert there.cache.stats().leases == 0
    assert files(there.exporter.folder) == []
    there.engine.forward([1])
    there.engine.remove(1)


def test_a_drive_that_fails_leaves_nothing_behind(prefill: Make, folder: HandoverFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    there = prefill()
    there.compute(PROMPT)

    def fail(*_arguments: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("kvtier.io.handover_piece.os.pwrite", fail)
    with pytest.raises(TransferError, match="cannot be written"):
        there.exporter.export(1)
    assert there.cache.stats().leases == 0
    assert files(folder) == []


def test_a_drive_that_cannot_be_read_is_a_miss(prefill: Make, decode: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    here = decode()
    known, ticket = prefill().hand_over(PROMPT)
    here.importer.offer(ticket)

    def fail(*_arguments: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("kvtier.io.handover_piece.os.preadv", fail)
        assert here.fill(known) == 0
    here.finish()


def test_reused_blocks_that_are_lost_are_taken_from_the_ticket(prefill: Make, warm_cache: Make, folder: HandoverFolder) -> None:
    """The prompt's first blocks lie on NVMe here, and cannot be read: what was handed over has them, too."""
    from handover_rig import Decode
    from toy_engine import PROMPT as STORED
    from toy_engine import fails

    from kvtier.io.faults import FaultOperation

    here = Decode(warm_cache(fails(FaultOperation.READ, count=99), primary=20), folder)
    known, ticket = prefill().hand_over([*STORED, 1, 2, 3, 4, 5])
    here.importer.offer(ticket)
    here.engine.admit(Request(1, known))
    assert here.importer.fill(1) == len(known) - 1
    here.engine.sequences[1].computed = len(known) - 1
    here.finish()


@pytest.mark.parametrize("moment", ["_claim", "_copy", "_agree"])
def test_another_sequence_under_the_same_number_is_not_taken_for_the_one_that_was_filled(moment: str, prefill: Make, decode: Make,
                                                                                         folder: HandoverFolder,
                                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is pre-empted while a thread fills it, and another prompt is admitted under its number."""
    here = decode()
    known, ticket = prefill().hand_over(PROMPT)
    here.importer.offer(ticket)
    here.engine.admit(Request(1, known))
    begins = getattr(here.importer, moment)
    other = [*range(500, 520), 1, 2]

    def exchanged(*arguments: Any) -> Any:
        here.engine.remove(1, store=False)
        here.engine.admit(Request(1, other))
        return begins(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(here.importer, moment, exchanged)
        with pytest.raises(UnknownRequest, match="meanwhile"):
            here.importer.fill(1)
    here.cache.verify()
    assert len(files(folder)) == 1
    here.finish()
    assert here.cache.probe_prefix_tokens(Request(3, other)) == 20, "it was computed by itself"
    assert here.serve(known, 2) == 21, "the ticket is still good"


def test_what_took_the_place_of_a_request_taken_in_ahead_stays(prefill: Make, decode: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    here = decode()
    known, ticket = prefill().hand_over(PROMPT)
    here.importer.offer(ticket)
    agree = here.importer._agree

    def exchanged(*arguments: Any) -> Any:
        here.cache.remove_sequence(1)
        here.engine.admit(Request(1, [5, 6, 7]))
        return agree(*arguments)

    monkeypatch.setattr(here.importer, "_agree", exchanged)
    with pytest.raises(UnknownRequest):
        here.importer.take_in(Request(1, known))
    assert here.cache.stats().sequences == 1
    here.finish()


def test_another_sequence_under_the_same_number_is_not_exported_unseen(prefill: Make, folder: HandoverFolder,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    there = prefill()
    there.compute(PROMPT)
    is_ready = there.cache.is_ready

    def exchanged(request_id: int) -> bool:
        was_ready = is_ready(request_id)
        there.engine.remove(1)
        there.compute([*PROMPT, 7])  # what it reuses might still be on its way
        return was_ready

    monkeypatch.setattr(there.cache, "is_ready", exchanged)
    with pytest.raises(UnknownRequest, match="meanwhile"):
        there.exporter.export(1)
    assert files(folder) == []
    assert there.cache.stats().leases == 0
