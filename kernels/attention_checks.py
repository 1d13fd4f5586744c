"""Checks of values that attention reads: lengths, and the table entries of what is visible. On a GPU they make the host wait."""

from __future__ import annotations

import torch

from kvtier.errors import RequestError
from kvtier.kernels.attention_context import PagedContext


def check_lengths(kernel: str, context: PagedContext, lengths: torch.Tensor) -> None:
    """No sequence is longer than its row of the table."""
    sinks, unit = context.visibility.sinks, context.tokens_per_block
    capacity = context.capacity - (context.visibility.bubble(unit) if context.capacity > sinks else 0)
    if context.visibility.ring is not None and context.capacity >= context.visibility.ring.capacity:
        capacity = 2**31 - 1   # a ring holds the last tokens of a sequence of any length
    wrong = (lengths < 0) | (lengths > capacity)
    if bool(wrong.any()):
        sequence = int(wrong.nonzero()[0])
        raise RequestError(f"{kernel}: lengths[{sequence}]={int(lengths[sequence])} (sequence {sequence}): the table's "
                           f"{context.table.shape[2]} blocks of {unit} tokens allow 0 to {capacity}; "
                           "allocate more blocks, or make a wider table")


def check_keys(context: PagedContext, first: torch.Tensor, lengths: torch.Tensor) -> None:
    """What queries at positions ``first[s]`` to ``lengths[s] - 1`` of each sequence see has pages. What has left their window need not."""
    visibility, unit = context.visibility, context.tokens_per_block
    blocks = torch.arange(context.table.shape[2], device=context.table.device)

    def covered(begin: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Blocks that hold tokens ``begin[s]`` to ``end[s] - 1``, bool ``[sequences, max_blocks]``."""
        first_block, last_block = (visibility.places(tokens, unit) // unit for tokens in (begin, end - 1))
        return (blocks >= first_block[:, None]) & (blocks <= last_block[:, None]) & (begin < end)[:, None]

    if visibility.ring is not None:
        needed = torch.zeros_like(context.table[:, 0], dtype=torch.bool)
        for sequence, bounds in enumerate(zip(first.tolist(), lengths.tolist(), strict=True)):
            for begin, end in visibility.place_spans(*bounds, unit):
                needed[sequence, begin // unit:-(-end // unit)] = True
    else:
        sinks, nothing = torch.full_like(lengths, visibility.sinks), torch.zeros_like(lengths)
        seen_from = nothing if visibility.reach is None else first - visibility.reach + 1
        needed = covered(nothing, torch.minimum(sinks, lengths)) | covered(torch.maximum(seen_from, sinks), lengths)
    bad = context.layer_pages.is_bad(context.table, field_axis=1) & needed[:, None]
    if bool(bad.any()):
        sequence, field, block = bad.nonzero()[0].tolist()
        raise context.layer_pages.entry_error("table", sequence, field, block, int(context.table[sequence, field, block]))


def check_source_rows(kernel: str, context: PagedContext, source_rows: torch.Tensor, lengths: torch.Tensor) -> None:
    """Every visible token lies in a row of the table, at a page."""
    sequences, unit = context.table.shape[0], context.tokens_per_block
    most = int(lengths.max())
    if most > source_rows.shape[1]:
        sequence = int(lengths.argmax())
        raise RequestError(f"{kernel}: source_rows has {source_rows.shape[1]} tokens for lengths[{sequence}]={most} (sequence {sequence})")
    tokens = torch.arange(most, device=lengths.device)
    seen = (tokens < lengths[:, None]) & context.visibility.sees((lengths - 1)[:, None], tokens)
    source = source_rows[:, :most]
    wrong = seen & ((source < -1) | (source >= sequences))
    if bool(wrong.any()):
        sequence, token = wrong.nonzero()[0].tolist()
        raise RequestError(f"{kernel}: source_rows[{sequence}, {token}]={int(source[sequence, token])}: the table has {sequences} rows "
                           f"(allowed: 0 to {sequences - 1}, or -1 for the sequence's own)")
    own = torch.arange(sequences, device=lengths.device)[:, None]
    owners = torch.where((source < 0) | ~seen, own, source.long())
    places = context.visibility.places(tokens, unit)
    blocks = (places // unit).clamp(max=context.table.shape[2] - 1)
    entries = context.table[owners, :, blocks]   # [sequences, tokens, fields]
    bad = context.layer_pages.is_bad(entries, field_axis=2) & seen[..., None]
    if bool(bad.any()):
        sequence, token, field = bad.nonzero()[0].tolist()
        owner, block = int(owners[sequence, token]), int(blocks[token])
        raise context.layer_pages.entry_error("table", owner, field, block, int(context.table[owner, field, block]))
