"""``RowKernel``: the gather and scatter kernel on a stream of ours (design: copy engine)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvtier.errors import TransferError
from kvtier.io.capture_mode import beside_captures
from kvtier.kernels.row_moves import RowPlaces, move_rows


class RowMover(Protocol):
    """What a copier needs of a kernel."""

    def copy(self, destination: RowPlaces, source: RowPlaces, pairs: Sequence[tuple[int, int]], num_layers: int, num_bytes: int,
             stream: int) -> None:
        """Enqueue ``move_rows`` on a ``cudaStream_t``."""


class RowKernel:
    """Launches through torch and Triton. Thread-safe.

    Args:
        device: "cuda:N".

    Raises:
        TransferError: torch cannot use CUDA, or there is no Triton.
    """

    def __init__(self, device: str) -> None:
        try:
            import triton  # noqa: F401 - the kernel's module needs it, and this is the time to say so
        except ImportError as error:
            raise TransferError(f"the copy kernel needs Triton ({error})") from error
        if not torch.cuda.is_available():
            raise TransferError("the copy kernel needs a torch that can use CUDA")
        self._device = torch.device(device)
        self._streams: dict[int, Any] = {}

    def copy(self, destination: RowPlaces, source: RowPlaces, pairs: Sequence[tuple[int, int]], num_layers: int, num_bytes: int,
             stream: int) -> None:
        """See ``RowMover.copy``."""
        # torch asks after events of its own before it pins memory, and pins more where none is free.
        beside_captures(self._launch, destination, source, pairs, num_layers, num_bytes, stream)

    def _launch(self, destination: RowPlaces, source: RowPlaces, pairs: Sequence[tuple[int, int]], num_layers: int, num_bytes: int,
                stream: int) -> None:
        with torch.cuda.stream(self._stream(stream)):
            # Allocated for this stream: both allocators give the memory out again only behind what the stream does with it now.
            listed = torch.tensor(pairs, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)
            move_rows(destination, source, listed, num_layers, num_bytes)

    def _stream(self, handle: int) -> Any:
        found = self._streams.get(handle)
        if found is None:
            found = self._streams[handle] = torch.cuda.ExternalStream(handle, device=self._device)  # type: ignore[no-untyped-call]
        return found
