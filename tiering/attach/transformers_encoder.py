"""Attach a transformers model with an encoder: what its decoder keeps of the encoder's output lies in pages too (design: cross-attention).

The encoder runs once for each request that is admitted; keys and values of its output go into the pages of the cross-attention group, and
no step behind that computes them again. The decoder's own layers work as in any other attached model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from kvtier.errors import ConfigError
from kvtier.pools.primary import PrimaryPool
from kvtier.tiering.attach.transformers import AttachedModel
from kvtier.tiering.attach.transformers_forward import ENCODER_PASS, STEP_KEYWORD, PagedStep
from kvtier.tiering.attach.transformers_layout import ENCODER_DECODER_TYPES
from kvtier.tiering.ledger.request import token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def digest_of(encoder_tokens: Sequence[int]) -> bytes:
    """What identifies an encoder's input, for ``Request(encoder_digest=...)``: SHA-256 of its token ids."""
    return hashlib.sha256(token_bytes(encoder_tokens, "encoder_tokens")).digest()


class AttachedEncoderDecoder(AttachedModel):
    """A model with an encoder and a decoder over primary pools: bart and mbart.

    Arguments and errors as of :class:`~kvtier.tiering.attach.transformers.AttachedModel`; the layout's last group is that of
    cross-attention. A request has ``encoder_length`` and, to be reused, ``encoder_digest`` (:func:`digest_of`); its tokens are the
    decoder's.
    """

    def __init__(self, model: PreTrainedModel, pools: PrimaryPool | Sequence[PrimaryPool], *, key_scale: float = 1.0,
                 value_scale: float = 1.0) -> None:
        if model.config.model_type not in ENCODER_DECODER_TYPES:
            raise ConfigError(f"model type {model.config.model_type!r} has no encoder, or one that is not supported (supported: "
                              f"{', '.join(ENCODER_DECODER_TYPES)}); use AttachedModel for models without one")
        super().__init__(model, pools, key_scale=key_scale, value_scale=value_scale)
        decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
        self._cross_layers = [layer.encoder_attn for layer in decoder.layers]
        self._cross_places = self._places[len(self._cross_layers):]
        # Its positions come from a count that this model keeps of one sequence; ours differ within a batch.
        self._embedding = decoder.embed_positions
        self._positions: torch.Tensor | None = None
        self._hook = self._embedding.register_forward_hook(self._place_tokens)

    def detach(self) -> None:
        """Give the model its own attention and positions back. May be called again."""
        self._hook.remove()
        super().detach()

    def encode(self, encoder_tokens: Sequence[int], *table_rows: torch.Tensor) -> None:
        """Run the encoder and write what each cross-attention layer keeps of its output.

        Args:
            encoder_tokens: the encoder's input.
            table_rows: for each group int32 ``[2, max_blocks]``, the sequence's row of its block table.
        """
        row = table_rows[self._cross_places[0].group][None]
        positions = torch.arange(len(encoder_tokens), dtype=torch.int32, device=self._device)
        encoder: Any = self.model.get_encoder()
        with torch.inference_mode():
            inputs = torch.tensor([list(encoder_tokens)], dtype=torch.long, device=self._device)
            output = encoder(input_ids=inputs, **{STEP_KEYWORD: ENCODER_PASS}).last_hidden_state[0]
            if self.before_layer is not None:
                self.before_layer(len(self._places) - 1)
            for layer, place in zip(self._cross_layers, self._cross_places, strict=True):
                keys, values = (project(output).view(len(encoder_tokens), layer.num_heads, layer.head_dim)
                                for project in (layer.k_proj, layer.v_proj))
                place.write(keys, values, row, torch.zeros_like(positions), positions)

    def _call(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: PagedStep) -> torch.Tensor:
        self._positions = position_ids.long()
        # The decoder asks for the encoder's output to make keys and values of. Ours are in the pages: one token stands in for it.
        nothing = torch.zeros(input_ids.shape[0], 1, self.model.config.d_model, dtype=self.model.dtype, device=self._device)
        output = self.model(decoder_input_ids=input_ids, encoder_outputs=BaseModelOutput(last_hidden_state=nothing), use_cache=False,
                            **{STEP_KEYWORD: step})
        logits: torch.Tensor = output.logits
        return logits

    def _place_tokens(self, module: Any, _arguments: object, output: torch.Tensor) -> torch.Tensor:
        if self._positions is None:
            return output
        embedded = torch.nn.functional.embedding(self._positions + module.offset, module.weight)
        self._positions = None
        return embedded
