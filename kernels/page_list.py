"""Page lists: the compressed rows in which other engines name a batch's pages, made into a block table (spec: append, paged attention).

FlashInfer's form: the pages of sequence s are ``indices[indptr[s]:indptr[s + 1]]``, and its last page has ``last_page_len`` tokens. So it
has ``page size * (pages - 1) + last_page_len`` tokens.
"""

from __future__ import annotations

import torch

from kvtier.errors import RequestError
from kvtier.kernels.block_offsets import MAX_PAGES
from kvtier.kernels.checks import INDEX_TYPES, NULL_ENTRY, check_dtype, check_same_device, check_shape, check_whole

_KERNEL = "table_of_page_list"


def table_of_page_list(indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, *, tokens_per_block: int, num_blocks: int,
                       num_layers: int = 1, kv_factor: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Block table and lengths of a page list. Made once for a step; the values are checked, for which the host waits on a GPU.

    Args:
        indptr: int32 or int64 ``[sequences + 1]``: from 0, never falling, to the number of ``indices``.
        indices: int32 or int64 ``[pages of all sequences]``: blocks of the pool.
        last_page_len: int32 or int64 ``[sequences]``: 1 to ``tokens_per_block``; of a sequence without pages 0.
        tokens_per_block: page size.
        num_blocks: blocks of the pool.
        num_layers, kv_factor: pages per block are their product; entries count pages.

    Returns:
        int32 ``[sequences, 2, pages of the longest]``, unused entries null, and int32 ``[sequences]``: tokens of each.

    Raises:
        RequestError: pointers that fall or do not fit, a last page that is empty or longer than a page, a block outside the pool, a pool
            with more pages than an entry counts.
    """
    check_shape(_KERNEL, "indptr", indptr, (None,), "sequences + 1")
    sequences = indptr.shape[0] - 1
    check_shape(_KERNEL, "indices", indices, (None,), "pages")
    check_shape(_KERNEL, "last_page_len", last_page_len, (sequences,), "sequences")
    for name, tensor in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
        check_dtype(_KERNEL, name, tensor, INDEX_TYPES)
    check_same_device(_KERNEL, indptr, indices=indices, last_page_len=last_page_len)
    tokens_per_block, num_blocks, num_layers, kv_factor = check_whole(
        _KERNEL, tokens_per_block=tokens_per_block, num_blocks=num_blocks, num_layers=num_layers, kv_factor=kv_factor)
    if not 0 < tokens_per_block <= MAX_PAGES or tokens_per_block & (tokens_per_block - 1):
        raise RequestError(f"{_KERNEL}: tokens_per_block={tokens_per_block}: must be a power of two, up to 2**30")
    if num_layers < 1 or kv_factor not in (1, 2) or num_blocks * num_layers * kv_factor > MAX_PAGES:
        raise RequestError(f"{_KERNEL}: num_blocks={num_blocks}, num_layers={num_layers}, kv_factor={kv_factor}: allowed are at least one "
                           f"layer, a factor of 1 or 2, and {MAX_PAGES} pages, which an int32 entry counts to")
    counts = indptr.diff().long()
    _check(indptr, counts, indices, last_page_len, tokens_per_block, num_blocks)
    widest = int(counts.max()) if sequences else 0
    column = torch.arange(widest, device=indptr.device)
    is_page = column < counts[:, None]
    table = torch.full((sequences, 2, widest), NULL_ENTRY, dtype=torch.int32, device=indptr.device)
    first = (indices * (num_layers * kv_factor)).int()
    for field in (0, 1):
        table[:, field][is_page] = first + min(field, kv_factor - 1)
    lengths = torch.where(counts > 0, (counts - 1) * tokens_per_block + last_page_len, 0)
    return table, lengths.int()


def _check(indptr: torch.Tensor, counts: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, tokens_per_block: int,
           num_blocks: int) -> None:
    if not indptr.shape[0] or int(indptr[0]) != 0:
        raise RequestError(f"{_KERNEL}: indptr begins with {indptr[:1].tolist()}: the first sequence's pages begin at 0")
    if bool((counts < 0).any()):
        sequence = int((counts < 0).nonzero()[0])
        raise RequestError(f"{_KERNEL}: indptr[{sequence + 1}]={int(indptr[sequence + 1])} (sequence {sequence}) is less than "
                           f"indptr[{sequence}]={int(indptr[sequence])}: pointers never fall")
    if int(indptr[-1]) != indices.shape[0]:
        raise RequestError(f"{_KERNEL}: indptr ends with {int(indptr[-1])}: there are {indices.shape[0]} indices")
    lowest = (counts > 0).int()
    wrong = (last_page_len < lowest) | (last_page_len > tokens_per_block * lowest)
    if bool(wrong.any()):
        sequence = int(wrong.nonzero()[0])
        allowed = f"1 to {tokens_per_block}" if int(counts[sequence]) else "0, it has no pages"
        raise RequestError(f"{_KERNEL}: last_page_len[{sequence}]={int(last_page_len[sequence])} (sequence {sequence}): allowed: {allowed}")
    outside = (indices < 0) | (indices >= num_blocks)
    if bool(outside.any()):
        place = int(outside.nonzero()[0])
        sequence = int((indptr[1:] <= place).sum())
        raise RequestError(f"{_KERNEL}: indices[{place}]={int(indices[place])} (sequence {sequence}): the pool has blocks 0 to "
                           f"{num_blocks - 1}")
