"""A plain ``Cache`` for ``model.generate(cache=...)``: offload and reuse of whole prompts, for those who want no serving loop.

The model keeps its own attention, and its keys and values lie in ordinary tensors while it generates. At the beginning what the tier has
of the prompt is copied out of its pages; at the end what was computed is copied in. So generating takes device memory twice for what the
pages hold too, and one call serves one prompt. An engine that serves many requests attaches with
:mod:`kvtier.tiering.attach.transformers`, where attention reads the pages in place.

transformers' side of this is ``CacheLayerMixin`` of release 5.19 to 5.24.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from kvtier.errors import CapacityError, ConfigError, RequestError, TransferError
from kvtier.kernels import write_kv
from kvtier.pools.pool_index import slot_of
from kvtier.tiering.ledger.request import Request, token_bytes

if TYPE_CHECKING:
    from kvtier.tiering.manager import KVCacheManager

_log = logging.getLogger(__name__)


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]  # its own __init_subclass__
    """One layer: keys and values ``[rows, kv_heads, tokens, head_dim]``, first those that were reused. How many rows there are, the first
    forward pass says: until then there is nothing to be reordered or repeated."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reused_keys, self.reused_values = keys, values  # [kv_heads, tokens, head_dim]

    def get_seq_length(self) -> int:
        return super().get_seq_length() if self.is_initialized else self.reused_keys.shape[1]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Begin with what was reused, the same for each row (beams, or several answers to one prompt)."""
        for name, states, reused in (("keys", key_states, self.reused_keys), ("values", value_states, self.reused_values)):
            if (states.dtype, states.device, states.shape[1], states.shape[3]) != (reused.dtype, reused.device, reused.shape[0],
                                                                                 reused.shape[2]):
                raise ConfigError(f"the model's {name} are {states.dtype} {tuple(states.shape)} on {states.device}, the cache holds "
                                  f"{reused.dtype} of {reused.shape[0]} heads with {reused.shape[2]} elements on {reused.device}; make the "
                                  "layout with layout_of(model.config, dtype=model.dtype)")
        super().lazy_initialization(key_states, value_states)
        rows = key_states.shape[0]
        self.keys = self.reused_keys.expand(rows, -1, -1, -1)
        self.values = self.reused_values.expand(rows, -1, -1, -1)

    def crop(self, tokens_to_remove: int) -> None:
        if self.is_initialized or tokens_to_remove >= 0:
            super().crop(tokens_to_remove)
        else:
            self._reuse(max(self.reused_keys.shape[1] + tokens_to_remove, 0))

    def reset(self) -> None:
        super().reset()
        self._reuse(0)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.is_initialized:
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            super().batch_select_indices(indices)

    def _reuse(self, count: int) -> None:
        self.reused_keys, self.reused_values = self.reused_keys[:, :count], self.reused_values[:, :count]

    @property
    def num_rows(self) -> int:
        return 0 if self.keys is None else self.keys.shape[0]

    def first_row(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens ``start`` to ``end - 1``, ``[tokens, kv_heads, head_dim]``."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[0, :, start:end].transpose(0, 1), self.values[0, :, start:end].transpose(0, 1)


class GenerationCache(Cache):
    """The KV cache of one prompt, over a tier.

    ::

        with GenerationCache(tier, Request(1, input_ids[0])) as cache:
            output = model.generate(input_ids, cache=cache, max_new_tokens=50)
            cache.keep(output[0])

    Give ``generate`` the whole prompt of the request, without padding: it computes only what is not there. A cache sees how many tokens
    there are and not which: another prompt of another length is noticed, and nothing of it stored; **one of the same length is stored as
    the request's, and later answers are wrong**. Leaving the block stores the prompt, and what :meth:`keep` was given; after an error
    nothing new is stored. Several beams or several answers to one prompt may share one cache; then only the prompt is stored. Caches of
    different prompts can be used at the same time, in different threads too.

    Assisted decoding computes the whole prompt, whatever a cache has of it: give it a request with ``skip_read=True``. With another one it
    ends in a ValueError of transformers', as soon as something is reused.

    Args:
        tier: a manager whose layout is the model's (``layout_of``), all of it full attention.
        request: the prompt, with its namespace. Its id must not be in use.
        load_timeout: seconds to wait for what is stored; after that the prompt is computed. And for what holds up its blocks, a drive that
            hangs for example; after that the prompt is computed and not stored.
        engine_stream: the CUDA stream that the model computes on; None on a CPU.

    Attributes:
        reused_tokens: prompt tokens that do not have to be computed.

    Raises:
        ConfigError: a layout with windows, states or latent rows.
        CapacityError: a prompt longer than the primary level has room for.
    """

    def __init__(self, tier: KVCacheManager, request: Request, *, load_timeout: float = 30.0, engine_stream: Any = None) -> None:
        group = tier.layout.groups[0]
        if len(tier.layout.groups) != 1 or group.kind != "attention" or group.spec.window is not None or group.is_split:
            kinds = ", ".join(other.describe() for other in tier.layout.groups)
            raise ConfigError(f"GenerationCache: a layout of {kinds}; it holds full attention alone. Serve this model with AttachedModel "
                              "and ServingLoop")
        self._tier = tier
        self._request = request
        self._engine_stream = engine_stream
        self._prompt: list[int] = array("i", request.token_bytes).tolist()
        self._kept: list[int] | None = None
        self._num_certain = len(self._prompt)  # leading tokens of the layers that are the prompt's, or of what was kept
        self._is_doubtful = False  # tokens came that need not be those that were said
        self._num_computed = 0  # tokens that the layers had at the most
        self._pass_size = 0  # tokens of the newest forward pass
        self._goes_beyond = False  # several tokens came at the prompt's end or over it: a longer prompt, unless a draft is taken back now
        self._is_open = True
        self.reused_tokens = 0
        layers = self._begin(request, load_timeout)
        if layers is None:
            with suppress(CapacityError):  # it had room, but for what is still being read into that
                layers = self._begin(_without_reuse(request, self._prompt), load_timeout)
        if layers is None:
            _log.warning("request %d: copies or reads have held up its blocks for longer than %s s; nothing of it is reused or stored",
                         request.id, load_timeout)
            self._is_open = False  # the tier knows nothing of it
            self.reused_tokens, layers = 0, self._layers_of(torch.empty(0, dtype=torch.int32), 0)
        self._layers = layers
        super().__init__(layers=[*layers])

    def __enter__(self) -> GenerationCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(store=error is None)

    def keep(self, tokens: Sequence[int] | torch.Tensor) -> None:
        """Store these tokens too when the cache is closed: the prompt and the answer, as ``generate`` returns them.

        RequestError when they do not begin with the prompt.
        """
        kept = array("i", token_bytes(tokens)).tolist()
        if kept[:len(self._prompt)] != self._prompt:
            raise RequestError(f"request {self._request.id}: keep() was given tokens that do not begin with the prompt's "
                               f"{len(self._prompt)}; pass one row of what generate returned, the prompt included")
        self._kept = kept
        self._num_certain = self.get_seq_length()
        self._goes_beyond = False

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *arguments: Any,
               **keywords: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in what a layer has computed, of the tokens behind those that it has."""
        if layer_idx == 0 and not self._is_doubtful:
            self._doubt(self._layers[0].get_seq_length(), key_states.shape[-2])
        return super().update(key_states, value_states, layer_idx, *arguments, **keywords)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back ``-tokens_to_remove`` tokens. They are not stored, nor what comes in their place, but see :meth:`keep`."""
        super().crop(tokens_to_remove)
        self._num_certain = min(self._num_certain, self.get_seq_length())
        self._goes_beyond, self._pass_size = False, 0

    def reset(self) -> None:
        """Take back all tokens, those that were reused too; as of :meth:`crop`."""
        super().reset()  # type: ignore[no-untyped-call]
        self._num_certain = self._pass_size = 0

    @property
    def is_croppable(self) -> bool:
        """False once the prompt may have been given twice. Assisted decoding asks behind its first forward pass, for which it has not
        looked at what the cache has, and ends with a ValueError then: its answer would be of the prompt behind a part of itself."""
        return not self._is_doubtful

    def close(self, store: bool = True) -> None:
        """Store what was computed, and let the tier's blocks go. May be called again."""
        if not self._is_open:
            return
        self._is_open = False
        is_stored = False
        try:
            is_stored = store and self._write_back()
        finally:
            self._tier.remove_sequence(self._request.id, store=is_stored)
            self._tier.refresh()

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _doubt(self, length: int, count: int) -> None:
        """Whether ``count`` tokens behind ``length`` may be others than those of the prompt. A cache sees no tokens, only how many there
        are: a pass that begins in the prompt ends in it too, one that is smaller than the pass before it is the last of it, and behind it
        comes one token, or a draft that is taken back."""
        end, prompt = length + count, len(self._prompt)
        is_prompt = self._kept is None and length <= prompt <= self._num_certain  # not what was looked at, or is not stored anyway
        if (count > length > 0 and end > prompt) or (is_prompt and 0 < length < prompt < end):
            what = (f"{count} tokens were computed behind {length}, and the prompt has {prompt}. If all of it was given once more: "
                    "assisted decoding takes no cache that has part of the prompt; pass Request(..., skip_read=True)")
        elif is_prompt and end < prompt and count < self._pass_size:
            what = (f"passes of {self._pass_size} and of {count} tokens end before the prompt's {prompt}: another prompt was given to the "
                    "model than to the request, or in unequal parts")
        else:
            self._goes_beyond |= is_prompt and end > prompt and count > 1
            self._pass_size = count
            self._num_computed = max(self._num_computed, end)
            return
        self._is_doubtful = True
        _log.warning("request %d: %s. Nothing is stored", self._request.id, what)

    def _begin(self, request: Request, load_timeout: float) -> list[_Layer] | None:
        """Admit the prompt and copy out what there is of it. None, and nothing admitted, when that does not come or turns out bad."""
        tier = self._tier
        tier.add_sequence(request)
        layers: list[_Layer] | None = None
        try:
            self.reused_tokens = tier.wait_ready(request.id, timeout=load_timeout)
            with tier.step(self._engine_stream, ids=[request.id]) as ready:
                if ready:
                    layers = self._layers_of(self._slots(), self.reused_tokens)
        except (TimeoutError, CapacityError, TransferError):
            pass
        finally:
            if layers is None:
                tier.remove_sequence(request.id, store=False)
        return layers

    def _layers_of(self, slots: torch.Tensor, count: int) -> list[_Layer]:
        """Keys and values of ``count`` tokens in these blocks, layer by layer."""
        layers: list[_Layer] = []
        slots = slots[:-(-count // self._tier.layout.tokens_per_block)]
        for number in range(len(self._tier.layout.layers)):
            pages = self._tier.layer_buffer(number)[slots]  # [blocks, 2, heads, tokens, dim], a copy
            keys, values = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :count]
            layers.append(_Layer(keys, values))
        return layers

    def _slots(self) -> torch.Tensor:
        """Where the sequence's blocks lie, int32. The manager's block table does not do: it is one for all threads."""
        with self._tier.locked() as ledger:
            slots = [slot_of(block.index) for block in ledger.sequence(self._request.id).rows[0].blocks]
        return torch.tensor(slots, dtype=torch.int32, device=self._tier.pool(group=0).primary.pages.device)

    def _write_back(self) -> bool:
        """Copy what was computed into the pages. False when they do not hold it, and must not be stored."""
        lengths = {layer.get_seq_length() for layer in self._layers}
        end = min(*lengths, self._num_certain)
        if end <= self.reused_tokens or self._is_doubtful or len(lengths) > 1:  # several: of a forward pass that failed and was repeated
            return False
        if self._goes_beyond or self._num_computed < len(self._prompt):
            _log.warning("request %d: the model was given %s tokens, and the prompt has %d: another prompt than the request's? Nothing is "
                         "stored", self._request.id, "more" if self._goes_beyond else self._num_computed, len(self._prompt))
            return False
        tier, request_id = self._tier, self._request.id
        # With the newest token in place, the one before it can be stored. An answer may be longer than the tier's sequences.
        kept = (self._kept or [])[:min(end + 1, tier.config.max_seq_len)]
        has_one_row = self._layers[0].num_rows == 1 == self._request.beam_width
        answer = kept[len(self._prompt):] if has_one_row and end >= len(self._prompt) else []
        if answer:
            try:
                tier.append_tokens(request_id, answer)
            except CapacityError:
                answer = []  # no room for it: the prompt alone is stored
        end = min(end, len(self._prompt) + len(answer))
        pool = tier.pool(group=0).primary
        with tier.step(self._engine_stream, ids=[request_id]) as ready:
            if not ready:
                return False
            positions = torch.arange(self.reused_tokens, end, dtype=torch.int32, device=pool.pages.device)
            first = self._slots() * (pool.group.num_layers * pool.group.kv_factor)
            table = torch.stack((first, first + 1))[None]
            for number, layer in enumerate(self._layers):
                keys, values = layer.first_row(self.reused_tokens, end)
                write_kv(pool.pages, keys, values, table, torch.zeros_like(positions), positions, layer=number,
                         num_layers=pool.group.num_layers, kv_factor=pool.group.kv_factor)
        tier.mark_computed(request_id, end)
        return True


def _without_reuse(request: Request, prompt: Sequence[int]) -> Request:
    return Request(request.id, prompt, lora_id=request.lora_id, cache_salt=request.cache_salt, extra_ids=request.extra_ids,
                   multimodal=request.multimodal, retention=request.retention, lora_digest=request.lora_digest,
                   extra_ids_digest=request.extra_ids_digest, skip_read=True, skip_write=request.skip_write)
