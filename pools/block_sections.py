"""``BlockSection``: the parts of a block, in the order in which a host or NVMe slot holds them (spec: pool layouts).

A block is one thing: one slot, one move, one read from a file. Kernels, however, want each kind of data in a tensor of its
own, whose pages follow one another without gaps. So on the device every section has its own memory; in a slot of the
lower levels the sections lie behind one another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kvtier.pools.layer_spec import DTYPE_BYTES, LayerSpec

KV: Final = "kv"            #: keys and values of one width, or MLA's rows
KEYS: Final = "keys"        #: keys, where values have another width
VALUES: Final = "values"
STATE: Final = "state"      #: recurrent state
SCALES: Final = "scales"    #: block scales of keys and values
INDEXER: Final = "indexer"  #: keys of the sparse-attention indexer


@dataclass(frozen=True)
class BlockSection:
    """One part of a block of one group.

    Attributes:
        name: one of the names above.
        shape: of one block: ``(layers, fields, heads, tokens_per_block, dim)`` for keys, values and scales,
            ``(layers, tokens_per_block, bytes)`` for the indexer, ``(layers, bytes)`` for state.
        dtype: by torch's name.
        offset: where it begins in a slot of the lower levels, in bytes.
        is_by_token: whether a partial copy takes its first tokens only. Scales and everything else goes whole, and so do numbers of
            4 bits (bytes with scales beside them): packed data is not cut at a token.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    is_by_token: bool

    @property
    def num_bytes(self) -> int:
        """Bytes in one block."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's tokens in one layer and field; for sections by token."""
        assert self.is_by_token
        return self.shape[-2] * self.shape[-1] * DTYPE_BYTES[self.dtype]


def sections_of(spec: LayerSpec, num_layers: int, tokens_per_block: int) -> tuple[BlockSection, ...]:
    """The sections of a block that holds ``num_layers`` layers of this kind. ``spec.dtype`` must be resolved."""
    assert isinstance(spec.dtype, str)
    made: list[BlockSection] = []

    def add(name: str, shape: tuple[int, ...], dtype: str, is_by_token: bool) -> None:
        offset = made[-1].offset + made[-1].num_bytes if made else 0
        made.append(BlockSection(name, (num_layers, *shape), dtype, offset, is_by_token))

    page = (spec.num_kv_heads, tokens_per_block)
    is_packed = spec.dtype == "uint8" and spec.scale_bytes > 0
    if spec.kind == "recurrent":
        add(STATE, (spec.state_bytes,), spec.dtype, False)
    elif spec.is_split:
        add(KEYS, (1, *page, spec.head_dim), spec.dtype, not is_packed)
        add(VALUES, (1, *page, spec.value_dim), spec.dtype, not is_packed)
    else:
        add(KV, (spec.kv_factor, *page, spec.head_dim), spec.dtype, not is_packed)
    if spec.scale_bytes:
        add(SCALES, (spec.kv_factor, *page, spec.scale_bytes), "uint8", False)
    if spec.indexer_bytes:
        add(INDEXER, (tokens_per_block, spec.indexer_bytes), "uint8", False)
    return tuple(made)
