"""Which rank holds which heads of a model, and how blocks of one number of ranks become blocks of another (design: ranks).

With tensor parallelism a rank's block has a part of each layer's heads, one stretch of them. A piece of a handover has those that its
exporting rank *owns*: of heads that several ranks hold (more ranks than heads, MLA's one row) the lowest of them, so that each head is
handed over once. An importing rank takes its heads from whoever owned them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.pools.block_sections import INDEXER
from kvtier.pools.layer_spec import DTYPE_BYTES
from kvtier.pools.layout import KVLayout

Bytes = npt.NDArray[np.uint8]

FORMAT: Final = 1


@dataclass(frozen=True)
class HeadsPart:
    """A section of a block, as rows of heads: ``[outer, heads, inner bytes]``. ``total``: heads over all ranks."""

    offset: int
    outer: int
    heads: int
    inner: int
    total: int

    @property
    def num_bytes(self) -> int:
        return self.outer * self.heads * self.inner


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model's KV cache.

    Attributes:
        layout: the rank's own.
        model: what both sides call it.
        rank, num_ranks: which of how many.
        total_heads: by group, KV heads over all ranks; 1 for MLA.
    """

    layout: KVLayout
    model: str
    rank: int
    num_ranks: int
    total_heads: tuple[int, ...]

    @classmethod
    def of(cls, layout: KVLayout, model: str | None, rank: int, num_ranks: int, total_kv_heads: int | Sequence[int] | None) -> Shard:
        """The shard of a cache.

        Args:
            total_kv_heads: heads of the whole model, of all attention groups or by group; None: ``num_ranks`` times the rank's own.

        Raises:
            ConfigError: no model, kinds of layers that are not handed over, or numbers of heads that do not fit the layout.
        """
        if not model:
            raise ConfigError(f"model={model!r}: what is handed over must name its model; give KVCacheManager "
                              "model=\"name@revision:weights-digest\"")
        for group in layout.groups:
            if group.kind not in ("attention", "mla") or group.sink_bubble:
                what = f"sinks that do not fill blocks of {layout.tokens_per_block} tokens" if group.sink_bubble else group.kind
                raise ConfigError(f"group {group.number} ({group.describe()}): blocks of attention and MLA layers are handed over; {what} "
                                  "not included, let the decoding process compute the prompt")
        shard = cls(layout, model, rank, num_ranks, _totals(layout, num_ranks, total_kv_heads))
        for group, total in zip(layout.groups, shard.total_heads, strict=True):
            heads = heads_of(total, num_ranks, rank)
            if heads is None or len(heads) != group.spec.num_kv_heads:
                raise ConfigError(f"total_kv_heads={total}: group {group.number} has {group.spec.num_kv_heads} heads on rank {rank} of "
                                  f"{num_ranks}; give the heads of the whole model, which ranks divide evenly (or repeat evenly, one on "
                                  "each)")
        return shard

    @cached_property
    def content(self) -> dict[str, Any]:
        """What the whole model's blocks are, whatever the number of ranks: keys begin with it, and both sides must have the same."""
        described: dict[str, Any] = json.loads(self.layout.describe())
        for group, total in zip(described["groups"], self.total_heads, strict=True):
            group["heads"] = total
        return {"format": FORMAT, "model": self.model, **described}

    @cached_property
    def seed(self) -> bytes:
        """32 bytes that name the content."""
        return hashlib.sha256(b"kvtier handover" + json.dumps(self.content, sort_keys=True).encode()).digest()

    @cached_property
    def parts(self) -> tuple[tuple[HeadsPart, ...], ...]:
        """By group, the sections of a block of this rank."""
        return tuple(tuple(self._part(number, section.name, section.shape, section.dtype, section.offset) for section in group.sections)
                     for number, group in enumerate(self.layout.groups))

    def _part(self, group: int, name: str, shape: tuple[int, ...], dtype: str, offset: int) -> HeadsPart:
        if name == INDEXER:  # [layers, tokens, bytes], the same on all ranks
            return HeadsPart(offset, shape[0], 1, shape[1] * shape[2], 1)
        layers, fields, heads, tokens, width = shape
        return HeadsPart(offset, layers * fields, heads, tokens * width * DTYPE_BYTES[dtype], self.total_heads[group])

    def piece_bytes(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """By group, bytes of a block in the piece of such an exporting rank; 0 where others own all of it."""
        return tuple(sum(part.outer * len(owned_heads(part.total, num_ranks, rank)) * part.inner for part in parts) for parts in self.parts)

    def readers(self, rank: int, num_ranks: int, num_readers: int) -> list[int]:
        """Which of ``num_readers`` importing ranks take something from the piece of exporting rank ``rank`` of ``num_ranks``."""
        totals = {part.total for parts in self.parts for part in parts}
        return [reader for reader in range(num_readers)
                if any(_common(owned_heads(total, num_ranks, rank), heads_of(total, num_readers, reader) or range(0)) for total in totals)]

    def extract(self, group: int, rows: Bytes) -> Bytes:
        """What this rank owns of its blocks: uint8 ``[blocks, block_bytes]`` to ``[blocks, piece bytes]``."""
        piece = np.empty((len(rows), self.piece_bytes(self.rank, self.num_ranks)[group]), dtype=np.uint8)
        start = 0
        for part in self.parts[group]:
            mine, owned = self._heads(part), owned_heads(part.total, self.num_ranks, self.rank)
            end = start + part.outer * len(owned) * part.inner
            _copy_heads(_view(rows, part.offset, part, len(mine)), mine, _view(piece, start, part, len(owned)), owned)
            start = end
        return piece

    def place(self, group: int, piece: Bytes, rank: int, num_ranks: int, rows: Bytes) -> None:
        """Copy what a piece of exporting rank ``rank`` of ``num_ranks`` has of this rank's heads into this rank's blocks."""
        start = 0
        for part in self.parts[group]:
            mine, owned = self._heads(part), owned_heads(part.total, num_ranks, rank)
            _copy_heads(_view(piece, start, part, len(owned)), owned, _view(rows, part.offset, part, len(mine)), mine)
            start += part.outer * len(owned) * part.inner

    def _heads(self, part: HeadsPart) -> range:
        heads = heads_of(part.total, self.num_ranks, self.rank)
        assert heads is not None
        return heads


def heads_of(total: int, num_ranks: int, rank: int) -> range | None:
    """The heads that a rank holds: an equal part of them, or one where there are more ranks. None where they cannot be divided so."""
    if total >= num_ranks:
        count = total // num_ranks
        return range(rank * count, (rank + 1) * count) if total % num_ranks == 0 else None
    return range(rank // (num_ranks // total), rank // (num_ranks // total) + 1) if num_ranks % total == 0 else None


def owned_heads(total: int, num_ranks: int, rank: int) -> range:
    """Those of them that no lower rank holds."""
    heads = heads_of(total, num_ranks, rank)
    if heads is None or (total < num_ranks and rank % (num_ranks // total)):
        return range(0)
    return heads


def require_same_content(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raise ConfigError naming the first difference between what this cache holds and what a ticket is of."""
    remedy = "the exporting and the importing process need the same model, layers, dtype and tokens_per_block; ranks may differ"
    for name in ("format", "model", "tokens_per_block"):
        if mine[name] != theirs.get(name):
            raise ConfigError(f"ticket: {name}={theirs.get(name)!r}, this cache has {mine[name]!r}; {remedy}")
    groups = theirs.get("groups")
    if not isinstance(groups, list) or len(groups) != len(mine["groups"]):
        count = len(groups) if isinstance(groups, list) else groups
        raise ConfigError(f"ticket: {count!r} groups of layers, this cache has {len(mine['groups'])}; {remedy}")
    for number, (own, other) in enumerate(zip(mine["groups"], groups, strict=True)):
        if own != other:
            names = sorted({*own, *other}) if isinstance(other, dict) else []
            for name in names:
                if own.get(name) != other.get(name):
                    hint = " (of the whole model: total_kv_heads)" if name == "heads" else ""
                    raise ConfigError(f"ticket: group {number} has {name}={other.get(name)!r}, this cache has {own.get(name)!r}{hint}; "
                                      f"{remedy}")
            raise ConfigError(f"ticket: group {number} is {other!r}; {remedy}")


def _totals(layout: KVLayout, num_ranks: int, given: int | Sequence[int] | None) -> tuple[int, ...]:
    groups = layout.groups
    numbers: Sequence[object]
    if given is None:
        numbers = [group.spec.num_kv_heads * num_ranks for group in groups]
    elif isinstance(given, Sequence):
        numbers = given
    else:
        numbers = [given] * len(groups)
    if len(numbers) != len(groups):
        raise ConfigError(f"total_kv_heads={given!r}: {len(numbers)} numbers for {len(groups)} groups; give one for all, or one for each")
    totals: list[int] = []
    for group, number in zip(groups, numbers, strict=True):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigError(f"total_kv_heads={given!r}: give whole numbers of at least 1, the KV heads of the whole model")
        totals.append(1 if group.kind == "mla" else number)
    return tuple(totals)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _view(rows: Bytes, offset: int, part: HeadsPart, heads: int) -> Bytes:
    """A section of each row as ``[blocks, outer, heads, inner]``, without a copy."""
    return rows[:, offset:offset + part.outer * heads * part.inner].reshape(len(rows), part.outer, heads, part.inner)


def _copy_heads(source: Bytes, source_heads: range, destination: Bytes, destination_heads: range) -> None:
    both = _common(source_heads, destination_heads)
    if both:
        start, end = both.start - destination_heads.start, both.stop - destination_heads.start
        destination[:, :, start:end] = source[:, :, both.start - source_heads.start:both.stop - source_heads.start]
