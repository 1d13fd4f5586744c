"""Masks of drafts that branch: who sees whom among the last positions (spec: read path, tree drafts).

Drafts lie side by side in their sequence's pages, each at a place of its own; alternatives share everything before they part. The mask
says, for each query of a chunk, which tokens of the chunk it sees; what is before the chunk all of them see.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import INDEX_TYPES, check_dtype, check_shape, check_whole


def mask_of_parents(parents: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """The mask of a chunk whose token i continues token ``parents[i]``.

    Args:
        parents: for each token an earlier one of the chunk, or -1: it continues what is before the chunk.
        device: where the mask is wanted.

    Returns:
        bool ``[tokens, tokens]``: row i has the tokens on the path to token i, itself included.

    Raises:
        RequestError: a parent that is not before its token.
    """
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    check_whole("mask_of_parents", **{f"parents[{token}]": parent for token, parent in enumerate(parents)})
    for token, parent in enumerate(parents):
        if not -1 <= parent < token:
            raise RequestError(f"mask_of_parents: parents[{token}]={parent}: a token continues an earlier one (allowed: -1 to {token - 1})")
        if parent >= 0:
            mask[token] = mask[parent]
        mask[token, token] = True
    return mask.to(device)


def mask_of_places(places: torch.Tensor, past: int) -> torch.Tensor:
    """The mask of drafts from the places on their paths (``KVCacheManager.draft_table(id).places``).

    Args:
        places: int32 or int64 ``[drafts, longest path]``, padded with -1; draft i lies at place ``past + i``.
        past: tokens before the drafts.

    Returns:
        bool ``[drafts, drafts]`` on the same device.

    Raises:
        RequestError: a place that is none of the drafts', a wrong shape or dtype.
    """
    check_shape("mask_of_places", "places", places, (None, None), "drafts, longest path")
    check_dtype("mask_of_places", "places", places, INDEX_TYPES)
    past, = check_whole("mask_of_places", past=past)
    drafts = places.shape[0]
    wrong = (places != -1) & ((places < past) | (places >= past + drafts))
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise RequestError(f"mask_of_places: places[{row}, {column}]={int(places[row, column])}: {drafts} drafts behind {past} tokens lie "
                           f"at {past} to {past + drafts - 1}, and -1 is none")
    mask = torch.zeros(drafts, drafts + 1, dtype=torch.bool, device=places.device)
    mask.scatter_(1, torch.where(places < 0, drafts, places - past).long(), True)
    return mask[:, :drafts].contiguous()
