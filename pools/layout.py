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
from kvtier.pools.layer_group import LayerGroup
from kvtier.pools.layer_spec import DTYPE_BYTES, LayerSpec, TorchDtype, dtype_name, require_count

__all__ = ["DTYPE_BYTES", "KVLayout", "LayerGroup", "LayerSpec"]

_KIND_ORDER: Final = {"attention": 0, "mla": 1, "recurrent": 2, "cross": 3}


@dataclass(frozen=True)
class KVLayout:
    """Shape of the whole KV cache.

    Args:
        layers: one :class:`LayerSpec` per model layer, in model order.
        dtype: storage dtype of layers that do not name their own, by name ("float32", "bfloat16", ...) or as torch's own.
        tokens_per_block: a power of two, so that position to (page, entry) is a shift and a mask.

    Raises:
        ConfigError: no layers, an unknown dtype, a block size that is no power of two, a snapshot interval that is no multiple
            of the block size.
    """

    layers: Sequence[LayerSpec]
    dtype: str | TorchDtype = "bfloat16"  # a name once it is made
    tokens_per_block: int = 32
    _resolved: tuple[LayerSpec, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_count("tokens_per_block", self.tokens_per_block, highest=1 << 16)
        if self.tokens_per_block & (self.tokens_per_block - 1):
            below = 1 << (self.tokens_per_block.bit_length() - 1)
            raise ConfigError(f"tokens_per_block={self.tokens_per_block}: must be a power of two, for example {below} or {below * 2}")
        if not self.layers:
            raise ConfigError("layers=[]: a layout needs at least one layer")
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        resolved = tuple(spec if spec.dtype else replace(spec, dtype=self.dtype) for spec in self.layers)
        for spec in resolved:
            if spec.dtype not in DTYPE_BYTES:
                raise ConfigError(f"dtype={spec.dtype!r}: unknown; use one of {', '.join(DTYPE_BYTES)}")
            if spec.snapshot_interval % self.tokens_per_block:
                above = -(-spec.snapshot_interval // self.tokens_per_block) * self.tokens_per_block
                raise ConfigError(f"snapshot_interval={spec.snapshot_interval}: must be a multiple of tokens_per_block="
                                  f"{self.tokens_per_block}, because a state is kept where a block ends; use for example {above}")
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "_resolved", resolved)

    @classmethod
    def uniform(cls, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str | TorchDtype = "bfloat16",
                tokens_per_block: int = 32) -> KVLayout:
        """A model whose layers are all full attention of one shape."""
        require_count("num_layers", num_layers, highest=1 << 16)
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

    @cached_property
    def _places(self) -> dict[int, tuple[LayerGroup, int]]:
        return {layer: (group, position) for group in self.groups for position, layer in enumerate(group.layers)}

    def place_of_layer(self, layer: int) -> tuple[LayerGroup, int]:
        """The group of a model layer and the layer's position inside that group's blocks."""
        place = self._places.get(layer) if isinstance(layer, int) and not isinstance(layer, bool) else None
        if place is None:
            raise ConfigError(f"layer={layer!r}: the layout has layers 0..{len(self.layers) - 1}")
        return place

    @property
    def bytes_per_token(self) -> float:
        """Bytes of KV cache per token over all groups; a state counts once for each snapshot interval."""
        return sum(group.block_bytes / (group.snapshot_interval or self.tokens_per_block) for group in self.groups)

    def describe(self) -> str:
        """The layout in one line of JSON: part of the namespace that a store directory carries in clear."""
        groups: list[dict[str, Any]] = []
        for group in self.groups:
            spec = group.spec
            groups.append({"kind": spec.kind, "layers": list(group.layers), "heads": spec.num_kv_heads, "head_dim": spec.head_dim,
                           "value_dim": spec.value_dim, "window": spec.window, "sinks": spec.sinks, "dtype": spec.dtype,
                           "state_bytes": spec.state_bytes, "snapshot_interval": spec.snapshot_interval})
            # Only where there are any: stores of layouts without them stay usable.
            beside = {"scale_bytes": spec.scale_bytes, "indexer_bytes": spec.indexer_bytes}
            groups[-1].update({name: size for name, size in beside.items() if size})
        return json.dumps({"tokens_per_block": self.tokens_per_block, "groups": groups}, sort_keys=True)
