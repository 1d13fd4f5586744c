"""``KVLayout``: the shape of a model's KV cache, and the groups its layers form (design: public names).

Layers with equal (kind, window, sinks, shape, dtype) share one *group*: one set of pools, one block id space. Groups are
numbered by ascending window, then full attention, then the other kinds. Pure arithmetic: no torch here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from kvtier.errors import ConfigError

DTYPE_BYTES: Final[dict[str, int]] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1, "uint8": 1,
}
"""Bytes of one element of each storage dtype, by torch's names."""

_KIND_ORDER: Final = {"attention": 0, "mla": 1, "recurrent": 2, "cross": 3}


def _positive(name: str, value: int, limit: int = 1 << 40) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
        raise ConfigError(f"{name}={value!r}: must be a whole number between 1 and {limit}")


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the model. Make one with :meth:`attention`, :meth:`mla`, :meth:`recurrent` or :meth:`cross`.

    ``window=W``: a token attends to itself and the W-1 tokens before it; ``None`` means full attention.
    """

    kind: str
    num_kv_heads: int = 1
    head_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    sinks: int = 0
    dtype: str | None = None
    state_bytes: int = 0
    snapshot_interval: int = 0

    @classmethod
    def attention(cls, num_kv_heads: int, head_dim: int, value_dim: int | None = None, window: int | None = None,
                  sinks: int = 0, dtype: str | None = None) -> LayerSpec:
        """Self-attention: per token ``num_kv_heads`` keys of ``head_dim`` and values of ``value_dim`` (default equal)."""
        _positive("num_kv_heads", num_kv_heads)
        _positive("head_dim", head_dim)
        if value_dim is not None:
            _positive("value_dim", value_dim)
        if window is not None:
            _positive("window", window)
        if sinks < 0:
            raise ConfigError(f"sinks={sinks}: must not be negative")
        return cls("attention", num_kv_heads, head_dim, value_dim or head_dim, window, sinks, dtype)

    @classmethod
    def mla(cls, latent_dim: int, rope_dim: int, dtype: str | None = None) -> LayerSpec:
        """Multi-head latent attention: per token one row of ``latent_dim + rope_dim`` that serves as key and value."""
        _positive("latent_dim", latent_dim)
        _positive("rope_dim", rope_dim)
        return cls("mla", 1, latent_dim + rope_dim, latent_dim, dtype=dtype)

    @classmethod
    def recurrent(cls, state_bytes: int, snapshot_interval: int) -> LayerSpec:
        """A recurrent layer: ``state_bytes`` of state, kept every ``snapshot_interval`` tokens."""
        _positive("state_bytes", state_bytes)
        _positive("snapshot_interval", snapshot_interval)
        return cls("recurrent", state_bytes=state_bytes, snapshot_interval=snapshot_interval, dtype="uint8")

    @classmethod
    def cross(cls, num_kv_heads: int, head_dim: int, dtype: str | None = None) -> LayerSpec:
        """Cross-attention over an encoder's output, written once per request."""
        _positive("num_kv_heads", num_kv_heads)
        _positive("head_dim", head_dim)
        return cls("cross", num_kv_heads, head_dim, head_dim, dtype=dtype)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share pools: equal kind, window, sinks, shape and dtype."""

    number: int
    spec: LayerSpec
    layers: tuple[int, ...]  #: model layer numbers, ascending
    tokens_per_block: int

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def dtype(self) -> str:
        """Storage dtype by torch's name."""
        assert self.spec.dtype is not None
        return self.spec.dtype

    @property
    def kv_factor(self) -> int:
        """2 for separate keys and values, 1 where one row serves as both (MLA) and for recurrent state."""
        return 1 if self.spec.kind in ("mla", "recurrent") else 2

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """``(layers, kv_factor, heads, tokens_per_block, head_dim)`` of one block; one layer's page is the last three."""
        return (self.num_layers, self.kv_factor, self.spec.num_kv_heads, self.tokens_per_block, self.spec.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer's keys (or values) in one block."""
        return self.spec.num_kv_heads * self.tokens_per_block * self.spec.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers of the group, keys and values."""
        if self.spec.kind == "recurrent":
            return self.num_layers * self.spec.state_bytes
        return self.num_layers * self.kv_factor * self.page_bytes


@dataclass(frozen=True)
class KVLayout:
    """Shape of the whole KV cache.

    Args:
        layers: one :class:`LayerSpec` per model layer, in model order.
        dtype: storage dtype of layers that do not name their own ("float32", "bfloat16", ...).
        tokens_per_block: a power of two, so that position to (page, entry) is a shift and a mask.

    Raises:
        ConfigError: no layers, an unknown dtype, a block size that is no power of two.
    """

    layers: Sequence[LayerSpec]
    dtype: str = "bfloat16"
    tokens_per_block: int = 32
    _resolved: tuple[LayerSpec, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _positive("tokens_per_block", self.tokens_per_block, 1 << 16)
        if self.tokens_per_block & (self.tokens_per_block - 1):
            below = 1 << (self.tokens_per_block.bit_length() - 1)
            raise ConfigError(f"tokens_per_block={self.tokens_per_block}: must be a power of two, for example {below} or {below * 2}")
        if not self.layers:
            raise ConfigError("layers=[]: a layout needs at least one layer")
        resolved = tuple(spec if spec.dtype else replace(spec, dtype=self.dtype) for spec in self.layers)
        for spec in resolved:
            if spec.dtype not in DTYPE_BYTES:
                raise ConfigError(f"dtype={spec.dtype!r}: unknown; use one of {', '.join(DTYPE_BYTES)}")
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "_resolved", resolved)

    @classmethod
    def uniform(cls, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str = "bfloat16",
                tokens_per_block: int = 32) -> KVLayout:
        """A model whose layers are all full attention of one shape."""
        _positive("num_layers", num_layers, 1 << 16)
        spec = LayerSpec.attention(num_kv_heads, head_dim)
        return cls([spec] * num_layers, dtype, tokens_per_block)

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The groups in their order: ascending window, full attention, MLA, recurrent, cross."""
        members: dict[LayerSpec, list[int]] = {}
        for number, spec in enumerate(self._resolved):
            members.setdefault(spec, []).append(number)

        def order(item: tuple[LayerSpec, list[int]]) -> tuple[int, int, int]:
            spec, layers = item
            return (_KIND_ORDER[spec.kind], spec.window if spec.window is not None else 1 << 62, layers[0])

        ordered = sorted(members.items(), key=order)
        return tuple(LayerGroup(number, spec, tuple(layers), self.tokens_per_block)
                     for number, (spec, layers) in enumerate(ordered))

    def place_of_layer(self, layer: int) -> tuple[LayerGroup, int]:
        """The group of a model layer and the layer's position inside that group's blocks."""
        for group in self.groups:
            if layer in group.layers:
                return group, group.layers.index(layer)
        raise ConfigError(f"layer={layer}: the layout has layers 0..{len(self.layers) - 1}")

    @property
    def bytes_per_token(self) -> float:
        """Bytes of KV cache per token over all groups."""
        return sum(group.block_bytes for group in self.groups) / self.tokens_per_block

    def describe(self) -> str:
        """The layout in one line of JSON: part of the namespace that a store directory carries in clear."""
        groups: list[dict[str, Any]] = []
        for group in self.groups:
            spec = group.spec
            groups.append({"kind": spec.kind, "layers": list(group.layers), "heads": spec.num_kv_heads, "head_dim": spec.head_dim,
                           "value_dim": spec.value_dim, "window": spec.window, "sinks": spec.sinks, "dtype": spec.dtype,
                           "state_bytes": spec.state_bytes, "snapshot_interval": spec.snapshot_interval})
        return json.dumps({"tokens_per_block": self.tokens_per_block, "groups": groups}, sort_keys=True)
