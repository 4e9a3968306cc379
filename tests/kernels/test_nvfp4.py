"""NVFP4: E2M1 in blocks whose scales are numbers of E4M3, in a unit that a segment has."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernels.groups import Group, Segment

from gradcomp import BlockFloat, ConfigError, LayerSpec
from gradcomp.kernels import dispatch, reference, segments
from gradcomp.kernels.quantisers import rounded_up

pytest.importorskip("gradcomp._native")

BACKENDS = pytest.mark.parametrize(
    "backend", [reference, dispatch.named("native")], ids=["reference", "native"]
)
BLOCK = 16
NUMBERS = np.arange(0x7F).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""Those of E4M3 that are finite and have no sign."""


def group(values: Any, **row: Any) -> Group:
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


@BACKENDS
def test_nearest_is_the_formats_own_cast(backend: Any) -> None:
    values = uneven()
    unit, scales, codes = parts(group(values).encode(backend).payload, len(values))
    assert unit == np.abs(values).max() / np.float32(448 * 6)
    inverse = (np.float32(1) / (scales * unit)).repeat(BLOCK)
    expected = (np.abs(values) * inverse).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert codes.tolist() == np.where((values < 0) & (expected != 0), expected | 8, expected).tolist()
    decoded = group(values).values(group(values).encode(backend).payload)[0]
    numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(decoded, numbers * (scales * unit).repeat(BLOCK))


@BACKENDS
def test_a_scale_is_the_least_that_cuts_nothing_off(backend: Any) -> None:
    values = uneven()
    unit, scales, _ = parts(group(values).encode(backend).payload, len(values))
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
def test_draws_are_unbiased_and_as_far_off_as_said(octaves: int) -> None:
    values = uneven(512, octaves)
    each = group(values)
    draws = 600
    decoded = np.stack(
        [
            each.values(each.encode(dispatch.named("native"), stochastic=True, step=s).payload)[0]
            for s in range(draws)
        ]
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


@BACKENDS
def test_every_segment_has_a_unit_of_its_own(backend: Any) -> None:
    rows = [Segment(np.full(20, size, np.float32), bits=4, bucket_size=BLOCK) for size in (1.0, 1e-6, 0.0)]
    each = Group(segments.NVFP4, rows, gap=0)
    payload = each.encode(backend).payload
    units = [np.frombuffer(payload[at : at + 4], "<f4")[0] for at in each.table["payload"].tolist()]
    assert units == [np.float32(1) / np.float32(2688), np.float32(1e-6) / np.float32(2688), 2.0**-117]
    assert [np.unique(v).tolist() for v in each.values(payload)][2] == [0.0]


@BACKENDS
def test_blocks_far_below_the_largest_have_the_least_scale(backend: Any) -> None:
    values = np.concatenate(([1.0], np.zeros(15), np.full(16, 1e-9), np.zeros(16)))
    _, scales, codes = parts(group(values).encode(backend).payload, 48)
    assert scales.tolist() == [448, 2.0**-9, 2.0**-9]
    assert codes[0] == 7
    assert not codes[16:].any()


@BACKENDS
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("position", [0, 39])
def test_what_is_not_finite_is_flagged(backend: Any, value: float, position: int) -> None:
    values = np.ones(40, np.float32)
    values[position] = value
    encoded = group(values).encode(backend)
    assert encoded.flags == [1]
    assert not any(encoded.payload)


@BACKENDS
@pytest.mark.parametrize("byte", [0, 1, 0x7E, 0x7F, 0x80, 0xB8, 0xFF])
def test_a_scale_from_a_peer_is_a_number_or_flagged(backend: Any, byte: int) -> None:
    each = group(np.ones(32, np.float32))
    payload = bytearray(each.encode(backend).payload)
    payload[5] = byte
    found = each.decode(backend, bytes(payload))
    assert found.flags == [int(byte > 0x7E)]
    assert found.arrays == each.decode(reference, bytes(payload)).arrays
    assert each.reduce(backend, [bytes(payload)] * 2).flags == found.flags


@BACKENDS
@pytest.mark.parametrize("unit", [np.inf, -np.inf, np.nan, 3e38, -1e-3, 0.0, 1e-45])
def test_a_unit_from_a_peer_is_a_number_or_flagged(backend: Any, unit: float) -> None:
    each = group(np.ones(32, np.float32))
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
    payload = group(values).encode(reference).payload
    assert np.frombuffer(payload[:4], "<f4").tolist() == [1.0]
    assert payload[4:6] == bytes([0x7E, 0x44])
    assert payload[6:] == bytes([0xA7, 0x04, 0, 0, 0, 0, 0, 0, 0xD7])


@pytest.mark.parametrize("options", [{}, {"format": "fp8_e5m2"}, {"format": "fp4_e2m1", "scale": "ue4m3"}])
def test_settings_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="scale"):
        BlockFloat(**{"scale": "e4m3", **options})
