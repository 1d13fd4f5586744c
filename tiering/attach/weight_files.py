"""A fingerprint of the files that a model's weights are in."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError

WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors")
SAMPLES: Final = 64
SAMPLE_BYTES: Final = 4096
WHOLE_BYTES: Final = 1 << 20
"""A file up to this size is read whole. Of a larger one its first and last page and 64 pages between are: weights that were trained
further differ all over, and reading hundreds of gigabytes at every start is out of the question."""


def files_fingerprint(folder: Path, origin: str) -> str:
    """First 16 hex digits of the SHA-256 over the names, sizes and contents (of large files: samples) of a folder's weights.

    Args:
        origin: where the engine's user writes settings, for messages.

    Raises:
        ConfigError: no weights there, or one cannot be read.
    """
    files = sorted({file for pattern in WEIGHTS for file in folder.glob(pattern)}, key=lambda file: file.name)
    if not files:
        raise ConfigError(f"model {folder}: no weights there ({', '.join(WEIGHTS)}), so nothing says which weights computed a block; "
                          f'set "model": "name@revision:digest" in {origin}')
    digest = hashlib.sha256()
    try:
        for file in files:
            add_file(digest, file)
    except OSError as error:
        raise ConfigError(f"model {folder}: its weights cannot be read ({error}), so nothing says which weights computed a block; "
                          f'set "model": "name@revision:digest" in {origin}') from error
    return digest.hexdigest()[:16]


def add_file(digest: hashlib._Hash, file: Path) -> None:
    """Enter one file's name, size and content; OSError if it cannot be read."""
    size = file.stat().st_size
    digest.update(f"{file.name}\0{size}\0".encode())
    with file.open("rb") as stream:
        if size <= WHOLE_BYTES:
            digest.update(stream.read())
            return
        last = size - SAMPLE_BYTES
        for sample in range(SAMPLES + 2):
            stream.seek(last * sample // (SAMPLES + 1))
            digest.update(stream.read(SAMPLE_BYTES))
