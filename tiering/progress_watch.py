"""``ProgressWatch``: notices an engine that computes and never says so (design: what is not reported is not stored).

Nothing breaks without a report: what was computed is let go with the sequence. But no prompt is ever found again, and nothing else
would tell why.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from kvtier.tiering.ledger.sequence import ActiveSequence

logger = logging.getLogger(__name__)

_ENOUGH_STEPS: Final = 2  # a request may be aborted after its first one


class ProgressWatch:
    """Steps of each active sequence. Used under the manager's lock."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._has_said = False

    def note_step(self, ids: Iterable[int]) -> None:
        for request_id in ids:
            self._steps[request_id] = self._steps.get(request_id, 0) + 1

    def end(self, sequence: ActiveSequence, is_stored: bool) -> None:
        """A sequence ends, to be stored or not: warn, once for each cache, if it was computed and nothing of it was reported."""
        steps = self._steps.pop(sequence.id, 0)
        if steps < _ENOUGH_STEPS or not is_stored or self._has_said or sequence.computed > sequence.prepopulated:
            return
        self._has_said = True
        logger.warning("request %d took part in %d steps and none of its tokens was reported as computed: nothing of it is stored, and no "
                       "later request will find its prompt. Call mark_computed after each step. (This is said once.)", sequence.id, steps)
