"""Moves of single tokens inside a pool: accepted drafts come to stand one behind the other (spec: read path, tree drafts).

Drafts that branch have places of their own in a sequence's pages. When one path is accepted, its keys and values move to the places
directly behind the sequence's tokens, in all layers of a group at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import check_own_memory, check_plain, check_whole, whole_pairs

_KERNEL = "move_tokens"

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element: moving is no arithmetic, and not every device can index every dtype."""


def move_tokens(blocks: torch.Tensor, slots: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
    """Move the keys and values of single tokens of one sequence, in every layer, as if one move after the other were done.

    Args:
        blocks: ``[blocks, layers, fields, heads, tokens_per_block, dim]``, any strides, any dtype and device, changed in place.
        slots: the sequence's blocks by position, as indices into ``blocks``; a negative number where there is none.
        moves: (source place, destination place). Place p is entry ``p % tokens_per_block`` of the block at position
            ``p // tokens_per_block``. A source keeps its content unless it is a destination too.

    Raises:
        RequestError: a tensor of another shape, a place without a block, a slot outside the tensor. Nothing has moved then.
    """
    check_plain(_KERNEL, "blocks", blocks)
    check_whole(_KERNEL, **{f"slots[{position}]": slot for position, slot in enumerate(slots)})
    sources, destinations = _resolve(_checked(blocks, slots, whole_pairs(_KERNEL, "moves", moves)))
    if not sources:
        return
    cells = blocks.detach().view(_BITS[blocks.element_size()])
    tokens_per_block = blocks.shape[4]

    def entries(places: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        slot = [slots[place // tokens_per_block] for place in places]
        inside = [place % tokens_per_block for place in places]
        both = torch.tensor([slot, inside], dtype=torch.int64, device=blocks.device)
        return both[0], both[1]

    with torch.inference_mode():  # blocks may have been made in it, and cannot be written outside then
        slot, inside = entries(sources)
        moved = cells[slot, :, :, :, inside]  # a copy: all are read before any is written
        slot, inside = entries(destinations)
        cells[slot, :, :, :, inside] = moved


def _checked(blocks: torch.Tensor, slots: Sequence[int], moves: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    if blocks.dim() != 6 or blocks.element_size() not in _BITS:
        raise RequestError(f"{_KERNEL}: blocks has shape {tuple(blocks.shape)} and dtype {blocks.dtype}: pass [blocks, layers, fields, "
                           "heads, tokens_per_block, dim] with elements of 1, 2, 4 or 8 bytes")
    check_own_memory(_KERNEL, "blocks", blocks)
    num_blocks, tokens_per_block = blocks.shape[0], blocks.shape[4]
    capacity = len(slots) * tokens_per_block
    for move in moves:
        for name, place in zip(("source", "destination"), move, strict=True):
            if not 0 <= place < capacity:
                raise RequestError(f"{_KERNEL}: {name} place {place}: the sequence's {len(slots)} blocks of {tokens_per_block} tokens have "
                                   f"places 0 to {capacity - 1}")
            slot = slots[place // tokens_per_block]
            if not 0 <= slot < num_blocks:
                raise RequestError(f"{_KERNEL}: {name} place {place} lies in slot {slot}: the pool has slots 0 to {num_blocks - 1}, and a "
                                   "negative slot means that there is no block")
    return moves


def _resolve(moves: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Sources as they are before the first move, and destinations that are not given twice: the same result in one go."""
    origins: dict[int, int] = {}
    for source, destination in moves:
        origins[destination] = origins.get(source, source)
    kept = [(origin, destination) for destination, origin in origins.items() if origin != destination]
    return [origin for origin, _ in kept], [destination for _, destination in kept]


def move_tokens_reference(blocks: torch.Tensor, slots: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
    """The same, move by move and layer by layer, to be read and compared with."""
    tokens_per_block = blocks.shape[4]
    for source, destination in moves:
        for layer in range(blocks.shape[1]):
            for field in range(blocks.shape[2]):
                from_page = blocks[slots[source // tokens_per_block], layer, field]
                to_page = blocks[slots[destination // tokens_per_block], layer, field]
                to_page[:, destination % tokens_per_block] = from_page[:, source % tokens_per_block].clone()
