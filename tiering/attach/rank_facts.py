"""What only a vLLM worker knows, for the tier's index in the scheduler's process: page sizes, and what made the bytes.

vLLM constructs its workers first, and a spec in the scheduler's process sees neither page sizes nor vLLM's configuration. Each rank
leaves its facts in a small file in shared memory, named after the engine; the scheduler's side reads them all and removes them. While
its process lives, a rank has a lock on its file: what engines that never got that far have left is known by it, and removed by the next.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final

from kvtier.errors import ConfigError
from kvtier.pools.page_layout import PageGroup, PageLayout

SHARED_MEMORY: Final = Path("/dev/shm")
CRYPTOGRAPHIC: Final = ("sha256", "sha256_cbor")
"""Hash algorithms of vLLM whose keys name contents outside the process. The others start from a random seed and may collide."""

_PREFIX: Final = "kvtier-facts-"

KNOWN_DTYPES: Final = ("float32", "float16", "bfloat16", "half", "float", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla",
                       "nvfp4_ds_mla", "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "nvfp4", "nvfp4_4over6")
"""KV-cache dtypes whose pages hold all that reading them takes (scales included)."""


@dataclass(frozen=True)
class Facts:
    """Of one rank.

    Attributes:
        page_bytes: for each KV group, the bytes that count of one page in each of its tensors.
        is_state: for each KV group, whether its pages are running states.
        identity: whatever the bytes of a page depend on and its key does not contain.
        model: "name@revision:digest", "" where nothing says it.
        without_nvme: why nothing of this engine may be kept on NVMe; "" if it may.
    """

    page_bytes: tuple[tuple[int, ...], ...]
    is_state: tuple[bool, ...]
    identity: dict[str, str]
    model: str = ""
    without_nvme: str = ""

    def layout(self, pages_per_block: int, ranks: int) -> PageLayout:
        """The engine's pages as blocks of the tier."""
        groups = [PageGroup(sizes, pages_per_block, is_state, f"group {number}")
                  for number, (sizes, is_state) in enumerate(zip(self.page_bytes, self.is_state, strict=True))]
        return PageLayout(groups, ranks)

    def fingerprint(self) -> str:
        """The identity in one line of JSON: part of the namespace that a store directory carries in clear."""
        return json.dumps(self.identity, sort_keys=True)


def check_dtype(name: str) -> None:
    """Raise ConfigError for a KV-cache dtype whose pages are not known to be all there is."""
    if name not in KNOWN_DTYPES:
        raise ConfigError(f"kv_cache_dtype={name!r}: pages of this dtype are not known to hold all that reading them takes; use one of "
                          f"{', '.join(KNOWN_DTYPES)}")


def leave_facts(engine_id: str, rank: int, facts: Facts, folder: Path = SHARED_MEMORY) -> IO[str]:
    """Write a rank's facts for :func:`collect_facts`; what an earlier engine of this name has left is replaced.

    Returns:
        the file, to be kept open for as long as the engine lives.

    Raises:
        ConfigError: shared memory cannot be written.
    """
    _remove_stale(folder)
    target = _file(engine_id, rank, folder)
    part = target.with_suffix(f".{os.getpid()}")
    try:
        stream = os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8")
        fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        json.dump(asdict(facts), stream)
        stream.flush()
        part.replace(target)
        return stream
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{target}: cannot be written ({error.strerror}); the tier needs some shared memory in {folder}") from error


def collect_facts(engine_id: str, ranks: int, folder: Path = SHARED_MEMORY) -> Facts:
    """The facts that all ranks have left, and agree on; the files are removed.

    Raises:
        ConfigError: a rank has left none (it runs on another node, or its tier did not start), or two differ.
    """
    found = [_read(_file(engine_id, rank, folder)) for rank in range(ranks)]
    missing = [str(rank) for rank, facts in enumerate(found) if facts is None]
    if missing:
        raise ConfigError(f"ranks {', '.join(missing)} of {ranks} have not registered their pages on this node; one engine over several "
                          "nodes is not supported: run it on one, or without the tier")
    first = found[0]
    assert first is not None
    for rank, facts in enumerate(found):
        if facts != first:
            raise ConfigError(f"rank {rank} has other pages than rank 0 ({facts} against {first}); ranks of unequal size are not supported")
    for rank in range(ranks):
        _file(engine_id, rank, folder).unlink(missing_ok=True)
    return first


def _remove_stale(folder: Path) -> None:
    """Remove what ranks have left whose processes have ended."""
    for path in folder.glob(f"{_PREFIX}*.json"):
        with suppress(OSError), path.open() as stream:  # gone meanwhile, in use, or somebody else's
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _file(engine_id: str, rank: int, folder: Path) -> Path:
    return folder / f"{_PREFIX}{re.sub(r'[^A-Za-z0-9_.-]', '_', engine_id)}-{rank}.json"


def _read(file: Path) -> Facts | None:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return _facts(data) if isinstance(data, dict) else None


def _facts(data: Mapping[str, object]) -> Facts | None:
    pages, states, identity = data.get("page_bytes"), data.get("is_state"), data.get("identity")
    if not isinstance(pages, Sequence) or not isinstance(states, Sequence) or not isinstance(identity, dict):
        return None
    return Facts(tuple(tuple(int(size) for size in sizes) for sizes in pages), tuple(bool(state) for state in states),
                 {str(key): str(value) for key, value in identity.items()}, str(data.get("model", "")), str(data.get("without_nvme", "")))
