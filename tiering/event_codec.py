"""Events as bytes for another process: JSON, tokens packed as int32, hashes in hexadecimal. Nothing in it is ever executed."""

from __future__ import annotations

import base64
import json
import sys
from array import array
from collections.abc import Sequence
from typing import Any, Final

from kvtier.errors import TransferError
from kvtier.tiering.ledger.events import Created, Event, EventData, Removed, Stored, StoredBlock, Updated
from kvtier.types import Level

CODEC_VERSION: Final = 1


def encode_events(events: Sequence[Event]) -> bytes:
    """The message for some events. Reads their ``data``: not under a lock."""
    found = [[event.event_id, event.group, *_encode(event.data)] for event in events]
    return json.dumps({"version": CODEC_VERSION, "events": found}, separators=(",", ":")).encode()


def decode_events(message: bytes) -> list[Event]:
    """The events of a message.

    Raises:
        TransferError: it is no message of :func:`encode_events`; nothing of it is used.
    """
    try:
        content = json.loads(message)
        if content["version"] != CODEC_VERSION:
            raise ValueError(f"version {content['version']!r}, expected {CODEC_VERSION}")
        return [Event(_count(event_id), _count(group), _decode(kind, fields)) for event_id, group, kind, fields in content["events"]]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise TransferError(f"event message of {len(message)} bytes cannot be read ({type(error).__name__}: {error}); do all ranks run the "
                            "same version of kvtier?") from None


def _encode(data: EventData) -> tuple[str, list[object]]:
    if isinstance(data, Stored):
        return "stored", [None if data.parent_hash is None else data.parent_hash.hex(), [_encode_block(block) for block in data.blocks]]
    if isinstance(data, Removed):
        return "removed", [block_hash.hex() for block_hash in data.block_hashes]
    if isinstance(data, Updated):
        return "updated", [data.block_hash.hex(), data.level, data.priority]
    return "created", list(data.num_blocks_per_level)


def _decode(kind: str, fields: list[Any]) -> EventData:
    if kind == "stored":
        parent, blocks = fields
        return Stored(None if parent is None else bytes.fromhex(parent), tuple([_decode_block(*block) for block in blocks]))
    if kind == "removed":
        return Removed(tuple([bytes.fromhex(text) for text in fields]))
    if kind == "updated":
        block_hash, level, priority = fields
        return Updated(bytes.fromhex(block_hash), _change(level), _change(priority))
    if kind == "created":
        return Created(tuple([_count(number) for number in fields]))
    raise ValueError(f"unknown kind {kind!r}")


def _encode_block(block: StoredBlock) -> list[object]:
    return [block.block_hash.hex(), _pack(block.tokens), block.lora_id, block.cache_salt, block.level, block.priority,
            [[digest.hex(), offset] for digest, offset in block.multimodal]]


def _decode_block(block_hash: str, tokens: str, lora_id: int | None, cache_salt: str | None, level: int, priority: int,
                  multimodal: list[tuple[str, int]]) -> StoredBlock:
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise ValueError(f"cache_salt {cache_salt!r}")
    return StoredBlock(bytes.fromhex(block_hash), _unpack(tokens), None if lora_id is None else _whole(lora_id), cache_salt,
                       int(Level(_whole(level))), _count(priority),
                       tuple([(bytes.fromhex(digest), _count(offset)) for digest, offset in multimodal]))


def _pack(tokens: Sequence[int]) -> str:
    packed = array("i", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode()


def _unpack(text: str) -> tuple[int, ...]:
    packed = array("i")
    packed.frombytes(base64.b64decode(text, validate=True))
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


def _change(pair: list[int] | None) -> tuple[int, int] | None:
    if pair is None:
        return None
    old, new = pair
    return _count(old), _count(new)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} is no whole number")
    return value


def _count(value: object) -> int:
    if _whole(value) < 0:
        raise ValueError(f"{value!r} is negative")
    return _whole(value)
