"""Attach a Hugging Face transformers model: its KV cache lives in a kvtier primary pool (design: two ways to attach).

:func:`layout_of` gives the ``KVLayout`` of a model; :class:`AttachedModel` runs it over the pool's pages through block
tables. Which requests run when is the business of :mod:`kvtier.tiering.attach.serving_loop`.

Supported: transformers 5.19 to 5.24; llama, qwen2, qwen3 and smollm3 type models whose layers are all full attention.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final

import torch

from kvtier.errors import ConfigError
from kvtier.pools.layout import DTYPE_BYTES, KVLayout, LayerSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from kvtier.pools.primary import PrimaryPool

SUPPORTED_VERSIONS: Final = ((5, 19), (5, 24))
"""First and last minor release of transformers whose attention interface this file was tried with."""

SUPPORTED_MODEL_TYPES: Final = ("llama", "qwen2", "qwen3", "smollm3")
"""Values of ``config.model_type``; SmolLM and SmolLM2 are of type "llama"."""


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

from kvtier.tiering.attach.claims import claim, release  # noqa: E402 - below the check of the version, like what follows
from kvtier.tiering.attach.transformers_forward import ATTENTION_NAME, STEP_KEYWORD, PagedStep, register  # noqa: E402 - needs transformers


def layout_of(config: PretrainedConfig, *, dtype: str | torch.dtype, tokens_per_block: int = 32) -> KVLayout:
    """The KV layout of a model, from its transformers configuration.

    Args:
        config: of a llama, qwen2, qwen3 or smollm3 type model.
        dtype: storage dtype of keys and values; the model's own dtype, since pages are written as computed.
        tokens_per_block: a power of two.

    Raises:
        ConfigError: another type of model, a layer that is not full attention, a dtype kvtier does not store.
    """
    model_type = str(getattr(config, "model_type", "unknown"))
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(f"model type {model_type!r} is not supported by the transformers adapter; "
                          f"supported: {', '.join(SUPPORTED_MODEL_TYPES)} (SmolLM2 is of type llama)")
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind != "full_attention":
            raise ConfigError(f"layer {layer} of this {model_type} model is {kind!r}; the transformers adapter "
                              "supports models whose layers are all 'full_attention'")
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ConfigError(f"dtype={name!r}: load the model in one of {', '.join(DTYPE_BYTES)}")
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVLayout([LayerSpec.attention(kv_heads, head_dim)] * config.num_hidden_layers, name, tokens_per_block)


class AttachedModel:
    """A causal language model that reads and writes its KV cache in the pages of a primary pool.

    While attached, the model's own ``forward`` and ``generate`` do not work; :meth:`detach`, or leaving the ``with``
    block, gives it back as it was. A model can be attached to one pool after another.

    Args:
        model: a transformers causal language model on the pool's device.
        pool: the primary pool of the model's one group, of the layout that :func:`layout_of` gives.

    Raises:
        ConfigError: an unsupported model, one that is attached already, or a pool of another shape, dtype or device.
    """

    def __init__(self, model: PreTrainedModel, pool: PrimaryPool) -> None:
        if model.config._attn_implementation == ATTENTION_NAME:
            raise ConfigError("the model is attached to a pool already; detach() it there first, or load it a second time")
        group = pool.group
        expected = layout_of(model.config, dtype=model.dtype, tokens_per_block=group.tokens_per_block).groups[0]
        if (expected.block_shape, expected.dtype) != (group.block_shape, group.dtype):
            raise ConfigError(f"the pool's blocks are {group.block_shape} {group.dtype}, the model needs "
                              f"{expected.block_shape} {expected.dtype} (layers, kv, heads, tokens, head dimension); "
                              "make the layout with layout_of()")
        if model.device != pool.pages.device:
            raise ConfigError(f"the model is on {model.device}, the pool on {pool.pages.device}; move one: "
                              "model.to(...) or device=...")
        claim(pool, "this pool", f"an attached {type(model).__name__}", "detach() that model first")
        register()
        self._pool = pool
        self.model = model
        self._pages = pool.pages
        self._num_layers, self._kv_factor = group.num_layers, group.kv_factor
        self._layer_positions = tuple(group.layers.index(layer) for layer in range(len(group.layers)))
        self._previous_attention: str = model.config._attn_implementation or "sdpa"
        self._was_training = model.training
        model.train(False)
        model.set_attn_implementation(ATTENTION_NAME)

    def __enter__(self) -> AttachedModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.detach()

    def detach(self) -> None:
        """Give the model its own attention back. May be called again."""
        if self.model.config._attn_implementation == ATTENTION_NAME:
            self.model.set_attn_implementation(self._previous_attention)
            self.model.train(self._was_training)
            release(self._pool)

    @property
    def vocabulary_size(self) -> int:
        """Token ids are 0 to one less than this."""
        size: int = self.model.config.vocab_size
        return size

    def prefill(self, tokens: Sequence[int], past: int, *table_rows: torch.Tensor) -> torch.Tensor:
        """Compute one chunk of one sequence.

        Args:
            tokens: the tokens at positions ``past``, ``past + 1``, ...
            past: how many tokens of the sequence are in the pool already.
            table_rows: int32 ``[2, max_blocks]``, the sequence's row of the block table of the model's one group.

        Returns:
            Logits after the chunk's last token, ``[vocabulary]``.
        """
        device = self._pages.device
        positions = torch.arange(past, past + len(tokens), dtype=torch.int32, device=device)
        step = PagedStep(self._pages, self._num_layers, self._kv_factor, self._layer_positions, table_rows[0][None],
                         torch.zeros_like(positions), positions, past=past)
        return self._forward(torch.tensor([tokens], dtype=torch.long, device=device), positions[None], step)[0]

    def decode(self, tokens: Sequence[int], pasts: Sequence[int], *tables: torch.Tensor) -> torch.Tensor:
        """Compute one new token for each of several sequences.

        Args:
            tokens: the newest token of each sequence.
            pasts: how many tokens of each sequence are in the pool already: the position of its newest token.
            tables: int32 ``[sequences, 2, max_blocks]``, the block table of the model's one group.

        Returns:
            Logits ``[sequences, vocabulary]``.
        """
        device = self._pages.device
        positions = torch.tensor(pasts, dtype=torch.int32, device=device)
        rows = torch.arange(len(tokens), dtype=torch.int32, device=device)
        step = PagedStep(self._pages, self._num_layers, self._kv_factor, self._layer_positions, tables[0], rows, positions,
                         lengths=positions + 1)
        return self._forward(torch.tensor(tokens, dtype=torch.long, device=device)[:, None], positions[:, None], step)

    def _forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: PagedStep) -> torch.Tensor:
        with torch.inference_mode():
            # use_cache=False: keys and values reach attention as computed, and no second cache grows beside ours.
            output = self.model(input_ids=input_ids, position_ids=position_ids.long(), use_cache=False,
                                logits_to_keep=1, **{STEP_KEYWORD: step})
        logits: torch.Tensor = output.logits[:, -1]
        return logits
