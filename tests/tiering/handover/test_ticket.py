"""A ticket comes from another process: it survives the way there, and nothing in it is believed."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import HandoverTicket, RequestError
from kvtier.tiering.handover.ticket import HandoverPiece

FILE = "0123456789abcdef" * 2 + "-1700000000000.kv"
TICKET = HandoverTicket({"model": "m", "tokens_per_block": 4}, 2, 10, (b"a" * 32, b"b" * 32, b"c" * 32), (((0, 3),), ((0, 1), (2, 3))),
                        1700000000.0, (HandoverPiece(0, FILE, b"d" * 16), HandoverPiece(1, "", bytes(16))))


def test_a_ticket_survives_the_way_to_another_process() -> None:
    assert HandoverTicket.from_json(TICKET.to_json()) == TICKET
    assert HandoverTicket.from_json(TICKET.to_json().encode()) == TICKET
    assert pickle.loads(pickle.dumps(TICKET)) == TICKET
    assert "\n" not in TICKET.to_json()


@pytest.mark.parametrize(("field", "value", "message"), [
    ("content", None, "tokens_per_block"), ("content", {"tokens_per_block": 0}, "tokens_per_block"),
    ("content", {"tokens_per_block": "4"}, "tokens_per_block"),
    ("num_ranks", 0, "num_ranks"), ("num_ranks", 1e3, "num_ranks"), ("num_ranks", 4000, "num_ranks"),
    ("num_tokens", 0, "num_tokens"), ("num_tokens", 13, "3 keys for 4 blocks"), ("num_tokens", True, "num_tokens"),
    ("keys", "zz", "ValueError"), ("keys", "61" * 33, "keys"), ("keys", 5, "TypeError"),
    ("positions", [[[0, 4]]], "positions"), ("positions", [[[1, 1]]], "positions"), ("positions", [[[0, 2], [1, 3]]], "positions"),
    ("positions", [[[-1, 2]]], "positions"), ("positions", [5], "TypeError"), ("positions", [[[0, 1, 2]]], "ValueError"),
    ("deadline", "soon", "deadline"), ("deadline", -1, "deadline"), ("deadline", float("nan"), "deadline"), ("deadline", 1e300, "deadline"),
    ("pieces", [], "pieces"), ("pieces", [{"rank": 2, "file": FILE, "digest": "64" * 16}], "pieces of ranks"),
    ("pieces", [{"rank": 0, "file": "../secret", "digest": "64" * 16}], "file"),
    ("pieces", [{"rank": 0, "file": FILE.replace(".kv", ".part"), "digest": "64" * 16}], "file"),
    ("pieces", [{"rank": 0, "file": FILE, "digest": "64"}], "file"), ("pieces", [{"rank": 0}], "KeyError"),
    ("pieces", [{"rank": 0, "file": FILE, "digest": "64" * 16}] * 2, "pieces of ranks"),
])
def test_a_field_that_cannot_be_is_named(field: str, value: Any, message: str) -> None:
    found = json.loads(TICKET.to_json())
    with pytest.raises(RequestError, match=message):
        HandoverTicket.from_json(json.dumps(found | {field: value}))
    del found[field]
    with pytest.raises(RequestError, match=field):
        HandoverTicket.from_json(json.dumps(found))


@pytest.mark.parametrize("text", ["", "{", "5", "[]", "null", b"\xff", "[" * 100_000])
def test_what_is_no_ticket_is_refused(text: Any) -> None:
    with pytest.raises(RequestError, match="ticket"):
        HandoverTicket.from_json(text)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=6),
       st.sampled_from(sorted(json.loads(TICKET.to_json()))))
def test_nothing_but_request_errors_comes_of_a_strange_field(value: Any, field: str) -> None:
    try:
        HandoverTicket.from_json(json.dumps(json.loads(TICKET.to_json()) | {field: value}))
    except RequestError:
        pass


@pytest.mark.parametrize(("field", "value"), [
    ("keys", None), ("keys", 5), ("positions", None), ("positions", (5,)), ("positions", ((1, 2, 3),)), ("pieces", None), ("pieces", (5,)),
    ("pieces", (HandoverPiece(0, FILE, None),)), ("pieces", (HandoverPiece(0, FILE, [0] * 16),)), ("content", {})])  # type: ignore[arg-type]
def test_a_ticket_that_was_made_otherwise_is_checked_too(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match="ticket"):
        HandoverTicket.read(replace(TICKET, **{field: value}))
    with pytest.raises(RequestError, match="ticket"):
        HandoverTicket.read(5)  # type: ignore[arg-type]
    assert HandoverTicket.read(TICKET) is TICKET
    assert HandoverTicket.read(TICKET.to_json()) == TICKET


def test_tickets_of_all_ranks_become_one() -> None:
    zero, one = (replace(TICKET, pieces=(piece,), deadline=deadline) for piece, deadline in zip(TICKET.pieces, (9.0, 7.0), strict=True))
    assert zero.missing_ranks == [1]
    joined = HandoverTicket.joined([one, zero])
    assert joined == replace(TICKET, deadline=7.0)
    assert joined.missing_ranks == []
    with pytest.raises(RequestError, match="a rank comes twice"):
        HandoverTicket.joined([zero, zero])
    with pytest.raises(RequestError, match="different tokens"):
        HandoverTicket.joined([zero, replace(one, keys=(b"a" * 32, b"b" * 32, b"x" * 32))])
    for nothing in ([], [5], None, 5, TICKET):
        with pytest.raises(RequestError, match="pass the tickets"):
            HandoverTicket.joined(nothing)  # type: ignore[arg-type]
