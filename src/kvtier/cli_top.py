"""``kvtier top``: what a tier does now, from its ``/metrics``, again and again. Part of ``cli``.

Nothing but the endpoint is asked, so it works for any process, also on another machine, and disturbs nobody.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvtier.errors import ConfigError, KVTierError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvtier.bench.web_address import WebAddress

LEVELS: Final = ("primary", "secondary", "nvme")
STATES: Final = ("used", "busy", "cached", "backing", "empty")
_LETTERS: Final = dict(zip(STATES, "█▓▒░·", strict=True))
_BAR: Final = 30
_MOST_BYTES: Final = 64 << 20  # of an answer: more is no page of metrics
_TROUBLE: Final = {
    "fallbacks": "kvtier_fallbacks_total", "lost blocks": "kvtier_lost_blocks_total", "failed moves": "kvtier_transfer_failures_total",
    "checksum failures": "kvtier_checksum_failures_total", "NVMe read errors": "kvtier_nvme_read_errors_total",
    "blocks not stored": "kvtier_nvme_write_errors_total", "quarantined slots": "kvtier_nvme_quarantined_slots",
}

Labels = frozenset[tuple[str, str]]


class NoMetrics(KVTierError):
    """Nobody answers there, or not with metrics of a tier."""


@dataclass(frozen=True)
class Picture:
    """One answer of ``/metrics``: values by name and labels, and when (seconds that only go forward)."""

    at: float
    values: Mapping[tuple[str, Labels], float] = field(default_factory=dict)

    def sum(self, name: str, **labels: str) -> float:
        """Over all labels that are not given."""
        wanted = set(labels.items())
        return sum(value for (found, those), value in self.values.items() if found == name and wanted <= those)

    def label_values(self, name: str, label: str) -> list[str]:
        """Which values a label has, in order."""
        return sorted({dict(those).get(label, "") for found, those in self.values if found == name})


def full_address(text: str) -> WebAddress:
    """``HOST:PORT`` and ``http://HOST:PORT`` mean its ``/metrics``.

    Raises:
        ConfigError: neither that nor a URL.
    """
    from kvtier.bench.web_address import WebAddress, without_secrets
    from kvtier.pools.sizing import shown
    try:
        address = WebAddress.read(text)
    except ValueError:
        raise ConfigError(f"{shown(without_secrets(text))}: no address of metrics; write for example "
                          "http://127.0.0.1:9400/metrics") from None
    return address if address.path.strip("/") else replace(address, path="/metrics")


def fetch(address: WebAddress, timeout: float = 5.0) -> Picture:
    """Ask once.

    Raises:
        NoMetrics: nobody answers there in time, or not with metrics of a tier.
    """
    from kvtier.bench.web_address import opener, request_to
    from kvtier.tiering.metrics_reading import read_metrics
    try:
        request = request_to(address.url, address.headers)
        with opener().open(request, timeout=timeout) as answer:
            text = answer.read(_MOST_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError, HTTPException) as error:  # URLError is an OSError; HTTPException: a line that is no HTTP, half an answer
        reason = str(getattr(error, "reason", error)).strip() or repr(error)
        raise NoMetrics(f"{address.shown}: no answer ({reason}); is the engine running, and does it serve metrics there?") from None
    try:
        values = {(name, frozenset(labels.items())): value for name, labels, value in read_metrics(text).samples}
    except ValueError:
        values = {}
    if not any(name == "kvtier_up" for name, _ in values):
        raise NoMetrics(f"{address.shown}: answers, but not with metrics of kvtier; look for the address that serve_metrics(...).url names")
    return Picture(time.monotonic(), values)


def growth(now: Picture, before: Picture | None, name: str, **labels: str) -> float:
    """By how much a counter grew, per second; since its start where there is no picture before. After a restart it counts from 0."""
    new = now.sum(name, **labels)
    if before is None:
        return new
    old = before.sum(name, **labels)
    return (new - old if new >= old else new) / max(now.at - before.at, 1e-9)


def quantile(now: Picture, before: Picture | None, name: str, share: float, **labels: str) -> float | None:
    """Upper end of the bucket that this share of a histogram's new values does not exceed; None where there are none."""
    bounds = sorted({dict(those)["le"] for found, those in now.values if found == f"{name}_bucket"}, key=float)
    grown = [growth(now, before, f"{name}_bucket", le=bound, **labels) for bound in bounds]
    if not grown or grown[-1] <= 0.0:
        return None
    return next(float(bound) for bound, count in zip(bounds, grown, strict=True) if count >= share * grown[-1])


def view(now: Picture, before: Picture | None, url: str, problem: str = "") -> RenderableType:
    """The whole screen."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    info = next((dict(labels) for name, labels in now.values if name == "kvtier_info"), {})
    is_open = now.sum("kvtier_up") > 0
    head = f"kvtier {info.get('version', '')} {info.get('model', '')}  {url}".replace("  ", " ")
    state = problem or ("" if is_open else "the cache has been closed")
    lines: list[RenderableType] = [Text(head, style="bold"), Text(state, style="red")] if state else [Text(head, style="bold")]
    if not is_open:
        return Group(*lines)
    per = "" if before is None else "/s"

    levels = Table("level", "blocks", " ".join(f"{_LETTERS[name]} {name}" for name in STATES), f"hit tokens{per}", f"hit blocks{per}",
                   box=None, pad_edge=False)
    for level in LEVELS:
        size = now.sum("kvtier_capacity_blocks", level=level)
        if size:
            levels.add_row(level, f"{size:.0f}", bar({name: now.sum("kvtier_blocks", level=level, state=name) for name in STATES}, size),
                           f"{growth(now, before, 'kvtier_hit_tokens_total', level=level):.0f}",
                           f"{growth(now, before, 'kvtier_hit_blocks_total', level=level):.0f}")
    lines += [Text(""), levels, Text(""), _routes(now, before, per)]

    drops = "  ".join(f"{reason} {growth(now, before, 'kvtier_dropped_blocks_total', reason=reason):.0f}"
                      for reason in now.label_values("kvtier_dropped_blocks_total", "reason"))
    active = now.sum("kvtier_sequences") + now.sum("kvtier_engine_requests")
    lines += [Text(""), Text(f"dropped blocks{per}: {drops}"), Text(f"active {active:.0f}  leases {now.sum('kvtier_leases'):.0f}")]
    trouble = [f"{what} {now.sum(name):.0f}" for what, name in _TROUBLE.items() if now.sum(name) > 0]
    lines.append(Text("since the start: " + ("  ".join(trouble) or "no failures"), style="red" if trouble else "green"))
    return Group(*lines)


def bar(states: Mapping[str, float], size: float) -> str:
    """A level as one bar; what holds anything at all shows."""
    letters = ""
    for name in STATES[:-1]:
        count = states.get(name, 0.0)
        letters += _LETTERS[name] * (max(round(_BAR * count / size), 1) if count else 0)
    return letters[:_BAR].ljust(_BAR, _LETTERS["empty"])


def _routes(now: Picture, before: Picture | None, per: str) -> RenderableType:
    from rich.table import Table
    table = Table("moved", f"blocks{per}", f"MiB{per}", "95 % within", "of that waiting", box=None, pad_edge=False)
    for verb in ("onboarded", "offloaded"):
        name = f"kvtier_{verb}_blocks_total"
        for labels in sorted((dict(those) for found, those in now.values if found == name), key=lambda each: sorted(each.items())):
            route = {"source": labels["source"], "destination": labels["destination"]}
            times = [quantile(now, before, f"kvtier_move_{kind}_seconds", 0.95, **route) for kind in ("duration", "queue")]
            table.add_row(f"{route['source']} → {route['destination']}", f"{growth(now, before, name, **route):.0f}",
                          f"{growth(now, before, f'kvtier_{verb}_bytes_total', **route) / (1 << 20):.1f}",
                          *["" if seconds is None else f"{seconds * 1000:g} ms" for seconds in times])
    return table


def top(url: Annotated[str, typer.Argument(metavar="URL", help="Of the metrics, such as 127.0.0.1:9400.")],
        interval: Annotated[float, typer.Option(min=0.1, max=3600.0, metavar="SECONDS", help="Between two looks.")] = 2.0,
        once: Annotated[bool, typer.Option("--once", help="Look once, and show everything since the start.")] = False) -> None:
    """A live view of a running tier, until Ctrl-C.

    What is where, what moves, what is reused, what goes wrong. Exit code 1 if nobody answers there.
    """
    from rich.console import Console
    from rich.live import Live
    address = full_address(url)
    now = fetch(address)
    console = Console()
    if once or not console.is_terminal or console.is_dumb_terminal:
        console.print(view(now, None, address.shown))
        return
    before: Picture | None = None
    with Live(view(now, None, address.shown), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                before, now = now, fetch(address)
                problem = ""
            except NoMetrics as error:  # it may come back
                problem = str(error)
            live.update(view(now, before, address.shown, problem), refresh=True)
