"""Pretend keys and values, from which what happened to them can be read.

A cell stands for the keys and values of one token. Its content is the whole history that led to it: ``(cell of the token before,
(token, extra id, multimodal content))``, and at the very start the namespace. Two cells are equal exactly when a model would have
computed the same keys and values. A slot holds one cell for each token of a block.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvtier.tiering.ledger.group import RECURRENT
from kvtier.tiering.ledger.ledger import Ledger
from kvtier.tiering.ledger.request import MultimodalItem, Request

GARBAGE: Final = ("garbage",)
UNWRITTEN: Final = ("unwritten",)
RUN_RECORD: Final = struct.Struct("<32sQII")  # of a multimodal suffix: digest, offset in the item, start in the block, length

Cell = tuple[Any, ...]


def elements_of(tokens: Sequence[int], extra_ids: Sequence[int] | None, multimodal: Iterable[MultimodalItem]) -> list[Cell]:
    """What each prompt position contributes."""
    found: list[Cell] = []
    for position, token in enumerate(tokens):
        content = None
        for item in multimodal:
            before = 0
            for start, length in item.runs:
                if start <= position < start + length:
                    content = (item.digest, before + position - start)
                before += length
        found.append((token, None if extra_ids is None else extra_ids[position], content))
    return found


def tag_of(request: Request) -> Cell:
    encoder = () if request.encoder_digest is None else (request.encoder_digest,)
    return ("namespace", request.lora_id, request.cache_salt, request.extra_ids is not None, request.lora_digest,
            request.extra_ids_digest, *encoder)


def history(start: Cell, elements: Iterable[Cell]) -> list[Cell]:
    """One cell for each element."""
    cells: list[Cell] = []
    before = start
    for element in elements:
        before = (before, element)
        cells.append(before)
    return cells


def tree_contents(ledger: Ledger, group: int = 0) -> dict[int, list[Cell]]:
    """By block id: the cells that the tree says the group's block holds, read from the keys along its path. A block with a
    recurrent state has one cell: the state after the block's last token."""
    found: dict[int, list[Cell]] = {}
    for identity, root in ledger.tree.roots.items():
        stack: list[tuple[Any, Cell]] = [(root, ("namespace", *identity))]
        while stack:
            node, cell = stack.pop()
            for position in range(node.length):
                cells = history(cell, _elements_of_key(node.block_key(position), node.namespace.token_width))
                cell = cells[-1]
                block = node.values[group][position]
                if block is not None:
                    assert len(cells) == block.num_tokens
                    found[block.id] = [cell] if ledger.groups[group].kind == RECURRENT else cells
            stack.extend((child, cell) for child in node.children.values())
    return found


def _elements_of_key(key: bytes, width: int) -> list[Cell]:
    runs: list[tuple[bytes, int, int, int]] = []
    if len(key) % 2:  # only a suffix makes the length odd: the letter M and one record for each run
        records = 1
        while (len(key) - 1 - records * RUN_RECORD.size) % width or key[-1 - records * RUN_RECORD.size] != ord("M"):
            records += 1
        runs = [RUN_RECORD.unpack_from(key, len(key) - (i + 1) * RUN_RECORD.size) for i in range(records)]
        key = key[:-1 - records * RUN_RECORD.size]
    found: list[Cell] = []
    for position in range(len(key) // width):
        content = None
        for digest, offset, start, length in runs:
            if start <= position < start + length:
                content = (digest, offset + position - start)
        if width == 4:
            found.append((struct.unpack_from("<i", key, position * 4)[0], None, content))
        else:
            token, extra = struct.unpack_from("<iQ", key, position * 12)
            found.append((token, extra, content))
    return found
