"""Plans: what an attention call has to know on the host before it runs, worked out once and used by every layer (spec: read path).

:class:`PrefillPlan` is made for a step: which queries are whose. :class:`DecodePlan` is made once, for the largest batch and the
longest sequence: a decode step has no work on the host at all, and a captured CUDA graph finds the same buffers every time.
The split into plan and run is FlashInfer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvtier.errors import RequestError
from kvtier.kernels.attention_context import PagedContext
from kvtier.kernels.checks import check_whole

_SMALLEST_SPLIT: Final = 256
"""Tokens below which a part of a sequence is not worth a program of its own."""

_LARGEST_SPLIT: Final = 4096


@dataclass(frozen=True)
class Chunk:
    """One sequence's queries in a prefill call.

    Attributes:
        sequence: row of the table.
        begin, end: its rows of ``query``.
        past: keys that were there before them.
        length: keys that the last of them sees.
    """

    sequence: int
    begin: int
    end: int
    past: int
    length: int


class PrefillPlan:
    """Whose the queries of a prefill call are, and from which positions.

    Attributes:
        chunks: of the sequences that have queries.
        num_queries: of all of them.
        num_sequences: with those that have none.

    Args:
        query_indptr: int ``[sequences + 1]``: the queries of sequence s are rows ``query_indptr[s]`` to ``query_indptr[s + 1]``.
        past: int ``[sequences]``: tokens of each sequence in the pool before these queries.
        is_causal: False (cross-attention): ``past`` are all the keys there are, and every query sees them.
        device: where the queries are.

    Raises:
        RequestError: pointers that do not start at 0 or descend, a negative ``past``, numbers that are not whole.
    """

    def __init__(self, query_indptr: Sequence[int], past: Sequence[int], *, is_causal: bool = True,
                 device: torch.device | str = "cpu") -> None:
        kernel = "PrefillPlan"
        if len(query_indptr) != len(past) + 1:
            raise RequestError(f"{kernel}: query_indptr has {len(query_indptr)} numbers for {len(past)} sequences: pass one more than "
                               "sequences")
        query_indptr, past = (check_whole(kernel, **{f"{name}[{place}]": number for place, number in enumerate(numbers)})
                              for name, numbers in (("query_indptr", query_indptr), ("past", past)))
        if query_indptr[0] != 0:
            raise RequestError(f"{kernel}: query_indptr[0]={query_indptr[0]}: the first sequence's queries begin at 0")
        self.chunks: list[Chunk] = []
        for sequence, before in enumerate(past):
            begin, end = query_indptr[sequence], query_indptr[sequence + 1]
            if end < begin:
                raise RequestError(f"{kernel}: query_indptr[{sequence + 1}]={end} (sequence {sequence}) is less than "
                                   f"query_indptr[{sequence}]={begin}: pointers never descend")
            if before < 0:
                raise RequestError(f"{kernel}: past[{sequence}]={before} (sequence {sequence}): pass 0 or more")
            if begin < end:
                self.chunks.append(Chunk(sequence, begin, end, before, before + end - begin if is_causal else before))
        self.num_queries, self.num_sequences, self.is_causal = query_indptr[-1], len(past), is_causal
        self.device = _numbered(torch.device(device))
        self._tiles: dict[tuple[int, int], torch.Tensor] = {}
        self._sequences: torch.Tensor | None = None
        self._chunk_lengths: torch.Tensor | None = None

    @property
    def longest(self) -> int:
        """Keys of the longest sequence."""
        return max((chunk.length for chunk in self.chunks), default=0)

    def tiles(self, rows: int, group: int) -> torch.Tensor:
        """What the programs of a GPU kernel work on, int32 ``[tiles, 2]`` on the device: sequence, and the tile's first row. Made once.

        A row is a query of the sequence and one of the ``group`` query heads of a KV head: query ``row // group``, head ``row % group``.
        """
        if (rows, group) not in self._tiles:
            found = [(chunk.sequence, first) for chunk in self.chunks for first in range(0, (chunk.end - chunk.begin) * group, rows)]
            # Late tiles see most keys: started first, they are not what everybody waits for in the end.
            self._tiles[rows, group] = torch.tensor(found[::-1], dtype=torch.int32).view(-1, 2).to(self.device)
        return self._tiles[rows, group]

    def split_tokens(self, num_programs: int) -> int:
        """Tokens of a part, when ``num_programs`` programs have the queries and few of them do not fill the device."""
        parts = max(1, _programs_of(self.device) // max(1, num_programs))
        return max(_SMALLEST_SPLIT, -(-self.longest // (parts * _SMALLEST_SPLIT)) * _SMALLEST_SPLIT)

    def sequences(self) -> torch.Tensor:
        """int32 ``[sequences, 4]`` on the device: first query, query behind the last, past and length. Made once."""
        if self._sequences is None:
            rows = torch.zeros(self.num_sequences, 4, dtype=torch.int32)
            for chunk in self.chunks:
                rows[chunk.sequence] = torch.tensor([chunk.begin, chunk.end, chunk.past, chunk.length])
            self._sequences = rows.to(self.device)
        return self._sequences

    def chunk_lengths(self) -> torch.Tensor:
        """int32 ``[queries]`` on the device: queries in the chunk of each. Made once."""
        if self._chunk_lengths is None:
            lengths = torch.tensor([chunk.end - chunk.begin for chunk in self.chunks], dtype=torch.int32)
            self._chunk_lengths = lengths.repeat_interleave(lengths).to(self.device)
        return self._chunk_lengths


class DecodePlan:
    """How decode splits sequences over the programs of a GPU, and the buffers in which their parts meet.

    The parts of a sequence begin at multiples of ``split_tokens`` of what it sees, whatever else is in the batch: a sequence's
    result does not depend on the others. The buffers belong to one stream: calls on two at a time need two plans. A CPU needs none.

    Attributes:
        split_tokens: tokens of a part.
        num_splits: parts of the longest sequence.

    Args:
        max_sequences: of the largest batch.
        max_tokens: of the longest sequence.
        query_heads, kv_heads, value_dim: of the layers that it serves.
        device: of the pages.
        num_programs: programs that fill the device; None: four for each of its multiprocessors.

    Raises:
        RequestError: a size below 1.
    """

    def __init__(self, *, max_sequences: int, max_tokens: int, query_heads: int, kv_heads: int, value_dim: int,
                 device: torch.device | str = "cpu", num_programs: int | None = None) -> None:
        sizes = {"max_sequences": max_sequences, "max_tokens": max_tokens, "query_heads": query_heads, "kv_heads": kv_heads,
                 "value_dim": value_dim}
        max_sequences, max_tokens, query_heads, kv_heads, value_dim = check_whole("DecodePlan", **sizes)
        for name, size in sizes.items():
            if size < 1:
                raise RequestError(f"DecodePlan: {name}={size}: must be at least 1")
        self.max_sequences, self.max_tokens, self.query_heads, self.value_dim = max_sequences, max_tokens, query_heads, value_dim
        self.device = _numbered(torch.device(device))
        wanted, = [_programs_of(self.device)] if num_programs is None else check_whole("DecodePlan", num_programs=num_programs)
        splits = max(1, -(-wanted // (max_sequences * kv_heads)))
        tokens = -(-max_tokens // splits)
        self.split_tokens = min(_LARGEST_SPLIT, max(_SMALLEST_SPLIT, -(-tokens // _SMALLEST_SPLIT) * _SMALLEST_SPLIT))
        self.num_splits = -(-max_tokens // self.split_tokens)
        self._parts: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, query: torch.Tensor, context: PagedContext) -> DecodePlan:
        """A plan for one call."""
        return cls(max_sequences=query.shape[0], max_tokens=max(1, context.capacity), query_heads=query.shape[1], kv_heads=context.heads,
                   value_dim=context.value_dim, device=query.device)

    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers, made once: results float32 ``[max_sequences, num_splits, query_heads, value_dim]`` and, without the last axis, their
        log-sum-exp in base 2."""
        if self._parts is None:
            rows = torch.empty(self.max_sequences, self.num_splits, self.query_heads, self.value_dim, dtype=torch.float32,
                               device=self.device)
            self._parts = rows, torch.empty(rows.shape[:3], dtype=torch.float32, device=self.device)
        return self._parts

    def check(self, kernel: str, query: torch.Tensor, context: PagedContext) -> None:
        """Whether this plan serves a call.

        Raises:
            RequestError: it was made for fewer sequences, shorter ones, or other shapes.
        """
        sequences, query_heads, _ = query.shape
        if (query_heads, context.value_dim) != (self.query_heads, self.value_dim):
            raise RequestError(f"{kernel}: the plan was made for {self.query_heads} query heads and values of {self.value_dim}, this is "
                               f"{query_heads} and {context.value_dim}: make a plan for each kind of layer")
        if sequences > self.max_sequences:
            raise RequestError(f"{kernel}: {sequences} sequences: the plan was made for {self.max_sequences}; raise max_sequences")
        if context.capacity > -(-self.max_tokens // context.tokens_per_block) * context.tokens_per_block:
            raise RequestError(f"{kernel}: the table holds {context.capacity} tokens of a sequence: the plan was made for "
                               f"{self.max_tokens}; raise max_tokens")
        if not is_same_device(self.device, query.device):
            raise RequestError(f"{kernel}: the plan is on {self.device}, the query on {query.device}")


def _programs_of(device: torch.device) -> int:
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def is_same_device(one: torch.device, other: torch.device) -> bool:
    """Whether what lies on one can be read on the other: of GPUs the number counts too."""
    return one.type == other.type and (one.type != "cuda" or one.index == other.index)


def _numbered(device: torch.device) -> torch.device:
    """A GPU without a number is the current one now, and not whichever is current when the buffers are made."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
