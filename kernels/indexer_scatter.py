"""Indexer-K scatter: the keys of a sparse-attention indexer, with their scales, to flat places (spec: indexer-K scatter).

DeepSeek-V3.2's indexer keeps for each token a quantised key and a scale of 4 bytes. Where in a block they lie is the engine's
choice, given as a flat element number for each; the pool may be a strided view. The operation is TensorRT-LLM's
``indexerKCacheScatter``.
"""

from __future__ import annotations

import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import INDEX_TYPES, check_dtype, check_own_memory, check_plain, check_same_device, check_shape, checks_values
from kvtier.kernels.dispatch import kernel_paths

_KERNEL = "scatter_indexer_keys"


def scatter_indexer_keys(cache: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, key_slots: torch.Tensor,
                         scale_slots: torch.Tensor, *, check_values: bool | None = None) -> None:
    """Write byte j of token i's key to flat element ``key_slots[i] + j`` of the cache, and its scale to ``scale_slots[i]`` and after.

    Element e of a cache of shape ``[a, b, c, d]`` is ``[e // (b*c*d), e // (c*d) % b, e // d % c, e % d]``, whatever its strides.
    Two tokens of one call must not have the same place.

    Args:
        cache: uint8 ``[blocks, tokens_per_block, heads, bytes]`` (or any other 4 axes), any strides, changed in place
            (``PrimaryPool.indexer_buffer``).
        keys: ``[tokens, key_bytes]`` of a dtype of one byte (uint8, float8_e4m3fn, int8).
        scales: float32 ``[tokens]``, or their bytes, uint8 ``[tokens, 4]``.
        key_slots, scale_slots: int32 or int64 ``[tokens]``. A token with a negative slot is skipped, key and scale.
        check_values: whether slots are checked. None: yes on a CPU, no on a GPU, where it makes the host wait. Unchecked, a token that
            would leave the cache is skipped.

    Raises:
        RequestError: a wrong shape, dtype or device, or (with ``check_values``) a slot outside the cache. Nothing has been written
            then.
    """
    check_shape(_KERNEL, "cache", cache, (None,) * 4, "four axes")
    check_dtype(_KERNEL, "cache", cache, (torch.uint8,))
    check_shape(_KERNEL, "keys", keys, (None, None), "tokens, key_bytes")
    check_dtype(_KERNEL, "keys", keys, (torch.uint8, torch.float8_e4m3fn, torch.int8))
    check_plain(_KERNEL, "scales", scales)
    tokens, key_bytes = keys.shape
    if scales.dtype == torch.float32:
        check_shape(_KERNEL, "scales", scales, (tokens,), "tokens")
        scales = scales.detach().contiguous().view(torch.uint8).view(tokens, 4)
    check_dtype(_KERNEL, "scales", scales, (torch.uint8, torch.float32))
    check_shape(_KERNEL, "scales", scales, (tokens, 4), "tokens, 4 bytes")
    for name, slots in (("key_slots", key_slots), ("scale_slots", scale_slots)):
        check_shape(_KERNEL, name, slots, (tokens,), "tokens")
        check_dtype(_KERNEL, name, slots, INDEX_TYPES)
    check_own_memory(_KERNEL, "cache", cache)
    check_same_device(_KERNEL, cache, keys=keys, scales=scales, key_slots=key_slots, scale_slots=scale_slots)
    if checks_values(cache, check_values):
        for name, slots, width in (("key_slots", key_slots, key_bytes), ("scale_slots", scale_slots, 4)):
            wrong = (slots >= 0) & (slots > cache.numel() - width)
            if bool(wrong.any()):
                token = int(wrong.nonzero()[0])
                raise RequestError(f"{_KERNEL}: {name}[{token}]={int(slots[token])}: the cache has {cache.numel()} elements, and "
                                   f"{width} go there (allowed: 0 to {cache.numel() - width}, or negative to skip the token)")
    if tokens and cache.numel():
        with torch.inference_mode():   # the cache may have been made in it, and cannot be written outside then
            kernel_paths(cache.device.type).scatter(cache, keys.view(torch.uint8), scales, key_slots, scale_slots)


def scatter_torch(cache: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, key_slots: torch.Tensor,
                  scale_slots: torch.Tensor) -> None:
    """The path in torch operations: one indexed assignment for the keys and one for the scales."""
    is_there = (key_slots >= 0) & (scale_slots >= 0)
    is_there &= (key_slots <= cache.numel() - keys.shape[1]) & (scale_slots <= cache.numel() - 4)
    _, b, c, d = cache.shape
    for slots, data in ((key_slots, keys), (scale_slots, scales)):
        flat = slots[is_there].long()[:, None] + torch.arange(data.shape[1], device=cache.device)
        cache[flat // (b * c * d), flat // (c * d) % b, flat // d % c, flat % d] = data[is_there]


def scatter_reference(cache: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, key_slots: torch.Tensor,
                      scale_slots: torch.Tensor) -> None:
    """The same, byte by byte, to be read and compared with."""
    _, b, c, d = cache.shape
    for token, (key_slot, scale_slot) in enumerate(zip(key_slots.tolist(), scale_slots.tolist(), strict=True)):
        if key_slot < 0 or scale_slot < 0:
            continue
        for slot, data in ((key_slot, keys[token]), (scale_slot, scales[token])):
            for place, byte in enumerate(data, start=slot):
                cache[place // (b * c * d), place // (c * d) % b, place // d % c, place % d] = byte
