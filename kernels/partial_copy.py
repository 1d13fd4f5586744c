"""Partial block copy: the first n tokens of every head, in all layers and fields (spec: moving and tables).

A block that is shared and about to be written is copied first, and only what the new owner may use is copied. The
operation is TensorRT-LLM's ``cuKVCacheBlockPartialCopy``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import check_own_memory, check_plain, check_whole, whole_pairs
from kvtier.kernels.dispatch import kernel_paths

_KERNEL = "copy_partial_blocks"


def copy_partial_blocks(destination: torch.Tensor, source: torch.Tensor, pairs: Sequence[tuple[int, int]],
                        num_tokens: int) -> None:
    """Copy the first ``num_tokens`` tokens of blocks, for a batch of (source slot, destination slot) pairs.

    Args:
        destination: ``[blocks, layers, kv_factor, heads, tokens_per_block, head_dim]``, any strides, any device,
            changed in place.
        source: the same shape but for the number of blocks, the same dtype. It may be ``destination`` itself, or lie on
            another device.
        pairs: (source slot, destination slot). In one call no slot may be written twice, or be both read and written:
            a GPU does the pairs at the same time.
        num_tokens: tokens to copy. 0 or less, and ``tokens_per_block`` or more, mean the whole block: always so for 4-bit data and
            for block scales, which are not cut at a token (``BlockSection.is_by_token``).

    Raises:
        RequestError: shapes or dtypes that do not match, a slot outside its tensor, pairs that depend on each other, two views of one
            memory whose blocks overlap. Nothing has been copied then.
        ConfigError: a device without kernels.
    """
    for name, tensor in (("destination", destination), ("source", source)):
        check_plain(_KERNEL, name, tensor)
    if destination.dim() != 6 or source.dim() != 6 or destination.shape[1:] != source.shape[1:]:
        raise RequestError(f"{_KERNEL}: source has shape {tuple(source.shape)} and destination "
                           f"{tuple(destination.shape)}: pass two tensors [blocks, layers, kv_factor, heads, "
                           "tokens_per_block, head_dim] that differ in the number of blocks only")
    if destination.dtype != source.dtype:
        raise RequestError(f"{_KERNEL}: source is {source.dtype} and destination {destination.dtype}: a copy does not "
                           "convert; pass equal dtypes")
    num_tokens, = check_whole(_KERNEL, num_tokens=num_tokens)
    pairs = whole_pairs(_KERNEL, "pairs", pairs)
    read, written = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    for name, tensor, slots in (("source", source, read), ("destination", destination, written)):
        for slot in slots:
            if not 0 <= slot < tensor.shape[0]:
                raise RequestError(f"{_KERNEL}: {name} slot {slot}: the tensor has slots 0 to {tensor.shape[0] - 1}")
    if len(set(written)) < len(written):
        twice = next(slot for slot in written if written.count(slot) > 1)
        raise RequestError(f"{_KERNEL}: slot {twice} is written {written.count(twice)} times in one call (allowed: once); "
                           "pairs are carried out in no order, so use one call for each")
    tokens_per_block = destination.shape[4]
    tokens = num_tokens if 0 < num_tokens < tokens_per_block else tokens_per_block
    for tensor in (source, destination):
        kernel_paths(tensor.device.type)   # a ConfigError where there are none
    if not pairs:
        return
    check_own_memory(_KERNEL, "destination", destination)
    if (destination.data_ptr(), destination.stride()) == (source.data_ptr(), source.stride()):
        if both := sorted(set(written).intersection(read)):
            raise RequestError(f"{_KERNEL}: slot {both[0]} is both read and written in one call: pairs are carried out in no "
                               "order, so use one call for each")
    elif destination.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
        _check_apart(source, read, destination, written, tokens)
    with torch.inference_mode():   # blocks may have been made in it, and cannot be written outside then
        kernel_paths(destination.device.type).partial_copy(destination.detach(), source.detach(), pairs, tokens)


def _check_apart(source: torch.Tensor, read: Sequence[int], destination: torch.Tensor, written: Sequence[int], tokens: int) -> None:
    """Two views of one memory: no number is both read and written."""
    targets = {slot: _places(destination, slot, tokens) for slot in written}
    for source_slot in read:
        origin = _places(source, source_slot, tokens)
        for slot, target in targets.items():
            if origin[0] <= target[-1] and target[0] <= origin[-1] and len(np.intersect1d(origin, target, assume_unique=True)):
                raise RequestError(f"{_KERNEL}: source slot {source_slot} and destination slot {slot} are the same memory: pairs are "
                                   "carried out in no order; pass views that do not overlap, or one tensor as both")


def _places(tensor: torch.Tensor, slot: int, tokens: int) -> npt.NDArray[Any]:
    """Where a block's numbers lie in their storage, ascending."""
    block = tensor[slot, :, :, :, :tokens]
    places = np.array([block.storage_offset()])
    for size, stride in zip(block.shape, block.stride(), strict=True):
        places = np.add.outer(places, np.arange(size) * stride)
    return np.unique(places)


def partial_copy_torch(destination: torch.Tensor, source: torch.Tensor, pairs: Sequence[tuple[int, int]], tokens: int) -> None:
    """The path in torch operations, between any two devices."""
    to, start = destination[:, :, :, :, :tokens], source[:, :, :, :, :tokens]
    # One strided copy for each pair, with nothing in between: on two cores faster than to gather and scatter the batch.
    for source_slot, destination_slot in pairs:
        to[destination_slot].copy_(start[source_slot])


def partial_copy_reference(destination: torch.Tensor, source: torch.Tensor, pairs: Sequence[tuple[int, int]], tokens: int) -> None:
    """The same, token by token, to be read and compared with."""
    for source_slot, destination_slot in pairs:
        for layer in range(destination.shape[1]):
            for field in range(destination.shape[2]):
                from_page, to_page = source[source_slot, layer, field], destination[destination_slot, layer, field]
                for token in range(tokens):
                    to_page[:, token] = from_page[:, token].to(to_page.device)
