"""The attention function that transformers calls for every layer of an attached model (design: model forward).

transformers looks attention up by name. Ours, ``"kvtier"``, gets queries, keys and values of the new tokens only, with
rotary positions already applied, writes the keys and values into the pages of the primary pool and attends through the
block table. What it needs to know about the batch travels with the call as one keyword, :class:`PagedStep`: there is no
global state, so two attached models never see each other's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvtier.errors import RequestError
from kvtier.kernels import Visibility, attention_decode, attention_prefill, write_kv
from kvtier.kernels.attention_context import ContextKeywords
from kvtier.pools.layout import KVLayout
from kvtier.pools.primary import PrimaryPool
from kvtier.tiering.attach.transformers_latent import latent_attention

ATTENTION_NAME: Final = "kvtier"
"""The name in transformers' attention registry."""

STEP_KEYWORD: Final = "kvtier_step"
"""The keyword of the model call that carries the :class:`PagedStep`; unknown keywords are handed down to attention."""


ENCODER_PASS: Final = "encoder"
"""Under that keyword while the encoder runs: its attention is transformers' own."""


@dataclass(frozen=True)
class LayerPlace:
    """Where one layer's keys and values lie.

    Attributes:
        group: the group's number: which of a step's block tables names its pages.
        position: the layer's position inside the group's blocks.
        pages: ``[blocks * layers * factor, kv_heads, tokens_per_block, head_dim]``, the group's whole primary pool.
        scale_pages: NVFP4's block scales beside them, page for page; None where numbers are stored otherwise.
        num_layers, kv_factor: pages per block are their product.
        key_scale, value_scale: what stored numbers are multiplied by.
        visibility: which tokens a query sees.
        is_latent: one latent row serves as key and value (MLA).
        is_cross: they are of the encoder's output, written before the first step.
    """

    group: int
    position: int
    pages: torch.Tensor
    scale_pages: torch.Tensor | None
    num_layers: int
    kv_factor: int
    key_scale: float
    value_scale: float
    visibility: Visibility
    is_latent: bool
    is_cross: bool

    def reading(self, scale: float, soft_cap: float | None) -> ContextKeywords:
        """Keywords of an attention call."""
        return {"num_layers": self.num_layers, "kv_factor": self.kv_factor, "scale_pages": self.scale_pages, "key_scale": self.key_scale,
                "value_scale": self.value_scale, "visibility": self.visibility, "scale": scale, "soft_cap": soft_cap,
                "check_values": self.check}

    def write(self, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, sequence_of_token: torch.Tensor,
              positions: torch.Tensor) -> None:
        """Write keys and values ``[tokens, kv_heads, head_dim]`` of new tokens."""
        write_kv(self.pages, keys, values, table, sequence_of_token, positions, layer=self.position, num_layers=self.num_layers,
                 kv_factor=self.kv_factor, scale_pages=self.scale_pages, key_scale=self.key_scale, value_scale=self.value_scale,
                 check_values=self.check)

    @property
    def check(self) -> bool | None:
        """Table and positions are the same for all layers of a group: checking them once is enough."""
        return None if self.position == 0 else False


def places_of(layout: KVLayout, pools: Sequence[PrimaryPool], key_scale: float, value_scale: float) -> list[LayerPlace]:
    """Where each model layer's keys and values lie, in model order."""
    places: list[LayerPlace] = []
    for layer in range(len(layout.layers)):
        group, position = layout.place_of_layer(layer)
        pool = pools[group.number]
        scale_pages = pool.scale_pages if group.spec.scale_bytes else None
        places.append(LayerPlace(group.number, position, pool.pages, scale_pages, group.num_layers, group.kv_factor, key_scale, value_scale,
                                 Visibility.of(group.spec), group.kind == "mla", group.kind == "cross"))
    return places


@dataclass(frozen=True)
class PagedStep:
    """One forward call over paged sequences: one prompt chunk, or one new token for each of several sequences.

    Attributes:
        places: where each model layer's keys and values lie.
        tables: for each group int32 ``[sequences, 2, max_blocks]``, page numbers of layer position 0, -1 where there is no block.
        sequence_of_token: int32 ``[tokens]``, the table row of each new token.
        positions: int32 ``[tokens]``, the position of each new token in its sequence.
        past: for a prompt chunk, how many tokens of the sequence are in the pool already; None for decode.
        lengths: for decode, int32 ``[sequences]``, tokens of each sequence with the new one; None for a prompt chunk.
        encoder_lengths: int32 ``[sequences]``, tokens of each sequence's encoder output; None for models without an encoder.
        before_layer: called with a layer's number before its pages are used; None where all of them have arrived.
    """

    places: Sequence[LayerPlace]
    tables: Sequence[torch.Tensor]
    sequence_of_token: torch.Tensor
    positions: torch.Tensor
    past: int | None = None
    lengths: torch.Tensor | None = None
    encoder_lengths: torch.Tensor | None = None
    before_layer: Callable[[int], object] | None = None

    def reach(self, layer: int) -> LayerPlace:
        """Where a layer's pages are, when they may be used."""
        if self.before_layer is not None:
            self.before_layer(layer)
        return self.places[layer]

    def attend(self, query: torch.Tensor, place: LayerPlace, scale: float, soft_cap: float | None = None) -> torch.Tensor:
        """Attention of the new tokens ``[tokens, query_heads, head_dim]`` over one layer's pages."""
        table, reading = self.tables[place.group], place.reading(scale, soft_cap)
        lengths, past = self.lengths, self.past
        if place.is_cross:  # all of the encoder's tokens, and none of ours
            assert self.encoder_lengths is not None
            lengths, past = (None, int(self.encoder_lengths[0])) if lengths is None else (self.encoder_lengths, None)
        if lengths is not None:
            return attention_decode(query, place.pages, table, lengths, layer=place.position, **reading)
        assert past is not None
        return attention_prefill(query, place.pages, table[0], past, layer=place.position, **reading)


def paged_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
                    softcap: float | None = None, **keywords: object) -> tuple[torch.Tensor, None]:
    """Write the new keys and values into their pages, then attend to everything the sequences have in the pool.

    Args:
        module: the model's attention layer; its ``layer_idx`` says which layer this is.
        query: ``[batch, query_heads, tokens, head_dim]``.
        key, value: ``[batch, kv_heads, tokens, head_dim]``, the new tokens only.
        attention_mask: unused; the kernels are causal by position, and know each layer's window.
        scaling: factor on the scores; ``head_dim ** -0.5`` when None.
        dropout: unused; an attached model only serves.
        softcap: scores stay within it; None: they are as they are.
        keywords: must hold the step under ``kvtier_step``.

    Returns:
        ``[batch, tokens, query_heads, head_dim]`` and None for the weights, as transformers expects.

    Raises:
        RequestError: the model was called without a step, for example by ``model.generate``.
    """
    step = keywords.get(STEP_KEYWORD)
    if step == ENCODER_PASS:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling)
        return output, None
    if not isinstance(step, PagedStep):
        raise RequestError("the model is attached to a kvtier pool and was called without a step: call it through "
                           "AttachedModel.prefill and AttachedModel.decode, or detach() it first")
    batch, heads, tokens, head_dim = query.shape
    layer_number = module.layer_idx
    assert isinstance(layer_number, int)
    is_cross = step.encoder_lengths is not None and not module.is_causal
    place = step.reach(layer_number + (len(step.places) // 2 if is_cross else 0))
    scale = scaling if scaling is not None else head_dim**-0.5
    if place.is_latent:  # written already, before it was expanded to these keys and values
        latent = latent_attention(module, query.transpose(1, 2).reshape(batch * tokens, heads, head_dim), place, step, scale)
        return latent.view(batch, tokens, heads, -1), None
    queries, keys, values = (states.transpose(1, 2).reshape(-1, states.shape[1], head_dim) for states in (query, key, value))
    if not is_cross:
        # Write first: a token attends to itself, and the kernels read nothing but the pool.
        place.write(keys, values, step.tables[place.group], step.sequence_of_token, step.positions)
    output = step.attend(queries, place, scale, softcap)
    return output.view(batch, tokens, heads, head_dim), None


def _no_mask(*_arguments: object, **_keywords: object) -> None:
    """The mask transformers would build; ours is implied by the positions."""


def register() -> None:
    """Make ``"kvtier"`` known to transformers. May be called again."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
