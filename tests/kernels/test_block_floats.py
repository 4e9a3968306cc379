"""Block floating formats: their numbers are those of ml_dtypes, their scale is the least that cuts nothing off.

Scales are powers of two, or for NVFP4 numbers of E4M3 in a unit that a segment has.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernels.backends import HOST, each_of
from kernels.groups import Group, Segment

from gradcomp import BlockFloat, ConfigError, LayerSpec
from gradcomp.kernels import reference, segments
from gradcomp.kernels.dispatch import HOST_KERNELS
from gradcomp.kernels.quantisers import rounded_up

pytest.importorskip("gradcomp._native")

FORMATS = {
    "fp8_e4m3": (segments.E4M3, ml_dtypes.float8_e4m3fn, 448.0),
    "fp8_e5m2": (segments.E5M2, ml_dtypes.float8_e5m2, 57344.0),
    "fp4_e2m1": (segments.E2M1, ml_dtypes.float4_e2m1fn, 6.0),
}
BACKEND = each_of(HOST)


def coded(values: Any, name: str, backend: Any, block: int = 32, **options: Any) -> tuple[Any, Any, Any]:
    """Scales, codes and decoded values of one segment."""
    codec = FORMATS[name][0]
    bits = segments.LEVELS[codec].start
    group = Group(codec, [Segment(np.asarray(values, np.float32), bits=bits, bucket_size=block)], gap=0)
    payload = group.encode(backend, **options).payload
    blocks = -(-len(values) // block)
    scales = np.ldexp(1.0, np.frombuffer(payload[:blocks], np.uint8).astype(int) - 127)
    codes = np.frombuffer(payload[blocks:], np.uint8)
    if bits == 4:
        codes = np.stack((codes & 15, codes >> 4), axis=1).reshape(-1)
    return np.repeat(scales, block)[: len(values)], codes[: len(values)], group.values(payload)[0]


@BACKEND
@pytest.mark.parametrize("name", FORMATS)
def test_nearest_is_the_formats_own_cast(name: str, backend: Any) -> None:
    _, kind, largest = FORMATS[name]
    rng = np.random.default_rng(0)
    values = (rng.normal(size=4096) * 2.0 ** rng.integers(-30, 30, 4096)).astype(np.float32)
    values[:64] = np.repeat([0.0, -0.0], 32)
    scales, codes, decoded = coded(values, name, backend)
    expected = (values / scales.astype(np.float32)).astype(kind)
    # Zero has no sign here.
    assert codes.tolist() == np.where(expected == 0, 0, expected.view(np.uint8)).tolist()
    assert np.array_equal(decoded, expected.astype(np.float32) * scales.astype(np.float32))
    peaks = np.abs(values).reshape(-1, 32).max(axis=1)[2:]
    own = scales.reshape(-1, 32)[2:, 0]
    assert (peaks <= largest * own).all()
    assert (peaks > largest * own / 2).all()


@BACKEND
@pytest.mark.parametrize("name", FORMATS)
def test_every_number_of_the_format_is_kept(name: str, backend: Any) -> None:
    codec, kind, largest = FORMATS[name]
    count = 1 << segments.LEVELS[codec].start
    numbers = np.arange(count).astype(np.uint8).view(kind).astype(np.float32)
    numbers = numbers[np.isfinite(numbers)]
    for stochastic in (False, True):
        # In blocks that begin with the largest number, whose scale is 1.
        values = np.stack((np.full(len(numbers), largest, np.float32), numbers), axis=1).reshape(-1)
        scales, _, decoded = coded(values, name, backend, block=2, stochastic=stochastic)
        assert set(scales.tolist()) == {1.0}
        assert decoded.tolist() == values.tolist()


@pytest.mark.parametrize("name", FORMATS)
def test_draws_are_unbiased_and_as_far_off_as_said(name: str) -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=256).astype(np.float32)
    decoded = np.stack([coded(values, name, HOST_KERNELS, stochastic=True, step=s)[2] for s in range(600)])
    bound = BlockFloat(name).distortion(LayerSpec("w", (256,)))
    peaks = np.abs(values).reshape(-1, 32).max(axis=1).repeat(32)
    spread = bound.peak * peaks / 2 / np.sqrt(600)  # of a coin between neighbours, at most
    assert (np.abs(decoded.mean(axis=0, dtype=np.float64) - values) <= 5 * spread).all()
    for each in decoded[:50].reshape(50, -1, 32) - values.reshape(-1, 32):
        blocks = values.reshape(-1, 32)
        assert (np.abs(each).max(axis=1) <= bound.peak * np.abs(blocks).max(axis=1)).all()
    errors = np.square(decoded - values).reshape(600, -1, 32).sum(axis=2).mean(axis=0)
    assert (errors <= 1.05 * bound.bound * np.square(values.reshape(-1, 32)).sum(axis=1)).all()


@BACKEND
@pytest.mark.parametrize("name", FORMATS)
def test_what_has_no_scale_is_not_finite(name: str, backend: Any) -> None:
    codec = FORMATS[name][0]
    values = np.full(40, np.finfo(np.float32).max, np.float32)
    group = Group(codec, [Segment(values, bits=segments.LEVELS[codec].start, bucket_size=32)])
    assert group.encode(backend).flags == [1]


@BACKEND
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("exponent", [0, 1, 254, 255])
def test_a_scale_from_a_peer_is_a_number_or_flagged(name: str, backend: Any, exponent: int) -> None:
    codec = FORMATS[name][0]
    rows = [Segment(np.zeros(4, np.float32), bits=segments.LEVELS[codec].start, bucket_size=32)]
    group = Group(codec, rows, gap=0)
    payload = bytes([exponent]) + bytes([0x11]) * (group.size - 1)
    found = group.decode(backend, payload)
    assert found.flags == [int(exponent >= 254)]
    assert found.arrays == group.decode(reference, payload).arrays


@BACKEND
def test_small_values_have_the_least_scale(backend: Any) -> None:
    values = np.full(32, np.finfo(np.float32).smallest_subnormal, np.float32)
    scales, codes, _ = coded(values, "fp8_e4m3", backend)
    assert set(scales.tolist()) == {2.0**-126}
    assert not codes.any()


# --- scales in units -------------------------------------------------------------------------------------------

BLOCK = 16
NUMBERS = np.arange(0x7F).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""Those of E4M3 that are finite and have no sign."""


def nvfp4(values: Any, **row: Any) -> Group:
    rows = [Segment(np.asarray(values, np.float32), bits=4, bucket_size=BLOCK, **row)]
    return Group(segments.NVFP4, rows, gap=0)


def parts(payload: bytes, count: int) -> tuple[Any, Any, Any]:
    """Unit, scales and codes."""
    blocks = -(-count // BLOCK)
    scales = np.frombuffer(payload[4 : 4 + blocks], ml_dtypes.float8_e4m3fn).astype(np.float32)
    packed = np.frombuffer(payload[4 + blocks :], np.uint8)
    codes = np.stack((packed & 15, packed >> 4), axis=1).reshape(-1)[:count]
    return np.frombuffer(payload[:4], "<f4")[0], scales, codes


def uneven(count: int = 4096, octaves: int = 12) -> Any:
    """Normal numbers, each block at a size of its own."""
    rng = np.random.default_rng(0)
    sizes = 2.0 ** rng.uniform(-octaves, 0, count // BLOCK)
    return (rng.normal(size=(count // BLOCK, BLOCK)) * sizes[:, None]).astype(np.float32).reshape(-1)


@BACKEND
def test_nearest_in_units_is_the_formats_own_cast(backend: Any) -> None:
    values = uneven()
    unit, scales, codes = parts(nvfp4(values).encode(backend).payload, len(values))
    assert unit == np.abs(values).max() / np.float32(448 * 6)
    inverse = (np.float32(1) / (scales * unit)).repeat(BLOCK)
    expected = (np.abs(values) * inverse).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert codes.tolist() == np.where((values < 0) & (expected != 0), expected | 8, expected).tolist()
    decoded = nvfp4(values).values(nvfp4(values).encode(backend).payload)[0]
    numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(decoded, numbers * (scales * unit).repeat(BLOCK))


@BACKEND
def test_a_scale_is_the_least_that_cuts_nothing_off(backend: Any) -> None:
    values = uneven()
    unit, scales, _ = parts(nvfp4(values).encode(backend).payload, len(values))
    peaks = np.abs(values).reshape(-1, BLOCK).max(axis=1).astype(np.float64)
    reach = 6.0 * scales.astype(np.float64) * unit
    assert (peaks <= reach * (1 + 2.0**-22)).all()
    below = NUMBERS[np.maximum(np.searchsorted(NUMBERS, scales) - 1, 0)]
    assert (peaks > 6.0 * below.astype(np.float64) * unit * (1 - 2.0**-22)).all()
    assert scales.max() == 448


def test_numbers_are_rounded_up_to_e4m3() -> None:
    assert rounded_up(NUMBERS[1:]).tolist() == list(range(1, 0x7F))
    between = ((NUMBERS[1:-1] + NUMBERS[2:]) / 2).astype(np.float32)
    for each in (between, np.nextafter(NUMBERS[1:-1], np.float32(1e3))):
        assert rounded_up(each).tolist() == list(range(2, 0x7F))
    assert rounded_up(np.array([0, 1e-45, 449, 1e30], np.float32)).tolist() == [1, 1, 0x7E, 0x7E]


@pytest.mark.parametrize("octaves", [0, 12, 25])
def test_draws_in_units_are_unbiased_and_as_far_off_as_said(octaves: int) -> None:
    values = uneven(512, octaves)
    each = nvfp4(values)
    draws = 600
    decoded = np.stack(
        [each.values(each.encode(HOST_KERNELS, stochastic=True, step=s).payload)[0] for s in range(draws)]
    ).astype(np.float64)
    unit, scales, _ = parts(each.encode(reference).payload, len(values))
    # Neighbours are at most half of the value apart, or half a scale.
    step = np.maximum(np.abs(values) / 2, (scales * unit).repeat(BLOCK) / 2)
    assert (np.abs(decoded.mean(axis=0) - values) <= 5 * step / 2 / np.sqrt(draws)).all()
    bound = BlockFloat("fp4_e2m1", BLOCK, scale="e4m3").distortion(LayerSpec("w", (512,)))
    assert bound.unbiased
    assert np.abs(decoded - values).max() <= bound.peak * np.abs(values).max()
    errors = np.square(decoded - values).sum(axis=1).mean()
    assert errors <= 1.05 * bound.bound * np.square(values.astype(np.float64)).sum()


def test_its_scales_lose_less_than_powers_of_two() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=1 << 15).astype(np.float32)
    lost = []
    for codec in (segments.NVFP4, segments.E2M1):
        each = Group(codec, [Segment(values, bits=4, bucket_size=BLOCK)])
        lost.append(np.square(each.values(each.encode(reference, stochastic=True).payload)[0] - values).sum())
    assert lost[0] < 0.9 * lost[1]


@BACKEND
def test_every_segment_has_a_unit_of_its_own(backend: Any) -> None:
    rows = [Segment(np.full(20, size, np.float32), bits=4, bucket_size=BLOCK) for size in (1.0, 1e-6, 0.0)]
    each = Group(segments.NVFP4, rows, gap=0)
    payload = each.encode(backend).payload
    units = [np.frombuffer(payload[at : at + 4], "<f4")[0] for at in each.table["payload"].tolist()]
    assert units == [np.float32(1) / np.float32(2688), np.float32(1e-6) / np.float32(2688), 2.0**-117]
    assert [np.unique(v).tolist() for v in each.values(payload)][2] == [0.0]


@BACKEND
def test_blocks_far_below_the_largest_have_the_least_scale(backend: Any) -> None:
    values = np.concatenate(([1.0], np.zeros(15), np.full(16, 1e-9), np.zeros(16)))
    _, scales, codes = parts(nvfp4(values).encode(backend).payload, 48)
    assert scales.tolist() == [448, 2.0**-9, 2.0**-9]
    assert codes[0] == 7
    assert not codes[16:].any()


@BACKEND
@pytest.mark.parametrize("byte", [0, 1, 0x7E, 0x7F, 0x80, 0xB8, 0xFF])
def test_a_scale_in_units_from_a_peer_is_a_number_or_flagged(backend: Any, byte: int) -> None:
    each = nvfp4(np.ones(32, np.float32))
    payload = bytearray(each.encode(backend).payload)
    payload[5] = byte
    found = each.decode(backend, bytes(payload))
    assert found.flags == [int(byte > 0x7E)]
    assert found.arrays == each.decode(reference, bytes(payload)).arrays
    assert each.reduce(backend, [bytes(payload)] * 2).flags == found.flags


@BACKEND
@pytest.mark.parametrize("unit", [np.inf, -np.inf, np.nan, 3e38, -1e-3, 0.0, 1e-45])
def test_a_unit_from_a_peer_is_a_number_or_flagged(backend: Any, unit: float) -> None:
    each = nvfp4(np.ones(32, np.float32))
    payload = np.array([unit], "<f4").tobytes() + each.encode(backend).payload[4:]
    found = each.decode(backend, payload)
    assert found.flags == [int(not np.abs(unit) < 1e38)]
    assert found.arrays == each.decode(reference, payload).arrays
    mean = each.reduce(backend, [payload, each.encode(backend).payload])
    assert mean == each.reduce(reference, [payload, each.encode(reference).payload])
    assert mean.flags == found.flags


def test_a_payload_by_hand() -> None:
    # The unit is 1. 6, -1 and 2 times the scale 448; 6 and -3 times the scale 3.
    values = np.zeros(18, np.float32)
    values[:3] = 2688, -448, 896
    values[16:] = 18, -9
    payload = nvfp4(values).encode(reference).payload
    assert np.frombuffer(payload[:4], "<f4").tolist() == [1.0]
    assert payload[4:6] == bytes([0x7E, 0x44])
    assert payload[6:] == bytes([0xA7, 0x04, 0, 0, 0, 0, 0, 0, 0xD7])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"format": "fp8"}, "fp8_e4m3, fp8_e5m2, fp4_e2m1"),
        ({"block": 0}, "block must be"),
        ({"block": True}, "block must be"),
        ({"rounding": "up"}, "stochastic, nearest"),
        ({"scale": "e4m3"}, "scale"),
        ({"scale": "e4m3", "format": "fp8_e5m2"}, "scale"),
        ({"format": "fp4_e2m1", "scale": "ue4m3"}, "scale"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        BlockFloat(**options)
