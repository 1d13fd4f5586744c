"""Multi-head latent attention (MLA) of an attached model: one latent row for each token in the pages, and attention over those rows.

A model of this kind keeps, for each token, a compressed row and a rotary key that all heads share. transformers hands both to the
cache before it expands them to keys and values of every head; :class:`LatentWriter` takes that place and writes them into the pages.
Attention then works on the rows as they lie: the keys' up-projection is absorbed into the query, and the values' into what comes out
(DeepSeek-V2, arXiv 2405.04434, section 2.1.2). So nothing of the context is expanded.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch

from kvtier.errors import ConfigError
from kvtier.kernels import append_mla, mla_decode, mla_prefill

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvtier.tiering.attach.transformers_forward import LayerPlace, PagedStep


class LatentWriter:
    """Stands where the model expects its cache, for one forward call."""

    is_compileable = False

    def __init__(self, step: PagedStep) -> None:
        self._step = step

    def update(self, latent: torch.Tensor, rope: torch.Tensor, layer_idx: int, *_arguments: object,
               **_keywords: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[batch, 1, tokens, latent_dim]`` and ``[batch, 1, tokens, rope_dim]`` into the pages, and give them back: what the model
        makes of them is left aside."""
        step, place = self._step, self._step.reach(layer_idx)
        append_mla(place.pages, latent.flatten(0, 2), rope.flatten(0, 2), step.tables[place.group], step.sequence_of_token, step.positions,
                   layer=place.position, num_layers=place.num_layers, scale_pages=place.scale_pages, scale=place.key_scale,
                   check_values=place.check)
        return latent, rope

    # What masks are made from; ours is implied by the positions.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


def latent_attention(module: torch.nn.Module, query: torch.Tensor, place: LayerPlace, step: PagedStep, scale: float) -> torch.Tensor:
    """Attention over latent rows.

    Args:
        module: the model's attention layer, whose ``kv_b_proj`` expands a latent row to the keys and values of all heads.
        query: ``[tokens, heads, nope_dim + rope_dim]``.

    Returns:
        ``[tokens, heads, value_dim]``.
    """
    heads, nope = query.shape[1], int(module.qk_nope_head_dim)  # type: ignore[arg-type]
    weight = module.kv_b_proj.weight.view(heads, -1, int(module.kv_lora_rank))  # type: ignore[union-attr, operator, arg-type]
    absorbed = torch.einsum("thn,hnl->thl", query[..., :nope], weight[:, :nope])
    table, reading = step.tables[place.group], place.reading(scale, None)
    reading["value_scale"] = reading["key_scale"]  # one row is key and value
    if step.lengths is not None:
        output = mla_decode(absorbed, query[..., nope:], place.pages, table, step.lengths, layer=place.position, **reading)
    else:
        assert step.past is not None
        output = mla_prefill(absorbed, query[..., nope:], place.pages, table[0], step.past, layer=place.position, **reading)
    return torch.einsum("thl,hvl->thv", output, weight[:, nope:])


def require_latent_cache(model: PreTrainedModel) -> None:
    """Raise ConfigError where this release of transformers caches expanded keys and values instead of latent rows."""
    layer = next(module for module in model.modules() if hasattr(module, "kv_b_proj"))
    if not hasattr(layer, "expand_kv") or "cache" not in inspect.signature(model.forward).parameters:
        raise ConfigError(f"{type(model).__name__}: this release of transformers hands expanded keys and values to its cache, not latent "
                          "rows; install one that does (5.24)")
