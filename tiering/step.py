"""``Step``: the sequences that take part in a forward pass, and which of their layers have arrived (design: layer-by-layer readiness)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from kvtier.pools.layout import KVLayout
from kvtier.pools.pool_index import PoolIndex
from kvtier.tiering.copy_batch import WHOLE


class Step(list[int]):
    """What ``KVCacheManager.step`` yields: the ids that take part, in the order of the call. Used by one thread, while the step runs.

    Attributes:
        late: by group, slots whose later layers may still be arriving. Empty lists in a step that began with everything there.
        num_layers: by group, leading layers that the engine may use.
        lost: ids that have lost blocks since the step began, as far as :meth:`wait_layer` has seen.
    """

    def __init__(self, ids: Iterable[int], num_layers: Sequence[int], late: Sequence[list[PoolIndex]],
                 wait: Callable[[Step, int], list[int]]) -> None:
        super().__init__(ids)
        self.num_layers = list(num_layers)
        self.late = list(late)
        self.lost: list[int] = []
        self._wait = wait

    def wait_layer(self, layer: int) -> list[int]:
        """Before the engine uses model layer ``layer``, in a step that began with an earlier one: let it wait for that layer only.

        On CUDA the step's stream waits, on the CPU this call does. It costs next to nothing once everything is there.

        Returns:
            ids that have lost blocks since the step began: what is computed for them is of no use. They are to be left out of
            ``mark_computed`` and ``append_step``; ``wait_ready`` tells from where they go on.

        Raises:
            ConfigError: the layout has no such layer.
            TransferError: the layer did not arrive within a minute.
        """
        return self._wait(self, layer)


def leading_layers(layout: KVLayout, layer: int | None) -> list[int]:
    """By group, how many of its layers come no later than model layer ``layer``; WHOLE for all of them.

    Raises:
        ConfigError: the layout has no such layer.
    """
    if layer is None:
        return [WHOLE] * len(layout.groups)
    layout.place_of_layer(layer)
    counts = [bisect_right(group.layers, layer) for group in layout.groups]
    return [WHOLE if count == group.num_layers else count for count, group in zip(counts, layout.groups, strict=True)]
