"""Where each rank's store lies when several ranks have theirs under one root (design: NVMe rules, "ranks").

The blocks of two ranks have the same keys and different bytes, so each has a directory, lock and manifest of its own. Its name says how
many ranks there are: with another number every rank holds other layers or heads, and none of the old blocks is of use.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError
from kvtier.io.store_directory import IDENTITY_NAME, NOT_CONTENT, occupied_bytes, unusable

_NAME: Final = re.compile(r"rank-(\d+)-of-(\d+)")


def rank_directory(root: Path, rank: int, num_ranks: int) -> Path:
    """The directory of one rank's store: below ``root``, or ``root`` itself where there is one rank."""
    return root if num_ranks == 1 else root / f"rank-{rank}-of-{num_ranks}"


def prepare_rank_directory(root: Path, rank: int, num_ranks: int) -> Path:
    """The same, after a look at who else is below ``root``. With several ranks, ``root`` is made when it is missing.

    Raises:
        ConfigError: as :func:`require_root`; or it cannot be made.
    """
    require_root(root, num_ranks)
    if num_ranks > 1:
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise unusable(root, error) from error
    return rank_directory(root, rank, num_ranks)


def require_root(root: Path, num_ranks: int) -> None:
    """Look whether so many ranks may have their stores here. Changes nothing.

    Raises:
        ConfigError: ``root`` is the store of one rank, or of another number of ranks, or (with several) holds something else.
    """
    remedy = "Give another directory, or delete what is there if its blocks are no longer wanted"
    try:
        entries = {entry.name: _NAME.fullmatch(entry.name) for entry in root.iterdir()} if root.is_dir() else {}
        others = sorted({int(match[2]) for match in entries.values() if match is not None} - {num_ranks})
        if others:
            raise ConfigError(f"nvme_directory={str(root)!r} holds stores of {' and '.join(map(str, others))} ranks, configured is "
                              f"num_ranks={num_ranks}. {remedy}")
        if num_ranks == 1:
            return
        if IDENTITY_NAME in entries:
            raise ConfigError(f"nvme_directory={str(root)!r} is the store of one rank, configured is num_ranks={num_ranks}. {remedy}")
        foreign = sorted(name for name, match in entries.items() if match is None and name not in NOT_CONTENT)
        if foreign:
            raise ConfigError(f"nvme_directory={str(root)!r} holds {len(foreign)} other entries ({', '.join(foreign[:3])}, ...): it is not "
                              "a root of kvtier stores. Give an empty directory or one that does not exist yet")
    except OSError as error:
        raise unusable(root, error) from error


def occupied_by_ranks(root: Path) -> int:
    """What slab files have allocated in ``root`` and in the directories of ranks below it.

    Raises:
        ConfigError: a directory cannot be looked into.
    """
    return sum(map(occupied_bytes, [root, *(place for place in root.glob("rank-*") if _NAME.fullmatch(place.name))]))


def are_ranks_of_one(stores: Sequence[Path]) -> bool:
    """Whether the names are those that one cache or engine gives to the directories of its ranks; some may be missing."""
    matches = [_NAME.fullmatch(path.name) for path in stores]
    return len({None if match is None else match[2] for match in matches}) == 1 and None not in matches


def in_order_of_ranks(stores: Sequence[Path]) -> list[Path]:
    """By name, numbers in their order: rank 10 comes behind rank 2."""
    return sorted(stores, key=lambda path: [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)])


def missing_ranks(stores: Sequence[Path]) -> list[str]:
    """Names of the directories that should be beside these, as they say how many ranks there are."""
    names = {path.name for path in stores}
    counts = {int(match[2]) for match in map(_NAME.fullmatch, names) if match is not None}
    return [name for count in sorted(counts) for rank in range(count) if (name := f"rank-{rank}-of-{count}") not in names]
