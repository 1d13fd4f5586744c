"""``TierPlan``: what index and workers of one engine must agree on, computed by each of them from the same settings."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.pools.page_layout import PageLayout
from kvtier.tiering.config import TierConfig


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
                total), or a setting that has no meaning here (``primary`` given, ``gds="required"``, ``request_directory_root``).
        """
        raise NotImplementedError
