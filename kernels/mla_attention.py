"""Attention over latent pages (MLA): one row per token serves all heads, as key and as value (spec: read path, MLA).

With its up-projections absorbed into the query and into what follows, multi-head latent attention (DeepSeek-V2) is attention of all
query heads over a single KV head: scores over the latent and the rotary part, values are the latent part.
"""

from __future__ import annotations

from typing import Unpack

import torch

from kvtier.errors import RequestError
from kvtier.kernels.attention import attention_decode, attention_prefill
from kvtier.kernels.attention_context import ContextKeywords
from kvtier.kernels.attention_plan import DecodePlan
from kvtier.kernels.checks import check_dtype, check_same_device, check_shape


def mla_decode(query_latent: torch.Tensor, query_rope: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, *,
               layer: int, plan: DecodePlan | None = None, **how: Unpack[ContextKeywords]) -> torch.Tensor:
    """One query for each sequence over latent pages.

    Args:
        query_latent: ``[sequences, heads, latent_dim]``: queries without position, times the keys' up-projection.
        query_rope: ``[sequences, heads, rope_dim]``: the rotary part.
        pages: ``[num_pages, 1, tokens_per_block, latent_dim + rope_dim]``: latent part first.
        table, lengths, layer, plan, how: as for :func:`~kvtier.kernels.attention.attention_decode`. ``scale`` must be given: the
            model's, of its heads' full width, cannot be told from the latent row's.

    Returns:
        ``[sequences, heads, latent_dim]``, to be multiplied by the values' up-projection.

    Raises:
        RequestError: as :func:`~kvtier.kernels.attention.attention_decode`; parts whose widths do not make a row; no scale.
    """
    query = _joined("mla_decode", query_latent, query_rope, pages)
    _complete("mla_decode", how, query_latent.shape[2])
    return attention_decode(query, pages, table, lengths, layer=layer, plan=plan, **how)


def mla_prefill(query_latent: torch.Tensor, query_rope: torch.Tensor, pages: torch.Tensor, table_row: torch.Tensor, past: int, *,
                layer: int, draft_mask: torch.Tensor | None = None, **how: Unpack[ContextKeywords]) -> torch.Tensor:
    """A chunk of one sequence's queries over latent pages.

    Args:
        query_latent, query_rope: ``[tokens, heads, latent_dim]`` and ``[tokens, heads, rope_dim]``, as for :func:`mla_decode`.
        pages: ``[num_pages, 1, tokens_per_block, latent_dim + rope_dim]``: latent part first.
        table_row, past, layer, draft_mask, how: as for :func:`~kvtier.kernels.attention.attention_prefill`. ``scale`` must be given.

    Returns:
        ``[tokens, heads, latent_dim]``.

    Raises:
        RequestError: as :func:`~kvtier.kernels.attention.attention_prefill`; parts whose widths do not make a row; no scale.
    """
    query = _joined("mla_prefill", query_latent, query_rope, pages)
    _complete("mla_prefill", how, query_latent.shape[2])
    return attention_prefill(query, pages, table_row, past, layer=layer, draft_mask=draft_mask, **how)


def _joined(kernel: str, query_latent: torch.Tensor, query_rope: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    check_shape(kernel, "query_latent", query_latent, (None, None, None), "tokens, heads, latent_dim")
    check_shape(kernel, "query_rope", query_rope, (*query_latent.shape[:2], None), "tokens, heads, rope_dim")
    check_dtype(kernel, "query_rope", query_rope, (query_latent.dtype,))
    check_shape(kernel, "pages", pages, (None, 1, None, None), "pages, 1 head, tokens_per_block, latent_dim + rope_dim")
    check_same_device(kernel, pages, query_latent=query_latent, query_rope=query_rope)
    if not query_latent.shape[2]:
        raise RequestError(f"{kernel}: query_latent has shape {tuple(query_latent.shape)}: the latent part is empty")
    return torch.cat([query_latent, query_rope], dim=2)


def _complete(kernel: str, how: ContextKeywords, latent_dim: int) -> None:
    """Add what latent pages always mean."""
    if how.get("scale") is None:
        raise RequestError(f"{kernel}: scale=None: pass the model's factor on the scores; latent rows of {latent_dim} do not say it")
    how["kv_factor"], how["value_dim"] = 1, latent_dim
