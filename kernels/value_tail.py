"""V tail zeroing: rows of values behind a sequence's end, in its last page, become 0 (spec: write path, V tail zeroing).

Attention that reads whole pages multiplies those rows with weights of 0, and 0 * NaN is NaN. Keys need none: their scores are
masked before the softmax. The operation is TensorRT-LLM's ``zeroPagedVCacheTail``.
"""

from __future__ import annotations

import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import (
    INDEX_TYPES,
    LayerPages,
    check_dtype,
    check_same_device,
    check_shape,
    check_table,
    check_whole,
    checks_values,
)
from kvtier.kernels.dispatch import kernel_paths
from kvtier.kernels.storage import StoredPages

_KERNEL = "zero_value_tail"


def zero_value_tail(pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, *, num_layers: int, layers: range | None = None,
                    kv_factor: int = 2, check_values: bool | None = None, value_pages: torch.Tensor | None = None,
                    scale_pages: torch.Tensor | None = None, value_scale_pages: torch.Tensor | None = None) -> None:
    """Zero entries ``length % tokens_per_block`` and up of the value page that holds the last of ``length`` tokens.

    Nothing to do for a length that is a multiple of ``tokens_per_block``, or 0.

    Args:
        pages, value_pages, scale_pages, value_scale_pages: as of :func:`~kvtier.kernels.append.write_kv`; block scales are zeroed
            where their rows are.
        table: int32 ``[sequences, 2, max_blocks]``. A page has one owner: two sequences may end in one page only at the same token
            (beams that share it).
        lengths: int32 or int64 ``[sequences]``: tokens in the pool, with the bubble behind sinks where there is one
            (:meth:`~kvtier.kernels.visibility.Visibility.num_places`). Not of a ring, where older tokens lie behind the newest.
        num_layers: layers in a block.
        layers: of them, those that were written; None for all.
        kv_factor: 2, or 1 where one row serves as key and value or values have a tensor of their own.
        check_values: whether lengths and table entries are checked. None: yes on a CPU, no on a GPU, where it makes the host wait.
            Unchecked, a length or an entry that names no page is left out.

    Raises:
        RequestError: a wrong shape, dtype, layer or device, or (with ``check_values``) a length outside the table, a last page that is
            null, not of this pool, or another sequence's. Nothing has been zeroed then.
    """
    num_layers, = check_whole(_KERNEL, num_layers=num_layers)
    layers = range(num_layers) if layers is None else layers
    if not isinstance(layers, range):
        raise RequestError(f"{_KERNEL}: layers={layers!r}: pass a range, or None for all")
    for layer in ((layers[0], layers[-1]) if layers else (0,)):   # the last is checked last: its offset allows the fewest entries
        layer_pages = LayerPages.of(_KERNEL, pages, layer=layer, num_layers=num_layers, kv_factor=kv_factor)
    stored = StoredPages.of(_KERNEL, pages, value_pages=value_pages, scale_pages=scale_pages, value_scale_pages=value_scale_pages,
                            kv_factor=kv_factor)
    stored.check_written(_KERNEL)
    check_table(_KERNEL, "table", table, with_sequences=True)
    check_shape(_KERNEL, "lengths", lengths, (table.shape[0],), "sequences")
    check_dtype(_KERNEL, "lengths", lengths, INDEX_TYPES)
    check_same_device(_KERNEL, pages, table=table, lengths=lengths)
    if checks_values(pages, check_values):
        _check_tails(layer_pages, table, lengths)
    if table.shape[0] and layers:
        offsets = range(layers.start * kv_factor, layers.stop * kv_factor, layers.step * kv_factor)
        with torch.inference_mode():   # pages may have been made in it, and cannot be written outside then
            kernel_paths(pages.device.type).zero_tail(stored.values, stored.value_block_scales, table, lengths, offsets)


def _check_tails(layer_pages: LayerPages, table: torch.Tensor, lengths: torch.Tensor) -> None:
    tokens_per_block = layer_pages.tokens_per_block
    capacity = table.shape[2] * tokens_per_block
    wrong = (lengths < 0) | (lengths > capacity)
    if bool(wrong.any()):
        sequence = int(wrong.nonzero()[0])
        raise RequestError(f"{_KERNEL}: lengths[{sequence}]={int(lengths[sequence])} (sequence {sequence}): the table's {table.shape[2]} "
                           f"blocks of {tokens_per_block} tokens allow 0 to {capacity}")
    sequences = (lengths % tokens_per_block != 0).nonzero().flatten()
    blocks = lengths[sequences] // tokens_per_block
    entries = table[sequences, :, blocks]
    bad = layer_pages.is_bad(entries, field_axis=1)[:, 1]
    if bool(bad.any()):
        found = int(bad.nonzero()[0])
        raise layer_pages.entry_error("table", int(sequences[found]), 1, int(blocks[found]), int(entries[found, 1]))
    _check_owners(table[:, 1], lengths, entries[:, 1], tokens_per_block)


def _check_owners(values: torch.Tensor, lengths: torch.Tensor, zeroed: torch.Tensor, tokens_per_block: int) -> None:
    """No page in which a tail is zeroed (entries ``zeroed``) holds more tokens of another sequence, in its middle or its end."""
    first = torch.arange(values.shape[1], device=values.device) * tokens_per_block
    held = (lengths[:, None] - first).clamp(0, tokens_per_block)   # tokens of each sequence in each of its blocks
    found = ((held > 0) & torch.isin(values, zeroed)).nonzero().tolist()
    owners: dict[int, tuple[int, int]] = {}
    for sequence, block in found:
        entry, tokens = int(values[sequence, block]), int(held[sequence, block])
        other, others = owners.setdefault(entry, (sequence, tokens))
        if tokens != others:
            raise RequestError(f"{_KERNEL}: table[{sequence}, 1, {block}]: sequences {other} and {sequence} share the page of entry "
                               f"{entry}, with {others} and {tokens} tokens in it (lengths {int(lengths[other])} and "
                               f"{int(lengths[sequence])}); a page has one owner: copy the block first")


def zero_tail_torch(values: torch.Tensor, block_scales: torch.Tensor | None, table: torch.Tensor, lengths: torch.Tensor,
                    layer_offsets: range) -> None:
    """The path in torch operations: one indexed assignment for all sequences, layers and entries."""
    num_pages, _, tokens_per_block, _ = values.shape
    blocks = lengths // tokens_per_block
    has_tail = (lengths > 0) & (lengths % tokens_per_block != 0) & (blocks < table.shape[2])
    sequences = has_tail.nonzero().flatten()
    if not len(sequences):
        return
    entries = table[sequences, 1, blocks[sequences]].long()
    pages = entries[:, None] + torch.arange(layer_offsets.start, layer_offsets.stop, layer_offsets.step, device=table.device)
    inside = torch.arange(tokens_per_block, device=table.device)
    is_tail = (inside >= (lengths[sequences] % tokens_per_block)[:, None])[:, None]
    is_page = ((entries >= 0)[:, None] & (pages < num_pages))[..., None]
    tails, layers, places = (is_tail & is_page).nonzero(as_tuple=True)
    for tensor in (values, block_scales):
        if tensor is not None:
            zeroed = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            zeroed[pages[tails, layers], :, places] = 0


def zero_tail_reference(values: torch.Tensor, block_scales: torch.Tensor | None, table: torch.Tensor, lengths: torch.Tensor,
                        layer_offsets: range) -> None:
    """The same, sequence by sequence and layer by layer, to be read and compared with."""
    tokens_per_block = values.shape[2]
    for sequence, length in enumerate(lengths.tolist()):
        block, tail = divmod(length, tokens_per_block)
        if not tail:
            continue
        entry = int(table[sequence, 1, block])
        assert entry >= 0, f"sequence {sequence} has no page for its last token"
        for offset in layer_offsets:
            for tensor in (values, block_scales):
                if tensor is not None:
                    tensor[entry + offset, :, tail:] = 0
