"""Block floating formats: their numbers are those of ml_dtypes, their scale is the least that cuts nothing off."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernels.groups import Group, Segment

from gradcomp import BlockFloat, ConfigError, LayerSpec
from gradcomp.kernels import dispatch, reference, segments

pytest.importorskip("gradcomp._native")

FORMATS = {
    "fp8_e4m3": (segments.E4M3, ml_dtypes.float8_e4m3fn, 448.0),
    "fp8_e5m2": (segments.E5M2, ml_dtypes.float8_e5m2, 57344.0),
    "fp4_e2m1": (segments.E2M1, ml_dtypes.float4_e2m1fn, 6.0),
}
BACKENDS = [reference, dispatch.named("native")]


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


@pytest.mark.parametrize("backend", BACKENDS, ids=["reference", "native"])
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


@pytest.mark.parametrize("backend", BACKENDS, ids=["reference", "native"])
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
    decoded = np.stack([coded(values, name, BACKENDS[1], stochastic=True, step=s)[2] for s in range(600)])
    bound = BlockFloat(name).distortion(LayerSpec("w", (256,)))
    peaks = np.abs(values).reshape(-1, 32).max(axis=1).repeat(32)
    spread = bound.peak * peaks / 2 / np.sqrt(600)  # of a coin between neighbours, at most
    assert (np.abs(decoded.mean(axis=0, dtype=np.float64) - values) <= 5 * spread).all()
    for each in decoded[:50].reshape(50, -1, 32) - values.reshape(-1, 32):
        blocks = values.reshape(-1, 32)
        assert (np.abs(each).max(axis=1) <= bound.peak * np.abs(blocks).max(axis=1)).all()
    errors = np.square(decoded - values).reshape(600, -1, 32).sum(axis=2).mean(axis=0)
    assert (errors <= 1.05 * bound.bound * np.square(values.reshape(-1, 32)).sum(axis=1)).all()


@pytest.mark.parametrize("backend", BACKENDS, ids=["reference", "native"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [np.inf, np.nan, np.finfo(np.float32).max])
def test_what_has_no_scale_is_not_finite(name: str, backend: Any, value: float) -> None:
    codec = FORMATS[name][0]
    values = np.full(40, value, np.float32)
    group = Group(codec, [Segment(values, bits=segments.LEVELS[codec].start, bucket_size=32)])
    assert group.encode(backend).flags == [1]


@pytest.mark.parametrize("backend", BACKENDS, ids=["reference", "native"])
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


def test_small_values_have_the_least_scale() -> None:
    values = np.full(32, np.finfo(np.float32).smallest_subnormal, np.float32)
    for backend in BACKENDS:
        scales, codes, _ = coded(values, "fp8_e4m3", backend)
        assert set(scales.tolist()) == {2.0**-126}
        assert not codes.any()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"format": "fp8"}, "fp8_e4m3, fp8_e5m2, fp4_e2m1"),
        ({"block": 0}, "block must be"),
        ({"block": True}, "block must be"),
        ({"rounding": "up"}, "stochastic, nearest"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        BlockFloat(**options)
