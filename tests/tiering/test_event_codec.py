"""Events that go to another process come out as they went in, and what is no event message is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import TransferError
from kvtier.tiering.event_codec import decode_events, encode_events
from kvtier.tiering.ledger.events import Created, Event, EventData, Removed, Stored, StoredBlock, Updated

HASHES = st.binary(min_size=32, max_size=32)
LEVELS = st.integers(0, 2)
PRIORITIES = st.integers(0, 100)
BLOCKS = st.builds(StoredBlock, HASHES, st.lists(st.integers(-2**31, 2**31 - 1), max_size=40).map(tuple),
                   st.none() | st.integers(0, 2**64 - 1), st.none() | st.text(st.characters(), max_size=20), LEVELS, PRIORITIES,
                   st.lists(st.tuples(HASHES, st.integers(0, 2**31)), max_size=2).map(tuple))
DATA: st.SearchStrategy[EventData] = st.one_of(
    st.builds(Created, st.lists(st.integers(0, 2**40), min_size=1, max_size=3).map(tuple)),
    st.builds(Stored, st.none() | HASHES, st.lists(BLOCKS, max_size=4).map(tuple)),
    st.builds(Removed, st.lists(HASHES, max_size=5).map(tuple)),
    st.builds(Updated, HASHES, st.none() | st.tuples(LEVELS, LEVELS), st.none() | st.tuples(PRIORITIES, PRIORITIES)))
EVENTS = st.lists(st.builds(Event, st.integers(0, 2**62), st.integers(0, 40), DATA), max_size=5)

BLOCK = StoredBlock(bytes(range(32)), (1, -1, 2**31 - 1, -2**31), 2**64 - 1, "tenant \ud800 ü", 2, 100, ((bytes(32), 0), (b"\x01" * 32, 7)))
EXAMPLES = [Event(0, 0, Created((8, 4, 16))), Event(1, 0, Stored(None, (BLOCK,))), Event(2, 1, Stored(bytes(32), (BLOCK, BLOCK))),
            Event(3, 0, Removed((bytes(32), b"\xff" * 32))), Event(4, 0, Updated(bytes(32), (0, 1), None)),
            Event(5, 0, Updated(bytes(32), None, (35, 80)))]


def test_the_example_of_each_kind_comes_out_as_it_went_in() -> None:
    found = decode_events(encode_events(EXAMPLES))
    assert found == EXAMPLES
    assert [type(event.data) for event in found] == [Created, Stored, Stored, Removed, Updated, Updated]
    stored = found[1].data
    assert isinstance(stored, Stored)
    assert type(stored.blocks[0].block_hash) is bytes
    assert type(stored.blocks[0].tokens) is tuple


@given(EVENTS)
def test_any_events_come_out_as_they_went_in(events: list[Event]) -> None:
    assert decode_events(encode_events(events)) == events


@pytest.mark.parametrize(("kind", "fields"), [
    (Created, ["num_blocks_per_level"]), (Stored, ["parent_hash", "blocks"]), (Removed, ["block_hashes"]),
    (Updated, ["block_hash", "level", "priority"]),
    (StoredBlock, ["block_hash", "tokens", "lora_id", "cache_salt", "level", "priority", "multimodal"])])
def test_no_field_is_left_out(kind: type, fields: list[str]) -> None:
    """A field that is added to an event has to be added to the message as well."""
    assert [field.name for field in dataclasses.fields(kind)] == fields


def changed(position: int, *path: int | str, to: Any) -> bytes:
    content = json.loads(encode_events(EXAMPLES))
    place = content["events"][position]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return json.dumps(content).encode()


BAD = {
    "empty": b"", "no JSON": b"\x80\x04N.", "cut": encode_events(EXAMPLES)[:-3], "a number": b"7", "null": b"null", "a list": b"[]",
    "no events": b'{"version": 1}', "another version": b'{"version": 2, "events": []}',
    "events that are a number": b'{"version":1,"events":3}',
    "deeply nested": b"[" * 100_000, "a huge number": b'{"version":1,"events":[[' + b"9" * 10_000 + b',0,"created",[1]]]}',
    "an unknown kind": changed(0, 2, to="pickled"), "an id that is text": changed(0, 0, to="0"), "a negative id": changed(0, 0, to=-1),
    "an id that is true": changed(0, 0, to=True), "a size that is text": changed(0, 3, 0, to="8"),
    "a missing part": b'{"version":1,"events":[[0,0,"created"]]}',
    "a hash that is none": changed(3, 3, 0, to="xy"), "a hash that is a number": changed(3, 3, 0, to=5),
    "tokens of half a size": changed(1, 3, 1, 0, 1, to="AAA="), "tokens that are none": changed(1, 3, 1, 0, 1, to="*"),
    "no such level": changed(1, 3, 1, 0, 4, to=7), "a salt that is a list": changed(1, 3, 1, 0, 3, to=[]),
    "an item without an offset": changed(1, 3, 1, 0, 6, 0, to=["00"]),
    "a block with a part missing": changed(1, 3, 1, 0, to=["00"]), "three levels": changed(4, 3, 1, to=[0, 1, 2]),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_event_message_is_refused(name: str) -> None:
    with pytest.raises(TransferError, match="cannot be read"):
        decode_events(BAD[name])


@given(st.binary(max_size=200))
def test_any_bytes_are_events_or_refused(message: bytes) -> None:
    try:
        decode_events(message)
    except TransferError:
        pass


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_message_is_events_or_refused(place: int, value: int) -> None:
    message = bytearray(encode_events(EXAMPLES))
    message[place % len(message)] = value
    try:
        decode_events(bytes(message))
    except TransferError:
        pass
