"""``kvtier bench serve``: a served workload with the tier and without it, in turns: time to first token, throughput, hits by level.

For each number of requests at once there are three points: *none* (nobody comes back: what the tier costs), *returning* (users come back
after others have pushed them out of the device), *restart* (they come back after a restart of the engine). Each point has fresh engines and
a fresh store. The engine alone is measured twice in each round: no difference smaller than the one between these two says anything. A point
at which the tier did not serve from its level, or served where nothing was to be found, is INVALID.

Beside the engine alone stand what else one could have on the same device and host memory: nothing reused at all, and the tier without its
NVMe level; and the ceiling, an engine whose own pool has room for everything and that is never restarted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kvtier.bench.build import compiled
from kvtier.bench.measure import Alternative, Interleaved, Spread
from kvtier.bench.nvme import working_folder
from kvtier.bench.report import Limit, Report, ResultRow, noise_row, spread_row
from kvtier.bench.serve_engine import BLOCK, EngineMaker, HitTokens, ServedEngine, ServeError, Sizes
from kvtier.bench.serve_text import TextSource
from kvtier.bench.serve_workload import Played, Shape, Workload, distinct_tokens, returning_users, strangers, trace_arrivals
from kvtier.errors import ConfigError
from kvtier.io.store_directory import expand

ALONE: Final = "engine alone"
OURS: Final = "kvtier"
AGAIN: Final = "engine alone again"
RECOMPUTE: Final = "recompute"
HOST_ONLY: Final = "kvtier, host only"
CEILING: Final = "room for everything"
KINDS: Final = ("none", "returning", "restart")
TRACE: Final = "trace"
PERCENTILES: Final = (50, 90, 99)
NEGLIGIBLE: Final = 0.02
"""Of throughput: less than this may the tier cost where nothing is found."""

LONG: Final = Shape(shared=512, per_turn=256, answer=32, turns=3)
_LEVELS: Final = {"returning": "host", "restart": "nvme", TRACE: "host or nvme"}
_ARRIVALS: Final = 256  # requests of a trace in flight at most


@dataclass(frozen=True)
class ServePlan:
    """What is served.

    Attributes:
        at_once: requests in flight, one point for each.
        shape: of the conversations.
        users: at least so many, and four for each request in flight, so that the device cannot hold them all.
        rounds: recorded at each point, after ``warm_up`` of them.
        kinds: of points.
        trace: a file to be served instead, with its own arrivals; block: tokens of its blocks; speed: times as fast; most_requests: of it.
        more_engines: measure ``HOST_ONLY`` and ``CEILING`` too, which are two engines more at the same time.
    """

    at_once: tuple[int, ...] = (1, 4, 16)
    shape: Shape = LONG
    users: int = 12
    rounds: int = 5
    kinds: tuple[str, ...] = KINDS
    trace: Path | None = None
    block: int = 512
    speed: float = 1.0
    most_requests: int = 200
    more_engines: bool = False
    warm_up: int = 1

    @classmethod
    def usual(cls, quick: bool, trace: Path | None = None, block: int = 512, speed: float = 1.0, more_engines: bool = False) -> ServePlan:
        """The full one, or a first look: four users with a block each, alone in flight, and no point without returning users."""
        if quick:
            return cls((1,), Shape(1, 32, 1, 2), 4, 5, KINDS[1:], trace, block, speed, 40, more_engines, 0)
        return cls(trace=trace, block=block, speed=speed, more_engines=more_engines)

    def changed(self, kinds: str | None, at_once: str | None, users: int | None, rounds: int | None, shape: str | None) -> ServePlan:
        """With what was given instead, as on a command line: names and numbers with commas between. ConfigError for what is none."""
        change: dict[str, Any] = {key: value for key, value in (("users", users), ("rounds", rounds)) if value is not None}
        if kinds is not None:
            change["kinds"] = tuple(kinds.split(","))
            if not set(change["kinds"]) <= set(KINDS):
                raise ConfigError(f"--points {kinds}: the points are {', '.join(KINDS)}; separate them with commas")
        try:
            if at_once is not None:
                change["at_once"] = tuple(int(number) for number in at_once.split(","))
            if shape is not None:
                change["shape"] = Shape(*(int(number) for number in shape.split(",")))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"--at-once {at_once}, --shape {shape}: whole numbers with commas between, of a shape four") from error
        return replace(self, **change)

    def arms(self, kind: str) -> tuple[str, ...]:
        """Who takes turns, the ceiling first. Where nobody comes back there is nothing that others could reuse."""
        if kind == "none":
            return ALONE, OURS, AGAIN
        return (CEILING, ALONE, OURS, HOST_ONLY, RECOMPUTE, AGAIN) if self.more_engines else (ALONE, OURS, RECOMPUTE, AGAIN)

    def check(self, max_tokens: int, text: TextSource) -> None:
        """Raise ConfigError for what cannot be served."""
        shape = self.shape
        if min(self.at_once, default=0) < 1 or self.rounds < 1 or self.users < 1 or shape.turns < 2 or not self.speed > 0.0 \
                or min(shape.shared, shape.per_turn, shape.answer, self.block, self.most_requests) < 1:
            raise ConfigError(f"{self}: needs at least 1 at once, 1 round, 1 user, 2 turns of at least 1 token, and a speed above 0")
        if self.trace is None and shape.longest > max_tokens:
            raise ConfigError(f"the conversations are {shape.longest} tokens long and the model takes {max_tokens}; use --quick, or "
                              "another model")
        if self.trace is not None:  # its first request tells whether it can be read
            trace_arrivals(self.trace, self.block, text, max_tokens, 1, self.speed)

    def workload(self, kind: str, at_once: int, seed: str, text: TextSource, max_tokens: int) -> Workload:
        if self.trace is not None:
            return trace_arrivals(self.trace, self.block, text, max_tokens, self.most_requests, self.speed)
        made = strangers if kind == "none" else returning_users
        return made(text, seed, self.shape, max(self.users, 4 * at_once))

    def sizes(self, work: Workload, at_once: int, arm: str, engines: int) -> Sizes:
        """The device holds a quarter of the working set (or what is in flight), host memory all of it, NVMe that of every round."""
        working_set = distinct_tokens((*work.before, *work.timed), BLOCK)
        in_flight = (work.longest + 2 * BLOCK) * at_once
        pool = 2 * working_set + in_flight if arm == CEILING else max(working_set // 4, in_flight)
        nvme = 0 if arm == HOST_ONLY else (self.warm_up + self.rounds + 2) * (2 * working_set + in_flight)
        return Sizes(pool, working_set * 3 // 2 + in_flight, nvme, work.longest + BLOCK, at_once, engines)


@dataclass
class _Point:
    """One point under way: engines, and what each round gave."""

    name: str
    kind: str
    at_once: int
    plays: dict[str, list[Played]] = field(default_factory=dict)
    hits: list[HitTokens] = field(default_factory=list)
    measured: Interleaved = field(default_factory=Interleaved)


def measure_serve(maker: EngineMaker, engine: str, plan: ServePlan, directory: Path | None = None, quick: bool = False,
                  text_file: Path | None = None) -> Report:
    """Measure.

    Args:
        maker: of engines; ``engine`` is its name in the rows.
        plan: what is served.
        directory: a folder on the drive of the NVMe level; the current folder when None. What is written there is removed again.
        quick: for the report.
        text_file: what prompts are cut from; Python's language reference when None.

    Returns:
        A report that has not been printed. Its config says under "invalid" which points did not hold.

    Raises:
        ConfigError: a file, folder, plan or trace that cannot be used.
    """
    text = TextSource(maker.encode, text_file)
    plan.check(maker.max_tokens, text)
    parent = expand(directory) if directory is not None else Path.cwd()
    hits: dict[str, object] = {}
    report = Report("kvtier bench serve", {
        "command": "serve", "quick": quick, "compiled": compiled(), "engine": maker.as_json(), "at_once": list(plan.at_once),
        "rounds": plan.rounds, "users": plan.users, "shape": vars(plan.shape), "trace": None if plan.trace is None else plan.trace.name,
        "speed": plan.speed, "tokens_per_block": BLOCK, "text": "the Python language reference" if text_file is None else text_file.name,
        "more_engines": plan.more_engines, "hit_tokens": hits}, parent)
    report.baselines = (ALONE, HOST_ONLY, RECOMPUTE)
    with working_folder(parent) as folder, report.interruptible():
        for kind in (TRACE,) if plan.trace is not None else plan.kinds:
            for at_once in plan.at_once[-1:] if plan.trace is not None else plan.at_once:
                point = _Point(f"serve/{engine}/{kind}/{at_once}", kind, at_once)
                report.say(f"measuring {point.name}")
                try:
                    _measure(point, maker, plan, text, folder / f"{kind}-{at_once}")
                    _judge(point)
                except (ServeError, ConfigError) as error:
                    report.reject(point.name, str(error))
                    continue
                hits[point.name] = sum(point.hits, HitTokens(0, 0, 0)).as_json()
                _add_rows(report, point, plan)
    report.note(f"Every ratio is how many times as good as the engine alone, in the same round; against {RECOMPUTE}: as the engine alone "
                f"with nothing reused; against {HOST_ONLY}: as the tier without NVMe; against {CEILING}: as an engine whose own pool has "
                "it, which is never restarted. noise is the engine alone against itself.")
    return report


def _measure(point: _Point, maker: EngineMaker, plan: ServePlan, text: TextSource, folder: Path) -> None:
    """All engines at the same time, in turns. Each arm of each round has prompts that no other finds, of the same lengths."""
    arms = plan.arms(point.kind)
    flight = _ARRIVALS if plan.trace is not None else point.at_once
    unsalted = [plan.workload(point.kind, point.at_once, f"{point.name} {number}", text, maker.max_tokens)
                for number in range(plan.warm_up + plan.rounds)]
    works = {(arm, number): work.recomputed(f"{arm} {number}") if arm == RECOMPUTE else work.salted(f"{arm} {number}")
             for number, work in enumerate(unsalted) for arm in arms}
    distinct = [arm for arm in arms if arm not in (AGAIN, RECOMPUTE)]  # those two are the engine alone
    sizes = {arm: plan.sizes(works[OURS, 0], point.at_once, arm, len(distinct)) for arm in distinct}
    with ExitStack() as running:
        engines = _start(maker, sizes, folder, running)
        if point.kind == "restart":
            for (arm, _), work in works.items():
                if arm == OURS:  # the others would lose it; the ceiling is not restarted
                    engines[arm].play(work.before, flight)
            engines[OURS].settle()
            running.close()
            engines = _start(maker, sizes, folder, running)
        for number in range(plan.warm_up + plan.rounds):
            is_recorded = number >= plan.warm_up
            turns = [_turn(point, engines[arm], arm, works[arm, number], flight, is_recorded) for arm in arms]
            point.measured.round(turns, warm_up=not is_recorded)


def _start(maker: EngineMaker, sizes: Mapping[str, Sizes], folder: Path, running: ExitStack) -> dict[str, ServedEngine]:
    folder.mkdir(exist_ok=True)
    engines = {}
    for arm, each in sizes.items():
        engines[arm] = maker.start(each, folder if arm in (OURS, HOST_ONLY) else None)
        running.callback(engines[arm].close)
    return engines | {AGAIN: engines[ALONE], RECOMPUTE: engines[ALONE]}


def _turn(point: _Point, engine: ServedEngine, arm: str, work: Workload, flight: int, is_recorded: bool) -> Alternative:
    before = HitTokens(0, 0, 0)

    def prepare() -> None:
        nonlocal before
        if work.before and (point.kind != "restart" or arm == CEILING):
            engine.play(work.before, flight)
        if arm == OURS:
            before = engine.hit_tokens()

    def run() -> float:
        played = engine.play(work.timed, flight)
        if is_recorded:
            point.plays.setdefault(arm, []).append(played)
        return played.seconds

    def check() -> None:
        if arm == OURS and is_recorded:
            point.hits.append(engine.hit_tokens() - before)

    return Alternative(arm, run, prepare, check)


def _judge(point: _Point) -> None:
    """Raises ServeError where the tier did not do what the point is about."""
    for number, hits in enumerate(point.hits):
        served = {"host": hits.host, "nvme": hits.nvme, "host or nvme": hits.host + hits.nvme}
        if point.kind == "none" and hits != HitTokens(0, 0, 0):
            raise ServeError(f"round {number}: {hits.as_json()} tokens were found, and no prompt was sent twice")
        if point.kind != "none" and not served[_LEVELS[point.kind]]:
            raise ServeError(f"round {number}: nothing came from {_LEVELS[point.kind]}: hit tokens {hits.as_json()}; kvtier check says why")


def _add_rows(report: Report, point: _Point, plan: ServePlan) -> None:
    work_tokens = sum(len(answer.tokens) for answer in point.plays[OURS][0].answers)
    ours, alone = (Spread.of([work_tokens / played.seconds for played in point.plays[arm]]) for arm in (OURS, ALONE))
    ratio = point.measured.speed_ratios(OURS, ALONE)
    others = [arm for arm in plan.arms(point.kind) if arm in (CEILING, HOST_ONLY, RECOMPUTE)]
    report.add(ResultRow(f"{point.name}/throughput", "tokens/s", ours.median, ours.low, ours.high, Limit(ALONE, alone.median),
                         ratio.median, {arm: point.measured.speed_ratio(OURS, arm) for arm in others}))
    noise = noise_row(f"{point.name}/noise", point.measured, AGAIN, ALONE)
    report.add(noise)
    for percent in PERCENTILES:
        firsts = {arm: [1e3 * played.first_token(percent) for played in point.plays[arm]] for arm in (OURS, ALONE, *others)}
        spread = Spread.of(firsts[OURS])
        ratios = {arm: statistics.median(theirs / ours for ours, theirs in zip(firsts[OURS], firsts[arm], strict=True))
                  for arm in (ALONE, *others)}
        report.add(ResultRow(f"{point.name}/ttft_p{percent}", "ms", spread.median, spread.low, spread.high,
                             Limit(ALONE, statistics.median(firsts[ALONE])), ratios.pop(ALONE), ratios))
    if point.kind != "none":
        for level in ("device", "host", "nvme"):
            report.add(spread_row(f"{point.name}/hit_tokens/{level}", "tokens", Spread.of([hits.as_json()[level] for hits in point.hits])))
    if point.kind == "none":
        least = min(noise.low, 1 - NEGLIGIBLE)
        report.note(f"{point.name}: throughput {ratio.median:.3f} of the engine alone, which is {noise.low:.3f} to {noise.high:.3f} of "
                    f"itself: {'within' if ratio.median >= least else 'NOT within'} {NEGLIGIBLE:.0%} or that noise")
    else:
        hits = sum(point.hits, HitTokens(0, 0, 0)).as_json()
        different = sum(ours.tokens != theirs.tokens for one, two in zip(point.plays[OURS], point.plays[ALONE], strict=True)
                        for ours, theirs in zip(one.answers, two.answers, strict=True))
        report.note(f"{point.name}: hit tokens {hits} in {plan.rounds} rounds; {different} of "
                    f"{sum(len(played.answers) for played in point.plays[OURS])} answers differ from the engine's alone (near ties may)")
