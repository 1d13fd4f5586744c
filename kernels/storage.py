"""How keys and values are stored in pages: as they are, in 8 bits with a scale, or in 4 bits with block scales (spec: write path).

The pages' dtype says which. Keys and values have scales of their own, always: a model's values are often ten times smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import FLOAT_TYPES, check_dtype, check_own_memory, check_same_device, check_shape


class Storage(IntEnum):
    """How a number is stored. The numbers are what the Triton kernels are told."""

    SAME = 0    #: a floating-point dtype, as it is
    FP8 = 1     #: e4m3, one scale for the tensor
    INT8 = 2    #: one scale for the tensor
    NVFP4 = 3   #: e2m1, an e4m3 scale for every 16 elements of a row, one scale for the tensor

    def stored_dim(self, head_dim: int) -> int:
        """Elements of the pages' last axis that hold ``head_dim`` numbers."""
        return head_dim // 2 if self is Storage.NVFP4 else head_dim


_BY_DTYPE = {torch.float8_e4m3fn: Storage.FP8, torch.int8: Storage.INT8, torch.uint8: Storage.NVFP4}


@dataclass(frozen=True)
class StoredPages:
    """Pages of keys and of values, with what makes numbers of them.

    Attributes:
        storage: of both.
        keys, values: ``[num_pages, heads, tokens_per_block, stored_dim]``, any strides; the same tensor where they share a pool.
        key_block_scales, value_block_scales: uint8 ``[num_pages, heads, tokens_per_block, dim / 16]``, bits of e4m3, page for page
            beside the pages; None but for NVFP4.
        key_scale, value_scale: what a stored number is multiplied by, in float32.
    """

    storage: Storage
    keys: torch.Tensor
    values: torch.Tensor
    key_block_scales: torch.Tensor | None
    value_block_scales: torch.Tensor | None
    key_scale: float
    value_scale: float

    @property
    def key_dim(self) -> int:
        """Numbers in one key."""
        return self.keys.shape[3] * (2 if self.storage is Storage.NVFP4 else 1)

    @property
    def value_dim(self) -> int:
        """Numbers in one value."""
        return self.values.shape[3] * (2 if self.storage is Storage.NVFP4 else 1)

    @classmethod
    def of(cls, kernel: str, pages: torch.Tensor, *, value_pages: torch.Tensor | None = None, scale_pages: torch.Tensor | None = None,
           value_scale_pages: torch.Tensor | None = None, key_scale: float = 1.0, value_scale: float = 1.0,
           kv_factor: int = 2) -> StoredPages:
        """Check that pages, scales and factors fit together.

        Args:
            kernel: who asks, for messages.
            pages: of keys, and of values too unless ``value_pages`` are given.
            value_pages: where values have a tensor of their own: the same first three axes and dtype; ``kv_factor`` is 1 then,
                because a page has the same number in both.
            scale_pages: block scales beside ``pages``; they make uint8 pages NVFP4.
            value_scale_pages: block scales beside ``value_pages``.
            key_scale, value_scale: finite and greater than 0 (NVFP4: 0 too); 1 where numbers are stored as they are.

        Raises:
            RequestError: they do not.
        """
        check_shape(kernel, "pages", pages, (None,) * 4, "pages, heads, tokens_per_block, head_dim")
        check_dtype(kernel, "pages", pages, (*FLOAT_TYPES, *_BY_DTYPE))
        storage = _BY_DTYPE.get(pages.dtype, Storage.SAME)
        if (scale_pages is not None) != (storage is Storage.NVFP4):
            remedy = "pass scale_pages with them" if scale_pages is None else "scale_pages belong to pages of uint8"
            raise RequestError(f"{kernel}: pages has dtype {str(pages.dtype).removeprefix('torch.')}: {remedy} (NVFP4)")
        if value_pages is not None:
            if kv_factor != 1:
                raise RequestError(f"{kernel}: value_pages with kv_factor={kv_factor}: where values have a tensor of their own, a page has "
                                   "the same number in both; pass kv_factor=1")
            check_shape(kernel, "value_pages", value_pages, (*pages.shape[:3], None), "pages, heads, tokens_per_block, value_dim")
            check_dtype(kernel, "value_pages", value_pages, (pages.dtype,))
            if not value_pages.shape[3]:
                raise RequestError(f"{kernel}: value_pages has shape {tuple(value_pages.shape)}: no axis may be empty")
        if (value_scale_pages is not None) != (storage is Storage.NVFP4 and value_pages is not None):
            raise RequestError(f"{kernel}: value_scale_pages {'are missing' if value_scale_pages is None else 'given'}: they go with "
                               "scale_pages and value_pages together")
        check_same_device(kernel, pages, value_pages=value_pages, scale_pages=scale_pages, value_scale_pages=value_scale_pages)
        # What is stored is data: pages that are a parameter of something are written and read as any others.
        pages = pages.detach() if pages.requires_grad else pages
        values = pages if value_pages is None else value_pages.detach()
        value_scales = scale_pages if value_scale_pages is None else value_scale_pages
        for name, data, scales in (("scale_pages", pages, scale_pages), ("value_scale_pages", values, value_scales)):
            if scales is None:
                continue
            if data.shape[3] % 8:
                raise RequestError(f"{kernel}: pages of {data.shape[3]} bytes a row: NVFP4 has groups of 16 numbers, so a multiple of 8")
            check_shape(kernel, name, scales, (*data.shape[:3], data.shape[3] // 8), "pages, heads, tokens_per_block, head_dim / 16")
            check_dtype(kernel, name, scales, (torch.uint8,))
        for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
            check_scale(kernel, name, scale, storage)
        return cls(storage, pages, values, scale_pages, value_scales, key_scale, value_scale)

    def check_written(self, kernel: str) -> None:
        """RequestError unless every number that may be written has memory of its own."""
        for name, tensor in (("pages", self.keys), ("value_pages", self.values), ("scale_pages", self.key_block_scales),
                             ("value_scale_pages", self.value_block_scales)):
            if tensor is not None:
                check_own_memory(kernel, name, tensor)


def check_scale(kernel: str, name: str, scale: float, storage: Storage) -> None:
    """RequestError unless numbers stored like this can have this scale."""
    try:
        given = float(scale)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:   # the last is torch's
        raise RequestError(f"{kernel}: {name}={scale!r}: pass one number") from error
    if storage is Storage.SAME:
        if given != 1.0:
            raise RequestError(f"{kernel}: {name}={scale} with a floating-point dtype: numbers are stored as they are; pass 1")
        return
    with np.errstate(over="ignore"):
        number = np.float32(given)
    if not math.isfinite(number) or number < 0 or (number == 0 and (given != 0 or storage is not Storage.NVFP4)):
        raise RequestError(f"{kernel}: {name}={scale}: must be finite and greater than 0 in float32"
                           f"{' (or 0)' if storage is Storage.NVFP4 else ''}; it is what stored numbers are multiplied by")
