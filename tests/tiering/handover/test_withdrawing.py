"""A handover is taken back, or seen to have ended: by whom it was taken, and what is said when folder, rank or exporter is gone."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from handover_rig import Clock, Decode, Prefill, both_folders, files, sides

from kvtier import BlockExporter, HandoverFolder, Request, RequestError
from kvtier.tiering.handover import exporting, importing

Make = Callable[..., Any]
PROMPT = list(range(100, 121))


def ended(there: Prefill) -> list[bool]:
    return [handover.was_taken for handover in there.exporter.poll()]


@both_folders
def test_a_withdrawn_handover_is_gone_and_one_that_is_taken_cannot_be_withdrawn(prefill: Make, decode: Make,
                                                                                folder: HandoverFolder) -> None:
    here, there = decode(), prefill()
    known, ticket = there.hand_over(PROMPT)
    here.importer.offer(ticket)
    assert there.exporter.withdraw(ticket.to_json())
    assert files(folder) == []
    with pytest.raises(RequestError, match="file"):
        there.exporter.withdraw(replace(ticket, pieces=(replace(ticket.pieces[0], file="../../notes.txt"),)))
    assert there.exporter.poll() == []
    assert here.serve(known) == 0
    assert here.importer.stats().gone == 1
    known, ticket = there.hand_over(PROMPT[1:], 2)
    here.importer.offer(ticket)
    here.serve(known, 2)
    assert not there.exporter.withdraw(ticket)


def test_what_is_being_read_is_not_withdrawn_and_what_its_reader_leaves_is(prefill: Make, decode: Make, folder: HandoverFolder,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = decode(), prefill()
    known, ticket = there.hand_over(PROMPT)
    here.importer.offer(ticket)
    answers: list[bool] = []

    def fails(*_arguments: Any) -> None:
        answers.append(there.exporter.withdraw(ticket))
        raise KeyboardInterrupt

    here.engine.admit(Request(1, known))
    with monkeypatch.context() as patch:
        patch.setattr(importing, "write_rows", fails)
        with pytest.raises(KeyboardInterrupt):
            here.importer.fill(1)
    assert (answers, ended(there)) == ([False], [])
    assert there.exporter.withdraw(ticket)
    assert here.importer.fill(1) == 0
    assert (files(folder), ended(there)) == ([], [])
    here.finish()


def test_what_one_of_two_ranks_has_taken_is_not_withdrawn(make_cache: Make, folder: HandoverFolder) -> None:
    [there] = sides(make_cache, folder, 1, "attention", Prefill)
    one, two = sides(make_cache, folder, 2, "attention", Decode)
    known, ticket = there.hand_over(PROMPT)
    for side in (one, two):
        side.importer.offer(ticket)
    assert one.serve(known) == 21
    assert not there.exporter.withdraw(ticket)
    assert ended(there) == []
    assert two.serve(known) == 21, "the other one has what the first one has"
    assert ended(there) == [True]


def test_a_ticket_is_withdrawn_once_and_by_its_own_rank(make_cache: Make, folder: HandoverFolder) -> None:
    one, two = sides(make_cache, folder, 2, "attention", Prefill)
    _known, first = one.hand_over(PROMPT)
    two.hand_over(PROMPT)
    assert not two.exporter.withdraw(first)
    assert one.exporter.withdraw(first)
    assert not one.exporter.withdraw(first)
    assert (one.exporter.outstanding, two.exporter.outstanding) == (0, 1)


def test_who_polls_while_a_handover_is_withdrawn_does_not_see_it_taken(prefill: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    there = prefill()
    _known, ticket = there.hand_over(PROMPT)
    seen: list[bool] = []
    poller = threading.Thread(target=lambda: seen.extend(ended(there)))
    withdraw = exporting.withdraw

    def slow(*given: Any) -> bool:
        is_gone = withdraw(*given)
        poller.start()
        poller.join(0.3)
        return is_gone

    monkeypatch.setattr(exporting, "withdraw", slow)
    assert there.exporter.withdraw(ticket)
    poller.join(10.0)
    assert (seen, there.exporter.outstanding) == ([], 0)


@both_folders
@pytest.mark.parametrize("becomes", ["nothing", "another one", "another one while it is elsewhere"])
def test_a_folder_that_is_gone_was_not_taken(becomes: str, prefill: Make, decode: Make, folder: HandoverFolder) -> None:
    here, there = decode(), prefill()
    known, ticket = there.hand_over(PROMPT)
    here.importer.offer(ticket)
    if becomes != "another one while it is elsewhere":
        shutil.rmtree(folder.directory)
        if becomes == "another one":
            folder.directory.mkdir(mode=0o700)
    else:
        shutil.move(folder.directory, folder.directory.with_name("moved-" + folder.directory.name))
        folder.directory.mkdir(mode=0o700)
    try:
        assert not there.exporter.withdraw(ticket)
        assert ended(there) == [False]
        assert here.serve(known) == 0
        known, ticket = there.hand_over(PROMPT[1:], 2)
        here.importer.offer(ticket)
        assert here.serve(known, 2) == 20
        assert ended(there) == [True]
    finally:
        shutil.rmtree(folder.directory.with_name("moved-" + folder.directory.name), ignore_errors=True)


def test_an_exporter_that_is_made_again_withdraws_what_the_first_one_left_and_hears_nothing_of_it(
        prefill: Make, decode: Make, folder: HandoverFolder, clock: Clock) -> None:
    here, there = decode(), prefill()
    _known, first = there.hand_over(PROMPT)
    known, second = there.hand_over(PROMPT[1:], 2)
    _known, third = there.hand_over(PROMPT[2:], 3)
    again = BlockExporter(there.cache, folder)
    assert again.withdraw(first.to_json())
    here.importer.offer(second)
    assert here.serve(known) == 20
    assert not again.withdraw(second)
    clock.now += 61
    assert again.poll() == []
    assert files(folder) == [], "but what nobody took is removed"
    assert not again.withdraw(third)
    assert again.outstanding == 0


def test_what_was_over_when_it_was_seen_to_be_gone_is_not_said_to_be_taken(prefill: Make, folder: HandoverFolder, clock: Clock) -> None:
    there = prefill()
    there.hand_over(PROMPT)
    clock.now += 61
    assert folder.collect() == 1
    assert ended(there) == [False]
    assert ended(there) == [], "each is said once"
