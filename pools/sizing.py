"""Sizes: from "8 blocks", "64GiB" or "90%" to block counts per group and level, checked before anything is allocated.

Part of design.md's public names (``TierConfig``): what does not fit is said in bytes, with what to change. Pure
arithmetic: what is free is passed in, so that one rule serves CPU, CUDA and tests.
"""

from __future__ import annotations

import difflib
import enum
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from kvtier.errors import ConfigError
from kvtier.pools.layout import KVLayout, LayerGroup
from kvtier.pools.nvme_geometry import NvmeGeometry
from kvtier.pools.pool_index import LEVEL_NAMES, NVME, PRIMARY, SECONDARY

_log = logging.getLogger(__name__)

ALIGNMENT: Final = 4096
MAX_BLOCKS: Final = 1 << 31
"""Most blocks that one size may name: slots and ids stay far inside 64-bit offsets, and a slip is caught."""
MAX_BYTES: Final = 1 << 60

_BYTE_UNITS: Final = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
                      "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_UNITS_BY_LOWER: Final = {unit.lower(): unit for unit in (*_BYTE_UNITS, "blocks", "%")} | {"block": "blocks"}
_SPELLING: Final = re.compile(r"([+-]?)([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z%]*)")
_MAX_DIGITS: Final = 100  # the largest size there is has 19
_MAX_SHOWN: Final = 200
_EXAMPLES: Final = 'write for example "8 blocks", "64GiB", "500 MB" or "90%"'


class SizeKind(enum.Enum):
    """What a size counts."""

    BLOCKS = "blocks"  #: blocks of each group
    BYTES = "bytes"    #: bytes of the whole level, or of one group when given per group
    SHARE = "share"    #: a share of what is free, 0..1


@dataclass(frozen=True)
class Size:
    """One parsed size. ``amount`` is exact: whole blocks, whole bytes, or a share of 1."""

    kind: SizeKind
    amount: Fraction
    text: str


def parse_size(text: object, name: str) -> Size:
    """Parse one size with its unit; ``name`` is the key it came from, for messages.

    Units: ``blocks``, ``B``, ``KB`` ... ``TB`` (powers of 1000), ``KiB`` ... ``TiB`` (powers of 1024), ``%``; upper and
    lower case alike. Fractions are fine for bytes and shares.

    Raises:
        ConfigError: no unit, an unknown unit, a negative number, a fraction of a block, more than 100%, too large.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        raise ConfigError(_no_unit(name, text, shown(abs(text))))
    if not isinstance(text, str):
        raise ConfigError(f"{name}={shown(text)}: not a size; {_EXAMPLES}")
    match = _SPELLING.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{name}={shown(text)}: not a size; {_EXAMPLES}")
    sign, digits, unit_text = match.groups()
    if not unit_text:
        raise ConfigError(_no_unit(name, text, digits))
    unit = _UNITS_BY_LOWER.get(unit_text.lower())
    if unit is None:
        near = difflib.get_close_matches(unit_text.lower(), _UNITS_BY_LOWER, 1)
        hint = f'did you mean "{digits} {_UNITS_BY_LOWER[near[0]]}"?' if near else _EXAMPLES
        raise ConfigError(f"{name}={shown(text)}: unknown unit {shown(unit_text)}; {hint}")
    if sign == "-":
        raise ConfigError(f"{name}={shown(text)}: a size must not be negative; {_EXAMPLES}")
    if len(digits) > _MAX_DIGITS:
        raise ConfigError(f"{name}={shown(text)}: {len(digits)} digits; {_EXAMPLES}")
    number = Fraction(digits)
    if unit == "blocks":
        if number.denominator != 1:
            raise ConfigError(f"{name}={shown(text)}: blocks come whole; write \"{math.ceil(number)} blocks\"")
        if number > MAX_BLOCKS:
            raise ConfigError(f"{name}={shown(text)}: at most {MAX_BLOCKS} blocks")
        return Size(SizeKind.BLOCKS, number, text)
    if unit == "%":
        if number > 100:
            raise ConfigError(f"{name}={shown(text)}: a share is at most 100%")
        return Size(SizeKind.SHARE, number / 100, text)
    num_bytes = math.floor(number * _BYTE_UNITS[unit])
    if num_bytes > MAX_BYTES:
        raise ConfigError(f"{name}={shown(text)}: at most {format_bytes(MAX_BYTES)}")
    return Size(SizeKind.BYTES, Fraction(num_bytes), text)


def shown(value: object) -> str:
    """A value as messages show it: a long one shortened, and a number of thousands of digits not at all, for Python refuses to."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _no_unit(name: str, text: object, digits: str) -> str:
    """The message for a number without its unit, with what may have been meant: not each unit goes with each number."""
    try:
        number = Fraction(digits) if len(digits) <= _MAX_DIGITS and "e" not in digits else None  # 1e-05 is no spelling of a size
    except ValueError:  # nan, inf
        number = None
    if number is None:
        return f"{name}={shown(text)}: a size needs a unit; {_EXAMPLES}"
    meant = []
    if number.denominator == 1 and number <= MAX_BLOCKS:
        meant.append(f"{number} blocks")
    if number <= MAX_BYTES:
        meant.append(f"{digits}GiB" if number * _BYTE_UNITS["GiB"] <= MAX_BYTES else f"{digits}B")
    if "." in digits and number <= 1:
        meant.insert(0, f"{float(number * 100):g}%")  # a share of 1, as other settings have it
    elif number <= 100:
        meant.append(f"{digits}%")
    words = ", ".join(f'"{each}"' for each in meant)
    return f"{name}={shown(text)}: a size needs a unit; " + (f"write {' or '.join(words.rsplit(', ', 1))}" if meant else _EXAMPLES)


def parse_sizes(value: object, name: str) -> tuple[Size, ...]:
    """Parse a size, or a list with one size per group.

    Raises:
        ConfigError: as :func:`parse_size`, or an empty list.
    """
    if isinstance(value, (list, tuple)):
        if not value:
            raise ConfigError(f"{name}=[]: a list of sizes names one per group; {_EXAMPLES}")
        return tuple(parse_size(item, f"{name}[{number}]") for number, item in enumerate(value))
    return (parse_size(value, name),)


def format_bytes(num_bytes: int) -> str:
    """Bytes for people: "1.50 GiB (1610612736 bytes)"."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{amount:.2f} {unit} ({num_bytes} bytes)"


@dataclass(frozen=True)
class FreeSpace:
    """What is free, in bytes, before kvtier takes anything.

    Attributes:
        host_bytes: host memory.
        host_limit: what bounds ``host_bytes``, for messages ("MemAvailable", "cgroup limit").
        device_bytes: memory of the CUDA device; None for ``device="cpu"``, where primary and secondary share
            ``host_bytes`` and primary is served first.
        disk_bytes: what the slab files may occupy: free space less the reserve, plus what they occupy already; None
            without a directory.
        host_part_bytes, disk_part_bytes: what a size in percent is a share of, where other ranks on this machine have the rest; None: all.
    """

    host_bytes: int
    host_limit: str = "host memory"
    device_bytes: int | None = None
    disk_bytes: int | None = None
    host_part_bytes: int | None = None
    disk_part_bytes: int | None = None


@dataclass(frozen=True)
class PoolSizes:
    """Blocks per group, for each level."""

    primary: tuple[int, ...]
    secondary: tuple[int, ...]
    nvme: tuple[int, ...]


def slot_bytes(group: LayerGroup, level: int) -> int:
    """Bytes that one block of ``group`` takes on a level, padding and header included."""
    if level == PRIMARY:
        return group.block_bytes
    if level == SECONDARY:
        return -(-group.block_bytes // ALIGNMENT) * ALIGNMENT
    return NvmeGeometry(group.block_bytes, 1).stride


def level_bytes(layout: KVLayout, counts: Sequence[int], level: int) -> int:
    """Bytes that ``counts[group]`` blocks of each group take on a level."""
    return sum(count * slot_bytes(group, level) for group, count in zip(layout.groups, counts, strict=True))


def nvme_geometries(layout: KVLayout, sizes: PoolSizes) -> list[NvmeGeometry]:
    """The slab file of each group, by group number: what ``NvmeStore.open`` takes. A group without NVMe blocks has 0 slots."""
    return [NvmeGeometry(group.block_bytes, count) for group, count in zip(layout.groups, sizes.nvme, strict=True)]


def resolve_sizes(layout: KVLayout, primary: object, secondary: object, nvme: object, free: FreeSpace,
                  group_shares: Sequence[float] | None = None, max_tokens: int | None = None,
                  has_direct_nvme: bool = False, byte_divisor: int = 1) -> PoolSizes:
    """Block counts per group and level, and the check that they fit into what is free.

    A size is one for all groups (blocks: of each group; bytes and shares: of the level, split by ``group_shares``, equal by default) or a
    list with one per group. Cross-attention groups have a primary level only: their part of a lower level is the others'. Rounding follows
    TensorRT-LLM's ``calculateMaxNumBlocks``: bytes become whole tokens, and the primary level rounds its last block up, the lower levels
    down. A share always rounds down: it must never ask for more than there is.

    ``max_tokens`` caps each group's primary level at the blocks of so many tokens. The smaller of size and cap counts, and a
    warning names both where they differ.

    ``byte_divisor``: sizes in bytes are for so many ranks together, of which this is one.

    ``has_direct_nvme``: primary blocks reach NVMe by themselves (GPUDirect Storage), so a group may do without secondary blocks.

    Raises:
        ConfigError: a list whose length is not the number of groups, a group left without primary blocks, a lower level
            smaller than one block, a group with NVMe but without secondary blocks, or a level that does not fit; names
            level, wanted, available and what to change.
    """
    shares = parts_of_groups(group_shares, len(layout.groups))
    on_device = free.device_bytes is not None
    host_part = free.host_bytes if free.host_part_bytes is None else free.host_part_bytes
    disk_part = free.disk_bytes if free.disk_part_bytes is None else free.disk_part_bytes
    primary_free = free.device_bytes if free.device_bytes is not None else host_part
    primary_counts = _level_counts(layout, primary, PRIMARY, shares, primary_free, byte_divisor)
    for group, count in zip(layout.groups, primary_counts, strict=True):
        if count == 0:
            raise ConfigError(f"primary={shown(primary)} gives group {group.number} no block; a block of it takes "
                              f"{format_bytes(group.block_bytes)}: raise primary=... or the group's share")
    if max_tokens is not None:
        primary_counts = _capped(layout, primary, primary_counts, max_tokens)
    taken = 0 if on_device else level_bytes(layout, primary_counts, PRIMARY)
    secondary_counts = _level_counts(layout, secondary, SECONDARY, shares, max(0, host_part - taken), byte_divisor)
    if free.disk_bytes is None and any(size.amount for size in parse_sizes(nvme, "nvme")):
        raise ConfigError(f"nvme={shown(nvme)} wants a folder for its files; set nvme_directory=...")
    nvme_counts = _level_counts(layout, nvme, NVME, shares, disk_part or 0, byte_divisor)
    sizes = PoolSizes(primary_counts, secondary_counts, nvme_counts)
    check_fits(layout, sizes, free)
    for number, below in enumerate(nvme_counts):
        if below and not secondary_counts[number] and not has_direct_nvme:
            raise ConfigError(f"nvme={shown(nvme)} gives group {number} {below} blocks and secondary={shown(secondary)} gives it none: "
                              "blocks reach NVMe through the secondary level; give the group both or none of them")
    return sizes


def warn_of_unread_levels(sizes: PoolSizes, enable_block_reuse: bool) -> None:
    """Say once, when a tier is made, that its lower levels are of no use: without reuse nothing would ever be read back."""
    blocks = sum(sizes.secondary)
    if blocks and not enable_block_reuse:
        _log.warning("secondary: %d blocks of host memory with enable_block_reuse=False: nothing would ever be read back from "
                     "there; set secondary=\"0 blocks\", or enable_block_reuse=True", blocks)


def _capped(layout: KVLayout, primary: object, counts: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Primary blocks after the cap; a warning says what did not count."""
    cap = -(-max_tokens // layout.tokens_per_block)
    named = ", ".join(map(str, counts))
    if any(count > cap for count in counts):
        _log.warning("primary: max_tokens=%d allows %d blocks per group, primary=%r would give %s: the smaller one counts",
                     max_tokens, cap, primary, named)
    elif any(count < cap for count in counts):
        _log.warning("primary: primary=%r gives %s blocks, max_tokens=%d would allow %d per group: the smaller one counts",
                     primary, named, max_tokens, cap)
    return tuple(min(count, cap) for count in counts)


def check_fits(layout: KVLayout, sizes: PoolSizes, free: FreeSpace) -> None:
    """Compare what the levels want with what is free.

    Raises:
        ConfigError: names the first level that does not fit, the wanted and the available size, and what to lower.
    """
    wanted = [level_bytes(layout, counts, level)
              for level, counts in enumerate((sizes.primary, sizes.secondary, sizes.nvme))]
    if free.device_bytes is not None:
        _check_level(PRIMARY, wanted[PRIMARY], free.device_bytes, "device memory")
        _check_level(SECONDARY, wanted[SECONDARY], free.host_bytes, free.host_limit)
    else:
        _check_level(PRIMARY, wanted[PRIMARY], free.host_bytes, free.host_limit)
        _check_level(SECONDARY, wanted[SECONDARY], free.host_bytes - wanted[PRIMARY],
                     f"{free.host_limit} after the primary level")
    _check_level(NVME, wanted[NVME], free.disk_bytes or 0, "disk space of nvme_directory after the reserve")


def _check_level(level: int, wanted: int, available: int, where: str) -> None:
    if wanted > available:
        name = LEVEL_NAMES[level]
        raise ConfigError(f"{name}: {format_bytes(wanted)} wanted, {format_bytes(max(0, available))} available "
                          f'({where}); lower {name}=..., for example to a share of what is free: {name}="50%"')


def parts_of_groups(group_shares: Sequence[float] | None, count: int) -> list[Fraction]:
    """What each of ``count`` groups gets of a level, adding up to 1: equal parts without ``group_shares``.

    Raises:
        ConfigError: not one share for each group, or unusable ones.
    """
    if group_shares is None:
        return [Fraction(1, count)] * count
    check_group_shares(group_shares)
    if len(group_shares) != count:
        raise ConfigError(f"group_shares={shown(list(group_shares))}: {len(group_shares)} shares for {count} groups; give one per group")
    shares = [Fraction(str(share)) for share in group_shares]  # the decimals that were written, not the floats beside them
    return [share / sum(shares) for share in shares]


def check_group_shares(shares: Sequence[float]) -> None:
    """Raise ConfigError unless every share is in 0..1 and their sum is above 0."""
    if any(not 0.0 <= share <= 1.0 for share in shares):
        raise ConfigError(f"group_shares={shown(list(shares))}: each share must be between 0 and 1")
    if not sum(shares) > 0.0:
        raise ConfigError(f"group_shares={shown(list(shares))}: the shares must add up to more than 0")


def _level_counts(layout: KVLayout, given: object, level: int, shares: list[Fraction], available: int,
                  byte_divisor: int) -> tuple[int, ...]:
    """Blocks of each group on one level. On the lower ones cross-attention has none: what it keeps is never stored, so that nothing of it
    ever goes down."""
    groups = layout.groups
    sizes = parse_sizes(given, LEVEL_NAMES[level])
    goes_down = [level == PRIMARY or group.kind != "cross" for group in groups]
    if isinstance(given, (list, tuple)):
        if len(sizes) != len(groups):
            raise ConfigError(f"{LEVEL_NAMES[level]}: {len(sizes)} sizes for {len(groups)} groups; give one for all, not in a list, or a "
                              f"list with one per group, not {shown(list(given))}")
        parts = [(size, Fraction(1)) for size in sizes]
        for group, size, counts in zip(groups, sizes, goes_down, strict=True):
            if size.amount and not counts:
                _log.warning("%s: %r for group %d, which is cross-attention: nothing of it ever leaves the primary level; it gets no block",
                             LEVEL_NAMES[level], size.text, group.number)
    else:
        total = sum(share for share, counts in zip(shares, goes_down, strict=True) if counts)
        parts = [(sizes[0], share / total if total else share) for share in shares]
    parts = [(size, share / byte_divisor if size.kind is SizeKind.BYTES else share) for size, share in parts]
    return tuple(_blocks(group, size, level, share, available) if counts else 0
                 for group, (size, share), counts in zip(groups, parts, goes_down, strict=True))


def _blocks(group: LayerGroup, size: Size, level: int, share: Fraction, available: int) -> int:
    """Blocks of one group that a size stands for; ``share`` is the group's part of a byte amount."""
    if size.kind is SizeKind.BLOCKS:
        return int(size.amount)
    per_block = slot_bytes(group, level)
    if size.kind is SizeKind.SHARE:
        count = math.floor(available * size.amount * share) // per_block
    elif level == PRIMARY:
        num_tokens = math.floor(size.amount * share) * group.tokens_per_block // per_block
        count = -(-num_tokens // group.tokens_per_block)
    else:
        count = math.floor(size.amount * share) // per_block
    if count == 0 and size.amount > 0 and share > 0 and level != PRIMARY:
        raise ConfigError(f"{LEVEL_NAMES[level]}={shown(size.text)} is less than one block of group {group.number}, which "
                          f"takes {format_bytes(per_block)} there; raise it, or leave the level out: \"0 blocks\"")
    return count
