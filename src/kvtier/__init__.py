"""kvtier: the memory tier for LLM inference engines.

``import kvtier`` is light: names are loaded when they are first used, and torch only with what needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.errors import (
        CapacityError,
        ConfigError,
        CorruptBlock,
        KVTierError,
        LedgerError,
        RequestError,
        TransferError,
        UnknownBlock,
        UnknownRequest,
    )
    from kvtier.io.handover_folder import HandoverFolder
    from kvtier.policies.retention import RetentionConfig, RetentionLevel, TokenRange
    from kvtier.pools.layout import KVLayout, LayerSpec
    from kvtier.tiering.config import TierConfig
    from kvtier.tiering.handover.exporting import BlockExporter
    from kvtier.tiering.handover.importing import BlockImporter
    from kvtier.tiering.handover.ticket import HandoverTicket
    from kvtier.tiering.ledger.request import MultimodalItem, Request
    from kvtier.tiering.manager import KVCacheManager
    from kvtier.tiering.tier_index import TierIndex
    from kvtier.tiering.tier_store import TierStore
    from kvtier.tiering.tier_worker import TierWorker
    from kvtier.types import Level, TransferMode

__version__ = "0.1.0"

_HOMES = {
    "kvtier.errors": ("CapacityError", "ConfigError", "CorruptBlock", "KVTierError", "LedgerError", "RequestError", "TransferError",
                      "UnknownBlock", "UnknownRequest"),
    "kvtier.io.handover_folder": ("HandoverFolder",),
    "kvtier.policies.retention": ("RetentionConfig", "RetentionLevel", "TokenRange"),
    "kvtier.pools.layout": ("KVLayout", "LayerSpec"),
    "kvtier.tiering.config": ("TierConfig",),
    "kvtier.tiering.handover.exporting": ("BlockExporter",),
    "kvtier.tiering.handover.importing": ("BlockImporter",),
    "kvtier.tiering.handover.ticket": ("HandoverTicket",),
    "kvtier.tiering.ledger.request": ("MultimodalItem", "Request"),
    "kvtier.tiering.manager": ("KVCacheManager",),
    "kvtier.tiering.tier_index": ("TierIndex",),
    "kvtier.tiering.tier_store": ("TierStore",),
    "kvtier.tiering.tier_worker": ("TierWorker",),
    "kvtier.types": ("Level", "TransferMode"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BlockExporter", "BlockImporter", "CapacityError", "ConfigError", "CorruptBlock", "HandoverFolder", "HandoverTicket", "KVCacheManager",
    "KVLayout", "KVTierError", "LayerSpec", "LedgerError", "Level", "MultimodalItem", "Request", "RequestError", "RetentionConfig",
    "RetentionLevel", "TierConfig", "TierIndex", "TierStore", "TierWorker", "TokenRange", "TransferError", "TransferMode",
    "UnknownBlock", "UnknownRequest",
]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
