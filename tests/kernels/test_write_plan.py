"""plan_write: three lengths, pool positions and rotary positions, and which tokens are not written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import RequestError
from kvtier.kernels.ring_map import RingMap
from kvtier.kernels.write_plan import plan_write


@examples(100)
@given(lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=5), padding=st.integers(0, 3),
       dtype=st.sampled_from([torch.int32, torch.int64]), deltas=st.booleans(), kind=st.sampled_from(["past", "override", "offset"]),
       owned=st.booleans(), ring=st.sampled_from([None, RingMap(4, 1, 2), RingMap(6, 0, 4, True)]), seed=st.integers(0, 1000))
def test_each_token_has_its_sequence_its_place_and_its_rotation(lengths, padding, dtype, deltas, kind, owned, ring, seed):
    generator = torch.Generator().manual_seed(seed)
    past, new = [past for past, _ in lengths], [new for _, new in lengths]
    total = sum(new) + padding
    numbers = torch.randint(0, 50, (total,), generator=generator)
    delta = torch.randint(-5, 50, (len(new),), generator=generator)
    is_owned = torch.rand(total, generator=generator) < 0.5
    plan = plan_write(torch.tensor([p + n for p, n in lengths], dtype=dtype), torch.tensor(new, dtype=dtype), total, is_padded=padding > 0,
                      rotary_positions=numbers if kind == "override" else None, position_offsets=numbers if kind == "offset" else None,
                      position_deltas=delta if deltas else None, is_owned=is_owned if owned else None, ring=ring)
    token = 0
    for sequence in range(len(new)):
        for number in range(new[sequence]):
            position = past[sequence] + number
            length = past[sequence] + new[sequence]
            rotary = {"past": position, "override": int(numbers[token]), "offset": past[sequence] + int(numbers[token])}[kind]
            written = (not owned or bool(is_owned[token])) and (
                ring is None or position < ring.sinks or position >= length - ring.ring)
            assert int(plan.sequence_of_token[token]) == (sequence if written else -1)
            assert int(plan.positions[token]) == (position if ring is None else ring.place(position))
            assert int(plan.rotary_positions[token]) == rotary + (int(delta[sequence]) if deltas else 0)
            token += 1
    assert plan.sequence_of_token[token:].tolist() == [-1] * padding
    assert plan.rotary_positions[token:].tolist() == [0] * padding


@pytest.mark.parametrize(("change", "message"), [
    ({"sequence_lengths": torch.tensor([3, 6])}, "sequence_lengths[1]=6 (sequence 1): allowed are 0 to cache_lengths[1]=5"),
    ({"sequence_lengths": torch.tensor([-1, 2])}, "sequence_lengths[0]=-1 (sequence 0)"),
    ({"num_tokens": 6}, "num_tokens=6: sequence_lengths add up to 5; pass that, or is_padded=True"),
    ({"num_tokens": 4, "is_padded": True}, "num_tokens=4: sequence_lengths add up to 5; pass that, or more"),
    ({"sequence_lengths": torch.tensor([3])}, "sequence_lengths has shape (1,): pass [sequences] = [2]"),
    ({"cache_lengths": torch.tensor([9.0, 5.0])}, "cache_lengths has dtype float32"),
    ({"rotary_positions": torch.arange(4)}, "rotary_positions has shape (4,): pass [num_tokens] = [5]"),
    ({"position_deltas": torch.arange(5)}, "position_deltas has shape (5,): pass [sequences] = [2]"),
    ({"rotary_positions": torch.arange(5), "position_offsets": torch.arange(5)}, "are both given"),
    ({"is_owned": torch.arange(5)}, "is_owned has dtype int64: pass bool"),
    ({"sequence_lengths": torch.zeros(2, dtype=torch.int32, device="meta")}, "sequence_lengths is on meta"),
])
def test_lengths_that_do_not_fit_are_refused(change, message):
    call = {"cache_lengths": torch.tensor([9, 5]), "sequence_lengths": torch.tensor([3, 2]), "num_tokens": 5} | change
    with pytest.raises(RequestError) as caught:
        plan_write(**call)
    assert message in str(caught.value)
