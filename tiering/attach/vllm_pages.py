"""Which pages of a vLLM transfer belong to which chunks of ours: block ids, group sizes and first indices, taken apart by group.

A chunk of ours is ``blocks_per_chunk`` pages of one KV group. vLLM names the pages of a transfer group by group: how many, and the
index within the request of the first one. The first page may lie inside its chunk (what is before it is already on the device, or has
left the window), and of a load the last chunk may be needed in part only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.errors import TransferError


@dataclass(frozen=True)
class Part:
    """The chunks of one group in a transfer: a job of the tier, its group and its host slots, in the order of the request."""

    job_id: int
    group: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class PartPages:
    """A part and the device's pages of it; ``skip`` pages are left out at the front of its first chunk."""

    part: Part
    pages: tuple[int, ...]
    skip: int


def pages_of(parts: Sequence[Part], pages: Sequence[int], group_sizes: Sequence[int], first_indices: Sequence[int], pages_per_chunk: int, *,
             is_store: bool) -> list[PartPages]:
    """Give each part its pages.

    Args:
        parts: at most one for each group; a group without one must have no pages.
        pages: block ids of all groups, one group after the other.
        group_sizes, first_indices: how many of them belong to each group; index within the request of each group's first one.
        pages_per_chunk: pages in one chunk, in every group.
        is_store: every chunk but the first must then be complete to its end.

    Raises:
        TransferError: pages and chunks do not add up. Of a store that means that pages were left out in the middle: which ones cannot
            be known, so nothing may be stored.
    """
    by_group = {part.group: part for part in parts}
    result, position = [], 0
    for group, (count, first) in enumerate(zip(group_sizes, first_indices, strict=True)):
        part = by_group.pop(group, None)
        slots = len(part.slots) if part is not None else 0
        skip = first % pages_per_chunk if count else 0
        full = slots * pages_per_chunk - skip
        shortest = full if is_store else full - pages_per_chunk + 1
        if not (shortest <= count <= full if slots else count == 0):
            raise TransferError(f"group {group}: {count} pages from place {skip} of the first chunk on do not fill {slots} chunks of "
                                f"{pages_per_chunk} pages")
        if part is not None:
            result.append(PartPages(part, tuple(int(page) for page in pages[position:position + count]), skip))
        position += count
    if by_group or position != len(pages):
        raise TransferError(f"{len(pages)} pages are named for groups {sorted(by_group)}, of {position} the chunks are known")
    return result
