"""``Request``: what an engine asks the tier to hold, checked once when it is made (design: public names).

Compiled code answers an argument that does not fit its annotation with a TypeError of its own. What users pass is therefore
annotated as Any, is checked here, and has its type in the list of arguments.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, cast

from kvtier.errors import RequestError
from kvtier.policies.retention import RetentionConfig

INT32_MIN: Final = -(1 << 31)
INT32_MAX: Final = (1 << 31) - 1
UINT64_MAX: Final = (1 << 64) - 1
DIGEST_BYTES: Final = 32


def token_bytes(tokens: object, name: str = "tokens") -> bytes:
    """Tokens as native int32 bytes, copied once.

    Accepts any one-dimensional int32 buffer (bytes-like objects of format ``i``, numpy arrays, ``array('i')``), anything with
    ``tolist()`` (torch tensors, other integer arrays) and sequences of ints.

    Raises:
        RequestError: not integers, or a value outside int32 (names its position).
    """
    try:
        view = memoryview(cast(Any, tokens))
    except (TypeError, ValueError):  # no buffer, or one of a kind that has no format
        view = None
    if view is not None:
        if view.ndim != 1:
            raise RequestError(f"{name}: a buffer of {view.ndim} dimensions; pass one dimension of int32 token ids")
        if view.format in ("i", "=i", "<i", "@i") and view.itemsize == 4:
            return view.tobytes()
        if view.format in ("f", "d", "e", "?", "B", "b", "c"):
            raise RequestError(f"{name}: a buffer of format {view.format!r}; pass int32 token ids")
    values = cast(Any, tokens).tolist() if hasattr(tokens, "tolist") else tokens
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise RequestError(f"{name}={type(tokens).__name__}: pass a sequence of ints or an int32 buffer")
    try:
        if bool not in set(map(type, values)):  # a mask is no prompt, though Python counts with it
            return array("i", values).tobytes()
    except (OverflowError, TypeError):
        pass  # which value it was, and why, is said below
    for position, value in enumerate(values):
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            raise RequestError(f"{name}[{position}] is a {type(value).__name__}: pass one dimension of token ids, one row of a batch")
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise RequestError(f"{name}[{position}]={value!r}: token ids are whole numbers")
        if not INT32_MIN <= value <= INT32_MAX:
            raise RequestError(f"{name}[{position}]={value}: outside int32 ({INT32_MIN}..{INT32_MAX}); pass token ids of the model's "
                               "vocabulary")
    raise RequestError(f"{name}: not a sequence of int32 token ids")


class MultimodalItem:
    """One image, sound or video inside a prompt.

    Args:
        digest: 32 bytes that identify the content (a SHA-256 of it).
        runs: (start, length) runs of prompt positions that its tokens occupy, ascending, not overlapping.

    Raises:
        RequestError: a digest of another length, an empty, negative or overlapping run.
    """

    def __init__(self, digest: Any, runs: Any) -> None:
        if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
            raise RequestError(f"digest={digest!r}: a content digest is {DIGEST_BYTES} bytes (for example a SHA-256)")
        if not isinstance(runs, Sequence) or not runs:
            raise RequestError(f"runs={runs!r}: a multimodal item needs the (start, length) runs of its tokens")
        end = 0
        for run in runs:
            if not isinstance(run, Sequence) or len(run) != 2 or any(type(number) is not int for number in run):
                raise RequestError(f"runs: {run!r}; a run is (start, length), both whole numbers")
            start, length = run
            if start < end or length <= 0:
                raise RequestError(f"runs: ({start}, {length}) after position {end}; runs ascend, do not overlap and have a positive "
                                   "length")
            end = start + length
        self.digest = digest
        self.runs: tuple[tuple[int, int], ...] = tuple((start, length) for start, length in runs)

    def __reduce__(self) -> tuple[object, ...]:
        """For ``copy`` and ``pickle``, which find no attributes in a compiled object."""
        return type(self), (self.digest, self.runs)


class Request:
    """One sequence to be served.

    Args:
        id: the engine's id, an int; unique among active sequences.
        tokens: prompt token ids, see :func:`token_bytes`. At least one.
        lora_id: int; the adapter the prompt is computed with. Blocks of different adapters are never shared. ``lora_digest`` (stable
            across processes) lets such blocks reach NVMe.
        cache_salt: str; blocks are shared only among requests of equal salt.
        extra_ids: sequence of int, one unsigned 64-bit id per prompt token (prompt tuning); ``extra_ids_digest`` lets such
            blocks reach NVMe.
        multimodal: sequence of :class:`MultimodalItem`, whose content is part of the key of the blocks they overlap. In any order; no
            position belongs to two of them.
        retention: RetentionConfig; how long blocks are kept; None keeps priority 35.
        beam_width: int; how many beams continue the prompt.
        max_new_tokens: int; how many tokens may be generated; used by capacity estimates.
        num_draft_tokens: int; speculative tokens per step; used by capacity estimates.
        encoder_length: int; encoder tokens of cross-attention layers. ``encoder_digest`` (32 bytes that identify the encoder's input) is
            part of the key of every block; without it such a request neither matches nor stores anything, because what its decoder
            layers keep depends on the encoder.
        skip_read: bool; match nothing. skip_write: bool; store nothing.

    Raises:
        RequestError: see each argument.
    """

    def __init__(self, id: Any, tokens: object, *, lora_id: Any = None, cache_salt: Any = None,
                 extra_ids: Any = None, multimodal: Any = (),
                 retention: Any = None, beam_width: Any = 1, max_new_tokens: Any = 16,
                 num_draft_tokens: Any = 0, encoder_length: Any = 0, skip_read: Any = False, skip_write: Any = False,
                 lora_digest: Any = None, extra_ids_digest: Any = None, encoder_digest: Any = None) -> None:
        if type(id) is not int and (isinstance(id, bool) or not isinstance(id, int)):
            raise RequestError(f"id={id!r}: a request id is a whole number")
        self.id: int = id
        self.token_bytes = token_bytes(tokens)
        self.num_tokens = len(self.token_bytes) // 4
        if self.num_tokens == 0:
            raise RequestError(f"request {id}: tokens=[]; a prompt has at least one token")
        if lora_id is not None or cache_salt is not None:
            _check_owner(id, lora_id, cache_salt)
        self.lora_id: int | None = lora_id
        self.cache_salt: str | None = cache_salt
        self.extra_ids: tuple[int, ...] | None = None
        self.multimodal: tuple[MultimodalItem, ...] = ()
        if extra_ids is not None:
            self.extra_ids = _checked_extra_ids(id, extra_ids, self.num_tokens)
        if lora_digest is not None:
            _check_digest(id, "lora_digest", lora_digest, "lora_id", lora_id)
        if extra_ids_digest is not None:
            _check_digest(id, "extra_ids_digest", extra_ids_digest, "extra_ids", extra_ids)
        if encoder_digest is not None:
            _check_digest(id, "encoder_digest", encoder_digest, "encoder_length", encoder_length or None)
        if type(multimodal) is not tuple or multimodal:
            self.multimodal = _checked_items(id, multimodal, self.num_tokens)
        if retention is not None and not isinstance(retention, RetentionConfig):
            raise RequestError(f"request {id}: retention={retention!r}; pass a RetentionConfig, or None")
        if (type(beam_width) is not int or beam_width < 1 or type(max_new_tokens) is not int or max_new_tokens < 0
                or type(num_draft_tokens) is not int or num_draft_tokens < 0 or type(encoder_length) is not int or encoder_length < 0):
            _check_counts(id, beam_width, max_new_tokens, num_draft_tokens, encoder_length)
        self.retention: RetentionConfig | None = retention
        self.beam_width: int = beam_width
        self.max_new_tokens: int = max_new_tokens
        self.num_draft_tokens: int = num_draft_tokens
        self.encoder_length: int = encoder_length
        if type(skip_read) is not bool or type(skip_write) is not bool:
            raise RequestError(f"request {id}: skip_read={skip_read!r}, skip_write={skip_write!r}; pass True or False")
        self.skip_read: bool = skip_read
        self.skip_write: bool = skip_write
        self.lora_digest: bytes | None = lora_digest
        self.extra_ids_digest: bytes | None = extra_ids_digest
        self.encoder_digest: bytes | None = encoder_digest

    def __reduce__(self) -> tuple[object, ...]:
        """For ``copy`` and ``pickle``, which find no attributes in a compiled object."""
        keywords = {"lora_id": self.lora_id, "cache_salt": self.cache_salt, "extra_ids": self.extra_ids, "multimodal": self.multimodal,
                    "retention": self.retention, "beam_width": self.beam_width, "max_new_tokens": self.max_new_tokens,
                    "num_draft_tokens": self.num_draft_tokens, "encoder_length": self.encoder_length, "skip_read": self.skip_read,
                    "skip_write": self.skip_write, "lora_digest": self.lora_digest, "extra_ids_digest": self.extra_ids_digest,
                    "encoder_digest": self.encoder_digest}
        return _made_again, (type(self), self.id, self.token_bytes, keywords)


def _made_again(kind: type[Request], id: int, tokens: bytes, keywords: dict[str, object]) -> Request:
    return kind(id, memoryview(tokens).cast("i"), **keywords)


def _check_owner(id: int, lora_id: object, cache_salt: object) -> None:
    if lora_id is not None and (isinstance(lora_id, bool) or not isinstance(lora_id, int) or not 0 <= lora_id <= UINT64_MAX):
        raise RequestError(f"request {id}: lora_id={lora_id!r}; pass a whole number from 0 to 2^64-1, or None")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise RequestError(f"request {id}: cache_salt={cache_salt!r}; pass a string, or None")


def _checked_extra_ids(id: int, extra_ids: object, num_tokens: int) -> tuple[int, ...]:
    if not isinstance(extra_ids, Sequence):
        raise RequestError(f"request {id}: extra_ids={extra_ids!r}; pass one whole number for each token")
    ids = tuple(extra_ids)
    if len(ids) != num_tokens:
        raise RequestError(f"request {id}: {len(ids)} extra_ids for {num_tokens} tokens; pass one for each token")
    for position, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= UINT64_MAX:
            raise RequestError(f"request {id}: extra_ids[{position}]={value!r}; pass whole numbers from 0 to 2^64-1")
    return ids


def _check_digest(id: int, name: str, digest: object, owner_name: str, owner: object) -> None:
    if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
        raise RequestError(f"request {id}: {name}={digest!r}; a digest is {DIGEST_BYTES} bytes (for example a SHA-256)")
    if owner is None:
        raise RequestError(f"request {id}: {name} without {owner_name}; pass both or neither")


def _checked_items(id: int, multimodal: object, num_tokens: int) -> tuple[MultimodalItem, ...]:
    if not isinstance(multimodal, Sequence) or any(not isinstance(item, MultimodalItem) for item in multimodal):
        raise RequestError(f"request {id}: multimodal={multimodal!r}; pass a list of MultimodalItem")
    for item in multimodal:
        start, length = item.runs[-1]
        if start + length > num_tokens:
            raise RequestError(f"request {id}: a multimodal run ends at {start + length}, the prompt has {num_tokens} tokens")
    if len(multimodal) > 1:
        taken = sorted([run for item in multimodal for run in item.runs])
        for (start, length), (other, _) in pairwise(taken):
            if other < start + length:
                raise RequestError(f"request {id}: multimodal runs overlap: one begins at {other}, another is at {start} to "
                                   f"{start + length - 1}; a position belongs to one item")
    return tuple(multimodal)


def _check_counts(id: int, beam_width: object, max_new_tokens: object, num_draft_tokens: object, encoder_length: object) -> None:
    for name, number, least in (("beam_width", beam_width, 1), ("max_new_tokens", max_new_tokens, 0),
                                ("num_draft_tokens", num_draft_tokens, 0), ("encoder_length", encoder_length, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise RequestError(f"request {id}: {name}={number!r}; must be a whole number of at least {least}")
