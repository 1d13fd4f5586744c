"""Making a manifest again from the slot headers of the slabs (design: a damaged manifest is rebuilt, never silently shortened).

A header counts when it matches its own checksum and names this namespace, this group and this slot. The block behind it
is not read here: like every block it is verified whenever it is read, and is quarantined then if it is torn.

A block that was discarded and whose slot has not been written since comes back: its header does not know. That is harmless,
for a key names one content and the block is verified like any other, and it happens only where the manifest was damaged.
Making the header invalid at each discard would prevent it and cost every eviction one more write to the drive. A reset is
different: it changes the namespace digest, so nothing from before one ever comes back.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from kvtier.errors import TransferError
from kvtier.io.incident import Incident
from kvtier.io.manifest_rows import ManifestRow, Place
from kvtier.io.slab import SlabFile, SlotHeader

_log = logging.getLogger(__name__)
_RUN: Final = 256     # slots that one task scans
_THREADS: Final = 8   # header reads are small: the drive wants several in flight


@dataclass(frozen=True)
class Rebuilt:
    """What the headers say.

    Attributes:
        rows: one per block, hit counts carried over where the old row is known.
        recovered: how many of them no sound row of the old manifest vouched for.
        lost: slots that a row pointed at and whose header does not vouch for any block: to be quarantined.
        duplicates: intact headers left out because the same key lies in another slot too.
    """

    rows: list[ManifestRow]
    recovered: int
    lost: list[Place]
    duplicates: int


def rebuild_from_headers(slabs: Sequence[SlabFile], known: Mapping[Place, ManifestRow], suspected: Collection[Place],
                         quarantined: Collection[Place]) -> Rebuilt:
    """Scan every slot that is not quarantined.

    Args:
        slabs: one per group, opened at their full size.
        known: rows of the old manifest that matched their digests.
        suspected: slots that damaged rows claimed to describe.
        quarantined: slots to leave alone.
    """
    found: dict[tuple[int, bytes], tuple[Place, SlotHeader]] = {}
    intact: set[Place] = set()
    for slab in slabs:
        for slot, header in _scan(slab, quarantined):
            place = (slab.group, slot)
            intact.add(place)
            other = found.get((slab.group, header.key))
            if other is None or _is_better(place, header, other, known):
                found[slab.group, header.key] = (place, header)
    rows = []
    recovered = 0
    for place, header in found.values():
        old = known.get(place)
        vouched = old is not None and old.key == header.key
        recovered += not vouched
        rows.append(ManifestRow(*place, header.key, header.length, header.checksum, header.priority, header.expiry,
                                old.hits if old is not None and vouched else 0))
    slots = {slab.group: slab.geometry.num_slots for slab in slabs}
    pointed_at = {place for place in {*known, *suspected} if 0 <= place[1] < slots.get(place[0], 0)}
    lost = sorted(pointed_at - intact - set(quarantined))
    return Rebuilt(sorted(rows), recovered, lost, len(intact) - len(found))


def _is_better(place: Place, header: SlotHeader, other: tuple[Place, SlotHeader], known: Mapping[Place, ManifestRow]) -> bool:
    """Of two slots with one key: the one the old manifest knew, else the one written later."""
    def rank(at: Place, what: SlotHeader) -> tuple[bool, float]:
        row = known.get(at)
        return (row is not None and row.key == what.key, what.written)

    return rank(place, header) > rank(*other)


def _scan(slab: SlabFile, quarantined: Collection[Place]) -> list[tuple[int, SlotHeader]]:
    unreadable = Incident(_log)

    def scan_run(start: int) -> list[tuple[int, SlotHeader]]:
        headers = []
        for slot in range(start, min(start + _RUN, slab.geometry.num_slots)):
            if (slab.group, slot) in quarantined:
                continue
            try:
                header = slab.read_header(slot)
            except (OSError, TransferError) as error:
                unreadable.warn("group %d, slot %d: header cannot be read: %s", slab.group, slot, error)
                continue
            if header is not None:
                headers.append((slot, header))
        return headers

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="kvtier-rebuild") as threads:
        return [pair for run in threads.map(scan_run, range(0, slab.geometry.num_slots, _RUN)) for pair in run]
