"""Where the pages of SGLang's host pool lie: as views that one copy reaches, or by the pool's own methods (design: two ways to attach).

Pools have many layouts. Instead of knowing them, we ask the pool for views of single pages (``get_data_page(index, flat=False)``), and
derive from the first, second and last one where all pages lie. What does not follow such a rule (pages that move, or are no views)
goes through a flat page and the pool's own copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvtier.errors import ConfigError


class HostPages:
    """The pages of one host pool.

    Args:
        pool: SGLang's ``HostKVCache``.

    Attributes:
        page_size: tokens of a page.
        num_pages: of the pool.
        page_bytes: of one page.
        pieces: a page's pieces as uint8 ``[num_pages, bytes]`` views of the pool, in the order of a flat page; None where pages are copied
            by the pool's methods.

    Raises:
        ConfigError: a pool without pages, or whose pages are not in host memory.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page_size = int(getattr(pool, "page_size", 0))
        self.num_pages = int(getattr(pool, "size", 0)) // max(self.page_size, 1)
        if self.page_size < 1 or self.num_pages < 1:
            raise ConfigError(f"{type(pool).__name__}: page_size={self.page_size}, {self.num_pages} pages: a host pool without pages "
                              "cannot be tiered")
        try:
            flat = pool.get_dummy_flat_data_page()
        except Exception as error:
            raise ConfigError(f"{type(pool).__name__}: has no flat pages ({error}); this kind of pool is not supported") from error
        if flat.device.type != "cpu":
            raise ConfigError(f"{type(pool).__name__}: its pages are on {flat.device}, not in host memory")
        self.dtype: torch.dtype = flat.dtype
        self.page_bytes: int = flat.numel() * flat.element_size()
        self.pieces = self._views()

    def rows(self, indices: Sequence[int] | torch.Tensor, count: int) -> list[int] | None:
        """The rows of ``count`` pages that host indices, one for each token, name; None when they name no whole pages of this pool."""
        numbers = indices.tolist() if isinstance(indices, torch.Tensor) else list(indices)
        if len(numbers) != count * self.page_size:
            return None
        rows = []
        for start in range(0, len(numbers), self.page_size):
            first = numbers[start]
            if (first % self.page_size or numbers[start:start + self.page_size] != list(range(first, first + self.page_size))
                    or not 0 <= first // self.page_size < self.num_pages):
                return None
            rows.append(first // self.page_size)
        return rows

    def fetch(self, rows: Sequence[int], read: Callable[[Sequence[torch.Tensor], Sequence[int]], int]) -> int:
        """Let ``read(tensors, pages)`` fill rows of the pool, from the first on; returns what it returns."""
        if self.pieces is not None:
            return read(self.pieces, rows)
        staging = torch.empty(len(rows), self.page_bytes, dtype=torch.uint8)
        count = read([staging], range(len(rows)))
        for row, page in zip(rows[:count], staging, strict=False):
            self._pool.set_from_flat_data_page(row * self.page_size, page.view(self.dtype))
        return count

    def put(self, rows: Sequence[int], write: Callable[[Sequence[torch.Tensor], Sequence[int]], list[bool]]) -> list[bool]:
        """Let ``write(tensors, pages)`` take rows of the pool; returns what it returns."""
        if self.pieces is not None:
            return write(self.pieces, rows)
        staging = torch.empty(len(rows), self.page_bytes, dtype=torch.uint8)
        for row, page in zip(rows, staging, strict=True):
            page.copy_(as_bytes(self._pool.get_data_page(row * self.page_size, flat=True)))
        return write([staging], range(len(rows)))

    def _views(self) -> list[torch.Tensor] | None:
        if getattr(self._pool, "shared_allocation_domain", None) is not None:  # its pages move
            return None
        try:
            pages = [self._pool.get_data_page(row * self.page_size, flat=False)
                     for row in (0, min(1, self.num_pages - 1), self.num_pages - 1)]
        except Exception:  # a kind of pool that gives no pages in place, whatever it says then: its pages are copied
            return None
        first, second, last = pages
        size = first.element_size()
        storage = first.untyped_storage()
        pitch = (second.data_ptr() - first.data_ptr()) if self.num_pages > 1 else self.page_bytes
        is_regular = (all(page.untyped_storage().data_ptr() == storage.data_ptr() and page.shape == first.shape
                          and page.stride() == first.stride() for page in pages)
                      and last.data_ptr() - first.data_ptr() == (self.num_pages - 1) * pitch
                      and first.numel() * size == self.page_bytes and first.device.type == "cpu")
        if not is_regular:
            return None
        run, outer = _contiguous_tail(first)
        if self.num_pages > 1 and pitch < run * size:
            return None
        base = torch.empty(0, dtype=torch.uint8).set_(storage)
        starts = [sum(place * stride for place, stride in zip(places, first.stride(), strict=False))
                  for places in itertools.product(*(range(extent) for extent in first.shape[:outer]))]
        offset = first.data_ptr() - storage.data_ptr()
        if offset + max(starts) * size + (self.num_pages - 1) * pitch + run * size > storage.nbytes():
            return None
        return [base.as_strided((self.num_pages, run * size), (pitch, 1), offset + start * size) for start in starts]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes, flat, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _contiguous_tail(page: torch.Tensor) -> tuple[int, int]:
    """How many numbers follow one another at the end of a page's shape, and how many leading dimensions are outside of that."""
    outer, run = page.dim(), 1
    while outer and (page.shape[outer - 1] == 1 or page.stride(outer - 1) == run):
        outer -= 1
        run = math.prod(page.shape[outer:])
    return run, outer
