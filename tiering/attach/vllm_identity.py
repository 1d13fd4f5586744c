"""Which weights computed a block: a fingerprint of a model's files, or its commit in a hub's cache.

vLLM's block hashes contain tokens, adapter names, salts and images, and nothing of the model: two models, or two states of one model,
would find each other's blocks on NVMe. A wrong identity is wrong text, so where none can be found there is no NVMe level.
"""

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


def files_fingerprint(folder: Path) -> str:
    """First 16 hex digits of the SHA-256 over the names, sizes and contents (of large files: samples) of a folder's weights.

    Raises:
        ConfigError: no weights there, or one cannot be read.
    """
    files = sorted({file for pattern in WEIGHTS for file in folder.glob(pattern)}, key=lambda file: file.name)
    if not files:
        raise ConfigError(f"model {folder}: no weights there ({', '.join(WEIGHTS)}), so nothing says which weights computed a block; "
                          'set "model": "name@revision:digest" in kv_connector_extra_config')
    digest = hashlib.sha256()
    try:
        for file in files:
            _add(digest, file)
    except OSError as error:
        raise ConfigError(f"model {folder}: its weights cannot be read ({error}), so nothing says which weights computed a block; "
                          'set "model": "name@revision:digest" in kv_connector_extra_config') from error
    return digest.hexdigest()[:16]


def model_identity(model: str, revision: str | None, commit: str | None) -> str:
    """``name@revision:digest`` of the model that vLLM has loaded.

    Args:
        model: vLLM's ``model``: a folder, a file, or a name in a hub.
        revision: as the user asked for it.
        commit: of a model from a hub, the commit it was loaded from; it stands for the weights.

    Raises:
        ConfigError: neither files nor a commit.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return f"{path.resolve().name}@local:{files_fingerprint(path)}"
    if path.is_file():
        digest = hashlib.sha256()
        _add(digest, path)
        return f"{path.name}@local:{digest.hexdigest()[:16]}"
    if commit:
        return f"{model}@{revision or 'main'}:{commit}"
    raise ConfigError(f"model {model!r}: neither a folder nor a commit of a hub is known for it, so nothing says which weights computed a "
                      'block; set "model": "name@revision:digest" in kv_connector_extra_config')


def _add(digest: hashlib._Hash, file: Path) -> None:
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
