"""A block as a file that a human can look at: ``TransferMode.POSIX_DEBUG_FALLBACK`` (spec: transfer modes).

The first line is JSON: which block, where it came from, what its bytes mean, their checksum. Behind it are the bytes, as a host slot
holds them. ``head -1 FILE`` shows the line, :func:`read_debug_file` checks the rest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import CorruptBlock
from kvtier.pools.layout import LayerGroup
from kvtier.pools.pool_index import LEVEL_NAMES, level_of, slot_of
from kvtier.tiering.ledger.moves import Move

FILE_MODE: Final = 0o600
KIND: Final = "kvtier debug block"
VERSION: Final = 1
LONGEST_HEADER: Final = 1 << 16


def file_name(move: Move) -> str:
    """One file for each block of a group: a block that travels again replaces it."""
    return f"group-{move.group}-block-{move.block_id}.kvblock"


def header(move: Move, key: bytes, group: LayerGroup, payload: npt.NDArray[np.uint8]) -> bytes:
    """The first line of the file of a block with this chain key."""
    fields = {
        "kind": KIND, "version": VERSION, "group": move.group, "layers": list(group.layers), "block_id": move.block_id,
        "key": key.hex() or None, "tokens_per_block": group.tokens_per_block, "move": move.number,
        "from": f"{LEVEL_NAMES[level_of(move.source)]} {slot_of(move.source)}",
        "to": f"{LEVEL_NAMES[level_of(move.destination)]} {slot_of(move.destination)}",
        "sections": [{"name": section.name, "shape": list(section.shape), "dtype": section.dtype, "offset": section.offset,
                      "bytes": section.num_bytes} for section in group.sections],
        "bytes": len(payload), "xxh3_128": xxhash.xxh3_128_hexdigest(payload.data)}
    return json.dumps(fields).encode() + b"\n"


def check(data: bytes, name: str) -> tuple[dict[str, Any], bytes]:
    """Header and payload of a file's bytes. Raises CorruptBlock when they are not what was written."""
    line, _, payload = data.partition(b"\n")
    try:
        fields = json.loads(line) if len(line) <= LONGEST_HEADER else None
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or fields.get("kind") != KIND or fields.get("version") != VERSION:
        raise CorruptBlock(f"{name}: not a file of version {VERSION} of a {KIND}")
    if fields.get("bytes") != len(payload) or fields.get("xxh3_128") != xxhash.xxh3_128_hexdigest(payload):
        raise CorruptBlock(f"{name}: {len(payload)} bytes that are not the {fields.get('bytes')} that were written")
    return fields, payload


def read_debug_file(path: str | Path) -> tuple[dict[str, Any], bytes]:
    """Header and payload of a block's file. Raises CorruptBlock when its checksum says otherwise, OSError when it cannot be read."""
    return check(Path(path).read_bytes(), str(path))


async def write_and_read_back(folder: int, name: str, first_line: bytes, payload: npt.NDArray[np.uint8]) -> bytes:
    """Write a file as a whole or not at all, and read its payload back.

    Args:
        folder: descriptor of an open folder.

    Raises:
        OSError: it cannot be written or read. CorruptBlock: it reads back differently.
    """
    import aiofiles  # type: ignore[import-untyped]  # not at the top: only this mode needs it

    partial = f".{name}.partial"
    with suppress(FileNotFoundError):
        os.unlink(partial, dir_fd=folder)
    try:
        async with aiofiles.open(partial, "xb", opener=_opener(folder)) as file:
            await file.write(first_line)
            await file.write(payload.data)
        os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial, dir_fd=folder)
        raise
    async with aiofiles.open(name, "rb", opener=_opener(folder)) as file:
        data = await file.read()
    _fields, found = check(data, name)
    if not data.startswith(first_line):
        raise CorruptBlock(f"{name}: somebody else's file")
    return found


def _opener(folder: int) -> Callable[[str, int], int]:
    def open_below(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, FILE_MODE, dir_fd=folder)
    return open_below
