"""One forward step of the serving loop: a decode batch and pieces of prompts, and what the cache is told about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from kvtier.tiering.attach.serving_sequence import LayerwiseModel, PagedEncoderModel, PagedModel, ServedSequence

if TYPE_CHECKING:
    from kvtier.tiering.manager import KVCacheManager
    from kvtier.tiering.step import Step

Sampled = tuple[ServedSequence, torch.Tensor]
"""A sequence and its logits, ``[beams, vocabulary]``; of the prompt's last token ``[1, vocabulary]``."""


@dataclass
class StepOutcome:
    """What a step brought: logits of those that get a token, and the sequences that could not take part."""

    sampled: list[Sampled] = field(default_factory=list)
    left_out: list[ServedSequence] = field(default_factory=list)


def compute_step(cache: KVCacheManager, model: PagedModel, decoding: Sequence[ServedSequence],
                 chunks: Sequence[tuple[ServedSequence, int]], engine_stream: object, clock: Callable[[], float]) -> StepOutcome:
    """Compute the newest tokens of ``decoding`` in one batch and ``chunks`` (sequence, prompt tokens) one by one.

    Sequences whose blocks turn out not to be there are left out by the cache. With a model that has a ``before_layer``, the step begins
    with its first layer's blocks and waits for each of the others when the model comes to it; what was computed for sequences that lost
    blocks meanwhile is forgotten.
    """
    outcome = StepOutcome()
    by_layer = reads_layer_by_layer(model)
    ids = [*(sequence.id for sequence in decoding), *(sequence.id for sequence, _ in chunks)]
    if not ids:
        return outcome
    done: list[tuple[ServedSequence, int]] = []  # booked behind the step: after an error of the model nothing was computed
    with cache.step(engine_stream, ids=ids, layer=0 if by_layer else None) as step:
        waits = _LayerWaits(step, clock)
        if by_layer:
            cast(LayerwiseModel, model).before_layer = waits.wait
        ready = frozenset(step)
        outcome.left_out = [sequence for sequence in (*decoding, *(sequence for sequence, _ in chunks)) if sequence.id not in ready]
        decoding = [sequence for sequence in decoding if sequence.id in ready]
        chunks = [(sequence, count) for sequence, count in chunks if sequence.id in ready]
        in_order = [*(sequence.id for sequence in decoding), *(sequence.id for sequence, _ in chunks)]
        tables = [cache.block_table(in_order, group=group) for group in range(len(cache.layout.groups))] if in_order else []
        _encode(model, [*decoding, *(sequence for sequence, _ in chunks)], tables)
        row = sum(len(sequence.newest) for sequence in decoding)
        if decoding:
            logits = _decode(model, decoding, [table[:row] for table in tables])
            outcome.sampled += zip(decoding, torch.split(logits, [len(sequence.newest) for sequence in decoding]), strict=True)
        for sequence, count in chunks:
            start, end = sequence.computed, sequence.computed + count
            began, waited = clock(), waits.seconds
            logits = _prefill(model, sequence, end, [table[row] for table in tables])
            row += sequence.request.beam_width  # all beams have a row; while the prompt is computed they are the same
            if end == len(sequence.tokens):
                outcome.sampled.append((sequence, logits[None]))
            if (seconds := clock() - began - (waits.seconds - waited)) > 0.0:
                cache.report_prefill(range(start, end), seconds)
            done.append((sequence, end))
    lost = [sequence for sequence in (*decoding, *(sequence for sequence, _ in done)) if sequence.id in step.lost]
    if lost:
        outcome.left_out += lost
        outcome.sampled = [(sequence, logits) for sequence, logits in outcome.sampled if sequence not in lost]
        done = [(sequence, end) for sequence, end in done if sequence not in lost]
    for sequence, end in done:
        sequence.computed = end
        cache.mark_computed(sequence.id, sequence.computed)
        if sequence.computed == len(sequence.tokens) and not sequence.prompt_is_stored:
            sequence.prompt_is_stored = True
            cache.store_context(sequence.id)
    return outcome


class _LayerWaits:
    """Waits for layers as the model comes to them, and knows how long: loading is no part of the time that computing takes."""

    def __init__(self, step: Step, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._step = step
        self._clock = clock

    def wait(self, layer: int) -> None:
        began = self._clock()
        self._step.wait_layer(layer)
        self.seconds += self._clock() - began


def reads_layer_by_layer(model: PagedModel) -> bool:
    """Whether the model says which layer it comes to, so that it can begin before the last one's blocks have arrived."""
    return hasattr(model, "before_layer")


def _encode(model: PagedModel, sequences: Sequence[ServedSequence], tables: Sequence[torch.Tensor]) -> None:
    """Write the encoder's output of those that need it: new ones, and those that are back after a pre-emption or a loss."""
    row = 0
    for sequence in sequences:
        if sequence.encoder_tokens is not None and not sequence.is_encoded:
            cast(PagedEncoderModel, model).encode(sequence.encoder_tokens, *(table[row] for table in tables))
            sequence.is_encoded = True
        row += sequence.request.beam_width  # all beams have a row; what the encoder wrote they share


def _decode(model: PagedModel, decoding: Sequence[ServedSequence], tables: Sequence[torch.Tensor]) -> torch.Tensor:
    tokens = [token for sequence in decoding for token in sequence.newest]
    pasts = [sequence.computed for sequence in decoding for _ in sequence.newest]
    lengths = [len(sequence.encoder_tokens) for sequence in decoding if sequence.encoder_tokens is not None for _ in sequence.newest]
    if not lengths:
        return model.decode(tokens, pasts, *tables)
    return cast(PagedEncoderModel, model).decode(tokens, pasts, *tables, encoder_lengths=lengths)


def _prefill(model: PagedModel, sequence: ServedSequence, end: int, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    tokens = sequence.tokens[sequence.computed:end]
    if sequence.encoder_tokens is None:
        return model.prefill(tokens, sequence.computed, *rows)
    return cast(PagedEncoderModel, model).prefill(tokens, sequence.computed, *rows, encoder_lengths=[len(sequence.encoder_tokens)])
