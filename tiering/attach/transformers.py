"""Attach a Hugging Face transformers model: its KV cache lives in kvtier's primary pools (design: two ways to attach).

:func:`layout_of` gives the ``KVLayout`` of a model; :class:`AttachedModel` runs it over the pools' pages through block
tables. Which requests run when is the business of :mod:`kvtier.tiering.attach.serving_loop`.

Supported: transformers 5.19 to 5.24, and the types of model that ``transformers_layout.py`` names: full attention and sliding
windows, latent rows (MLA), and decoders with an encoder
(:class:`~kvtier.tiering.attach.transformers_encoder.AttachedEncoderDecoder`).
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import torch

from kvtier.errors import ConfigError
from kvtier.pools.layout import LayerGroup
from kvtier.pools.primary import PrimaryPool
from kvtier.tiering.attach.transformers_layout import LATENT_TYPES, QUANTISED, SUPPORTED_MODEL_TYPES, layout_of, storage_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["SUPPORTED_MODEL_TYPES", "SUPPORTED_VERSIONS", "AttachedModel", "check_version", "layout_of"]

SUPPORTED_VERSIONS: Final = ((5, 19), (5, 24))
"""First and last minor release of transformers whose attention interface this file was tried with."""

def check_version(version: str) -> None:
    """Raise ConfigError unless this transformers release is one the adapter supports."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    (major, first), (_, last) = SUPPORTED_VERSIONS
    if not SUPPORTED_VERSIONS[0] <= found <= SUPPORTED_VERSIONS[1]:
        raise ConfigError(f"transformers {version}: this adapter supports {major}.{first} to {major}.{last}; install "
                          f"one of these: pip install 'transformers>={major}.{first},<{major}.{last + 1}'")


def _installed_version() -> str:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("transformers is not installed: pip install 'kvtier[demo]'") from None


check_version(_installed_version())

from kvtier.tiering.attach.claims import claim, release  # noqa: E402 - what needs transformers comes below the check of its version
from kvtier.tiering.attach.transformers_forward import ATTENTION_NAME, STEP_KEYWORD, PagedStep, places_of, register  # noqa: E402
from kvtier.tiering.attach.transformers_latent import LatentWriter, require_latent_cache  # noqa: E402


class AttachedModel:
    """A causal language model that reads and writes its KV cache in the pages of primary pools.

    While attached, the model's own ``forward`` and ``generate`` do not work; :meth:`detach`, or leaving the ``with``
    block, gives it back as it was. A model can be attached to one cache after another.

    Args:
        model: a transformers causal language model on the pools' device.
        pools: the primary pool of each group, in order, of the layout that :func:`layout_of` gives: ``[cache.pool(group).primary for
            group in range(len(layout.groups))]``. For a model of one group its pool by itself will do.
        key_scale, value_scale: of pools that store FP8, INT8 or NVFP4: what stored keys and values are multiplied by to be read (of NVFP4
            the global scale). A latent row has one scale, ``key_scale``.

    Attributes:
        before_layer: called with the number of each layer of the layout before its pages are used; None at first. The serving loop sets
            it, so that a step can begin while blocks of later layers are still arriving.

    Raises:
        ConfigError: an unsupported model, one that is attached already, pools of another shape, dtype or device, a pool that another model
            uses, or a scale for pools that store numbers as they are.
    """

    def __init__(self, model: PreTrainedModel, pools: PrimaryPool | Sequence[PrimaryPool], *, key_scale: float = 1.0,
                 value_scale: float = 1.0) -> None:
        pools = [pools] if isinstance(pools, PrimaryPool) else list(pools)
        if model.config._attn_implementation == ATTENTION_NAME:
            raise ConfigError("the model is attached to a pool already; detach() it there first, or load it a second time")
        _check_pools(model, pools, key_scale, value_scale)
        if model.config.model_type in LATENT_TYPES:
            require_latent_cache(model)
        for number, pool in enumerate(pools):
            try:
                claim(pool, "this pool", f"an attached {type(model).__name__}", "detach() that model first")
            except ConfigError:
                for claimed in pools[:number]:
                    release(claimed)
                raise
        register()
        self.model = model
        self.before_layer: Callable[[int], object] | None = None
        self._pools = pools
        self._device = pools[0].pages.device
        layout = layout_of(model.config, dtype=storage_of(pools[0].group), tokens_per_block=pools[0].group.tokens_per_block)
        self._places = places_of(layout, pools, key_scale, value_scale)
        self._is_latent = model.config.model_type in LATENT_TYPES
        self._previous_attention: str = model.config._attn_implementation or "sdpa"
        self._was_training = model.training
        model.train(False)
        model.set_attn_implementation(ATTENTION_NAME)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.detach()

    def detach(self) -> None:
        """Give the model its own attention back. May be called again."""
        if self.model.config._attn_implementation == ATTENTION_NAME:
            self.model.set_attn_implementation(self._previous_attention)
            self.model.train(self._was_training)
            for pool in self._pools:
                release(pool)

    @property
    def vocabulary_size(self) -> int:
        """Token ids are 0 to one less than this."""
        size: int = self.model.config.vocab_size
        return size

    def prefill(self, tokens: Sequence[int], past: int, *table_rows: torch.Tensor, encoder_lengths: Sequence[int] = ()) -> torch.Tensor:
        """Compute one chunk of one sequence.

        Args:
            tokens: the tokens at positions ``past``, ``past + 1``, ...
            past: how many tokens of the sequence are in the pools already.
            table_rows: for each group int32 ``[2, max_blocks]``, the sequence's row of its block table.
            encoder_lengths: with an encoder, the length of its input; in a list, as for :meth:`decode`.

        Returns:
            Logits after the chunk's last token, ``[vocabulary]``.
        """
        positions = torch.arange(past, past + len(tokens), dtype=torch.int32, device=self._device)
        step = PagedStep(self._places, [row[None] for row in table_rows], torch.zeros_like(positions), positions, past=past,
                         encoder_lengths=self._lengths(encoder_lengths), before_layer=self.before_layer)
        return self._forward(torch.tensor([tokens], dtype=torch.long, device=self._device), positions[None], step)[0]

    def decode(self, tokens: Sequence[int], pasts: Sequence[int], *tables: torch.Tensor,
               encoder_lengths: Sequence[int] = ()) -> torch.Tensor:
        """Compute one new token for each of several sequences.

        Args:
            tokens: the newest token of each sequence.
            pasts: how many tokens of each sequence are in the pools already: the position of its newest token.
            tables: for each group int32 ``[sequences, 2, max_blocks]``, its block table.
            encoder_lengths: with an encoder, the length of each sequence's input to it.

        Returns:
            Logits ``[sequences, vocabulary]``.
        """
        positions = torch.tensor(pasts, dtype=torch.int32, device=self._device)
        rows = torch.arange(len(tokens), dtype=torch.int32, device=self._device)
        step = PagedStep(self._places, tables, rows, positions, lengths=positions + 1, encoder_lengths=self._lengths(encoder_lengths),
                         before_layer=self.before_layer)
        return self._forward(torch.tensor(tokens, dtype=torch.long, device=self._device)[:, None], positions[:, None], step)

    def _lengths(self, encoder_lengths: Sequence[int]) -> torch.Tensor | None:
        return torch.tensor(encoder_lengths, dtype=torch.int32, device=self._device) if encoder_lengths else None

    def _forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: PagedStep) -> torch.Tensor:
        with torch.inference_mode():
            return self._call(input_ids, position_ids, step)[:, -1]

    def _call(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: PagedStep) -> torch.Tensor:
        # Latent rows reach us where the model would cache them, before it expands them to keys and values of all heads.
        cache = {"cache": LatentWriter(step)} if self._is_latent else {}
        # use_cache=False: keys and values reach attention as computed, and no second cache grows beside ours.
        output = self.model(input_ids=input_ids, position_ids=position_ids.long(), use_cache=False, logits_to_keep=1,
                            **{STEP_KEYWORD: step}, **cache)
        logits: torch.Tensor = output.logits
        return logits


def _check_pools(model: PreTrainedModel, pools: Sequence[PrimaryPool], key_scale: float, value_scale: float) -> None:
    if not pools:
        raise ConfigError("AttachedModel: no pool; pass the primary pool of each group of the cache's layout")
    dtype = storage_of(pools[0].group)
    stored = dtype if dtype in QUANTISED else str(model.dtype)
    expected = layout_of(model.config, dtype=stored, tokens_per_block=pools[0].group.tokens_per_block).groups
    found = [pool.group for pool in pools]
    if [(group.layers, group.spec) for group in expected] != [(group.layers, group.spec) for group in found]:
        raise ConfigError(f"the pools are for {_described(found)}; the model needs {_described(expected)}; make the layout with "
                          "layout_of(), and pass the pool of every group in order")
    if dtype not in QUANTISED and (key_scale, value_scale) != (1.0, 1.0):
        raise ConfigError(f"key_scale={key_scale}, value_scale={value_scale}: the pools store {dtype} as it is; leave the scales out, or "
                          f"make the layout with one of {', '.join(QUANTISED)}")
    for pool in pools:
        if model.device != pool.pages.device:
            raise ConfigError(f"the model is on {model.device}, the pool on {pool.pages.device}; move one: "
                              "model.to(...) or device=...")


def _described(groups: Sequence[LayerGroup]) -> str:
    return "; ".join(f"{group.num_layers} layers of {group.describe()}" for group in groups)
