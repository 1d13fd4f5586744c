"""``kvtier check``: does the tier that is attached to this engine really serve, and does it serve the right bytes?

A random prompt under a fresh salt, so that nobody can have it: computed once (*cold*), taken out of the device's own cache (*flush*), sent
again under the same salt (*warm*). The warm answer must come from the level asked for and nothing of it from the device, and must be the
cold one: equal tokens, nearly equal probabilities. The same prompt under another fresh salt must be served by nobody.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvtier.bench.check_engine import Answer, CheckedEngine, EngineTrouble, Order, Prompt
from kvtier.bench.check_flush import Clock, flush_device, push_out_of_host, wait_until_written
from kvtier.bench.check_llm import LlmEngine
from kvtier.bench.check_metrics import ACTIVE, CHUNK_HITS, HOST, NVME, REQUESTS, TIER_TOKENS, Growth, Metrics
from kvtier.bench.check_report import LEVEL_NAMES, CheckResult, Finding, Verdict, why_no_hits
from kvtier.bench.report import check_writable, write_json
from kvtier.errors import ConfigError

LARGEST_DIFFERENCE: Final = 0.05
"""Of log-probabilities. A prompt computed in other pieces than before is rounded otherwise; wrong keys and values differ by far more."""

LEVELS: Final = ("host", "nvme")
ATTEMPTS: Final = 3
"""With a new prompt, where others disturbed the counters or two tokens were equally likely."""

_ATTACH: Final = "vllm serve MODEL --kv-transfer-config '{...}' with the line in docs/attach/vllm.md"
_COUNTED_SECONDS: Final = 10.0


@dataclass(frozen=True)
class CheckOptions:
    """How to check.

    Attributes:
        level: that the warm answer must come from: "host" or "nvme".
        num_tokens: of the prompt, less where the model takes less.
        answer_tokens: generated and compared.
        seconds: for everything.
        save: stop after the cold answer and write it here, for a check after a restart of the engine.
        resume: begin with the cold answer in this file, which that wrote.
        seed: of the prompts; None: never the same twice.
    """

    level: str = "host"
    num_tokens: int = 2048
    answer_tokens: int = 16
    seconds: float = 600.0
    save: Path | None = None
    resume: Path | None = None
    seed: int | None = None

    def check(self) -> None:
        """Raise ConfigError for what cannot be checked."""
        if self.level not in LEVELS:
            raise ConfigError(f"--level {self.level}: the levels are {' and '.join(LEVELS)}")
        if self.num_tokens < 16 or self.answer_tokens < 1 or not self.seconds > 0.0:
            raise ConfigError(f"tokens={self.num_tokens}, answer_tokens={self.answer_tokens}, seconds={self.seconds}: needs at least 16, 1 "
                              "and more than 0")
        if self.save is not None and self.resume is not None:
            raise ConfigError("--save and --resume: save before the restart, resume after it; one of them at a time")
        if self.save is not None:
            check_writable(self.save)
        if self.resume is not None:
            _read_saved(self.resume)


@dataclass(frozen=True)
class Cold:
    """A prompt, and the answer to it that was computed. ``growth``: what was counted meanwhile; None after a restart."""

    prompt: Prompt
    salt: str
    answer: Answer
    growth: Growth | None = field(default=None, compare=False)

    def as_json(self, model: str) -> dict[str, object]:
        return {"model": model, "prompt": self.prompt, "salt": self.salt, "answer": self.answer.as_json()}


class _Disturbed(Exception):
    """Others used the engine meanwhile, so its counters say nothing about our request."""


def check_llm(llm: Any, level: str = "host", **options: Any) -> CheckResult:
    """Check an ``LLM`` of vLLM in this process; ``result.ok`` says whether all held.

    Args:
        llm: made with ``disable_log_stats=False`` and the tier's ``kv_transfer_config``.
        level: that the warm answer must come from, "host" or "nvme".
        options: further attributes of :class:`CheckOptions`.

    Raises:
        ConfigError: no ``LLM``, options that cannot be used.
        EngineTrouble: no tier is attached to it.
    """
    return run_check(LlmEngine(llm), CheckOptions(level, **options))


def run_check(engine: CheckedEngine, options: CheckOptions, say: Callable[[str], None] = lambda text: None) -> CheckResult:
    """Check an engine.

    Args:
        engine: which one.
        options: how.
        say: is told what happens now.

    Raises:
        ConfigError: options or a saved file that cannot be used.
        EngineTrouble: the engine does not answer, or no tier is attached to it.
    """
    options.check()
    clock = Clock(options.seconds)
    seen = engine.metrics(min(clock.left(), _COUNTED_SECONDS))
    if not seen.is_vllm:
        raise EngineTrouble(f"{engine.name}: no metrics of vLLM; is this vLLM, and started without --disable-log-stats "
                            "(LLM: disable_log_stats=False)?")
    if not seen.has_tier:
        raise EngineTrouble(f"{engine.name}: no kvtier tier is attached to this engine; start it with {_ATTACH}")
    check = _Check(engine, options, clock, say)
    try:
        check.run()
    except EngineTrouble as error:
        check.find("the engine answers", Verdict.FAILED, str(error), "look at the engine's log: a tier that fails is a miss, not an error")
    return check.result


class _Check:
    """One check under way."""

    def __init__(self, engine: CheckedEngine, options: CheckOptions, clock: Clock, say: Callable[[str], None]) -> None:
        self.result = CheckResult(options.level, engine.name, engine.model)
        self._engine = engine
        self._options = options
        self._clock = clock
        self._say = say
        self._rng = random.Random(options.seed)
        self._is_hidden = False

    def find(self, name: str, verdict: Verdict, says: str, remedy: str = "") -> None:
        self.result.findings.append(Finding(name, verdict, says, remedy if verdict is not Verdict.PASSED else ""))

    def run(self) -> None:
        """Once, and with another prompt where this one's answer or others hid what there was to see."""
        for attempt in range(1, ATTEMPTS + 1):
            self.result.findings.clear()
            self.result.details = {"attempts": attempt}
            self._is_hidden = False
            try:
                self._attempt()
            except _Disturbed as error:
                self._is_hidden = True
                self.find("nobody else uses the engine", Verdict.NOT_SHOWN, str(error), "check while it is idle, or a replica of it")
            if not self._is_hidden or self.result.verdict is Verdict.FAILED or self._options.resume is not None:
                return

    def _attempt(self) -> None:
        options = self._options
        if options.resume is not None:
            cold = _load(options.resume, self._engine.model)
        else:
            self._say("cold: computing a prompt that nobody has sent before")
            cold = self._compute()
            if not self._is_fresh("a fresh prompt is computed", cold.growth):
                return
        if options.save is not None:
            self._save(options.save, cold)
            return
        if options.level == "nvme" and options.resume is None and not self._push_to_nvme():
            return
        self._say("flush: emptying the device's own cache")
        flush = flush_device(self._engine, self._rng, self._clock)
        self.result.details["flush"] = flush.as_json()
        if not flush.is_done:
            self.find("the device's cache is out of the way", Verdict.NOT_SHOWN, flush.says, flush.remedy)
            return
        self._say("warm: the same prompt again")
        self._warm(cold)

    def _compute(self) -> Cold:
        room = self._engine.max_tokens - self._options.answer_tokens
        prompt = self._engine.make_prompt(self._rng, min(self._options.num_tokens, room * 9 // 10))
        salt = self._salt()
        answer, growth = self._measure(Order(prompt, salt, self._options.answer_tokens))
        self.result.details |= {"prompt_tokens": answer.prompt_tokens, "cold": growth.as_json()}
        return Cold(prompt, salt, answer, growth)

    def _warm(self, cold: Cold) -> None:
        answer, growth = self._measure(Order(cold.prompt, cold.salt, len(cold.answer.tokens)))
        self.result.details |= {"prompt_tokens": answer.prompt_tokens, "warm": growth.as_json()}
        self._look_at_hits(cold, growth, answer.prompt_tokens)
        self._say("the same prompt under another salt")
        control, alone = self._measure(Order(cold.prompt, self._salt(), len(cold.answer.tokens), writes=False))
        self._compare(cold.answer, answer, control)
        self._is_fresh("another salt is not served", alone)

    def _look_at_hits(self, cold: Cold, warm: Growth, prompt_tokens: int) -> None:
        seen, level = warm.as_json(), self._options.level
        device = seen["device_tokens"]
        self.find("nothing comes from the device", Verdict.NOT_SHOWN if device else Verdict.PASSED, f"{device} tokens from its own cache",
                  "the flush did not empty it: start vLLM with VLLM_SERVER_DEV_MODE=1, which offers /reset_prefix_cache")
        ours, other = (HOST, NVME) if level == "host" else (NVME, HOST)
        found, elsewhere = warm.of(CHUNK_HITS, ours), warm.of(CHUNK_HITS, other)
        says = (f"{found} chunks from {LEVEL_NAMES[level]}, {elsewhere} from the other level; {warm.of(TIER_TOKENS)} of {prompt_tokens} "
                "prompt tokens")
        name = f"the tier serves from {LEVEL_NAMES[level]}"
        if found and not elsewhere:
            self.find(name, Verdict.PASSED, says)
        elif elsewhere and level == "host":
            self.find(name, Verdict.FAILED, says, "the host level does not hold the whole prompt: raise secondary, or use fewer --tokens")
        elif elsewhere:
            self.find(name, Verdict.NOT_SHOWN, says, "it was still in host memory: run with --save FILE, restart the engine, and run with "
                      "--resume FILE")
        elif device:
            self.find(name, Verdict.NOT_SHOWN, says, "what the device serves is not asked for in the tier")
        else:
            self.find(name, Verdict.FAILED, says, why_no_hits(level, cold.growth, warm, prompt_tokens))

    def _compare(self, cold: Answer, warm: Answer, control: Answer) -> None:
        """``control`` was computed again: where it differs from cold, too, the engine alone is not repeatable."""
        parted = _parted(cold, warm)
        self.result.details |= {"tokens_equal": parted is None, "largest_logprob_difference": _difference(cold, warm),
                                "engine_alone_logprob_difference": _difference(cold, control)}
        repeats = _parted(cold, control) is None and _difference(cold, control) < LARGEST_DIFFERENCE
        wrong = ("do not use the tier on this engine: keep the JSON and the engine's log, and try without NVMe" if repeats else
                 "the engine alone does not answer the same twice either: check again with fewer requests, or VLLM_BATCH_INVARIANT=1")
        bad = Verdict.FAILED if repeats else Verdict.NOT_SHOWN
        if parted is None:
            self.find("equal tokens", Verdict.PASSED, f"all {len(cold.tokens)} generated tokens")
        elif parted < len(cold.gaps) and cold.gaps[parted] < LARGEST_DIFFERENCE:
            self._is_hidden = True
            self.find("equal tokens", Verdict.NOT_SHOWN, f"token {parted} differs, where two were equally likely to within "
                      f"{cold.gaps[parted]:.4f}", "check again: another prompt")
        else:
            self.find("equal tokens", bad, f"token {parted} of {len(cold.tokens)} differs from the one that was computed", wrong)
        difference = _difference(cold, warm)
        says = f"they differ by at most {difference:.4f} (limit {LARGEST_DIFFERENCE}; computed again: {_difference(cold, control):.4f})"
        self.find("equal log-probabilities", Verdict.PASSED if difference < LARGEST_DIFFERENCE else bad, says, wrong)

    def _is_fresh(self, name: str, growth: Growth | None) -> bool:
        """Nobody may have served this request."""
        assert growth is not None
        seen = growth.as_json()
        served = seen["device_tokens"] + seen["tier_tokens"]
        self.find(name, Verdict.FAILED if served else Verdict.PASSED, f"{served} tokens of it were reused",
                  "blocks are found under a salt they were not stored with: do not share this engine between users, and report it")
        return not served

    def _push_to_nvme(self) -> bool:
        self._say("waiting until it is written to NVMe, then pushing it out of host memory")
        wait_until_written(self._engine, self._rng, self._clock)
        pushed = push_out_of_host(self._engine, self._rng, self._clock)
        self.result.details["pushed_out"] = pushed.as_json()
        if not pushed.is_done:
            self.find("the prompt is out of host memory", Verdict.NOT_SHOWN, pushed.says, pushed.remedy)
        return pushed.is_done

    def _save(self, file: Path, cold: Cold) -> None:
        written = wait_until_written(self._engine, self._rng, self._clock)
        self.find("it is on NVMe before the restart", Verdict.PASSED if written else Verdict.FAILED, f"{written} bytes were written",
                  "look for 'no NVMe level' in the engine's log, and whether nvme_offload_min_priority is above 35")
        write_json(file, cold.as_json(self._engine.model))
        self._say(f"wrote {file}; restart the engine, then run kvtier check with --resume {file} --level nvme")

    def _measure(self, order: Order) -> tuple[Answer, Growth]:
        """One request, and what the engine counted for it.

        Raises:
            _Disturbed: it counted others, too.
        """
        before = self._engine.metrics(self._clock.left())
        began = time.monotonic()
        answer = self._engine.ask(order, self._clock.left())
        seconds = time.monotonic() - began
        after = self._counted(before)
        growth = Growth(before, after)
        active = sum(after.total(name) for name in ACTIVE)
        if self._engine.is_shared and (growth.of(REQUESTS) > 1 or active > 0):
            raise _Disturbed(f"{growth.of(REQUESTS)} requests ended instead of 1, and {active:.0f} are active")
        self.result.details.setdefault("seconds", [])
        seen = self.result.details["seconds"]
        assert isinstance(seen, list)
        seen.append(round(seconds, 3))
        return answer, growth

    def _counted(self, before: Metrics) -> Metrics:
        """The metrics once they show our request: they come a little after the answer."""
        end = time.monotonic() + min(_COUNTED_SECONDS, self._clock.left())
        while True:
            after = self._engine.metrics(self._clock.left())
            idle = not self._engine.is_shared or not any(after.total(name) > 0 for name in ACTIVE)
            if (after.total(REQUESTS) > before.total(REQUESTS) and idle) or time.monotonic() > end:
                return after
            time.sleep(0.05)

    def _salt(self) -> str:
        return f"kvtier-check-{self._rng.getrandbits(64):016x}"


def _parted(one: Answer, two: Answer) -> int | None:
    """Where two answers part; None where they do not."""
    longest = max(len(one.tokens), len(two.tokens))
    return next((place for place in range(longest) if one.tokens[place:place + 1] != two.tokens[place:place + 1]), None)


def _difference(one: Answer, two: Answer) -> float:
    """Largest difference of log-probabilities as far as the tokens are the same."""
    parted = _parted(one, two)
    end = len(one.tokens) if parted is None else parted
    return max((abs(left - right) for left, right in zip(one.logprobs[:end], two.logprobs[:end], strict=False)), default=0.0)


def _load(file: Path, model: str) -> Cold:
    cold, saved = _read_saved(file)
    if saved != model:
        raise ConfigError(f"--resume {file}: of the model {saved}, and this engine serves {model}; check the same model")
    return cold


def _read_saved(file: Path) -> tuple[Cold, str]:
    """What ``--save`` wrote: the cold answer, and whose it is. ConfigError for another file."""
    try:
        given = json.loads(file.read_bytes())
        cold = Cold(given["prompt"], str(given["salt"]), Answer.from_json(given["answer"]))
        return cold, str(given["model"])
    except OSError as error:
        raise ConfigError(f"--resume {file}: cannot be read ({error.strerror}); write it before the restart, with --save") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--resume {file}: not what --save writes ({error!r}); write it anew before a restart") from error
