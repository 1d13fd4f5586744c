import numpy as np
import numpy.typing as npt

def copy_runs(destination: int, source: int, runs: npt.NDArray[np.int64], destination_row: int, source_row: int, pieces: int,
              destination_piece: int, source_piece: int, bytes: int, threads: int, past_cache: bool, /) -> None:
    """Copy rows of pieces between places of the host's memory, by torch's threads and without the GIL.

    Args:
        destination, source: addresses that offsets are added to.
        runs: contiguous ``[n, 3]``: offset in the destination, offset in the source, rows.
        destination_row, source_row: bytes from one row of a run to the next.
        pieces: of a row, at least 1.
        destination_piece, source_piece: bytes from one piece of a row to the next.
        bytes: of a piece, at least 1.
        threads: at most so many copy, at least 1. Behind a fork, the thread that forked is alone.
        past_cache: whether whole lines of 64 bytes are written without being read before, and without staying in the cache.

    Raises:
        ValueError: runs of another size, or a number below what is allowed. All addresses are the caller's responsibility.
    """
