"""``LayerCopier``: copies blocks where one end keeps each layer's pages together (design: the device pool may be layer-first).

A layer-first pool has a block's layers at equal distances, a slot of the lower levels has them one after the other. Both are the
same to ``RowCopier`` once a row is one layer of one block, so that a batch of blocks is still one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvtier.io.piece_copier import PieceCopier, piece_copier
from kvtier.io.row_copier import Call, Numbers, RowCopier, Rows, strided_copy


@dataclass(frozen=True)
class BlockRows:
    """One section of all blocks of a memory on the host.

    Attributes:
        rows: layer-first uint8 ``[layers * slots, bytes of one layer]``, contiguous, layer after layer; otherwise uint8
            ``[slots, section bytes]``, perhaps strided.
        layers: how many, when layer-first; else 0.
    """

    rows: Rows
    layers: int = 0

    def by_layer(self, num_layers: int) -> Rows:
        """Blocks of so many layers, uint8 ``[slots, layers, bytes of one layer]``, strided."""
        return _cube(self).transpose(1, 0, 2) if self.layers else self.rows.reshape(len(self.rows), num_layers, -1)


class LayerCopier:
    """Copies between two memories of which one or both are layer-first.

    Args:
        source, destination: both ends.
        first, end: the layers to copy; all of them when left out.
    """

    def __init__(self, source: BlockRows, destination: BlockRows, first: int = 0, end: int | None = None) -> None:
        layers = source.layers or destination.layers
        end = layers if end is None else end
        self._num_layers = layers
        self._layers = np.arange(first, end)
        self._pages: RowCopier | None = None
        self._by_layer: list[RowCopier] = []
        self._cubes: tuple[Rows, Rows] | None = None
        if source.layers and destination.layers:
            self._cubes = _cube(source)[first:end], _cube(destination)[first:end]
            return
        layered, other = (source, destination) if source.layers else (destination, source)
        num_bytes = layered.rows.shape[1]
        num_slots = layered.rows.shape[0] // layers
        self._is_from_layers = bool(source.layers)
        self._num_slots = num_slots
        if other.rows.flags.c_contiguous:
            pages = other.rows.reshape(-1, num_bytes)
            self._pages = RowCopier(layered.rows, pages) if self._is_from_layers else RowCopier(pages, layered.rows)
            return
        # Gaps between the slots (padding, other sections): each layer is copied for all blocks.
        for layer in range(first, end):
            ours = layered.rows[layer * num_slots:(layer + 1) * num_slots]
            theirs = other.rows[:, layer * num_bytes:(layer + 1) * num_bytes]
            self._by_layer.append(RowCopier(ours, theirs) if self._is_from_layers else RowCopier(theirs, ours))

    def copy(self, sources: Numbers, destinations: Numbers) -> None:
        """Copy blocks, as :meth:`RowCopier.copy` does rows."""
        for call in self.plan(sources, destinations):
            call()

    def plan(self, sources: Numbers, destinations: Numbers) -> list[Call]:
        """The calls that copy these blocks; see :meth:`RowCopier.plan`."""
        if self._cubes is not None:  # the layers of one block by one strided copy
            source, destination = self._cubes
            return [strided_copy(destination[:, to_slot], source[:, from_slot])
                    for from_slot, to_slot in zip(sources.tolist(), destinations.tolist(), strict=True)]
        if self._pages is None:
            return [call for copier in self._by_layer for call in copier.plan(sources, destinations)]
        count = self._num_layers
        apart = self._layers * self._num_slots
        if self._is_from_layers:
            return self._pages.plan((sources[:, None] + apart).ravel(), (destinations[:, None] * count + self._layers).ravel())
        return self._pages.plan((sources[:, None] * count + self._layers).ravel(), (destinations[:, None] + apart).ravel())


BlockCopier: TypeAlias = PieceCopier | RowCopier | LayerCopier
"""Plans the calls that copy blocks of two memories."""


def section_copier(source: BlockRows, destination: BlockRows) -> BlockCopier:
    """The copier for one section of the blocks of two memories."""
    layers = source.layers or destination.layers or 1
    if (pieces := piece_copier(source.by_layer(layers), destination.by_layer(layers))) is not None:
        return pieces
    if source.layers or destination.layers:
        return LayerCopier(source, destination)
    return RowCopier(source.rows, destination.rows)


def layers_copier(source: BlockRows, destination: BlockRows, num_layers: int, first: int, end: int) -> BlockCopier:
    """The copier for layers ``first`` to ``end`` - 1 of one section, which has ``num_layers`` of them."""
    if (pieces := piece_copier(source.by_layer(num_layers)[:, first:end], destination.by_layer(num_layers)[:, first:end])) is not None:
        return pieces
    if source.layers or destination.layers:
        return LayerCopier(source, destination, first, end)
    layer_bytes = source.rows.shape[1] // num_layers
    columns = slice(first * layer_bytes, end * layer_bytes)
    return RowCopier(source.rows[:, columns], destination.rows[:, columns])


def _cube(memory: BlockRows) -> Rows:
    """uint8 ``[layers, slots, bytes of one layer]``."""
    return memory.rows.reshape(memory.layers, -1, memory.rows.shape[1])
