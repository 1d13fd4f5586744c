"""What the serving loop knows: of the model two calls, of a request its answer so far and how much of it is in the pool."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvtier.errors import KVTierError
from kvtier.tiering.attach.beam_search import Beam, BeamSearch
from kvtier.tiering.attach.sampling import GREEDY, Sampling
from kvtier.tiering.ledger.request import Request


class PagedModel(Protocol):
    """A model that computes over block tables; calls and shapes as in ``AttachedModel``. Token ids lie below ``vocabulary_size``.

    Block tables are given in order of the groups of the cache's layout, as many as it has.
    """

    @property
    def vocabulary_size(self) -> int: ...

    def prefill(self, tokens: Sequence[int], past: int, *table_rows: torch.Tensor) -> torch.Tensor: ...

    def decode(self, tokens: Sequence[int], pasts: Sequence[int], *tables: torch.Tensor) -> torch.Tensor: ...


class LayerwiseModel(PagedModel, Protocol):
    """A model that calls ``before_layer(layer)``, unless it is None, before it uses the pages of a model layer."""

    before_layer: Callable[[int], object] | None


class PagedEncoderModel(PagedModel, Protocol):
    """A model with an encoder, whose output is written into the pages once; calls as in ``AttachedEncoderDecoder``."""

    def encode(self, encoder_tokens: Sequence[int], *table_rows: torch.Tensor) -> None: ...

    def prefill(self, tokens: Sequence[int], past: int, *table_rows: torch.Tensor, encoder_lengths: Sequence[int] = ()) -> torch.Tensor: ...

    def decode(self, tokens: Sequence[int], pasts: Sequence[int], *tables: torch.Tensor,
               encoder_lengths: Sequence[int] = ()) -> torch.Tensor: ...


@dataclass
class Answer:
    """What became of one request. While it is being answered, what there is so far.

    Attributes:
        request_id, prompt_tokens: of the request as submitted.
        tokens: generated token ids; ends with the stop token when one was sampled. With several beams the best beam's, at the end.
        top_gaps: for each generated token of a request that takes the best one, how far its logit was above the second best.
        beams: with several beams all answers found, best first.
        reused_tokens: tokens that did not have to be computed when the request first started.
        first_token_seconds, seconds: from ``submit`` to the first token and to the end.
        preemptions: how often the request had to make room for others and went on later.
        is_complete: nothing will be added.
        error: None, or why the request ended early.
    """

    request_id: int
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    top_gaps: list[float] = field(default_factory=list)
    beams: list[Beam] = field(default_factory=list)
    reused_tokens: int = 0
    first_token_seconds: float = 0.0
    seconds: float = 0.0
    preemptions: int = 0
    is_complete: bool = False
    error: KVTierError | None = None


@dataclass(eq=False)  # each is itself, whatever another one looks like
class ServedSequence:
    """A request on its way: waiting, loading (its reused blocks are promised, not there yet) or running."""

    request: Request          #: as submitted; after a pre-emption, what is left to do of it
    answer: Answer
    max_new_tokens: int
    arrived: float
    tokens: list[int]         #: prompt, and what was generated; with several beams the prompt alone
    sampling: Sampling = GREEDY
    generator: torch.Generator | None = None
    beams: BeamSearch | None = None
    encoder_tokens: list[int] | None = None
    is_encoded: bool = False  #: the encoder's output is in the pages
    reused: int = 0           #: leading tokens that reuse brought; while loading, promised
    computed: int = 0         #: tokens whose keys and values are in the pool; while loading, the promised ones count
    loading: bool = True
    load_deadline: float = 0.0
    has_started: bool = False
    prompt_is_stored: bool = False

    @classmethod
    def of(cls, request: Request, arrived: float, sampling: Sampling = GREEDY,
           stop_tokens: frozenset[int] = frozenset()) -> ServedSequence:
        """A request that has just arrived."""
        tokens = array("i", request.token_bytes).tolist()
        beams = BeamSearch(request.beam_width, request.max_new_tokens, stop_tokens) if request.beam_width > 1 else None
        return cls(request, Answer(request.id, len(tokens)), request.max_new_tokens, arrived, tokens, sampling, sampling.generator(),
                   beams)

    def start_loading(self, now: float, timeout: float) -> None:
        self.loading = True
        self.load_deadline = now + timeout

    def confirm(self, valid: int) -> None:
        """So many of the promised tokens are really there. After a bad read computing goes on where the good ones end."""
        self.loading = False
        if valid < self.computed:  # what was lost may have been the encoder's
            self.is_encoded = False
        self.computed = min(self.computed, valid)
        self.reused = min(self.reused, valid)
        if not self.has_started:
            self.has_started = True
            self.answer.reused_tokens = self.reused

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def newest(self) -> list[int]:
        """The last token of each beam."""
        return self.beams.newest if self.beams is not None and self.beams.length else [self.tokens[-1]]

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens, of one beam."""
        return len(self.tokens) + (self.beams.length if self.beams is not None else 0)

    @property
    def num_generated(self) -> int:
        return self.beams.length if self.beams is not None else len(self.answer.tokens)

    @property
    def decodes(self) -> bool:
        """Only the newest token is left to compute, and it is a generated one."""
        return self.num_generated > 0 and self.num_tokens - self.computed == 1

    @property
    def is_broken(self) -> bool:
        """Its beams have lost tokens that differ from beam to beam: those cannot be computed again as one prompt."""
        return self.beams is not None and self.beams.length > 0 and not self.decodes

    @property
    def ends_for_certain(self) -> bool:
        """The next generated token is the last one."""
        return self.num_generated + 1 >= self.max_new_tokens

    @property
    def will_store_prompt(self) -> bool:
        """It is still computing its prompt, for others as well."""
        return not self.prompt_is_stored and not self.request.skip_write

    def chunk_end(self, chunk_size: int) -> int:
        """Where the next prompt chunk ends: at the next absolute multiple of the chunk size, or with the tokens."""
        return min(len(self.tokens), (self.computed // chunk_size + 1) * chunk_size)

    def take(self, token: int, gap: float | None, now: float) -> None:
        """Book a sampled token."""
        if not self.answer.tokens:
            self.answer.first_token_seconds = now - self.arrived
        self.computed = len(self.tokens)
        self.tokens.append(token)
        self.answer.tokens.append(token)
        if gap is not None:
            self.answer.top_gaps.append(gap)

    def interrupt(self, *, skip_read: bool) -> None:
        """Make the request the one that goes on from here: prompt and answer so far are its new prompt. Several beams begin again:
        what they have generated is no common prompt."""
        if self.beams is not None:
            self.beams.restart()
        self.is_encoded = False
        old = self.request
        extra_ids = old.extra_ids
        if extra_ids is not None:  # a generated token carries 0, as it did when it was appended
            extra_ids = (*extra_ids, *[0] * (len(self.tokens) - len(extra_ids)))
        self.request = Request(
            old.id, self.tokens, lora_id=old.lora_id, cache_salt=old.cache_salt, extra_ids=extra_ids,
            multimodal=old.multimodal, retention=old.retention,
            beam_width=old.beam_width, max_new_tokens=self.max_new_tokens - len(self.answer.tokens),
            num_draft_tokens=old.num_draft_tokens, encoder_length=old.encoder_length, encoder_digest=old.encoder_digest,
            skip_read=old.skip_read or skip_read, skip_write=old.skip_write, lora_digest=old.lora_digest,
            extra_ids_digest=old.extra_ids_digest)
        self.prompt_is_stored = False
