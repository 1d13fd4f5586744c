"""Getting a prompt out of the levels that are not to serve it: the device's own cache, and host memory where NVMe is checked."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Final

from kvtier.bench.check_engine import CheckedEngine, EngineTrouble, Order
from kvtier.bench.check_metrics import ASKED, HOST_CHUNKS, SKIPPED, WRITTEN_BYTES, Growth, Metrics

RESET_SECONDS: Final = 30.0
WRITTEN_SECONDS: Final = 30.0
PAUSE: Final = 0.25
SPARE: Final = 1.1
"""So many times a level's size goes through it before what was there is taken to be gone."""

_IDLE_PROMPTS: Final = 8   # of which nothing was stored
_STILL_PROMPTS: Final = 3  # with which the host level did not grow: it is full
_DEV_MODE: Final = "start vLLM with VLLM_SERVER_DEV_MODE=1, which offers /reset_prefix_cache"


class Clock:
    """The time that a check may take."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    def left(self) -> float:
        """Seconds. Raises EngineTrouble when there are none."""
        left = self._end - time.monotonic()
        if left <= 0.0:
            raise EngineTrouble(f"the check did not end within {self._seconds:.0f} s; --timeout gives it more")
        return left


@dataclass(frozen=True)
class Flush:
    """How a level was emptied: ``how`` is "reset" or "traffic", of so many tokens; if not, ``says`` why and ``remedy`` what to do."""

    is_done: bool
    how: str
    num_tokens: int = 0
    says: str = ""
    remedy: str = ""

    def as_json(self) -> dict[str, object]:
        return {"done": self.is_done, "how": self.how, "tokens": self.num_tokens}


def flush_device(engine: CheckedEngine, rng: random.Random, clock: Clock) -> Flush:
    """Empty the device's cache: by vLLM's own reset where it is offered, else by traffic that fills its pool and passes by the tier."""
    end = time.monotonic() + min(RESET_SECONDS, clock.left())
    while (done := engine.reset(clock.left())) is False:
        if time.monotonic() > end:
            return Flush(False, "reset", says=f"vLLM could not reset its cache within {RESET_SECONDS:.0f} s: requests or transfers hold "
                         "blocks", remedy="check while nobody else uses the engine")
        _poke(engine, rng, clock)  # an engine without requests may not step, and so not notice that a transfer has ended
    if done:
        return Flush(True, "reset")
    pool = engine.metrics(clock.left()).pool_tokens
    if pool is None:
        return Flush(False, "traffic", says="/reset_prefix_cache is not offered, and vLLM's metrics do not say how large its pool is",
                     remedy=_DEV_MODE)
    wanted, sent = int(SPARE * pool) + engine.max_tokens, 0
    try:
        while sent < wanted:
            sent += _fill(engine, rng, clock, writes=False)
    except EngineTrouble:
        if not clock.is_over:
            raise
        return Flush(False, "traffic", sent, f"{sent} of {wanted} tokens that would fill the device's pool were sent in time",
                     f"{_DEV_MODE}; or give more --timeout")
    return Flush(True, "traffic", sent)


def push_out_of_host(engine: CheckedEngine, rng: random.Random, clock: Clock) -> Flush:
    """Store new prompts until the host level is full and more than all of its content has been replaced."""
    before = last = engine.metrics(clock.left())
    most = before.total(HOST_CHUNKS)
    sent = idle = still = 0
    try:
        while idle < _IDLE_PROMPTS:
            sent += _fill(engine, rng, clock, writes=True)
            _poke(engine, rng, clock)  # what a request stores may be counted in the next one's steps only
            now = engine.metrics(clock.left())
            still = still + 1 if now.total(HOST_CHUNKS) <= most else 0
            most = max(most, now.total(HOST_CHUNKS))
            if still >= _STILL_PROMPTS and 0 < _stored(before, now) > SPARE * most:
                return Flush(True, "traffic", sent)
            idle = 0 if _stored(last, now) else idle + 1
            last = now
    except EngineTrouble:
        if not clock.is_over:
            raise
        return Flush(False, "traffic", sent, f"{sent} tokens did not push it out of host memory in time",
                     "run with --save FILE, restart the engine, and run with --resume FILE; or give more --timeout")
    return Flush(False, "traffic", sent, "prompts are not stored in host memory any more",
                 "look at the engine's log, and whether secondary_offload_min_priority is above 35")


def wait_until_written(engine: CheckedEngine, rng: random.Random, clock: Clock) -> int:
    """Bytes that the NVMe level has written, once it has been still for a moment; 0 where it has never written any."""
    end = time.monotonic() + min(WRITTEN_SECONDS, clock.left())
    last, still = -1, 0
    while time.monotonic() < end:
        _poke(engine, rng, clock)  # an idle engine's metrics do not move
        written = round(engine.metrics(clock.left()).total(WRITTEN_BYTES))
        still = still + 1 if written == last else 0
        if still >= 4 and (written > 0 or time.monotonic() > end - WRITTEN_SECONDS / 2):
            return written
        last = written
        time.sleep(PAUSE)
    return max(last, 0)


def _poke(engine: CheckedEngine, rng: random.Random, clock: Clock) -> None:
    """The least request there is."""
    engine.ask(Order(engine.make_prompt(rng, 4), "kvtier-check-poke", reads=False, writes=False), clock.left())


def _fill(engine: CheckedEngine, rng: random.Random, clock: Clock, *, writes: bool) -> int:
    """Send a prompt about as long as the engine takes, and say how long it was."""
    prompt = engine.make_prompt(rng, max((engine.max_tokens - 1) * 8 // 10, 1))
    order = Order(prompt, f"kvtier-check-fill-{rng.getrandbits(64):016x}", reads=False, writes=writes)
    return max(engine.ask(order, clock.left()).prompt_tokens, 1)


def _stored(before: Metrics, after: Metrics) -> int:
    """Chunks that the host level took in."""
    growth = Growth(before, after)
    return growth.of(ASKED) - growth.of(SKIPPED)
