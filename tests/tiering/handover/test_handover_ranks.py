"""Caches of several ranks on both sides: each rank's engine checks that it has the bytes of its own heads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from handover_rig import TOTAL, Decode, Prefill, files, flip, layout_of, sides

from kvtier import BlockImporter, ConfigError, HandoverFolder, HandoverTicket, Request, RequestError

Make = Callable[..., Any]
PROMPT = list(range(100, 121))


def hand_over(exporting: Sequence[Prefill], tokens: Sequence[int], request_id: int = 1) -> tuple[list[int], HandoverTicket]:
    told = [side.hand_over(tokens, request_id) for side in exporting]
    return told[0][0], HandoverTicket.joined([ticket for _known, ticket in told])


@pytest.mark.parametrize(("there", "here", "kind"), [
    *[(there, here, "attention") for there, here in ((2, 1), (1, 2), (2, 4), (4, 2), (8, 1), (1, 8), (2, 2))],
    *[(there, here, kind) for there, here in ((2, 1), (1, 2), (2, 4)) for kind in ("windows", "side data", "mla", "mla and attention")],
])
def test_every_rank_gets_its_heads(there: int, here: int, kind: str, make_cache: Make, folder: HandoverFolder) -> None:
    exporting, importing = (sides(make_cache, folder, ranks, kind, side) for ranks, side in ((there, Prefill), (here, Decode)))
    known, ticket = hand_over(exporting, PROMPT)
    num_files = sum(bool(piece.file) for piece in ticket.pieces)
    assert num_files == (1 if kind == "mla" else min(there, TOTAL)), "what ranks repeat is handed over once"
    text = ticket.to_json()
    for number, side in enumerate(importing):
        assert len(files(folder)) > 0, f"rank {number} has not taken its part"
        side.importer.offer(text)
        assert side.fill(known) == 21
        side.finish(answer=3)
    assert files(folder) == []
    assert all(ended.was_taken for side in exporting for ended in side.exporter.poll())


def test_a_ticket_that_lacks_a_rank_whose_heads_are_wanted_is_refused(make_cache: Make, folder: HandoverFolder) -> None:
    exporting = sides(make_cache, folder, 2, "attention", Prefill)
    known, ticket = exporting[0].hand_over(PROMPT)
    [whole] = sides(make_cache, folder, 1, "attention", Decode)
    with pytest.raises(RequestError, match=r"pieces of ranks \[1\] of 2 are missing"):
        whole.importer.offer(ticket)
    quarter = sides(make_cache, folder, 4, "attention", Decode)
    assert quarter[1].importer.offer(ticket), "its heads are in the piece that is there"
    assert quarter[1].serve(known) == 21
    with pytest.raises(RequestError, match="missing"):
        quarter[2].importer.offer(ticket)


def test_a_rank_takes_its_part_once(make_cache: Make, folder: HandoverFolder) -> None:
    [there] = sides(make_cache, folder, 1, "attention", Prefill)
    one, two = sides(make_cache, folder, 2, "attention", Decode)
    again = sides(make_cache, folder, 2, "attention", Decode)
    known, ticket = there.hand_over(PROMPT)
    for side in (one, two, *again):
        side.importer.offer(ticket)
    assert one.serve(known) == 21
    assert again[0].serve(known) == 0
    assert two.serve(known) == 21
    assert files(folder) == []


class Reduce:
    """The least of each number over ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._lists: list[list[int]] = []

    def __call__(self, numbers: list[int]) -> list[int]:
        if self._barrier.wait() == 0:
            self._lists = []
        self._barrier.wait()
        self._lists.append(numbers)
        self._barrier.wait()
        return [min(column) for column in zip(*self._lists, strict=True)]


def fill_all(importing: Sequence[Decode], known: list[int]) -> list[int]:
    taken = [-1] * len(importing)

    def fill(number: int) -> None:
        taken[number] = importing[number].fill(known)

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(len(importing))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken


@pytest.mark.parametrize(("kind", "damaged", "expected"), [("attention", None, 21), ("attention", 3, 12), ("windows", 3, 0)])
def test_all_ranks_go_on_from_where_the_worst_of_them_can(kind: str, damaged: int | None, expected: int, make_cache: Make,
                                                          folder: HandoverFolder) -> None:
    exporting = sides(make_cache, folder, 2, kind, Prefill)
    importing = sides(make_cache, folder, 2, kind, Decode, allreduce_min=Reduce(2))
    known, ticket = hand_over(exporting, PROMPT)
    for side in importing:
        side.importer.offer(ticket)
    if damaged is not None:  # in what only rank 1 reads
        block_bytes = exporting[1].cache.pool(len(ticket.positions) - 1).group.block_bytes
        flip(folder, -(6 - damaged) * block_bytes, name=ticket.pieces[1].file)
    assert fill_all(importing, known) == [expected] * 2
    assert [side.importer.stats().failures for side in importing] == [0, int(damaged is not None)]
    for side in importing:
        side.engine.sequences[1].computed = expected
        side.finish(answer=3)


def test_windows_filled_for_a_longer_prefix_are_not_used_for_a_shorter_one(make_cache: Make, folder: HandoverFolder) -> None:
    """One rank has taken everything in; the other one's part is damaged, and it has two blocks of its own."""
    exporting = sides(make_cache, folder, 2, "windows", Prefill)
    importing = sides(make_cache, folder, 2, "windows", Decode, allreduce_min=Reduce(2))
    importing[1].engine.serve(Request(7, PROMPT[:9]))
    known, ticket = hand_over(exporting, PROMPT)
    for side in importing:
        side.importer.offer(ticket)
    flip(folder, -1, name=ticket.pieces[1].file)
    assert fill_all(importing, known) == [0, 0]
    for side, there in zip(importing, (0, 8), strict=True):
        side.engine.sequences[1].computed = there
        side.finish(answer=3)


def test_a_rank_without_the_ticket_holds_the_others_back(make_cache: Make, folder: HandoverFolder) -> None:
    [there] = sides(make_cache, folder, 1, "windows", Prefill)
    importing = sides(make_cache, folder, 2, "windows", Decode, allreduce_min=Reduce(2))
    known, ticket = there.hand_over(PROMPT)
    importing[0].importer.offer(ticket)
    assert fill_all(importing, known) == [0, 0]
    assert len(files(folder)) == 1, "nobody has taken it"
    for side in importing:
        side.engine.sequences[1].computed = 0
        side.finish(answer=3)
    importing[0].importer.close()


def test_a_number_of_ranks_that_cannot_have_equal_parts_is_refused(make_cache: Make, folder: HandoverFolder) -> None:
    [there] = sides(make_cache, folder, 1, "attention", Prefill)
    [here] = sides(make_cache, folder, 1, "attention", Decode)
    _known, ticket = there.hand_over(PROMPT)
    with pytest.raises(ConfigError, match="num_ranks=3"):
        here.importer.offer(replace(ticket, num_ranks=3))
    with pytest.raises(ConfigError, match="total_kv_heads=5"):
        BlockImporter(make_cache(4, 0, layout=layout_of(TOTAL, "attention")), folder, total_kv_heads=5)
    here.cache.add_sequence(Request(1, PROMPT))
