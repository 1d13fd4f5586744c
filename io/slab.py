"""``SlabFile``: one preallocated file per layer group with fixed slots, each a header page and a block (design: NVMe rules).

The header says what the slot holds and carries a checksum of the block and one of itself. A read believes nothing: every
field is compared with what was asked for, so a flipped bit, a torn write, a misdirected read or write and a slot of
another model or from before a reset all end as ``CorruptBlock``.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvtier.errors import ConfigError, CorruptBlock, TransferError
from kvtier.io.checksum import ALGORITHM, CHECKSUM_BYTES, block_checksum, page_checksum
from kvtier.io.direct_file import Buffer, DirectFile, aligned_buffer
from kvtier.io.direct_row import DirectRow
from kvtier.io.faults import Faults
from kvtier.io.faulty_file import FaultyFile
from kvtier.pools.nvme_geometry import HEADER_BYTES, NvmeGeometry

_log = logging.getLogger(__name__)

MAGIC: Final = b"KVTSLOT\0"
FORMAT_VERSION: Final = 1
"""Version of the header page and of the whole store directory."""

# magic, version, group, slot, length, namespace digest, key, algorithm, block checksum, priority, expiry, time of writing
_FIELDS: Final = struct.Struct("<8sIIQQ32s32s16s16sidd")
_KNOWN: Final = struct.Struct("<8sIIQQ32s32s16s")
"""The front of them, up to the checksum's algorithm: what a reader knows beforehand."""
_ALGORITHM: Final = ALGORITHM.encode("ascii")
_SEALED_BYTES: Final = HEADER_BYTES - CHECKSUM_BYTES  # the header's own checksum is the end of the page and covers the rest


@dataclass(frozen=True)
class SlotHeader:
    """What a slot's header page says.

    Attributes:
        group, slot: where the block was meant to lie.
        key: chain key of the content, 32 bytes.
        length: bytes of the block without padding.
        namespace_digest: SHA-256 of the directory's identity, 32 bytes.
        checksum: of the block, 16 bytes, and its ``algorithm``.
        priority, expiry: of the block when it was written (expiry in wall-clock seconds, 0.0 for none).
        written: wall-clock time of the write in seconds; only to tell the newer of two copies.
    """

    group: int
    slot: int
    key: bytes
    length: int
    namespace_digest: bytes
    checksum: bytes
    priority: int
    expiry: float
    written: float
    algorithm: str = ALGORITHM
    magic: bytes = MAGIC
    version: int = FORMAT_VERSION

    def pack_into(self, page: Buffer) -> None:
        """Write the header and its own checksum into ``page``, uint8 [4096]. The unused middle stays as it is: zeros."""
        _FIELDS.pack_into(page.data, 0, self.magic, self.version, self.group, self.slot, self.length, self.namespace_digest,
                          self.key, self.algorithm.encode("ascii"), self.checksum, self.priority, self.expiry, self.written)
        page[_SEALED_BYTES:] = np.frombuffer(page_checksum(page.data[:_SEALED_BYTES]), np.uint8)

    @classmethod
    def unpack(cls, page: Buffer) -> SlotHeader:
        """What the page says, whether or not it is true. ``is_sealed`` tells whether it is what was once written."""
        (magic, version, group, slot, length, namespace_digest, key, algorithm, checksum, priority, expiry,
         written) = _FIELDS.unpack_from(page.data, 0)
        return cls(group, slot, key, length, namespace_digest, checksum, priority, expiry, written,
                   algorithm.rstrip(b"\0").decode("ascii", "backslashreplace"), magic, version)


def is_sealed(page: Buffer) -> bool:
    """True when a header page matches its own checksum."""
    view = page.data
    return page_checksum(view[:_SEALED_BYTES]) == view[_SEALED_BYTES:HEADER_BYTES]


class _HeaderPages(threading.local):
    """One aligned header page per thread: readers and the writer never share one."""

    def __init__(self) -> None:
        self.page = aligned_buffer(HEADER_BYTES)


class SlabFile:
    """The slab of one group. Reads from any thread; one writer per slot at a time.

    Args:
        path: the file; made when it is missing.
        group: number of the layer group.
        geometry: shape of the file. The file itself is sized by :meth:`DirectFile.resize` through ``file``.
        namespace_digest: goes into every header and is demanded of every header that is read.
        direct: whether to ask for direct I/O.
        faults: injected failures.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, group: int, geometry: NvmeGeometry, namespace_digest: bytes, *, direct: bool = True,
                 faults: Faults | None = None) -> None:
        self.group = group
        self.geometry = geometry
        self.namespace_digest = namespace_digest
        self.file = (DirectFile(path, create=True, direct=direct) if faults is None
                     else FaultyFile(path, geometry, faults, direct=direct))
        self._headers = _HeaderPages()
        self._has_faults = faults is not None
        self._detours_lock = threading.Lock()
        self.detours = 0
        """Blocks of direct rows that KvikIO refused and that went through the host instead."""
        self.one_by_one = faults is not None
        """Whether each block needs a call of its own: failures are injected into calls."""

    def require_size(self, num_slots: int) -> None:
        """Check that the file is long enough for ``num_slots`` slots.

        Raises:
            ConfigError: it is shorter: somebody truncated it.
        """
        size, expected = self.file.size(), num_slots * self.geometry.stride
        if size < expected:
            raise ConfigError(f"{self.file.path} has {size} bytes but its {num_slots} slots need {expected}: the file was truncated. "
                              f"Restore it, or delete it to start this group empty")

    def write(self, slot: int, key: bytes, data: Buffer | DirectRow, priority: int, expiry: float, written: float) -> SlotHeader:
        """Write header and block with one vectored call (a direct row and its header with two) and return the header. Nobody may change
        ``data`` meanwhile.

        Args:
            slot: where to; nobody may be reading it and no manifest row may point at it.
            key: chain key, 32 bytes.
            data: uint8 [block_bytes], or [payload_bytes] with padding behind the block (an aligned row travels in place); or a direct row.
            priority, expiry, written: see :class:`SlotHeader`.

        Raises:
            OSError, TransferError: as :meth:`DirectFile.write`; the slot's content is undefined then.
        """
        geometry = self.geometry
        if not isinstance(data, np.ndarray):
            if self._has_faults:  # they happen in the host's calls
                return self.write(slot, key, data.to_host(), priority, expiry, written)
            return self._write_row(slot, key, data, priority, expiry, written)
        page = self._headers.page
        header = self.seal(page, slot, key, data, priority, expiry, written)
        self.file.write(geometry.offset(slot), [page, data])
        return header

    def seal(self, page: Buffer, slot: int, key: bytes, data: Buffer, priority: int, expiry: float, written: float) -> SlotHeader:
        """Fill ``page``, uint8 [4096], with the header that goes in front of ``data``; arguments as of :meth:`write`."""
        block_bytes = self.geometry.block_bytes
        checksum = block_checksum(data[:block_bytes], key, self.group, slot)
        header = SlotHeader(self.group, slot, key, block_bytes, self.namespace_digest, checksum, priority, expiry, written)
        header.pack_into(page)
        return header

    def read_ahead(self, first_slot: int, outs: Sequence[Buffer]) -> list[Buffer]:
        """Read neighbouring slots with one vectored call, to be verified by :meth:`verify`.

        Args:
            first_slot: of the blocks.
            outs: for each slot uint8 [payload_bytes].

        Returns:
            the slots' header pages.

        Raises:
            TransferError, OSError: as :meth:`read`; nothing is known of any of the blocks then.
        """
        memory = aligned_buffer(len(outs) * HEADER_BYTES)
        pages = [memory[start:start + HEADER_BYTES] for start in range(0, memory.nbytes, HEADER_BYTES)]
        self.file.read(self.geometry.offset(first_slot), [buffer for pair in zip(pages, outs, strict=True) for buffer in pair])
        return pages

    def read(self, slot: int, key: bytes, out: Buffer | DirectRow) -> None:
        """Read and verify one block.

        Args:
            slot: where from.
            key: chain key that the slot must hold, 32 bytes.
            out: uint8 [block_bytes], or [payload_bytes] to read in place; or a direct row. Garbage unless the call returns.

        Raises:
            CorruptBlock: names group, slot and what differed.
            TransferError: the file ends inside the slot.
            OSError: the system could not read.
        """
        if not isinstance(out, np.ndarray):
            self._read_row(slot, key, out)
            return
        namespace_digest = self.namespace_digest
        page = self._headers.page
        self.file.read(self.geometry.offset(slot), [page, out])
        self._verify(page, slot, namespace_digest, key, out)

    def verify(self, slot: int, key: bytes, out: Buffer | DirectRow, page: Buffer) -> None:
        """Verify one block that :meth:`read_ahead` has read. CorruptBlock as of :meth:`read`.

        Args:
            slot, key, out: as of :meth:`read`.
            page: the slot's header page.
        """
        assert isinstance(out, np.ndarray), "only host memory is read ahead"
        self._verify(page, slot, self.namespace_digest, key, out)

    def _verify(self, page: Buffer, slot: int, namespace_digest: bytes, key: bytes, out: Buffer) -> None:
        """Raise CorruptBlock unless header and block are what they must be."""
        block = out[:self.geometry.block_bytes] if out.nbytes > self.geometry.block_bytes else out
        self._verify_with(page, slot, namespace_digest, key, lambda: block_checksum(block, key, self.group, slot))

    def _verify_with(self, page: Buffer, slot: int, namespace_digest: bytes, key: bytes, checksum_of_block: Callable[[], bytes]) -> None:
        """The same, whoever computes the block's checksum."""
        view = page.data
        known = _KNOWN.pack(MAGIC, FORMAT_VERSION, self.group, slot, self.geometry.block_bytes, namespace_digest, key, _ALGORITHM)
        # All at once: every block that is read comes by here. Which field differs is asked only when one does.
        if view[:_KNOWN.size] == known and is_sealed(page):
            checksum = checksum_of_block()
            stored = bytes(view[_KNOWN.size:_KNOWN.size + CHECKSUM_BYTES])
            if checksum == stored:
                return
            reason = f"checksum of the block is {checksum.hex()} instead of {stored.hex()}"
        else:
            reason = "; ".join(self._header_differences(page, slot, namespace_digest, key))
        raise CorruptBlock(f"group {self.group}, slot {slot} of {self.file.path}: {reason}. The block is not served")

    # -- direct rows: blocks that travel through KvikIO, with the header page through the host ---------------------------------

    def _write_row(self, slot: int, key: bytes, row: DirectRow, priority: int, expiry: float, written: float) -> SlotHeader:
        """The block out of its row, then the header. What KvikIO refuses goes through the host, and that is said and counted."""
        header = SlotHeader(self.group, slot, key, self.geometry.block_bytes, self.namespace_digest, row.checksum(key, self.group, slot),
                            priority, expiry, written)
        page = self._headers.page
        header.pack_into(page)
        offset = self.geometry.offset(slot)
        try:
            row.start_write(offset + HEADER_BYTES).wait()
        except TransferError as error:
            self.file.write(offset, [page, row.to_host()])
            self._note_detour(error)
        else:
            self.file.write(offset, [page])
        return header

    def _read_row(self, slot: int, key: bytes, row: DirectRow) -> None:
        """The block into its row, and the header meanwhile. What KvikIO refuses is read through the host, said and counted."""
        namespace_digest = self.namespace_digest
        page = self._headers.page
        offset = self.geometry.offset(slot)
        if self._has_faults:  # they happen in the host's calls
            arrived = aligned_buffer(row.nbytes)
            self.read(slot, key, arrived)
            row.from_host(arrived)
            return
        try:
            reading = row.start_read(offset + HEADER_BYTES)
            try:
                self.file.read(offset, [page])
            finally:
                reading.wait()  # also after an error of the other one: the row is in use until then
        except TransferError as error:
            arrived = aligned_buffer(row.nbytes)
            self.file.read(offset, [page, arrived])
            row.from_host(arrived)
            self._note_detour(error)  # not before: a file that is too short is too short for both ways
        self._verify_with(page, slot, namespace_digest, key, lambda: row.checksum(key, self.group, slot))

    def _note_detour(self, error: TransferError) -> None:
        with self._detours_lock:
            self.detours += 1
            is_first = self.detours == 1
        if is_first:
            _log.warning("%s: KvikIO failed, and the block went through the host; more of them are only counted: %s", self.file.path,
                         error)

    def read_header(self, slot: int) -> SlotHeader | None:
        """The header of a slot when it is intact and belongs here (place, namespace, length, algorithm), else ``None``.

        Raises:
            OSError, TransferError: it cannot be read.
        """
        page = self._headers.page
        self.file.read(self.geometry.offset(slot), [page])
        if any(self._header_differences(page, slot, self.namespace_digest, None)):
            return None
        return SlotHeader.unpack(page)

    def _header_differences(self, page: Buffer, slot: int, namespace_digest: bytes, key: bytes | None) -> Iterator[str]:
        """What in a header is not as it must be, in words. ``key=None`` accepts any key."""
        header = SlotHeader.unpack(page)
        if header.magic != MAGIC:
            yield f"magic is {header.magic!r} instead of {MAGIC!r}"
        if not is_sealed(page):
            yield "the header does not match its own checksum"
        if header.version != FORMAT_VERSION:
            yield f"format version is {header.version} instead of {FORMAT_VERSION}"
        if header.namespace_digest != namespace_digest:
            yield f"namespace is {header.namespace_digest.hex()[:16]} instead of {namespace_digest.hex()[:16]}"
        if key is not None and header.key != key:
            yield f"key is {header.key.hex()[:16]} instead of {key.hex()[:16]}"
        if header.group != self.group:
            yield f"header says group {header.group}"
        if header.slot != slot:
            yield f"header says slot {header.slot}"
        if header.length != self.geometry.block_bytes:
            yield f"length is {header.length} instead of {self.geometry.block_bytes}"
        if header.algorithm != ALGORITHM:
            yield f"checksum algorithm is {header.algorithm!r} instead of {ALGORITHM!r}"
