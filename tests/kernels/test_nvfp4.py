"""NVFP4 against a model that goes element by element in exact arithmetic, and what a round trip promises."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from kvtier.errors import RequestError
from kvtier.kernels.nvfp4 import dequantise_nvfp4, quantise_nvfp4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3_value(bits: int) -> float:
    """From the definition: 4 bits of exponent with bias 7, 3 of mantissa."""
    exponent, mantissa = bits >> 3 & 15, bits & 7
    return math.ldexp(mantissa / 8, -6) if not exponent else math.ldexp(1 + mantissa / 8, exponent - 7)


E4M3 = [e4m3_value(bits) for bits in range(127)]


def nearest(number: Fraction, values: list[float]) -> int:
    """Index of the nearest value, of two the even one; beyond the last the last."""
    return min(range(len(values)), key=lambda index: (abs(Fraction(values[index]) - min(number, Fraction(values[-1]))), index % 2))


def model(row: list[float], global_scale: float) -> tuple[list[int], int]:
    """Codes and scale of 16 numbers: every float32 operation that the format prescribes, rounded once, all else exact."""
    one = np.float32(global_scale)
    amax = max(np.float32(abs(number)) for number in row)
    if amax == 0 or one == 0:
        return [0] * 16, 0
    bits = nearest(Fraction(float(amax / (np.float32(6) * one))), E4M3)
    step = np.float32(E4M3[bits]) * one
    if step == 0:
        return [0] * 16, bits
    codes = []
    for number in row:
        quotient = np.float32(number) / step
        codes.append(nearest(abs(Fraction(float(quotient))), E2M1) + 8 * bool(np.signbit(quotient)))
    return codes, bits


def unpack(codes: torch.Tensor) -> list[int]:
    return [nibble for byte in codes.tolist() for nibble in (byte & 15, byte >> 4)]


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[float], float]:
    """16 numbers of mixed sizes and a global scale, so that ties, limits and the smallest scales all occur."""
    scale = draw(st.sampled_from([1.0, 0.25, 0.013, 1e-4, 3.7, 0.0]))
    size = draw(st.sampled_from([1.0, 2.0**-9, 2.0**-11, 6 * 2.0**-10, 448.0, 6 * 448.0, 1e5, 0.0]))
    steps = st.one_of(st.integers(-24, 24).map(lambda count: count / 4), st.floats(-6.5, 6.5, width=32))
    numbers = [float(np.float32(draw(steps) * size * (scale or 1.0))) for _ in range(16)]
    return numbers, scale


@examples(100)
@given(rows=st.lists(groups(), min_size=1, max_size=3))
def test_codes_and_scales_are_those_of_the_model(rows):
    scale = rows[0][1]
    numbers = torch.tensor([numbers for numbers, _ in rows])
    codes, scales = quantise_nvfp4(numbers, scale)
    back = dequantise_nvfp4(codes, scales, scale)
    for place, (row, _) in enumerate(rows):
        wanted, bits = model(row, scale)
        assert (unpack(codes[place]), int(scales[place, 0])) == (wanted, bits)
        step = np.float32(E4M3[bits]) * np.float32(scale)
        for number, code in zip(back[place].tolist(), wanted, strict=True):
            value = np.float32(E2M1[code & 7]) * step
            assert number == (-value if code & 8 else value)
            assert math.copysign(1, number) == (-1 if code & 8 else 1)


@pytest.mark.usefixtures("reference_kernels")
@examples(30)
@given(row=groups())
def test_the_reference_is_the_model_too(row):
    codes, scales = quantise_nvfp4(torch.tensor([row[0]]), row[1])
    assert (unpack(codes[0]), int(scales[0, 0])) == model(*row)
    back = dequantise_nvfp4(codes, scales, row[1])
    step = np.float32(E4M3[int(scales[0, 0])]) * np.float32(row[1])
    assert back[0].tolist() == [np.float32(E2M1[code & 7]) * step * (-1 if code & 8 else 1) for code in unpack(codes[0])]


def test_all_sixteen_codes_come_back_as_themselves_with_every_normal_scale():
    """Idempotent to the bit: a block that is read, and quantised again, has not changed."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    for scale in (1.0, 0.0137, 2.0**-20):
        normal = torch.tensor(E4M3[8:])
        numbers = table * (normal[:, None] * scale)
        codes, scales = quantise_nvfp4(numbers, scale)
        assert all(unpack(row) == list(range(16)) for row in codes)
        assert scales.flatten().tolist() == list(range(8, 127))
        assert torch.equal(dequantise_nvfp4(codes, scales, scale), numbers)


@examples(100)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1.0, 0.013, 5e-5]), size=st.integers(-6, 11),
       dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_a_second_round_trip_changes_nothing(seed, scale, size, dtype):
    numbers = torch.randn(3, 2, 48, generator=torch.Generator().manual_seed(seed)) * (2.0**size * scale)
    codes, scales = quantise_nvfp4(numbers.to(dtype), scale)
    again = quantise_nvfp4(dequantise_nvfp4(codes, scales, scale, torch.float32), scale)
    is_normal = scales >= 8
    assert torch.equal(again[1][is_normal], scales[is_normal])
    by_group = is_normal.repeat_interleave(8, dim=-1)
    assert torch.equal(again[0][by_group], codes[by_group])
    once_more = quantise_nvfp4(dequantise_nvfp4(*again, scale, torch.float32), scale)
    assert torch.equal(once_more[0], again[0])   # the smallest scales may shrink once, never twice
    assert torch.equal(once_more[1], again[1])


def test_the_error_is_within_half_a_step():
    numbers = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    scale = float(numbers.abs().max()) / (6 * 448)
    codes, scales = quantise_nvfp4(numbers, scale)
    back = dequantise_nvfp4(codes, scales, scale, torch.float64)
    amax = numbers.view(200, 4, 16).abs().amax(-1).double().repeat_interleave(16, -1)
    # The widest gap between two codes is 2 of 6; a scale that was rounded down by 1/16 saturates at most that much.
    assert bool(((back - numbers.double()).abs() <= amax * (1 / 6 + 1 / 100)).all())
    relative = float((back - numbers.double()).norm() / numbers.double().norm())
    assert relative < 0.12


def test_a_group_with_a_nan_reads_back_as_nan_and_its_neighbours_do_not():
    numbers = torch.ones(1, 48)
    numbers[0, 20] = float("nan")
    codes, scales = quantise_nvfp4(numbers, 0.5)
    assert int(scales[0, 1]) & 0x7F == 0x7F
    back = dequantise_nvfp4(codes, scales, 0.5)[0]
    assert bool(back[16:32].isnan().all())
    assert bool(back[:16].isfinite().all() and back[32:].isfinite().all())


@pytest.mark.parametrize(("scale", "numbers"), [(0.0, 3.0), (1.0, 0.0), (1.0, -0.0), (1.0, 1e-30)])
def test_nothing_to_scale_by_gives_zeros(scale, numbers):
    codes, scales = quantise_nvfp4(torch.full((2, 16), numbers), scale)
    assert not codes.any()
    assert not scales.any()
    assert not dequantise_nvfp4(codes, scales, scale).any()


def test_no_rows_are_no_rows():
    codes, scales = quantise_nvfp4(torch.zeros(0, 3, 32), 1.0)
    assert (codes.shape, scales.shape) == ((0, 3, 16), (0, 3, 2))
    assert dequantise_nvfp4(codes, scales, 1.0).shape == (0, 3, 32)


def test_what_is_too_large_saturates():
    codes, scales = quantise_nvfp4(torch.tensor([[1e9, -1e9, float("inf"), *[3.0] * 13]]), 1.0)
    assert scales.tolist() == [[126]]
    assert unpack(codes[0])[:3] == [7, 15, 7]
    assert dequantise_nvfp4(codes, scales, 1.0)[0, :3].tolist() == [2688.0, -2688.0, 2688.0]


@pytest.mark.parametrize(("call", "message"), [
    (lambda: quantise_nvfp4(torch.zeros(2, 24), 1.0), "numbers has shape (2, 24): its last axis must be a multiple of 16"),
    (lambda: quantise_nvfp4(torch.zeros(2, 0), 1.0), "numbers has shape (2, 0)"),
    (lambda: quantise_nvfp4(torch.zeros(2, 16, dtype=torch.int32), 1.0), "numbers has dtype int32"),
    (lambda: quantise_nvfp4(torch.zeros(2, 16), -1.0), "global_scale=-1.0: pass a finite number, 0 or more"),
    (lambda: quantise_nvfp4(torch.zeros(2, 16), math.nan), "global_scale=nan"),
    (lambda: quantise_nvfp4(torch.zeros(2, 16), 1e39), "global_scale=1e+39"),
    (lambda: dequantise_nvfp4(torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), 1.0, torch.int32),
     "dtype=torch.int32: pass a floating-point dtype"),
    (lambda: dequantise_nvfp4(torch.zeros(2, 8), torch.zeros(2, 1), 1.0), "codes has dtype float32: pass uint8"),
    (lambda: dequantise_nvfp4(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), 1.0),
     "scales has shape (2, 1)"),
])
def test_bad_input_is_refused(call, message):
    with pytest.raises(RequestError) as caught:
        call()
    assert message in str(caught.value)
