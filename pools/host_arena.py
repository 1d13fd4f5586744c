"""``HostArena``: the secondary level's memory, one exact mapping of aligned slots (design: secondary level).

One ``mmap`` instead of a pinning allocator: such allocators round up to a power of two, which can double the memory
taken. For CUDA the mapping is registered in pieces, because one registration of several hundred GiB fails on real
machines.
"""

from __future__ import annotations

import errno
import logging
import mmap
import resource
from contextlib import suppress
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError

_log = logging.getLogger(__name__)

ALIGNMENT: Final = 4096
PIECE_BYTES: Final = 16 << 30
"""The most that one registration with CUDA covers."""

_HUGE_PAGE: Final = 2 << 20
_REGISTER_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every device's context, not only the current one's


def anonymous_memory(num_bytes: int) -> mmap.mmap:
    """New private memory of at least this size: zero, from a page boundary on, in huge pages where the kernel has them.

    Huge pages mean fewer faults and TLB misses. The kernel places a mapping on their boundary only when it is whole huge pages
    long. Small mappings stay exact: there it would only waste memory. Pages are taken when they are first touched.

    Raises:
        OSError, OverflowError, ValueError: the system has no address space of this size.
    """
    is_large = num_bytes >= 2 * _HUGE_PAGE
    if is_large:
        num_bytes = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if is_large:
        _advise(memory, mmap.MADV_HUGEPAGE)
    return memory


class HostArena:
    """Host memory for ``num_slots`` blocks, each slot starting on a 4096-byte boundary.

    Attributes:
        rows: uint8 ``[num_slots, block_bytes]``, strided: the blocks without their padding.
        padded_rows: uint8 ``[num_slots, stride]``: what direct I/O reads and writes.
        stride: bytes from slot to slot, ``block_bytes`` rounded up to 4096.
        slots_per_piece: slots under one registration. A device copy of neighbouring slots must not cross a multiple of
            it: CUDA refuses a copy whose host range lies in two registrations.

    Args:
        num_slots: at least 1.
        block_bytes: bytes of one block of the group.
        pin: register the memory with CUDA, so that device copies run by DMA and beside the host. Needs cupy and a GPU.
        memory: somebody else's memory to use instead of new one (shared with other processes, say), uint8 ``[num_slots * stride]``
            from a page boundary on. It is theirs to give back.

    Raises:
        ConfigError: sizes below 1, no address space or memory for the mapping, or CUDA would not register it.
    """

    def __init__(self, num_slots: int, block_bytes: int, pin: bool, memory: npt.NDArray[np.uint8] | None = None) -> None:
        if num_slots < 1 or block_bytes < 1:
            raise ConfigError(f"secondary: {num_slots} slots of {block_bytes} bytes; both must be at least 1")
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.stride = -(-block_bytes // ALIGNMENT) * ALIGNMENT
        self.slots_per_piece = max(1, PIECE_BYTES // self.stride)
        num_bytes = num_slots * self.stride
        self._memory: mmap.mmap | None = None
        if memory is None:
            try:
                self._memory = anonymous_memory(num_bytes)
            except (OSError, OverflowError, ValueError) as error:
                raise ConfigError(f"secondary: {num_slots} slots of {self.stride} bytes want {num_bytes} bytes of host "
                                  f"memory, which the system refused ({error}); lower secondary=...") from error
            memory = np.frombuffer(self._memory, np.uint8, num_bytes)
        assert memory.shape == (num_bytes,)
        assert memory.ctypes.data % ALIGNMENT == 0
        self.padded_rows: npt.NDArray[np.uint8] = memory.reshape(num_slots, self.stride)
        self.rows: npt.NDArray[np.uint8] = self.padded_rows[:, :block_bytes]
        self._registered: list[int] = []
        self._closed = False
        if pin:
            self._pin(num_bytes)

    @property
    def is_pinned(self) -> bool:
        """Whether the memory is registered with CUDA."""
        return bool(self._registered)

    @property
    def address(self) -> int:
        """Of slot 0; the device sees registered memory at the same address."""
        address: int = self.padded_rows.ctypes.data
        return address

    def close(self) -> None:
        """Unregister and give the memory back, also under views that others still hold: they read zeros. Memory that is somebody
        else's is only unregistered.

        No copy may be running on this memory. May be called again.
        """
        if self._closed:
            return
        self._closed = True
        self._unpin()
        self.padded_rows = self.rows = np.empty((0, 0), dtype=np.uint8)
        if self._memory is None:
            return
        # A forgotten view keeps the mapping alive but must not keep the pages: that is how host tiers leak.
        _advise(self._memory, mmap.MADV_DONTNEED)
        with suppress(BufferError):  # raised while a view exists; the mapping then ends with the last view
            self._memory.close()

    def _pin(self, num_bytes: int) -> None:
        """Register the mapping piece by piece; when one piece is refused, undo all of them and say what to change."""
        try:
            from cupy.cuda import runtime
        except ImportError as error:
            self.close()
            raise ConfigError("secondary: pinning needs cupy; install kvtier[cuda] or use device='cpu'") from error
        # A forked child must not share these pages: copy-on-write would leave the device writing into the child's copy.
        if self._memory is not None:
            _advise(self._memory, mmap.MADV_DONTFORK)
        address = self.padded_rows.ctypes.data
        for start in range(0, num_bytes, self.slots_per_piece * self.stride):
            length = min(self.slots_per_piece * self.stride, num_bytes - start)
            try:
                runtime.hostRegister(address + start, length, _REGISTER_PORTABLE)
            except RuntimeError as error:  # CUDARuntimeError
                self.close()
                soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
                limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
                raise ConfigError(f"secondary: CUDA could not pin {length} bytes at offset {start} of {num_bytes} "
                                  f"({error}); the memlock limit is {limit}. Lower secondary=..., raise the "
                                  "container's memory limit, or set `ulimit -l unlimited`") from error
            self._registered.append(address + start)

    def _unpin(self) -> None:
        if self._registered:
            from cupy.cuda import runtime
            while self._registered:
                try:
                    runtime.hostUnregister(self._registered.pop())
                except RuntimeError as error:
                    # After an error of the device (an engine's kernel, say) every call fails with it. The process then has
                    # to end anyway, and the error that counts is the first one, which closing must not cover up.
                    _log.warning("secondary: CUDA would not unpin memory: %s", error)


def _advise(memory: mmap.mmap, advice: int) -> None:
    """Give the kernel a hint. A kernel built without the feature answers EINVAL, and the hint changes no result."""
    try:
        memory.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
