"""``WritePlan``: which sequence, pool position and rotary position each new token has; once for a step, the same for all layers.

Three lengths of a sequence are easily mixed up: ``cache_length`` (tokens in the pool after this write), ``sequence_length`` (new
tokens now) and ``past``, their difference. New token i goes to ``past + i``; with ``i`` alone a second chunk overwrites the first.
The rotary position is another number: draft tokens share positions, multimodal prompts and other ranks have their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvtier.errors import RequestError
from kvtier.kernels.checks import INDEX_TYPES, check_dtype, check_same_device, check_shape, check_whole, checks_values
from kvtier.kernels.ring_map import RingMap

_KERNEL = "plan_write"


@dataclass(frozen=True)
class WritePlan:
    """Where the tokens of one step go.

    Attributes:
        sequence_of_token: int32 ``[tokens]``: row of the block table; -1: the token is not written (padding, another rank's, or one
            that its own call would overwrite on a ring).
        positions: int64 ``[tokens]``: position in the pool.
        rotary_positions: int64 ``[tokens]``: position for the rotation.
    """

    sequence_of_token: torch.Tensor
    positions: torch.Tensor
    rotary_positions: torch.Tensor


def plan_write(cache_lengths: torch.Tensor, sequence_lengths: torch.Tensor, num_tokens: int, *, is_padded: bool = False,
               rotary_positions: torch.Tensor | None = None, position_offsets: torch.Tensor | None = None,
               position_deltas: torch.Tensor | None = None, is_owned: torch.Tensor | None = None, ring: RingMap | None = None,
               check_values: bool | None = None) -> WritePlan:
    """Plan the write of ``num_tokens`` new tokens, sequence after sequence.

    On a GPU nothing here makes the host wait, so it can be part of a captured graph.

    Args:
        cache_lengths: int32 or int64 ``[sequences]``: tokens in the pool after this write.
        sequence_lengths: the same type: new tokens of each sequence now; 0 is allowed.
        num_tokens: their sum; with ``is_padded`` it may be more (a captured batch), and what is behind the sum is not written.
        rotary_positions: int32 or int64 ``[num_tokens]``: instead of ``past + i`` (context parallelism).
        position_offsets: int32 or int64 ``[num_tokens]``: ``past + offset`` instead of ``past + i`` (drafts, whose branches share
            positions). Not with ``rotary_positions``.
        position_deltas: int32 or int64 ``[sequences]``: added to the rotary positions of a sequence (M-RoPE).
        is_owned: bool ``[num_tokens]``: False: another context-parallel rank writes this token.
        ring: map of a pool that is a ring; None: a token's position is its number. Where sinks leave a bubble it is another:
            ``replace(plan, positions=visibility.places(plan.positions, tokens_per_block))``, as attention reads.
        check_values: whether lengths are checked. None: yes on a CPU, no on a GPU.

    Raises:
        RequestError: a wrong shape, dtype or device, both kinds of rotary position, or (with ``check_values``) a negative length, more
            new tokens than the pool holds afterwards, lengths that do not add up to ``num_tokens``.
    """
    num_tokens, = check_whole(_KERNEL, num_tokens=num_tokens)
    if num_tokens < 0:
        raise RequestError(f"{_KERNEL}: num_tokens={num_tokens}: pass 0 or more")
    check_shape(_KERNEL, "cache_lengths", cache_lengths, (None,), "sequences")
    sequences = cache_lengths.shape[0]
    check_shape(_KERNEL, "sequence_lengths", sequence_lengths, (sequences,), "sequences")
    if rotary_positions is not None and position_offsets is not None:
        raise RequestError(f"{_KERNEL}: rotary_positions and position_offsets are both given: pass the one or the other")
    for name, index, length, axis in (("cache_lengths", cache_lengths, sequences, "sequences"),
                                      ("sequence_lengths", sequence_lengths, sequences, "sequences"),
                                      ("rotary_positions", rotary_positions, num_tokens, "num_tokens"),
                                      ("position_offsets", position_offsets, num_tokens, "num_tokens"),
                                      ("position_deltas", position_deltas, sequences, "sequences")):
        if index is not None:
            check_shape(_KERNEL, name, index, (length,), axis)
            check_dtype(_KERNEL, name, index, INDEX_TYPES)
    if is_owned is not None:
        check_shape(_KERNEL, "is_owned", is_owned, (num_tokens,), "num_tokens")
        check_dtype(_KERNEL, "is_owned", is_owned, (torch.bool,))
    check_same_device(_KERNEL, cache_lengths, sequence_lengths=sequence_lengths, rotary_positions=rotary_positions,
                      position_offsets=position_offsets, position_deltas=position_deltas, is_owned=is_owned)
    if checks_values(cache_lengths, check_values):
        _check_lengths(cache_lengths, sequence_lengths, num_tokens, is_padded)

    device = cache_lengths.device
    if not sequences:
        nothing = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        return WritePlan(nothing.int() - 1, nothing, nothing)
    ends = sequence_lengths.long().cumsum(0)
    token = torch.arange(num_tokens, device=device)
    found = torch.searchsorted(ends, token, right=True)
    row = found.clamp(max=sequences - 1)
    past = cache_lengths.long()[row] - sequence_lengths.long()[row]
    number = past + token - (ends[row] - sequence_lengths.long()[row])
    rotary = number if position_offsets is None else past + position_offsets
    if rotary_positions is not None:
        rotary = rotary_positions.long()
    if position_deltas is not None:
        rotary = rotary + position_deltas[row]
    written = found < sequences
    if is_owned is not None:
        written = written & is_owned
    places = number
    if ring is not None:
        written = written & ring.is_kept(number, cache_lengths.long()[row])
        places = ring.places(number)
    return WritePlan(torch.where(written, row, -1).int(), places, torch.where(found < sequences, rotary, 0))


def _check_lengths(cache_lengths: torch.Tensor, sequence_lengths: torch.Tensor, num_tokens: int, is_padded: bool) -> None:
    wrong = (sequence_lengths < 0) | (sequence_lengths > cache_lengths)
    if bool(wrong.any()):
        sequence = int(wrong.nonzero()[0])
        raise RequestError(f"{_KERNEL}: sequence_lengths[{sequence}]={int(sequence_lengths[sequence])} (sequence {sequence}): allowed are "
                           f"0 to cache_lengths[{sequence}]={int(cache_lengths[sequence])}, which counts the new tokens too")
    total = int(sequence_lengths.sum())
    if total != num_tokens and not (is_padded and total < num_tokens):
        raise RequestError(f"{_KERNEL}: num_tokens={num_tokens}: sequence_lengths add up to {total}; pass that"
                           f"{', or more' if is_padded else ', or is_padded=True for a padded batch'}")
