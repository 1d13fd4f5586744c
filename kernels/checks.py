"""What the paged kernels ask of their arguments, and how they say what is wrong.

All errors are :class:`~kvtier.errors.RequestError`: whoever called a kernel passed something that cannot be carried
out. A message names the kernel, the tensor, the sequence, the value, the allowed range and the remedy. Checks of shapes
cost nothing and always run; checks of values read tensors, which on a GPU would make the host wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Final, SupportsIndex, cast

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import KVTierError, RequestError

NULL_ENTRY: Final = -1
"""The table entry of a block that is not there: all ones as int32."""

FLOAT_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDEX_TYPES: Final = (torch.int32, torch.int64)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_plain(kernel: str, name: str, tensor: object) -> None:
    """``tensor`` is one whose memory holds its numbers: kernels that read through its address would get others without an error.

    Whether it is a view that negates is not asked while ``torch.compile`` traces: it cannot follow the question, and would end its graph.
    """
    if not isinstance(tensor, torch.Tensor):
        raise RequestError(f"{kernel}: {name} is of type {type(tensor).__name__}: pass a tensor")
    is_view = not torch.compiler.is_compiling() and (tensor.is_neg() or tensor.is_conj())
    if is_view or tensor.layout is not torch.strided:
        form = "a view that negates or conjugates what it reads" if is_view else f"stored as {tensor.layout}"
        raise RequestError(f"{kernel}: {name} is {form}: pass a tensor whose memory holds its numbers (to_dense, resolve_neg)")


def check_shape(kernel: str, name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], axes: str) -> None:
    """``tensor`` is plain and has ``shape``, where None stands for any length. ``axes`` describes the shape in words."""
    check_plain(kernel, name, tensor)
    fits = tensor.dim() == len(shape)
    if not fits or any(want is not None and want != have for want, have in zip(shape, tensor.shape, strict=True)):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise RequestError(f"{kernel}: {name} has shape {tuple(tensor.shape)}: pass [{axes}] = [{wanted}]")


def check_dtype(kernel: str, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """``tensor`` has one of ``dtypes``."""
    if tensor.dtype not in dtypes:
        allowed = " or ".join(_name(dtype) for dtype in dtypes)
        raise RequestError(f"{kernel}: {name} has dtype {_name(tensor.dtype)}: pass {allowed}")


def check_whole(kernel: str, error: type[KVTierError] = RequestError, /, **numbers: object) -> None:
    """All ``numbers`` are whole ones, or it is an ``error``."""
    for name, number in numbers.items():
        try:
            index(number)   # type: ignore[arg-type]
        except TypeError as cause:
            raise error(f"{kernel}: {name}={number!r}: pass a whole number") from cause


def whole_pairs(kernel: str, name: str, pairs: Iterable[Sequence[SupportsIndex]]) -> list[tuple[int, int]]:
    """``pairs`` as Python's whole numbers, whatever they are given as: no two elements of a tensor are equal in a set or a dict.

    Raises:
        RequestError: they are something else.
    """
    found: list[tuple[int, int]] = []
    place, given = name, cast(object, pairs)
    try:
        for number, pair in enumerate(pairs):
            place, given = f"{name}[{number}]", pair
            first, second = pair
            found.append((index(first), index(second)))
    except (TypeError, ValueError) as error:
        raise RequestError(f"{kernel}: {place}={given!r}: pass pairs of whole numbers") from error
    return found


def check_finite(kernel: str, name: str, number: object, remedy: str) -> None:
    """``number`` is one finite number."""
    try:
        is_finite = math.isfinite(number)   # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):   # the last is torch's
        is_finite = False
    if not is_finite:
        raise RequestError(f"{kernel}: {name}={number!r}: pass {remedy}")


def check_own_memory(kernel: str, name: str, tensor: torch.Tensor) -> None:
    """Every number of a tensor that is written has memory of its own.

    That is plain where each axis steps over all that the axes with smaller steps reach. Other strides are refused, though some of them are
    of numbers that lie between one another and share nothing: no pool is like that.
    """
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size <= 1:
            continue
        if stride <= reach:
            raise RequestError(f"{kernel}: {name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}: numbers share memory, and "
                               "a write would land in several places; pass a tensor with memory of its own for each (not an expanded one)")
        reach += (size - 1) * stride


def check_apart(kernel: str, name: str, written: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """What is written lies in front of or behind all of the other tensor's memory, as far as they have addresses: not while
    ``torch.compile`` traces them, nor where a tensor wraps another one."""
    if torch.compiler.is_compiling():
        return
    first, last = _extent(written)
    other_first, other_last = _extent(other)
    if first and other_first and written.device == other.device and first < other_last and other_first < last:
        raise RequestError(f"{kernel}: {name} lies in the memory of {other_name}: what is written would change what is read; pass a tensor "
                           "with memory of its own")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the one behind its last; equal where it has none."""
    first = tensor.data_ptr()
    if not tensor.numel():
        return first, first
    numbers = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + numbers * tensor.element_size()


def check_same_device(kernel: str, pages: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """All ``tensors`` are where the pages are."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != pages.device:
            raise RequestError(f"{kernel}: {name} is on {tensor.device}, the pages are on {pages.device}: "
                               "move it there first")


def check_table(kernel: str, name: str, table: torch.Tensor, *, with_sequences: bool) -> None:
    """A block table int32 ``[sequences, 2, max_blocks]``, or one sequence's row of it ``[2, max_blocks]``."""
    if with_sequences:
        check_shape(kernel, name, table, (None, 2, None), "sequences, fields, max_blocks")
    else:
        check_shape(kernel, name, table, (2, None), "fields, max_blocks")
    check_dtype(kernel, name, table, (torch.int32,))


_always_check = False


def set_always_check(enabled: bool) -> None:
    """The switch behind :func:`kvtier.kernels.dispatch.use_reference`."""
    global _always_check
    _always_check = enabled


def always_checks() -> bool:
    """Whether an engine is being debugged: references run, and whatever was asked, values are checked."""
    return _always_check


def checks_values(pages: torch.Tensor, asked: bool | None) -> bool:
    """Whether values are checked: as asked, and by default where it is cheap, on a CPU."""
    return _always_check or (pages.device.type == "cpu" if asked is None else asked)


@dataclass(frozen=True)
class LayerPages:
    """The pages of one layer in a pool of blocks, and which table entries name one of them."""

    kernel: str   #: who asks, for messages
    num_pages: int
    heads: int
    tokens_per_block: int
    head_dim: int
    offset: int   #: pages to add to a table entry: layer * kv_factor
    num_layers: int | None
    kv_factor: int

    @classmethod
    def of(cls, kernel: str, pages: torch.Tensor, *, layer: int, num_layers: int | None, kv_factor: int) -> LayerPages:
        """Check that the pool's pages, the layer and the factors fit together."""
        check_shape(kernel, "pages", pages, (None,) * 4, "pages, heads, tokens_per_block, head_dim")
        check_whole(kernel, layer=layer, num_layers=1 if num_layers is None else num_layers, kv_factor=kv_factor)
        layer, num_layers, kv_factor = index(layer), None if num_layers is None else index(num_layers), index(kv_factor)
        num_pages, heads, tokens_per_block, head_dim = pages.shape
        if not pages.numel() or tokens_per_block & (tokens_per_block - 1):
            raise RequestError(f"{kernel}: pages has shape {tuple(pages.shape)}: no axis may be empty, "
                               "and tokens_per_block must be a power of two")
        if kv_factor not in (1, 2):
            raise RequestError(f"{kernel}: kv_factor={kv_factor}: pass 2 for keys and values, 1 where one row is both")
        if num_layers is not None and (num_layers < 1 or num_pages % (num_layers * kv_factor)):
            raise RequestError(f"{kernel}: num_layers={num_layers} and kv_factor={kv_factor} do not divide the pool's "
                               f"{num_pages} pages: pass what the pool was made with")
        layers = num_layers if num_layers is not None else max(1, num_pages // kv_factor)
        if not 0 <= layer < layers:
            raise RequestError(f"{kernel}: layer={layer}: the pool's blocks have layers 0 to {layers - 1}")
        return cls(kernel, num_pages, heads, tokens_per_block, head_dim, layer * kv_factor, num_layers, kv_factor)

    def is_bad(self, entries: torch.Tensor, field_axis: int) -> torch.Tensor:
        """Which table entries name no page of this layer, bool in the shape of ``entries``.

        An entry is judged before the offset is added: null plus an offset would be somebody else's page.
        """
        bad = (entries < 0) | (entries >= self.num_pages - self.offset)
        if self.num_layers is not None:
            fields = torch.arange(entries.shape[field_axis], device=entries.device) % self.kv_factor
            shape = [1] * entries.dim()
            shape[field_axis] = -1
            bad |= entries % (self.num_layers * self.kv_factor) != fields.view(shape)
        return bad

    def is_bad_entry(self, entries: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """The same for entries ``[n, fields]`` on the host."""
        bad: npt.NDArray[np.bool_] = (entries < 0) | (entries >= self.num_pages - self.offset)
        if self.num_layers is not None:
            bad |= entries % (self.num_layers * self.kv_factor) != np.arange(entries.shape[1]) % self.kv_factor
        return bad

    def entry_error(self, name: str, sequence: int, field: int, block: int, entry: int) -> RequestError:
        """The error for one table entry that :meth:`is_bad` found."""
        first, limit = block * self.tokens_per_block, self.num_pages - self.offset - 1
        place = (f"{self.kernel}: {name}[{sequence}, {field}, {block}]={entry} (sequence {sequence}, "
                 f"{('keys', 'values')[field]} of positions {first} to {first + self.tokens_per_block - 1})")
        if entry == NULL_ENTRY:
            return RequestError(f"{place}: null, there is no block (allowed: 0 to {limit}); "
                                "allocate the sequence's blocks and fill the table before this call")
        if not 0 <= entry <= limit:
            return RequestError(f"{place}: outside the pool (allowed: 0 to {limit}, with {self.num_pages} pages and a "
                                f"layer offset of {self.offset}); fill the table from the slots of this pool")
        assert self.num_layers is not None
        step, field = self.num_layers * self.kv_factor, field % self.kv_factor
        return RequestError(f"{place}: not the first page of this field of a block (allowed: slot * {step} + {field}); "
                            "fill the table with the layers and the kv_factor of this pool")
