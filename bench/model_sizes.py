"""How many bytes of keys and values a token of a model takes: a catalogue, or a model's own ``config.json``.

The catalogue holds the numbers of the models' public configurations: layers, key-value heads, head size; for multi-head latent attention
the width of the latent and of its rotary part. Keys and values are two vectors for each head, the latent one for all of them.
"""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError
from kvtier.pools.sizing import shown

DEFAULT_MODEL: Final = "llama-3.1-8b"
ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "fp8": 1, "int8": 1}


@dataclass(frozen=True)
class ModelShape:
    """What decides the size of a model's cache.

    Attributes:
        name: of the model.
        layers: with a cache.
        width: elements of one token in one layer, keys and values together.
    """

    name: str
    layers: int
    width: int

    def token_bytes(self, dtype: str = "bfloat16") -> int:
        """Bytes of one token in all layers. ConfigError for an element type that is not known."""
        if dtype not in ELEMENT_BYTES:
            raise ConfigError(f"--dtype={shown(dtype)}: unknown; use one of {', '.join(ELEMENT_BYTES)}")
        return self.layers * self.width * ELEMENT_BYTES[dtype]


def _heads(layers: int, heads: int, head_dim: int = 128) -> tuple[int, int]:
    return layers, 2 * heads * head_dim


def _latent(layers: int, latent_dim: int = 512, rope_dim: int = 64) -> tuple[int, int]:
    return layers, latent_dim + rope_dim


_CATALOGUE: Final[dict[str, tuple[int, int]]] = {
    "llama-2-7b": _heads(32, 32), "llama-2-13b": _heads(40, 40), "llama-2-70b": _heads(80, 8),
    "llama-3-8b": _heads(32, 8), "llama-3-70b": _heads(80, 8), "llama-3.1-8b": _heads(32, 8), "llama-3.1-70b": _heads(80, 8),
    "llama-3.1-405b": _heads(126, 8), "llama-3.2-1b": _heads(16, 8, 64), "llama-3.2-3b": _heads(28, 8), "llama-3.3-70b": _heads(80, 8),
    "mistral-7b": _heads(32, 8), "mistral-nemo-12b": _heads(40, 8), "mistral-small-24b": _heads(40, 8),
    "mixtral-8x7b": _heads(32, 8), "mixtral-8x22b": _heads(56, 8),
    "qwen2.5-0.5b": _heads(24, 2, 64), "qwen2.5-1.5b": _heads(28, 2), "qwen2.5-3b": _heads(36, 2), "qwen2.5-7b": _heads(28, 4),
    "qwen2.5-14b": _heads(48, 8), "qwen2.5-32b": _heads(64, 8), "qwen2.5-72b": _heads(80, 8),
    "qwen3-0.6b": _heads(28, 8), "qwen3-1.7b": _heads(28, 8), "qwen3-4b": _heads(36, 8), "qwen3-8b": _heads(36, 8),
    "qwen3-14b": _heads(40, 8), "qwen3-32b": _heads(64, 8), "qwen3-30b-a3b": _heads(48, 4), "qwen3-235b-a22b": _heads(94, 4),
    "gpt-oss-20b": _heads(24, 8, 64), "gpt-oss-120b": _heads(36, 8, 64),
    "gemma-2-9b": _heads(42, 8, 256), "gemma-2-27b": _heads(46, 16), "gemma-3-4b": _heads(34, 4, 256), "gemma-3-12b": _heads(48, 8, 256),
    "gemma-3-27b": _heads(62, 16), "phi-3-mini": _heads(32, 32, 96), "phi-4": _heads(40, 10),
    "smollm2-135m": _heads(30, 3, 64), "smollm2-360m": _heads(32, 5, 64), "smollm2-1.7b": _heads(24, 32, 64),
    "deepseek-v2-lite": _latent(27), "deepseek-v2": _latent(60), "deepseek-v3": _latent(61), "deepseek-r1": _latent(61),
    "kimi-k2": _latent(61),
}


def known_models() -> list[ModelShape]:
    """The catalogue, by name."""
    return [ModelShape(name, layers, width) for name, (layers, width) in sorted(_CATALOGUE.items())]


def catalogue_lines() -> list[str]:
    """The catalogue for people: a line for each model, bytes of one token in all layers by element type."""
    columns: dict[int, list[str]] = {}
    for dtype, num_bytes in ELEMENT_BYTES.items():
        columns.setdefault(num_bytes, []).append(dtype)
    headings = [", ".join(dtypes) for dtypes in columns.values()]
    width = max(map(len, _CATALOGUE))
    rows = [[model.name, *(str(model.token_bytes(dtypes[0])) for dtypes in columns.values())] for model in known_models()]
    return ["Bytes per token:", *("  ".join([name.ljust(width), *(cell.rjust(len(heading)) for cell, heading in
                                                                  zip(cells, headings, strict=True))])
                                  for name, *cells in [["model", *headings], *rows])]


def find_model(model: str) -> ModelShape:
    """A model by its name in the catalogue (upper and lower case alike), by its ``config.json``, or by the folder that holds one.

    Raises:
        ConfigError: not in the catalogue (names the nearest), or a configuration that does not say what is needed.
    """
    name = model.rpartition("/")[2].lower()
    for ending in ("", "-instruct", "-it", "-chat"):
        if name.endswith(ending) and name.removesuffix(ending) in _CATALOGUE:
            return ModelShape(name.removesuffix(ending), *_CATALOGUE[name.removesuffix(ending)])
    path = Path(model)
    if os.path.isdir(path):  # unlike Path.is_dir, never an error: a name may be too long for one
        path /= "config.json"
    if os.path.isfile(path):
        return _from_config(path)
    near = difflib.get_close_matches(name, _CATALOGUE, 3, 0.3)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise ConfigError(f"--model={shown(model)}: neither a known model nor a config.json; {hint}"
                      "kvtier tune --list-models lists what is known")


def _from_config(path: Path) -> ModelShape:
    """A model of the transformers library's ``config.json``; that of a multimodal model has its language model inside."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--model={path}: cannot be read ({error}); name a model's config.json") from error
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    if not isinstance(config, dict):
        raise ConfigError(f"--model={path}: not a model's config.json; it has no keys")

    def number(key: str, otherwise: int | None = None) -> int:
        value = config.get(key)
        value = otherwise if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"--model={path}: {key}={shown(value)}; a model's config.json has a positive whole number there")
        return value

    layers = number("num_hidden_layers")
    if config.get("kv_lora_rank") is not None:
        width = number("kv_lora_rank") + number("qk_rope_head_dim")
    else:
        heads = number("num_attention_heads")
        head_dim = number("head_dim", number("hidden_size", heads) // heads)
        width = 2 * number("num_key_value_heads", heads) * head_dim
    return ModelShape(str(config.get("model_type") or path.parent.name), layers, width)
