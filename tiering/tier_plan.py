"""``TierPlan``: what index and workers of one engine must agree on, computed by each of them from the same settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from kvtier.errors import ConfigError
from kvtier.io.shared_arena import ArenaShape
from kvtier.pools.host_arena import ALIGNMENT
from kvtier.pools.page_layout import PageLayout
from kvtier.pools.sizing import SizeKind, format_bytes, parse_sizes, parts_of_groups
from kvtier.tiering.config import TierConfig

_OF_THE_ENGINE: Final = ("primary", "max_tokens", "chunk_size", "window_scratch_blocks", "request_directory_root", "allreduce_min",
                         "enable_block_reuse", "enable_partial_reuse", "copy_on_partial_reuse", "prefetch_bandwidth", "load_decision",
                         "layer_pieces", "max_batch_size", "max_seq_len", "max_beam_width", "gds_threads", "gds_task_size", "debug_checks",
                         "rank", "num_ranks", "size_scope")
"""Settings of a tier that owns the engine's pool. Silently doing without them would be a setting that does not work, also where it comes
from a file or from the environment."""


@dataclass(frozen=True)
class TierPlan:
    """The shape of the shared host arena. Picklable; equal settings give equal plans in every process.

    Attributes:
        layout: the engine's pages.
        host_slots: slots of each group in host memory.
        engine_id: names the arena in /dev/shm; one for each engine (and data-parallel replica) on a machine.
    """

    layout: PageLayout
    host_slots: tuple[int, ...]
    engine_id: str

    @classmethod
    def of(cls, layout: PageLayout, config: TierConfig, engine_id: str) -> TierPlan:
        """The plan of these settings.

        ``config.secondary`` is the host memory of all ranks together, in blocks of each group, or in bytes divided by ``group_shares``.

        Raises:
            ConfigError: a percentage (processes would measure different free memory), less than one block of a group (named per rank and in
                total), or a setting that has no meaning here (``primary`` given, ``gds="required"``, ``request_directory_root``, ...).
        """
        if not isinstance(engine_id, str):
            raise ConfigError(f"engine_id={engine_id!r}: pass a text; it names the arena in shared memory")
        for key in _OF_THE_ENGINE:
            source = config.sources[key]
            if source != "default":
                raise ConfigError(f"{key}={getattr(config, key)!r} ({source}): has no meaning where the engine owns its pool; leave it out")
        if config.gds == "required":
            raise ConfigError("gds='required': an engine that owns its pool reaches NVMe through host memory; use gds='auto' or 'off'")
        return cls(layout, level_slots(layout, config, "secondary"), engine_id)

    @cached_property
    def arena(self) -> ArenaShape:
        """The arena in shared memory."""
        return ArenaShape(self.engine_id, tuple(block.block_bytes for block in self.layout.blocks), self.host_slots, self.layout.ranks,
                          self.layout.copies)


def level_slots(layout: PageLayout, config: TierConfig, name: str, header_bytes: int = 0) -> tuple[int, ...]:
    """Slots of each group on the level called ``name``, "secondary" or "nvme"; ``header_bytes``: what a slot takes beside its block.

    Raises:
        ConfigError: as of ``TierPlan.of``.
    """
    given = getattr(config, name)
    sizes = parse_sizes(given, name)
    count = len(layout.groups)
    shares = parts_of_groups(config.group_shares, count)
    is_own = isinstance(given, list)  # a size for each group
    if is_own and len(sizes) != count:
        raise ConfigError(f"{name}={given!r}: {len(sizes)} sizes for {count} groups of pages; give one for all, not in a list, or one for "
                          "each")
    slots: list[int] = []
    for number, group in enumerate(layout.groups):
        size = sizes[number] if is_own else sizes[0]
        slot_bytes = -(-layout.blocks[number].block_bytes // ALIGNMENT) * ALIGNMENT + header_bytes
        if size.kind is SizeKind.SHARE:
            raise ConfigError(f"{name}={size.text!r}: index and workers would find different amounts free; give bytes or blocks, for "
                              f'example {name}="16GiB"')
        if size.kind is SizeKind.BLOCKS:
            slots.append(int(size.amount))
        else:
            slots.append(int(size.amount * (1 if is_own else shares[number])) // slot_bytes)
        if not slots[-1] and (size.amount or name == "secondary"):
            part = f" for {float(shares[number]):.0%} of it" if not is_own and count > 1 and size.kind is SizeKind.BYTES else ""
            each = f"{format_bytes(group.rank_bytes)} on each of {layout.copies} ranks, {format_bytes(slot_bytes)} in total"
            raise ConfigError(f"{name}={size.text!r}: too little{part}; one block of group {number} takes {each}; raise {name}=... (it is "
                              "of all ranks together)")
    return tuple(slots)
