"""``Planning``: the scheduler's contract (design: public names). Nothing here changes what the tier holds."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from kvtier.errors import RequestError
from kvtier.pools.layout import KVLayout
from kvtier.tiering import arguments
from kvtier.tiering.config import TierConfig
from kvtier.tiering.core import TierCore
from kvtier.tiering.ledger import capacity, scheduling
from kvtier.tiering.ledger.capacity import PrefixReuse
from kvtier.tiering.ledger.request import Request
from kvtier.tiering.ledger.scheduling import WhatIf
from kvtier.types import Level


class Planning(TierCore):
    """What a scheduler asks before it admits."""

    def __init__(self, layout: KVLayout, config: TierConfig, device: str = "cpu", model: str | None = None) -> None:
        super().__init__(layout, config, device, model)
        self._what_if = WhatIf(len(self.layout.groups))

    def match(self, tokens: Request | object, lora_id: int | None = None, cache_salt: str | None = None, **namespace: Any) -> PrefixReuse:
        """What a prompt would reuse now. Read only, moves no counter. ``tokens``: a Request, or tokens with namespace keywords."""
        request = as_request(tokens, lora_id=lora_id, cache_salt=cache_salt, **namespace)
        with self.locked() as ledger:
            return capacity.match(ledger, request)

    def needed_blocks_one_step(self, request: int | Request, two_steps: bool = False, group: int = 0) -> int:
        """Primary blocks of a group that the next step (or two) of a request, or of the active sequence with this id, may take.

        While this many are free in every group, no full block that ``match`` finds is given up for want of room. Added with fewer, a
        request to a model with recurrent layers may be computed as a whole: a state that is reused takes a block beside its copy.
        """
        self._check_group(group)
        arguments.truth("two_steps", two_steps)
        with self.locked() as ledger:
            target = request if isinstance(request, Request) else ledger.sequence(request)
            return capacity.needed_blocks_one_step(ledger, target, two_steps, group)

    def remaining_blocks_to_completion(self, request: int | Request, group: int = 0) -> int:
        """Primary blocks of a group from now until ``max_new_tokens`` are generated."""
        self._check_group(group)
        with self.locked() as ledger:
            target = request if isinstance(request, Request) else ledger.sequence(request)
            return capacity.remaining_blocks_to_completion(ledger, target, group)

    def start_scheduling(self) -> None:
        """Begin a what-if over reference counts; the real ones are not touched."""
        with self.locked() as ledger:
            self._what_if = WhatIf(len(ledger.groups))

    def scheduling_remove_sequence(self, request_id: int, group: int = 0) -> int:
        """As if the sequence were removed: how many primary blocks of a group that would free, after those removed before."""
        self._check_group(group)
        with self.locked() as ledger:
            return self._what_if.remove(ledger, ledger.sequence(request_id), group)

    def num_free_blocks(self, level: Level, group: int = 0) -> int:
        """Unreferenced blocks of a level, cached content and backings included."""
        self._check_group(group)
        arguments.level(level)
        with self.locked() as ledger:
            return ledger.allocators[group].queues.num_free(level)

    def num_schedulable_blocks(self, group: int = 0) -> int:
        """Primary blocks of a group that would be free after everything removed since :meth:`start_scheduling`."""
        self._check_group(group)
        with self.locked() as ledger:
            return scheduling.num_schedulable_blocks(ledger, self._what_if, group)

    def request_block_budget(self, request_id: int, group: int = 0) -> int:
        """Blocks that an active request may hold at most until it is complete.

        Scope: primary blocks of one group over all beams, those it holds already included; not its blocks on lower levels, nor what
        leases hold beyond it.
        """
        self._check_group(group)
        with self.locked() as ledger:
            return scheduling.request_block_budget(ledger, ledger.sequence(request_id), group)

    def probe_prefix_tokens(self, request: Request) -> int:
        """Prompt tokens that could be reused now, for routers: the sum of what :meth:`match` says. No side effect."""
        with self.locked() as ledger:
            return scheduling.probe_prefix_tokens(ledger, as_request(request))

    def beneficial_to_skip(self, request: Request, contributed_keys: Container[object]) -> bool:
        """Whether the request should wait a step, because the first block that it would compute is being computed by another one.

        ``contributed_keys``: the ``match(...).first_new_key`` of the requests that compute now.
        """
        with self.locked() as ledger:
            return scheduling.beneficial_to_skip(ledger, as_request(request), contributed_keys)

    def fit_token_budget(self, request_id: int, chunk_tokens: int, token_budget: int) -> int:
        """Prompt tokens of an active request to compute now, when less was reusable than estimated.

        Args:
            chunk_tokens: the chunk that was planned.
            token_budget: tokens that the step may compute for this request.

        Returns:
            At most either, and what is left of the prompt. A chunk that does not end the prompt ends where a block does, unless the
            budget does not reach that far. With ``chunk_size`` and layers that have a window, no more than there are blocks for: 0
            while the sequence is paused.
        """
        with self.locked() as ledger:
            return scheduling.fit_token_budget(ledger, ledger.sequence(request_id), chunk_tokens, token_budget)


def as_request(tokens: Request | object, **namespace: Any) -> Request:
    """A prompt with its namespace. RequestError for keywords beside a Request, which has its own."""
    if isinstance(tokens, Request):
        given = [name for name, value in namespace.items() if value is not None]
        if given:
            raise RequestError(f"request {tokens.id} with {', '.join(given)} beside it: a Request has its own namespace; leave them "
                               "out, or pass the tokens")
        return tokens
    try:
        return Request(0, tokens, **namespace)
    except TypeError as error:
        raise RequestError(f"{error}; namespace keywords are those of Request") from None
