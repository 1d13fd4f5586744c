"""What the scheduler's side tells the workers of TensorRT-LLM, once per step; and the keys of blocks.

Plans are plain frozen records: TensorRT-LLM pickles them and sends them to all ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

_DOMAIN: Final = b"kvtier tensorrt-llm 1\0"


@dataclass(frozen=True)
class Part:
    """One job of the tier: blocks of one request and layer group.

    Attributes:
        request_id: TensorRT-LLM's.
        job_id: the tier's.
        group: layer group.
        pages: TensorRT-LLM's pages, one for each block.
        slots: host slots, in the same order.
    """

    request_id: int
    job_id: int
    group: int
    pages: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """What workers do in one step.

    Attributes:
        number: of the plan. TensorRT-LLM may leave an old plan bound in a step that has none.
        fresh: by group, pages that belong to somebody else from this step on: copies that still read them come first.
        loads: before the forward pass.
        stores: behind it.
    """

    number: int
    fresh: tuple[tuple[int, ...], ...] = ()
    loads: tuple[Part, ...] = ()
    stores: tuple[Part, ...] = ()


def namespace_of(request: Any) -> bytes | None:
    """What besides tokens decides what a request's blocks hold: adapter, salt, images. None: it cannot be told, so nothing of the request
    is kept.

    TensorRT-LLM hands some callbacks the part of a request that its C++ side has: the salt may be there as a number only, and attributes
    that begin with ``py_`` are missing.
    """
    if not hasattr(request, "cache_salt") and not hasattr(request, "cache_salt_id"):
        return None
    hashes = getattr(request, "multimodal_hashes", None)
    has_more = any(getattr(request, name, None) is not None for name in ("py_multimodal_data", "multimodal_embedding",
                                                                         "prompt_embedding_table", "encoder_tokens"))
    if not hashes and has_more:
        return None
    images = [hashes, getattr(request, "multimodal_positions", None), getattr(request, "multimodal_lengths", None)] if hashes else []
    salt = getattr(request, "cache_salt_id", None)
    if salt is None:
        salt = getattr(request, "cache_salt", None)
    try:
        return json.dumps([getattr(request, "lora_task_id", None), salt, images]).encode()
    except (TypeError, ValueError):
        return None


class KeyChain:
    """Keys of a sequence's full blocks: each names the block's tokens, all before them and the namespace (SHA-256).

    Args:
        namespace: of the request.
        tokens_per_block: of TensorRT-LLM.
    """

    def __init__(self, namespace: bytes, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._last = hashlib.sha256(_DOMAIN + namespace).digest()
        self._keys: list[bytes] = []

    def keys(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """The first ``count`` keys of a sequence that has only grown since the last call."""
        width = self._tokens_per_block
        assert count * width <= len(tokens)
        while len(self._keys) < count:
            start = len(self._keys) * width
            self._last = hashlib.sha256(self._last + np.asarray(tokens[start:start + width], "<i8").tobytes()).digest()
            self._keys.append(self._last)
        return self._keys[:count]
