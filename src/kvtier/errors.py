"""The one family of errors that kvtier raises (design: bad input gets a message with value, limit and remedy).

Every message names the offending value, the limit it broke and what to change. Nothing is half done when one of these is
raised. ``assert`` is used only for bugs of kvtier itself.
"""

from __future__ import annotations

from collections.abc import Sequence


class KVTierError(Exception):
    """Base of every error that kvtier raises on purpose."""


class ConfigError(KVTierError):
    """The configuration, a layout or a directory cannot be used as given."""


class RequestError(KVTierError):
    """A request is malformed: bad tokens, bad retention, a duplicate id, a step out of order."""


class UnknownRequest(KVTierError):
    """No active sequence has this request id."""


class UnknownBlock(KVTierError):
    """No block has this id in this group."""


class CapacityError(KVTierError):
    """The primary pool cannot hold what was asked for.

    ``needed`` and ``available`` are blocks of the primary level. ``preempt`` names the active requests that, removed in this
    order (newest first), would make enough room; it is empty when that would not suffice: the pool is too small, or leases or
    file reads hold blocks.
    """

    def __init__(self, message: str, needed: int = 0, available: int = 0, preempt: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available
        self.preempt = tuple(preempt)


class TransferError(KVTierError):
    """A copy or a file operation failed."""


class CorruptBlock(TransferError):
    """Bytes read from NVMe do not match their key, slot, length or checksum. They are never served."""


class LedgerError(KVTierError):
    """An invariant of the ledger is broken: a bug of kvtier, found by ``verify()``."""
