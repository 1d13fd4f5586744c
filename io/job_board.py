"""``JobBoard``: what workers say about their jobs in shared memory (design: two ways to attach).

An engine's own channel carries at most "this job is over". Whether a rank has really copied each block, and whether it is still copying, is
written here by the rank itself: so a rank that failed or died is a miss, whatever the engine believes.

Words are int64, written by one process each and aligned, so that none is ever seen half written. A rank writes that a slot is whole after
its copy has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

MAX_JOBS: Final = 8192
"""Jobs that may be under way, reported or given up, at the same time."""

Words = npt.NDArray[np.int64]


class JobBoard:
    """A view of the shared words.

    Args:
        words: int64, :meth:`num_words` of them, zero at first.
        slots: of each group.
        ranks: workers; copies: of them, those whose pages a slot holds (1 of replicated pages).
    """

    def __init__(self, words: Words, slots: Sequence[int], ranks: int, copies: int) -> None:
        assert words.shape == (self.num_words(slots, ranks, copies),)
        self.ranks = ranks
        self._index = words[:1]
        self._opened = words[1:1 + ranks]
        at = 1 + ranks
        self._ended = words[at:at + MAX_JOBS * ranks].reshape(MAX_JOBS, ranks)
        at += MAX_JOBS * ranks
        self._whole: list[Words] = []
        for count in slots:
            self._whole.append(words[at:at + count * copies].reshape(count, copies))
            at += count * copies

    @staticmethod
    def num_words(slots: Sequence[int], ranks: int, copies: int) -> int:
        """How many words the board takes."""
        return 1 + ranks + MAX_JOBS * ranks + sum(slots) * copies

    # -- a rank's side ---------------------------------------------------------------------------------------------------

    def note_opened(self, rank: int) -> None:
        """The rank has opened the arena."""
        self._opened[rank] = 1

    def note_whole(self, group: int, slots: Sequence[int], rank: int, job: int) -> None:
        """The rank has copied all of its part into these slots."""
        self._whole[group][slots, rank] = job + 1

    def note_begun(self, rank: int, job: int) -> None:
        """The rank uses the job's slots (again)."""
        self._ended[job % MAX_JOBS, rank] = 0

    def note_ended(self, rank: int, job: int) -> None:
        """The rank uses no slot for this job any more."""
        self._ended[job % MAX_JOBS, rank] = job + 1

    # -- the index's side ------------------------------------------------------------------------------------------------

    def note_index(self) -> bool:
        """An index uses the board. Returns whether another one did before: then it speaks of that one's jobs."""
        is_used = bool(self._index[0])
        self._index[0] = 1
        return is_used

    def has_opened(self, rank: int) -> bool:
        """Whether the rank has ever opened the arena."""
        return bool(self._opened[rank])

    def all_opened(self) -> bool:
        """Whether every rank has."""
        return bool(self._opened.all())

    def has_ended(self, rank: int, job: int) -> bool:
        """Whether the rank has ended this job. Only of jobs younger than the last MAX_JOBS."""
        return bool(self._ended[job % MAX_JOBS, rank] == job + 1)

    def whole(self, group: int, slots: Sequence[int], job: int) -> list[bool]:
        """Of each slot, whether every rank has copied all of its part for this job."""
        found: list[bool] = (self._whole[group][slots] == job + 1).all(axis=1).tolist()
        return found
