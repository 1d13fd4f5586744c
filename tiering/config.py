"""``TierConfig``: every setting of the tier, from keywords, environment and file, in one strict model.

Precedence: keywords > ``KVTIER_<KEY>`` in the environment > file (YAML or TOML) > defaults. A key that nobody knows is
an error with the nearest name, wherever it was written: a setting that is silently dropped is one that does not work.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self, TypeGuard

from pydantic import (
    Field,
    InstanceOf,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvtier.errors import ConfigError
from kvtier.io.fault_text import parse_faults
from kvtier.io.faults import Faults
from kvtier.policies.retention import LEVELS
from kvtier.pools.rate import parse_rate
from kvtier.pools.sizing import SizeKind, check_group_shares, parse_size, parse_sizes, shown
from kvtier.tiering.config_sources import (
    ENVIRONMENT_PREFIX,
    KEYWORD_ONLY,
    Environment,
    File,
    Keywords,
    Sourced,
    expand_path,
    reading_file,
    unknown_key,
)

Sizes = str | list[str]
"""A size for every group, or a list with one per group; see ``kvtier.pools.sizing``."""
Priority = Annotated[int, Field(ge=0, le=100), WithJsonSchema(
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 100}, {"type": "string", "enum": [*LEVELS]}]})]


class TierConfig(BaseSettings):
    """Settings of one tier. Immutable; every key can be given as a keyword, as ``KVTIER_<KEY>`` or in a file.

    ``sources`` tells for each key where its value came from. Raises ConfigError for anything that cannot be used: an
    unknown key, a wrong type, a value outside its limits, settings that contradict each other.

    >>> TierConfig(primary="8 blocks", secondary="4 blocks").sources["primary"]
    'keyword'
    """

    model_config = SettingsConfigDict(strict=True, extra="forbid", frozen=True, env_prefix=ENVIRONMENT_PREFIX,
                                      arbitrary_types_allowed=True, allow_inf_nan=False, use_attribute_docstrings=True)

    primary: Sizes = "90%"
    """Device memory for blocks (host memory with ``device="cpu"``). At least one block per group."""
    secondary: Sizes = "0 blocks"
    """Pinned host memory. On the CPU it comes out of what the primary level leaves."""
    nvme: Sizes = "0 blocks"
    """Space for slab files in ``nvme_directory``, what is already there included. Needs ``secondary`` as well, through which blocks get
    there; only with ``gds="required"`` it does not."""
    group_shares: list[float] | None = None
    """How the groups divide a size that is given in bytes or percent for all of them: one number per group, each from 0 to 1, scaled to
    add up to 1. None: equally. A size in blocks is each group's, and a list has each group's own size."""
    max_tokens: Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    """Most tokens for which the primary level holds blocks, in each group. With ``primary``, the smaller of the two counts."""

    rank: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    """Which of ``num_ranks`` this process is, from 0."""
    num_ranks: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    """Processes of one engine on this machine whose blocks hold different parts of the same tokens (tensor or pipeline parallel). Each has
    a store of its own under ``nvme_directory``. Percentages of host memory and disk are divided among them."""
    size_scope: Literal["rank", "total"] = "rank"
    """Whether sizes in bytes are of each rank, or of all ``num_ranks`` together, in equal parts. A size in blocks is each rank's always:
    every rank holds its part of every block."""

    max_batch_size: Annotated[int, Field(ge=1, le=1 << 20)] = 64
    """Most sequences in one step; block tables are allocated for it."""
    max_seq_len: Annotated[int, Field(ge=1, le=1 << 31)] = 8192
    """Most tokens of one sequence, prompt and answer together; and of one encoder's output."""
    max_beam_width: Annotated[int, Field(ge=1, le=1 << 10)] = 1
    """Most beams of one request; block tables have a row for each beam of each sequence."""
    chunk_size: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    """Tokens the engine prefills at a time; None: the whole prompt at once. Chunks end at multiples of it. Layers with a window then hold
    only the blocks of the window and one chunk."""
    window_scratch_blocks: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    """With ``chunk_size``: most blocks per window group, over all requests, that are out of the window again when their chunk is computed.
    A request for whose chunk there are none waits. None: enough for two chunks."""

    nvme_directory: Path | None = None
    """Folder of the NVMe level. ``~`` and ``$VARS`` are expanded; a relative one is in the process's working directory, wherever it is
    written, and made absolute at once. With several ranks, the root under which each has its own."""
    nvme_free_space_reserve: str = "1GiB"
    """Free space that the NVMe level leaves on its file system; a size in bytes."""
    nvme_sync: bool = False
    """Wait for the drive's own cache on every commit. Off: power loss may cost recent entries, never correctness."""
    nvme_write_bandwidth: str | None = None
    """Store at most so much on NVMe, such as "500MiB/s"; closing a cache does not wait for it. None: as much as the drive takes. Loads are
    not counted."""
    nvme_scrub_bandwidth: str | None = None
    """Verify NVMe blocks in the background while nothing is being moved, reading at most so much, such as "50MiB/s". None: not at all;
    ``kvtier store scrub`` does it while no process uses the directory."""
    read_threads: Annotated[int, Field(ge=1, le=256)] = 4
    """Threads that read and verify NVMe blocks. How many of them have a read in the drive at once is found by measuring."""
    write_ahead_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.25
    """Share of the secondary level (without one, of the primary level) that ``refresh`` keeps clean, that is also on NVMe, coldest
    first; 0: none."""

    secondary_offload_min_priority: Priority = 35
    """Blocks below this priority are dropped instead of going to the secondary level. "HIGH", "MEDIUM" and "LOW" are 80, 35 and 10."""
    nvme_offload_min_priority: Priority = 35
    """Blocks below this priority never reach NVMe. "HIGH", "MEDIUM" and "LOW" are 80, 35 and 10."""
    enable_block_reuse: bool = True
    """Match and store prompts. Without it nothing is ever found again."""
    enable_partial_reuse: bool = True
    """Reuse a block whose first tokens match, not only whole blocks. Has no effect where layers keep a running state."""
    copy_on_partial_reuse: bool = True
    """Copy a partly matching block that others may want, instead of taking it over."""
    keep_backing: bool = True
    """Keep the lower copy of a promoted block while there is room: evicting it again then costs no write."""
    event_buffer_max_size: Annotated[int, Field(ge=0, le=1 << 30)] = 1024
    """Most events kept for ``poll_events``; 0 turns events off."""
    gds: Literal["required", "auto", "off"] = "auto"
    """GPUDirect Storage: fail without it, use it where a probe of the directory has shown that it works, or never."""
    gds_threads: Annotated[int, Field(ge=1, le=256)] = 8
    """With GPUDirect: threads of KvikIO in this process."""
    gds_task_size: str = "1MiB"
    """With GPUDirect: what one of those threads moves at a time; a size in bytes."""
    nvme_min_uses: Annotated[int, Field(ge=0, le=2)] = 0
    """Write a block to NVMe only when its prompt was asked for so many times before, as far as that is remembered. 1 spares a drive much
    of what never comes back, and costs hits of what comes back once."""
    nvme_max_depth: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    """Keep off NVMe what lies behind so many blocks of its prompt. None: nothing."""
    policy: Literal["default", "lru", "halving", "seen-first"] = "default"
    """Which content of the lowest priority is given up first. "lru": the least recently used; "halving" and "seen-first" keep prompts that
    were asked for before longer; "default" tries these on samples of the traffic and does what had the most hits (docs/tuning.md)."""
    request_directory_root: Path | None = None
    """Folder under which a request's own ``directory`` must lie, for ``TransferMode.POSIX_DEBUG_FALLBACK``. None: requests may not name
    one."""

    layer_pieces: Annotated[int, Field(ge=1, le=1 << 16)] = 4
    """Into how many pieces, by layers, blocks are cut on their way from the secondary to the primary level, at most, so that a forward pass
    can begin with the first layers (see ``step``). Small loads are not cut, nor those whose pieces would be too small. 1: none."""
    prefetch_bandwidth: str | None = "1GiB/s"
    """What ``prefetch`` reads and copies at most, all prefetches together. None: it does nothing."""
    load_decision: Literal["auto", "always"] = "auto"
    """Whether a prefix found on a lower level is loaded: "auto" leaves it to recompute where that is faster, as far as the engine has
    reported how fast it computes (``report_prefill``); "always" loads."""

    debug_checks: bool = False
    """Look at the order of all copies, file operations and steps a second time (LedgerError where nothing orders two uses of a slot), and
    fill blocks with a pattern before the step that first writes into them. An engine then writes into blocks within ``step`` only."""

    faults: Annotated[InstanceOf[Faults] | None, WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]})] = None
    """Failures on demand, to try what they cost: rules such as ``"nvme.read.bit_flip=0.01, secondary.copy.delay=0.1:5ms*20"`` (see
    ``kvtier.io.fault_text``), as text or as a list; in code also a ``Faults``. Never in production: they really happen."""
    clock: SkipJsonSchema[Callable[[], float]] = time.monotonic
    """Seconds that only go forward; a keyword only."""
    allreduce_min: SkipJsonSchema[Callable[[list[int]], list[int]] | None] = None
    """With several ranks: takes this rank's numbers and returns, element by element, the least of all ranks. Every rank calls it while
    its tier is made, so that all have the same number of blocks. A keyword only."""

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def from_file(cls, path: str | Path, **overrides: Any) -> TierConfig:
        """Read a ``.yaml``, ``.yml`` or ``.toml`` file instead of the one ``KVTIER_CONFIG`` names.

        ``overrides`` are keywords and, like the environment, win over the file.

        Raises:
            ConfigError: the file is missing, of another kind, no mapping of keys, or holds a bad key or value.
        """
        with reading_file(expand_path(path, "config file")):
            return cls(**overrides)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's, but ``update`` is checked as keywords are. Raises ConfigError."""
        copied = super().model_copy(deep=deep)
        if not update:
            return copied
        changed = type(self)(**{key: getattr(copied, key) for key in type(self).model_fields} | dict(update))
        changed._sources = self._sources | {key: changed._sources[key] for key in update if key in changed._sources}
        return changed

    @property
    def sources(self) -> Mapping[str, str]:
        """For each key "keyword", "environment KVTIER_<KEY>", "file PATH" or "default"."""
        return MappingProxyType(self._sources)

    @property
    def nvme_free_space_reserve_bytes(self) -> int:
        return int(parse_size(self.nvme_free_space_reserve, "nvme_free_space_reserve").amount)

    @property
    def prefetch_bytes_per_second(self) -> float:
        return 0.0 if self.prefetch_bandwidth is None else parse_rate(self.prefetch_bandwidth, "prefetch_bandwidth")

    @property
    def nvme_scrub_bytes_per_second(self) -> float | None:
        return None if self.nvme_scrub_bandwidth is None else parse_rate(self.nvme_scrub_bandwidth, "nvme_scrub_bandwidth")

    @property
    def nvme_write_bytes_per_second(self) -> float | None:
        return None if self.nvme_write_bandwidth is None else parse_rate(self.nvme_write_bandwidth, "nvme_write_bandwidth")

    def plain_values(self) -> dict[str, str | int | float | list[str] | list[float] | None]:
        """Every key's value as a file has it, None for what is not set, in the order of this class. Without keys that only code can set."""
        values = {key: getattr(self, key) for key in type(self).model_fields if key not in KEYWORD_ONLY}
        return {key: str(value) if isinstance(value, (Path, Faults)) else value for key, value in values.items()}

    def effective(self) -> list[tuple[str, str, str]]:
        """(key, value in words, source) of every key, in the order of this class: what an engine prints when it starts."""
        return [(key, "not set" if value is None else value if isinstance(value, str) else json.dumps(value), self._sources[key])
                for key, value in self.plain_values().items()]

    @classmethod
    def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource, dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keywords, then environment, then file; each value marked with where it came from."""
        return Keywords(settings_cls, init_settings), Environment(settings_cls), File(settings_cls)

    @field_validator("primary", "secondary", "nvme", mode="before")
    @classmethod
    def _check_sizes(cls, value: object, info: ValidationInfo) -> object:
        sizes = parse_sizes(value, str(info.field_name))
        if info.field_name == "primary" and any(size.amount == 0 for size in sizes):
            raise ConfigError(f"primary={shown(value)}: the primary level needs at least 1 block per group; write for "
                              'example "8 blocks" or "90%"')
        return list(value) if isinstance(value, tuple) else value

    @field_validator("nvme_free_space_reserve", mode="before")
    @classmethod
    def _check_reserve(cls, value: object) -> object:
        if parse_size(value, "nvme_free_space_reserve").kind is not SizeKind.BYTES:
            raise ConfigError(f'nvme_free_space_reserve={shown(value)}: must be a size in bytes, for example "1GiB"')
        return value

    @field_validator("gds_task_size", mode="before")
    @classmethod
    def _check_task_size(cls, value: object) -> object:
        size = parse_size(value, "gds_task_size")
        if size.kind is not SizeKind.BYTES or size.amount < 4096 or size.amount % 4096:
            raise ConfigError(f'gds_task_size={shown(value)}: must be a multiple of 4096 bytes, for example "1MiB"')
        return value

    @field_validator("nvme_scrub_bandwidth", "nvme_write_bandwidth", "prefetch_bandwidth", mode="before")
    @classmethod
    def _check_bandwidth(cls, value: object, info: ValidationInfo) -> object:
        if value is not None:
            parse_rate(value, str(info.field_name))
        return value

    @field_validator("group_shares", mode="before")
    @classmethod
    def _check_shares(cls, value: object) -> object:
        if isinstance(value, Sequence) and all(type(share) in (int, float) for share in value):
            check_group_shares(value)
            return [float(share) for share in value]
        return value

    @field_validator("nvme_directory", "request_directory_root", mode="before")
    @classmethod
    def _expand_paths(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, (str, Path)):
            return value
        path = expand_path(value, str(info.field_name))
        try:
            return path.absolute()  # once: a later chdir must not move the folder
        except OSError as error:
            raise ConfigError(f"{info.field_name}={shown(value)}: relative, and there is no working directory ({error.strerror}); write "
                              "the path out") from None

    @field_validator("gds", mode="before")
    @classmethod
    def _gds_switch(cls, value: object) -> object:
        if value is True:  # YAML 1.1 reads a bare `on` as true, and a bare `off` as false
            raise ConfigError('gds=True: must be "required", "auto" or "off" (YAML reads on and yes as true); write "auto" to use it where '
                              'it works, "required" to insist')
        return "off" if value is False else value

    @field_validator("secondary_offload_min_priority", "nvme_offload_min_priority", mode="before")
    @classmethod
    def _named_priority(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, str) or value.strip().lstrip("+-").isdecimal():  # a number from the environment is text, too
            return value
        if value.strip().upper() not in LEVELS:
            names = ", ".join(f"{name} ({number})" for name, number in LEVELS.items())
            raise ConfigError(f"{info.field_name}={shown(value)}: a priority is a whole number from 0 to 100, or one of {names}")
        return LEVELS[value.strip().upper()]

    @field_validator("faults", mode="before")
    @classmethod
    def _read_faults(cls, value: object) -> object:
        return parse_faults(value) if isinstance(value, str) or _is_texts(value) else value

    @field_validator("*", mode="wrap")
    @classmethod
    def _say_where_from(cls, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        """Unwrap a marked value. Stands behind all other validators of fields, and so around them: what they refuse is refused with the
        file or variable that it came from. Defaults are not marked."""
        if not isinstance(value, Sourced):
            return handler(value)
        try:
            return handler(value.value)
        except ConfigError as error:
            raise value.refused(error) from None

    @model_validator(mode="after")
    def _check_ranks(self) -> TierConfig:
        if self.rank >= self.num_ranks:
            raise ConfigError(f"rank={self.rank} with num_ranks={self.num_ranks}: ranks are numbered from 0 to num_ranks - 1; set both")
        return self

    @model_validator(mode="after")
    def _check_scratch(self) -> TierConfig:
        if self.window_scratch_blocks is not None and self.chunk_size is None:
            raise ConfigError(f"window_scratch_blocks={self.window_scratch_blocks} without chunk_size: whole prompts are computed at once; "
                              "set chunk_size or leave it out")
        return self

    @model_validator(mode="after")
    def _check_nvme(self) -> TierConfig:
        nvme = parse_sizes(self.nvme, "nvme")
        if not any(size.amount for size in nvme):
            return self
        secondary = parse_sizes(self.secondary, "secondary")
        if self.nvme_directory is None:
            is_alone = self.gds != "required" and not any(size.amount for size in secondary)
            raise ConfigError(f"nvme={shown(self.nvme)} wants a folder for its files" + (
                ', and a secondary level through which blocks get there; set nvme_directory=... and for example secondary="4GiB" (or, with '
                'GPUDirect Storage, gds="required")' if is_alone else "; set nvme_directory=..."))
        for group, size in enumerate(nvme):
            beside = secondary[group] if group < len(secondary) else secondary[-1]
            if size.amount and not beside.amount and self.gds != "required":
                raise ConfigError(f"nvme={shown(self.nvme)} with secondary={shown(self.secondary)}: NVMe without a secondary level needs "
                                  'GPUDirect Storage; set for example secondary="4GiB", or gds="required"')
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _from_sources(cls, data: object, handler: ModelWrapValidatorHandler[TierConfig]) -> TierConfig:
        """Refuse unknown keys, and turn pydantic's errors into ConfigError.

        ``model_validate`` and a field of another model come here twice: with what they were given, and from within ``handler``, whose
        constructor has read all sources, with values that are marked.
        """
        if not isinstance(data, Mapping):
            return handler(data)  # a TierConfig, or nothing that could be one: pydantic says so, and goes on where a field may be either
        if not all(isinstance(key, str) for key in data):
            raise ConfigError(f'{shown(data)}: a setting\'s key is text; write for example {{"primary": "8 blocks"}}')
        if not all(isinstance(value, Sourced) for value in data.values()):
            return handler(data)
        for key, sourced in data.items():
            if key not in cls.model_fields:
                raise unknown_key(key, sourced.origin, cls.model_fields)
        try:
            config = handler(data)
        except ValidationError as error:
            raise ConfigError("; ".join(_explain(details, data) for details in error.errors())) from None
        if not config._sources:  # else the constructor, called for an empty mapping, has told them
            config._sources = {key: data[key].origin if key in data else "default" for key in cls.model_fields}
        return config


def _is_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_LIMITS: Final = {
    "greater_than_equal": "must be at least {ge}", "less_than_equal": "must be at most {le}",
    "int_type": "must be a whole number", "int_parsing": "must be a whole number", "float_type": "must be a number",
    "bool_type": "must be true or false", "bool_parsing": "must be true or false", "string_type": "must be text",
    "list_type": "must be a list of numbers", "literal_error": "must be one of {expected}",
    "is_instance_of": "must be a {class}",
    "callable_type": "must be a function",
    "finite_number": "must be a finite number",
}
"""Pydantic's error types, said as the limit and the remedy in one."""


def _explain(details: ErrorDetails, given: Mapping[str, Sourced]) -> str:
    """One of pydantic's errors as key, value, source, limit."""
    key = str(details["loc"][0])
    template = _LIMITS.get(details["type"])
    limit = template.format(**details.get("ctx", {})) if template else details["msg"]
    item = "".join(f"[{part}]" for part in details["loc"][1:] if isinstance(part, int))
    return f"{key}{item}={shown(details['input'])} ({given[key].origin}): {limit}"
