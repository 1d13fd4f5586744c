"""Partial block copy: the first n tokens of every head, in all layers and fields (spec: moving and tables).

A block that is shared and about to be written is copied first, and only what the new owner may use is copied. The
operation is TensorRT-LLM's ``cuKVCacheBlockPartialCopy``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.errors import RequestError
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
        RequestError: shapes or dtypes that do not match, a slot outside its tensor, pairs that depend on each other.
            Nothing has been copied then.
    """
    if destination.dim() != 6 or source.dim() != 6 or destination.shape[1:] != source.shape[1:]:
        raise RequestError(f"{_KERNEL}: source has shape {tuple(source.shape)} and destination "
                           f"{tuple(destination.shape)}: pass two tensors [blocks, layers, kv_factor, heads, "
                           "tokens_per_block, head_dim] that differ in the number of blocks only")
    if destination.dtype != source.dtype:
        raise RequestError(f"{_KERNEL}: source is {source.dtype} and destination {destination.dtype}: a copy does not "
                           "convert; pass equal dtypes")
    read, written = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    for name, tensor, slots in (("source", source, read), ("destination", destination, written)):
        for slot in slots:
            if not 0 <= slot < tensor.shape[0]:
                raise RequestError(f"{_KERNEL}: {name} slot {slot}: the tensor has slots 0 to {tensor.shape[0] - 1}")
    if len(set(written)) < len(written):
        twice = next(slot for slot in written if written.count(slot) > 1)
        raise RequestError(f"{_KERNEL}: slot {twice} is written {written.count(twice)} times in one call (allowed: once); "
                           "pairs are carried out in no order, so use one call for each")
    if destination.data_ptr() == source.data_ptr() and (both := sorted(set(written).intersection(read))):
        raise RequestError(f"{_KERNEL}: slot {both[0]} is both read and written in one call: pairs are carried out in no "
                           "order, so use one call for each")

    tokens_per_block = destination.shape[4]
    tokens = num_tokens if 0 < num_tokens < tokens_per_block else tokens_per_block
    if pairs:
        kernel_paths(destination.device.type).partial_copy(destination.detach(), source.detach(), pairs, tokens)


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
