"""Which weights computed a block: a fingerprint of a model's files, or its commit in a hub's cache.

vLLM's block hashes contain tokens, adapter names, salts and images, and nothing of the model: two models, or two states of one model,
would find each other's blocks on NVMe. A wrong identity is wrong text, so where none can be found there is no NVMe level.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError
from kvtier.tiering.attach.weight_files import add_file, files_fingerprint

ORIGIN: Final = "kv_connector_extra_config"


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
        return f"{path.resolve().name}@local:{files_fingerprint(path, ORIGIN)}"
    if path.is_file():
        digest = hashlib.sha256()
        add_file(digest, path)
        return f"{path.name}@local:{digest.hexdigest()[:16]}"
    if commit:
        return f"{model}@{revision or 'main'}:{commit}"
    raise ConfigError(f"model {model!r}: neither a folder nor a commit of a hub is known for it, so nothing says which weights computed a "
                      'block; set "model": "name@revision:digest" in kv_connector_extra_config')
