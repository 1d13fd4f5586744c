"""``PagedContext``: the checked arguments of an attention call over pages, as its paths get them (spec: read path).

Decode, prefill and latent attention take the same keywords to say where keys and values lie and what is made of them; they are
described once, here, in :meth:`PagedContext.of`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypedDict

import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import (
    FLOAT_TYPES,
    LayerPages,
    check_dtype,
    check_finite,
    check_same_device,
    check_shape,
    check_table,
    check_whole,
)
from kvtier.kernels.storage import Storage, StoredPages
from kvtier.kernels.visibility import EVERYTHING, Visibility


class ContextKeywords(TypedDict, total=False):
    """The keywords of :meth:`PagedContext.of` that every attention call takes."""

    num_layers: int | None
    kv_factor: int
    scale: float | None
    visibility: Visibility
    soft_cap: float | None
    value_pages: torch.Tensor | None
    value_dim: int | None
    scale_pages: torch.Tensor | None
    value_scale_pages: torch.Tensor | None
    key_scale: float
    value_scale: float
    check_values: bool | None


@dataclass(frozen=True)
class PagedContext:
    """Where the keys and values of a batch lie, and what its queries make of them.

    Attributes:
        layer_pages: the pages of this layer, for checks and messages.
        stored: pages of keys and values, and how numbers are stored in them. Values have ``value_dim`` numbers here.
        table: int32 ``[sequences, 2, max_blocks]``.
        visibility: which tokens a query sees.
        scale: factor on the scores.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; None: they stay.
        source_rows: int32 ``[sequences, max_tokens]``: the row of the table in whose pages a token of a sequence lies; -1 is the
            sequence's own. None: all lie in their own.
    """

    layer_pages: LayerPages
    stored: StoredPages
    table: torch.Tensor
    visibility: Visibility
    scale: float
    soft_cap: float | None
    source_rows: torch.Tensor | None = None

    @classmethod
    def of(cls, kernel: str, query: torch.Tensor | None, pages: torch.Tensor, table: torch.Tensor, *, layer: int,
           num_layers: int | None = None, kv_factor: int = 2, scale: float | None = None, visibility: Visibility = EVERYTHING,
           soft_cap: float | None = None, value_pages: torch.Tensor | None = None, value_dim: int | None = None,
           scale_pages: torch.Tensor | None = None, value_scale_pages: torch.Tensor | None = None, key_scale: float = 1.0,
           value_scale: float = 1.0, check_values: bool | None = None) -> PagedContext:
        """Check that pages, table and query fit together.

        Args:
            kernel: who asks, for messages.
            query: ``[tokens, query_heads, head_dim]``; query_heads is a multiple of the pages' heads. None: nobody asks (gather).
            pages: ``[num_pages, heads, tokens_per_block, head_dim]``, any strides: keys, and values too unless there are
                ``value_pages``. FP8, INT8 and NVFP4: see :class:`~kvtier.kernels.storage.StoredPages`.
            table: int32 ``[sequences, 2, max_blocks]``: each block's first page of keys and of values; -1 is null.
            layer: position of the layer in its group's blocks.
            num_layers: layers in a block; when given, the layer and the table are checked against it.
            kv_factor: 2, or 1 where one row serves as key and value or values have pages of their own (both rows of the table are
                equal then).
            scale: factor on the scores; None: 1 / sqrt(head_dim).
            visibility: which tokens a query sees; all before it unless given.
            soft_cap: greater than 0; scores are kept within it by ``soft_cap * tanh(score / soft_cap)``.
            value_pages: ``[num_pages, heads, tokens_per_block, value_dim]``, where values have another width than keys.
            value_dim: numbers at the front of a stored value that are the value; all unless given. MLA: the latent part.
            scale_pages, value_scale_pages: NVFP4's block scales beside ``pages`` and ``value_pages``.
            key_scale, value_scale: what stored keys and values are multiplied by; 1 for floating-point pages.
            check_values: for the caller, see there.

        Raises:
            RequestError: a wrong shape, dtype, scale or device, or head counts that do not divide.
        """
        layer_pages = LayerPages.of(kernel, pages, layer=layer, num_layers=num_layers, kv_factor=kv_factor)
        stored = StoredPages.of(kernel, pages, value_pages=value_pages, scale_pages=scale_pages, value_scale_pages=value_scale_pages,
                                key_scale=key_scale, value_scale=value_scale, kv_factor=kv_factor)
        check_table(kernel, "table", table, with_sequences=True)
        if query is not None:
            check_shape(kernel, "query", query, (None, None, stored.key_dim), "tokens, query_heads, head_dim")
            check_dtype(kernel, "query", query, FLOAT_TYPES)
            if not query.shape[1] or query.shape[1] % layer_pages.heads:
                raise RequestError(f"{kernel}: query has {query.shape[1]} heads: pass a multiple of the pool's "
                                   f"{layer_pages.heads} KV heads")
        check_same_device(kernel, pages, query=query, table=table)
        ring = visibility.ring
        if ring is not None and ring.tokens_per_block != layer_pages.tokens_per_block:
            raise RequestError(f"{kernel}: the ring was made for tokens_per_block={ring.tokens_per_block}, the pages have "
                               f"{layer_pages.tokens_per_block}")
        if soft_cap is not None:
            remedy = "a finite number greater than 0, or None for no cap"
            check_finite(kernel, "soft_cap", soft_cap, remedy)
            if soft_cap <= 0:
                raise RequestError(f"{kernel}: soft_cap={soft_cap}: pass {remedy}")
        if value_dim is not None:
            stored = _narrow_values(kernel, stored, value_dim)
        factor = 1.0 / math.sqrt(stored.key_dim) if scale is None else scale
        check_finite(kernel, "scale", factor, "a finite number, or None for 1 / sqrt(head_dim)")
        if kv_factor == 1 and value_pages is None and key_scale != value_scale:
            raise RequestError(f"{kernel}: key_scale={key_scale} and value_scale={value_scale}: one row is key and value, stored "
                               "with one scale; pass it as both")
        return cls(layer_pages, stored, table, visibility, factor, soft_cap)

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.layer_pages.heads

    @property
    def tokens_per_block(self) -> int:
        return self.layer_pages.tokens_per_block

    @property
    def value_dim(self) -> int:
        """Numbers in one value, and in one row of the result."""
        return self.stored.value_dim

    @property
    def capacity(self) -> int:
        """Places that a row of the table can hold."""
        return self.table.shape[2] * self.tokens_per_block

    def compute_dtype(self, query: torch.Tensor) -> torch.dtype:
        """At least float32: half precision is for storage, sums are not kept in it."""
        widest = torch.promote_types(query.dtype, torch.float32)
        return torch.promote_types(widest, self.stored.keys.dtype) if self.stored.storage is Storage.SAME else widest


def _narrow_values(kernel: str, stored: StoredPages, value_dim: int) -> StoredPages:
    value_dim, = check_whole(kernel, value_dim=value_dim)
    unit = 16 if stored.storage is Storage.NVFP4 else 1
    if not 0 < value_dim <= stored.value_dim or value_dim % unit:
        raise RequestError(f"{kernel}: value_dim={value_dim}: the pages hold values of {stored.value_dim} numbers; pass 1 to "
                           f"{stored.value_dim}{', a multiple of 16' if unit > 1 else ''}")
    scales = stored.value_block_scales
    return replace(stored, values=stored.values[..., :stored.storage.stored_dim(value_dim)],
                   value_block_scales=None if scales is None else scales[..., :value_dim // 16])
