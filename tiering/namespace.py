"""Whose blocks these are: what stored bytes presuppose, and what the names of blocks do (design: NVMe rules)."""

from __future__ import annotations

import hashlib
import json
from typing import Final

from kvtier.pools.layout import KVLayout

FORMAT_VERSION: Final = 1


def store_namespace(layout: KVLayout, model: str | None, rank: int = 0, num_ranks: int = 1) -> str:
    """What a rank's store presupposes, as JSON with sorted keys. Its digest is in every slot header, so that no block of another model,
    layout or rank is ever served. A single rank is not named: stores from before ranks had names stay good."""
    return json.dumps(_common(layout, model, num_ranks) | ({"rank": rank} if num_ranks > 1 else {}), sort_keys=True)


def chain_seed(layout: KVLayout, model: str | None, num_ranks: int = 1) -> bytes:
    """32 bytes that every chain key begins with. Without the rank: a key names the tokens, and all ranks hold a part of the same block."""
    return hashlib.sha256(json.dumps(_common(layout, model, num_ranks), sort_keys=True).encode()).digest()


def _common(layout: KVLayout, model: str | None, num_ranks: int) -> dict[str, object]:
    return {"format": FORMAT_VERSION, "model": model or "", "layout": json.loads(layout.describe()), "ranks": num_ranks}
