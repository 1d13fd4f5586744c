"""``kvtier store``: the commands for an NVMe directory that no process is using. Part of ``cli``; imports nothing heavy at its top.

Each command takes the directory of a store, or the root above those of several ranks, and works on one after the other. Those that change
nothing take any folder with stores in it.
"""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvtier.errors import ConfigError, KVTierError
from kvtier.exit_codes import CHECK_FAILED, FINE, USED_WRONGLY

if TYPE_CHECKING:
    from kvtier.io.store_commands import Listing

_MOST_LINES = 20  # of bad blocks; all of them are in the JSON

store = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look after an NVMe directory that no process is using.")

Directory = Annotated[str, typer.Argument(metavar="DIR", help="A store, or the root above those of several ranks.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


class Answer(NamedTuple):
    """Of one command for one store: for programs, for people, and the exit code."""

    content: dict[str, object]
    lines: list[str]
    code: int = FINE


@store.command()
def ls(directory: Directory, json: Json = False) -> None:
    """Whose blocks these are, and how many there are of each group. Changes nothing."""
    from kvtier.io.store_commands import list_store

    def list_one(path: Path) -> Answer:
        listing = list_store(path)
        return Answer(listing.as_json(), _listing_lines(listing))

    _leave(directory, json, list_one)


@store.command()
def verify(directory: Directory, json: Json = False) -> None:
    """Read and verify every block. Changes nothing; exit code 1 if a block or the index is damaged."""
    from kvtier.io.store_commands import verify_store

    def verify_one(path: Path) -> Answer:
        found = verify_store(path, _progress())
        lines = [f"{path}: {found.blocks} blocks read, {len(found.bad)} bad"]
        lines += [*found.damage, *_bad_lines([reason for _, _, reason in found.bad])]
        if found.bad:
            lines.append("kvtier store scrub takes the bad slots out of service; a running cache does so when it meets them")
        if found.damage:
            lines.append("the next start, or kvtier store rebuild, makes a damaged manifest anew from the slot headers")
        return Answer(found.as_json(), lines, FINE if found.ok else CHECK_FAILED)

    _leave(directory, json, verify_one)


@store.command()
def scrub(directory: Directory,
          bandwidth: Annotated[str | None, typer.Option(metavar="RATE", help='At most so much is read, such as "200MiB/s".')] = None,
          seconds: Annotated[float | None, typer.Option(min=0.0, metavar="SECONDS",
                                                       help="Stop after this time; the next run goes on from there.")] = None,
          json: Json = False) -> None:
    """Verify every block and quarantine the bad ones.

    Goes on where the last run stopped. Exit code 1 if there are any.
    """
    from kvtier.io.store_commands import scrub_store
    from kvtier.pools.rate import parse_rate
    rate = None if bandwidth is None else parse_rate(bandwidth, "--bandwidth")

    def scrub_one(path: Path) -> Answer:
        done = scrub_store(path, rate, seconds)
        bad = [{"group": group, "slot": slot, "reason": reason} for (group, slot), reason in done.bad]
        end = "the pass is complete" if done.next_place is None else \
            f"the next run goes on at group {done.next_place[0]}, slot {done.next_place[1]}"
        return Answer({"directory": str(path), "blocks": done.verified, "num_bytes": done.num_bytes, "quarantined": bad,
                       "next": done.next_place},
                      [f"{path}: {done.verified} blocks verified, {len(bad)} quarantined; {end}",
                       *_bad_lines([reason for _, reason in done.bad])], CHECK_FAILED if bad else FINE)

    _leave(directory, json, scrub_one, changes=True)


@store.command()
def rebuild(directory: Directory, json: Json = False) -> None:
    """Make the manifest anew from the slot headers. Blocks given up before and not written over come back."""
    from kvtier.io.store_commands import rebuild_store

    def rebuild_one(path: Path) -> Answer:
        made = rebuild_store(path)
        return Answer({"directory": made.directory, "blocks": made.blocks, "recovered": made.recovered, "dropped": made.dropped,
                       "quarantined": made.quarantined},
                      [f"{path}: {made.blocks} blocks, {made.recovered} of them not in the old manifest; {made.dropped} rows dropped",
                       f"  {made.quarantined} slots in quarantine; kvtier store gc removes the old manifest"])

    _leave(directory, json, rebuild_one, changes=True)


@store.command()
def gc(directory: Directory,
       release: Annotated[bool, typer.Option("--release-quarantine", help="Also put quarantined slots back into service, empty: after "
                                             "a crash of the machine, when the drive is good.")] = False,
       json: Json = False) -> None:
    """Remove what has expired or was left behind.

    That is blocks whose time is over, damaged manifests that were kept, and files of interrupted runs.
    """
    from kvtier.io.store_commands import collect_garbage

    def collect_one(path: Path) -> Answer:
        gone = collect_garbage(path, release)
        return Answer({"directory": gone.directory, "expired": gone.expired, "released": gone.released, "files": list(gone.files),
                       "num_bytes": gone.num_bytes},
                      [f"{path}: {gone.expired} expired blocks and {len(gone.files)} files removed ({gone.num_bytes} bytes)",
                       *[f"  {gone.released} quarantined slots are in service again"] * release,
                       *(f"  {name}" for name in gone.files)])

    _leave(directory, json, collect_one, changes=True)


@store.command()
def clear(directory: Directory, yes: Annotated[bool, typer.Option("--yes", help="Really do it.")] = False, json: Json = False) -> None:
    """Forget all blocks. The files keep their size: delete the directory to free the space."""
    from kvtier.io.store_commands import clear_store, list_store

    def clear_one(path: Path) -> Answer:
        if not yes:
            blocks = sum(group.blocks for group in list_store(path).groups)
            raise ConfigError(f"{path} holds {blocks} blocks, which would all be forgotten; repeat the command with --yes")
        blocks = clear_store(path)
        return Answer({"directory": str(path), "blocks": blocks},
                      [f"{path}: {blocks} blocks forgotten; delete the directory to free its space"])

    _leave(directory, json, clear_one, changes=True)


def _leave(directory: str, json: bool, command: Callable[[Path], Answer], changes: bool = False) -> None:
    """Run a command for each store, print what it answers, and end with the worst exit code. ``changes``: the command changes stores.

    One store that cannot be used does not keep the others of a root from their turn.
    """
    from kvtier.io.rank_directories import missing_ranks
    from kvtier.io.store_directory import expand
    from kvtier.io.store_view import find_stores, find_stores_to_change
    stores = (find_stores_to_change if changes else find_stores)(directory)
    if stores != [expand(directory)]:
        for name in missing_ranks(stores):
            print(f"kvtier: {directory}: {name} is missing; that rank starts without stored blocks", file=sys.stderr)
    contents: list[dict[str, object]] = []
    worst = FINE
    for path in stores:
        try:
            answer = command(path)
        except (KVTierError, OSError) as error:
            if len(stores) == 1:
                raise
            code = USED_WRONGLY if isinstance(error, ConfigError) else CHECK_FAILED
            answer = Answer({"directory": str(path), "error": str(error)}, [], code)
            print(f"kvtier: {error}", file=sys.stderr)
        contents.append(answer.content)
        worst = max(worst, answer.code)
        if not json:
            for line in answer.lines:
                typer.echo(line)
    if json:
        typer.echo(json_format.dumps(contents, indent=2))
    raise typer.Exit(worst)


def _listing_lines(listing: Listing) -> list[str]:
    state = "DAMAGED" if listing.damage else "sound"
    lines = [f"{listing.directory}: format {listing.format_version}, generation {listing.generation}, manifest and slabs {state}"]
    lines += [f"  {name}: {json_format.dumps(value)}" for name, value in listing.namespace.items()]
    row = "  {:>5} {:>9} {:>9} {:>14} {:>14} {:>8} {:>11}".format
    lines.append(row("group", "slots", "blocks", "bytes", "bytes/block", "expired", "quarantined"))
    lines += [row(group.group, group.slots, group.blocks, group.num_bytes, group.block_bytes, group.expired, group.quarantined)
              for group in listing.groups]
    lines += [f"  {text}" for text in listing.damage]
    if listing.leftovers:
        lines.append(f"  {len(listing.leftovers)} leftover files, {listing.leftover_bytes} bytes: kvtier store gc removes them")
    if listing.scrub_at != (0, 0):
        lines.append("  scrubbing goes on at group {}, slot {}".format(*listing.scrub_at))
    return lines


def _bad_lines(reasons: list[str]) -> list[str]:
    lines = [f"  {reason}" for reason in reasons[:_MOST_LINES]]
    return lines if len(reasons) <= _MOST_LINES else [*lines, f"  and {len(reasons) - _MOST_LINES} more (--json has them all)"]


def _progress() -> Callable[[int, int], None]:
    """Shows how far a long reading is, where somebody is looking."""
    if not sys.stderr.isatty():
        return lambda done, total: None

    def show(done: int, total: int) -> None:
        if done % 64 == 0 or done == total:
            print(f"\r{done} of {total} blocks", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return show
