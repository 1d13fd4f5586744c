"""Load a stored prefix, compute it again, or load its front and compute the rest (design: deciding to load).

A prefix is usable from its beginning only, so a choice is one number: how many of the found blocks are loaded. Attention makes the
last tokens the dearest to compute, so with one level below, one of both ends is the best choice; a split pays where the front lies on
a faster level than what is behind it.
"""

from __future__ import annotations

from kvtier.policies.speed_models import PrefillCost


class LoadChoice:
    """What was chosen.

    Attributes:
        num_blocks: blocks to load, from the first one on.
        load_seconds: estimated seconds until they are there.
        seconds: estimated seconds until the whole prompt is there: loaded, then the rest computed.
        seconds_all: the same if everything found were loaded; seconds_none: if nothing were.
    """

    __slots__ = ("load_seconds", "num_blocks", "seconds", "seconds_all", "seconds_none")

    def __init__(self, num_blocks: int, load_seconds: float, seconds: float, seconds_all: float, seconds_none: float) -> None:
        self.num_blocks = num_blocks
        self.load_seconds = load_seconds
        self.seconds = seconds
        self.seconds_all = seconds_all
        self.seconds_none = seconds_none


def choose_load(block_seconds: list[float], can_split: bool, tokens_per_block: int, all_tokens: int, prompt_tokens: int,
                cost: PrefillCost) -> LoadChoice:
    """The number of blocks whose estimated time to the first token is the least; of equal ones the most, for the engine's time is scarce.

    Args:
        block_seconds: for each found block, what loading it adds to loading those before it: 0.0 where it is there already; a level's
            latency and waiting line with the first block from there.
        can_split: whether any number will do; otherwise all or none.
        tokens_per_block: of a full block.
        all_tokens: tokens that need not be computed when everything is loaded; more than the blocks' where part of one more is there.
        prompt_tokens: of the whole prompt.
        cost: of computing.
    """
    none = cost.seconds(0, prompt_tokens)
    best = 0
    least = none
    least_load = 0.0
    load = 0.0
    last = len(block_seconds)
    total = none
    for number in range(1, last + 1):
        load += block_seconds[number - 1]
        if number < last and not can_split:
            continue
        total = load + cost.seconds(all_tokens if number == last else number * tokens_per_block, prompt_tokens)
        if total <= least:
            best = number
            least = total
            least_load = load
    return LoadChoice(best, least_load, least, total, none)


def affordable(block_seconds: list[float], seconds: float) -> int:
    """How many blocks are loaded within ``seconds``, at least one if there is any."""
    number = 0
    load = 0.0
    for added in block_seconds:
        load += added
        if number and load > seconds:
            break
        number += 1
    return number
