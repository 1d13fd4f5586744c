"""Which requests run, and how much of each prompt a step computes. Decides only: what it decides, the serving loop does.

Every number comes from the cache's answers to a scheduler (``tiering/planning.py``). The policies and their names are those of
TensorRT-LLM's capacity and micro-batch schedulers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Literal

from kvtier.errors import CapacityError, ConfigError
from kvtier.tiering.attach.serving_sequence import ServedSequence
from kvtier.tiering.ledger.request import Request
from kvtier.types import Level

if TYPE_CHECKING:
    from kvtier.tiering.manager import KVCacheManager

AdmissionName = Literal["max_utilization", "guaranteed_no_evict"]
ChunkingName = Literal["first_come_first_served", "equal_progress"]


class AdmissionPolicy(ABC):
    """When a request may start. Counts are primary blocks by group."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._groups = range(len(cache.layout.groups))

    @abstractmethod
    def needed(self, request: int | Request) -> list[int]:
        """Blocks that a request, or the active one with this id, is going to need, as far as the policy looks ahead."""

    def room(self, active: Collection[ServedSequence]) -> list[int]:
        """Free blocks that no active request is going to need. A request starts if it needs no more than these."""
        needed = [self.needed(sequence.id) for sequence in active]
        return [self._cache.num_free_blocks(Level.PRIMARY, group=group) - sum(counts[group] for counts in needed) for group in self._groups]

    @abstractmethod
    def victims(self, ending: Collection[ServedSequence], growing: Collection[ServedSequence],
                active: Collection[ServedSequence]) -> list[ServedSequence]:
        """Whom to pre-empt before a step, so that those growing by a token find room. Active ones are in order of admission."""


class GuaranteedNoEvict(AdmissionPolicy):
    """Start a request only if it and all that run can be completed with the blocks there are. Nobody is pre-empted for room."""

    def needed(self, request: int | Request) -> list[int]:
        return [self._cache.remaining_blocks_to_completion(request, group=group) for group in self._groups]

    def victims(self, ending: Collection[ServedSequence], growing: Collection[ServedSequence],
                active: Collection[ServedSequence]) -> list[ServedSequence]:
        return []


class MaxUtilization(AdmissionPolicy):
    """Start a request if its next step fits beside those of all that run; when the pool gets full, pre-empt the newest."""

    def needed(self, request: int | Request) -> list[int]:
        return [self._cache.needed_blocks_one_step(request, group=group) for group in self._groups]

    def victims(self, ending: Collection[ServedSequence], growing: Collection[ServedSequence],
                active: Collection[ServedSequence]) -> list[ServedSequence]:
        cache = self._cache
        needed = {sequence.id: self.needed(sequence.id) for sequence in growing}
        cache.start_scheduling()
        for sequence in ending:  # they complete before the others grow: what they hold is there by then
            cache.scheduling_remove_sequence(sequence.id)
        leaving = {sequence.id for sequence in ending}
        staying = [sequence for sequence in active if sequence.id not in leaving]
        chosen: list[ServedSequence] = []
        while len(staying) > 1 and any(sum(counts[group] for counts in needed.values()) > cache.num_schedulable_blocks(group=group)
                                       for group in self._groups):
            newest = staying.pop()
            cache.scheduling_remove_sequence(newest.id)
            needed.pop(newest.id, None)
            chosen.append(newest)
        return chosen


ADMISSION: Final[dict[str, Callable[[KVCacheManager], AdmissionPolicy]]] = {
    "max_utilization": MaxUtilization, "guaranteed_no_evict": GuaranteedNoEvict}


class Scheduler:
    """Admission, skipping and chunks of one serving loop.

    Args:
        cache: is asked, and never changed.
        admission: ``"max_utilization"`` or ``"guaranteed_no_evict"``.
        chunking: ``"first_come_first_served"``: the first prompt gets what it can, then the next; ``"equal_progress"``: the prompt that
            is least far gets the next unit.
        chunk_size: longest piece of a prompt computed in one forward; pieces end at its absolute multiples.
        token_budget: most tokens in one step, generated ones included. None: one chunk of prompt beside any number of generated tokens,
            and pieces never end elsewhere than at a multiple of ``chunk_size``.
        chunk_unit: with a budget, what a piece is a multiple of; None: the block size.
        wait_for_shared_prefix: hold a request back while the first block that it would compute is being computed by another one.

    Raises:
        ConfigError: an unknown policy, a size below 1, a unit without a budget or larger than it.
    """

    def __init__(self, cache: KVCacheManager, *, admission: AdmissionName = "max_utilization",
                 chunking: ChunkingName = "first_come_first_served", chunk_size: int = 256, token_budget: int | None = None,
                 chunk_unit: int | None = None, wait_for_shared_prefix: bool = True) -> None:
        for name, value, known in (("admission", admission, ADMISSION), ("chunking", chunking, CHUNKING)):
            if value not in known:
                raise ConfigError(f"{name}={value!r}: choose one of {', '.join(known)}")
        if chunk_unit is not None and token_budget is None:
            raise ConfigError(f"chunk_unit={chunk_unit} without token_budget: pieces are whole chunks then; give both, or neither")
        unit = chunk_size if token_budget is None else chunk_unit or cache.layout.tokens_per_block
        for name, size in (("chunk_size", chunk_size), ("token_budget", token_budget), ("chunk_unit", unit)):
            if size is not None and size < 1:
                raise ConfigError(f"{name}={size}: must be at least 1")
        if token_budget is not None and unit > token_budget:
            raise ConfigError(f"chunk_unit={unit} with token_budget={token_budget}: no prompt would ever go on; lower one, raise the other")
        self.cache = cache
        self.policy = ADMISSION[admission](cache)
        self.chunk_size = chunk_size
        self.token_budget = token_budget
        self.chunk_unit = unit
        self.wait_for_shared_prefix = wait_for_shared_prefix
        self._share = CHUNKING[chunking]

    def admit(self, waiting: Iterable[ServedSequence], active: Collection[ServedSequence], most: int) -> list[ServedSequence]:
        """Which waiting requests to start now, at most ``most``. Nobody overtakes one that has no room, so nobody starves."""
        chosen: list[ServedSequence] = []
        room = self.policy.room(active) if most > 0 else []
        contributed = {self.cache.match(sequence.request).first_new_key for sequence in active if sequence.will_store_prompt} \
            if most > 0 and self.wait_for_shared_prefix else set()
        contributed.discard(None)
        for sequence in waiting:
            if len(chosen) >= most:
                break
            if contributed and self.cache.beneficial_to_skip(sequence.request, contributed):
                continue
            needed = self.policy.needed(sequence.request)
            if any(wanted > there for wanted, there in zip(needed, room, strict=True)):
                break
            room = [there - wanted for wanted, there in zip(needed, room, strict=True)]
            chosen.append(sequence)
            if self.wait_for_shared_prefix and sequence.will_store_prompt:
                key = self.cache.match(sequence.request).first_new_key
                if key is not None:
                    contributed.add(key)
        return chosen

    def shortage(self, request: Request) -> CapacityError | None:
        """Why a request cannot start although nothing runs; None when it can."""
        for group, (needed, room) in enumerate(zip(self.policy.needed(request), self.policy.room(()), strict=True)):
            if needed > room:
                total = self.cache.pool(group=group).primary.num_blocks
                return CapacityError(f"request {request.id}: {needed} primary blocks of group {group} are needed, the pool has {total} and "
                                     f"{room} of them are free; enlarge primary, shorten the prompt or ask for fewer tokens", needed, room)
        return None

    def outgrowth(self, sequence: ServedSequence, error: CapacityError) -> CapacityError:
        """Why an active request that runs alone finds no block: it may need more than there are until it is complete; or else ``error``."""
        for group in range(len(self.cache.layout.groups)):
            budget = self.cache.request_block_budget(sequence.id, group=group)
            total = self.cache.pool(group=group).primary.num_blocks
            if budget > total:
                return CapacityError(f"request {sequence.id} has outgrown the pool: until it is complete it may hold {budget} primary "
                                     f"blocks of group {group}, the pool has {total}; enlarge primary, ask for fewer tokens, or use "
                                     "admission='guaranteed_no_evict', which refuses such a request at once", budget, total)
        return error

    def never_fits(self, request: Request) -> bool:
        """Whether a request needs more blocks than there are, whoever ends."""
        return any(needed > self.cache.pool(group=group).primary.num_blocks for group, needed in enumerate(self.policy.needed(request)))

    def chunks(self, filling: Sequence[ServedSequence], num_decoding: int) -> list[tuple[ServedSequence, int]]:
        """How many prompt tokens to compute of each sequence in this step, beside ``num_decoding`` generated tokens.

        The cache has the last word (``fit_token_budget``): it knows what was really reused, and which blocks there are.
        """
        budget = self.chunk_size if self.token_budget is None else max(self.token_budget - num_decoding, 0)
        planned = self._share(filling, budget, self.chunk_size, self.chunk_unit)
        chunks: list[tuple[ServedSequence, int]] = []
        for sequence, count in zip(filling, planned, strict=True):
            fitting = min(count, budget)
            if fitting and sequence.computed < sequence.request.num_tokens:  # not where generated tokens are computed again
                fitting = self.cache.fit_token_budget(sequence.id, count, budget)
            if fitting:
                budget -= fitting
                chunks.append((sequence, fitting))
        return chunks


def _first_come_first_served(filling: Sequence[ServedSequence], budget: int, chunk_size: int, unit: int) -> list[int]:
    counts: list[int] = []
    for sequence in filling:
        count = 0
        while step := _next_piece(sequence, count, chunk_size, unit):
            if count + step > budget:
                budget = 0  # those behind do not overtake
                break
            count += step
        budget = max(budget - count, 0)
        counts.append(count)
    return counts


def _equal_progress(filling: Sequence[ServedSequence], budget: int, chunk_size: int, unit: int) -> list[int]:
    counts = [0] * len(filling)
    open_places = set(range(len(filling)))
    while open_places:
        place = min(open_places, key=lambda number: (filling[number].computed + counts[number], number))
        step = _next_piece(filling[place], counts[place], chunk_size, unit)
        if step and step <= budget:
            counts[place] += step
            budget -= step
        else:
            open_places.discard(place)
    return counts


def _next_piece(sequence: ServedSequence, count: int, chunk_size: int, unit: int) -> int:
    """Tokens up to the next absolute multiple of the unit, within the sequence's chunk; 0 at its end."""
    start, end = sequence.computed + count, sequence.chunk_end(chunk_size)
    return min((start // unit + 1) * unit, end) - start


CHUNKING: Final[dict[str, Callable[[Sequence[ServedSequence], int, int, int], list[int]]]] = {
    "first_come_first_served": _first_come_first_served, "equal_progress": _equal_progress}
