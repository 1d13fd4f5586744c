"""The attention function that transformers calls for every layer of an attached model (design: model forward).

transformers looks attention up by name. Ours, ``"kvtier"``, gets queries, keys and values of the new tokens only, with
rotary positions already applied, writes the keys and values into the pages of the primary pool and attends through the
block table. What it needs to know about the batch travels with the call as one keyword, :class:`PagedStep`: there is no
global state, so two attached models never see each other's batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kvtier.errors import RequestError
from kvtier.kernels import attention_decode, attention_prefill, write_kv

ATTENTION_NAME: Final = "kvtier"
"""The name in transformers' attention registry."""

STEP_KEYWORD: Final = "kvtier_step"
"""The keyword of the model call that carries the :class:`PagedStep`; unknown keywords are handed down to attention."""


@dataclass(frozen=True)
class PagedStep:
    """One forward call over paged sequences: one prompt chunk, or one new token for each of several sequences.

    Attributes:
        pages: ``[blocks * layers * kv_factor, kv_heads, tokens_per_block, head_dim]``, the group's whole primary pool.
        num_layers, kv_factor: pages per block are their product.
        layer_positions: for each model layer, its position inside the group's blocks.
        table: int32 ``[sequences, 2, max_blocks]``, page numbers of layer position 0, -1 where there is no block.
        sequence_of_token: int32 ``[tokens]``, the table row of each new token.
        positions: int32 ``[tokens]``, the position of each new token in its sequence.
        past: for a prompt chunk, how many tokens of the sequence are in the pool already; None for decode.
        lengths: for decode, int32 ``[sequences]``, tokens of each sequence with the new one; None for a prompt chunk.
    """

    pages: torch.Tensor
    num_layers: int
    kv_factor: int
    layer_positions: tuple[int, ...]
    table: torch.Tensor
    sequence_of_token: torch.Tensor
    positions: torch.Tensor
    past: int | None = None
    lengths: torch.Tensor | None = None


def paged_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
                    **keywords: object) -> tuple[torch.Tensor, None]:
    """Write the new keys and values into their pages, then attend to everything the sequences have in the pool.

    Args:
        module: the model's attention layer; its ``layer_idx`` says which layer this is.
        query: ``[batch, query_heads, tokens, head_dim]``.
        key, value: ``[batch, kv_heads, tokens, head_dim]``, the new tokens only.
        attention_mask: unused; the kernels are causal by position.
        scaling: factor on the scores; ``head_dim ** -0.5`` when None.
        dropout: unused; an attached model only serves.
        keywords: must hold the step under ``kvtier_step``.

    Returns:
        ``[batch, tokens, query_heads, head_dim]`` and None for the weights, as transformers expects.

    Raises:
        RequestError: the model was called without a step, for example by ``model.generate``.
    """
    step = keywords.get(STEP_KEYWORD)
    if not isinstance(step, PagedStep):
        raise RequestError("the model is attached to a kvtier pool and was called without a step: call it through "
                           "AttachedModel.prefill and AttachedModel.decode, or detach() it first")
    batch, heads, tokens, head_dim = query.shape
    layer_number = module.layer_idx
    assert isinstance(layer_number, int)
    layer = step.layer_positions[layer_number]
    rows = [states.transpose(1, 2).reshape(batch * tokens, -1, head_dim) for states in (query, key, value)]
    scale = scaling if scaling is not None else head_dim**-0.5
    # Table and positions are the same for every layer: checking them once is enough.
    check = None if layer_number == 0 else False
    # Write first: a token attends to itself, and the kernels read nothing but the pool.
    write_kv(step.pages, rows[1], rows[2], step.table, step.sequence_of_token, step.positions, layer=layer,
             num_layers=step.num_layers, kv_factor=step.kv_factor, check_values=check)
    if step.lengths is not None:
        output = attention_decode(rows[0], step.pages, step.table, step.lengths, layer=layer,
                                  num_layers=step.num_layers, kv_factor=step.kv_factor, scale=scale,
                                  check_values=check)
    else:
        assert step.past is not None
        output = attention_prefill(rows[0], step.pages, step.table[0], step.past, layer=layer,
                                   num_layers=step.num_layers, kv_factor=step.kv_factor, scale=scale,
                                   check_values=check)
    return output.view(batch, tokens, heads, head_dim), None


def _no_mask(*_arguments: object, **_keywords: object) -> None:
    """The mask transformers would build; ours is implied by the positions."""


def register() -> None:
    """Make ``"kvtier"`` known to transformers. May be called again."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
