"""How large the demo's pools are: a primary pool of at most a quarter of the work, as much host memory, the rest on NVMe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.bench.demo_conversation import ChatFormat, common_prefix
from kvtier.bench.demo_text import MAX_TURNS, MAX_USERS, SYSTEM_PROMPT, USERS
from kvtier.errors import ConfigError
from kvtier.tiering.config import TierConfig

TOKENS_PER_BLOCK: Final = 32
CHUNK_SIZE: Final = 256
ANSWER_TOKENS: Final = 24
MOST_IN_FLIGHT: Final = 4

DEFAULT_USERS: Final = 13  # the fewest with whom a quarter of the work holds two requests at a time
DEFAULT_TURNS: Final = MAX_TURNS
QUICK_TURNS: Final = 2


@dataclass(frozen=True)
class DemoPlan:
    """Sizes of one demo. All block counts are upper limits: answers may end early.

    Attributes:
        users, turns: conversations and how often each user speaks.
        openings: prompt of each user's first turn, as token ids.
        shared_tokens: leading tokens that all prompts have in common.
        longest_tokens: length of the longest conversation, last answer included.
        working_set_blocks: blocks of different content over all conversations.
        largest_request_blocks: blocks of the longest conversation.
        primary_blocks, secondary_blocks, nvme_blocks: sizes of the levels.
        in_flight: requests served at a time: as many of the longest as the primary pool holds beside the shared blocks.
    """

    users: int
    turns: int
    openings: tuple[tuple[int, ...], ...]
    shared_tokens: int
    longest_tokens: int
    working_set_blocks: int
    largest_request_blocks: int
    primary_blocks: int
    secondary_blocks: int
    nvme_blocks: int
    in_flight: int

    @property
    def is_quarter(self) -> bool:
        """Whether the primary pool holds no more than a quarter of the working set."""
        return self.primary_blocks * 4 <= self.working_set_blocks


def check_size(users: int, turns: int) -> None:
    """Raise ConfigError for more users or turns than there is text for, or less than one."""
    for name, value, limit in (("users", users, MAX_USERS), ("turns", turns, MAX_TURNS)):
        if not 1 <= value <= limit:
            raise ConfigError(f"--{name}={value}: the demo has text for 1 to {limit} {name}")


def plan_demo(chat: ChatFormat, users: int, turns: int) -> DemoPlan:
    """Sizes for so many users and turns.

    Raises:
        ConfigError: more users or turns than there is text for, or less than one.
    """
    check_size(users, turns)
    openings = [chat.opening(SYSTEM_PROMPT, user.turns[0]) for user in USERS[:users]]
    shared = common_prefix(openings) if users > 1 else 0
    lengths = []
    for opening, user in zip(openings, USERS, strict=False):
        prompt = opening
        for text in user.turns[1:turns]:
            prompt = chat.next_turn(prompt, [0] * ANSWER_TOKENS, text)
        lengths.append(len(prompt) + ANSWER_TOKENS)
    shared_blocks = shared // TOKENS_PER_BLOCK
    working_set = shared_blocks + sum(_blocks(length) - shared_blocks for length in lengths)
    largest = _blocks(max(lengths))
    # With few users one request alone is more than a quarter of the work. It has to fit, so the pool is larger then, and
    # the report says so.
    primary = max(working_set // 4, largest + 1)
    # One block to spare for each: where a partly matching block is copied, both copies are held for a moment.
    in_flight = min(MOST_IN_FLIGHT, users, (primary - shared_blocks) // (largest - shared_blocks + 1))
    return DemoPlan(users, turns, tuple(tuple(opening) for opening in openings), shared, max(lengths), working_set, largest,
                    primary, max(working_set // 4, 1), working_set + working_set // 4, max(in_flight, 1))


def check_settings(file: Path | None) -> None:
    """Raise ConfigError for a bad file or environment before a model is loaded for minutes."""
    _load(file, {"nvme": "0 blocks"})


def tiered_config(plan: DemoPlan, file: Path | None, keep_nvme: Path | None, scratch: Path) -> TierConfig:
    """Settings of the run with kvtier: the demo's own, except for what a file or the environment says.

    Args:
        file: YAML or TOML; None for no file.
        keep_nvme: folder of the NVMe level; wins over the file.
        scratch: folder of the NVMe level when nobody names one.

    Raises:
        ConfigError: a bad file or value.
    """
    own: dict[str, object] = {
        "primary": f"{plan.primary_blocks} blocks", "secondary": f"{plan.secondary_blocks} blocks",
        "nvme": f"{plan.nvme_blocks} blocks", "nvme_directory": scratch, "max_batch_size": plan.in_flight,
        "max_seq_len": _blocks(plan.longest_tokens) * TOKENS_PER_BLOCK, "chunk_size": CHUNK_SIZE,
        "event_buffer_max_size": 0}  # nobody polls events here
    # Who gave which value is asked with values that fit together whatever the file leaves to the demo: an NVMe level alone,
    # without folder or secondary level, would be refused before it could be completed.
    sources = dict(_load(file, {"nvme": "0 blocks"}).sources)
    sources["nvme"] = _load(file, {"nvme_directory": scratch, "secondary": "1 blocks"}).sources["nvme"]
    settings = {key: value for key, value in own.items() if sources[key] == "default"}
    if keep_nvme is not None:
        settings["nvme_directory"] = keep_nvme
    return _load(file, settings)


def recompute_config(plan: DemoPlan, tiered: TierConfig) -> TierConfig:
    """Settings of the run that it is compared with: reuse off, and a primary pool that never holds anybody up."""
    return TierConfig(primary=f"{plan.largest_request_blocks * tiered.max_batch_size} blocks", secondary="0 blocks",
                      nvme="0 blocks", nvme_directory=None, max_batch_size=tiered.max_batch_size,
                      max_seq_len=tiered.max_seq_len, chunk_size=tiered.chunk_size, enable_block_reuse=False,
                      event_buffer_max_size=0)


def _blocks(tokens: int) -> int:
    return -(-tokens // TOKENS_PER_BLOCK)


def _load(file: Path | None, settings: Mapping[str, object]) -> TierConfig:
    # The values are checked by the model itself, whatever their static type.
    return TierConfig.from_file(file, **settings) if file is not None else TierConfig(**settings)  # type: ignore[arg-type]
