"""Tests levels that are learned by Algorithm 5.1 (Markov 2024): the algorithm, and codebooks between extremes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from kernels.groups import Group, Segment

import gradcomp as gc
from gradcomp.compress.quantise.learned import even, learned, normalised, with_levels
from gradcomp.kernels import segments
from gradcomp.kernels.devices import HOST


def skewed(size: int = 40_000, seed: int = 0) -> Any:
    """Values of which most are close together, as those of weights and gradients are."""
    return np.random.default_rng(seed).laplace(size=size).astype(np.float32)


def literal(
    values: Any, levels: Sequence[float], batch: int, pinned: bool, rate: float = 0.01
) -> list[float]:
    """Algorithm 5.1, value by value; the closest levels are those of the beginning of a batch."""
    q = list(levels)
    batches = -(-len(values) // batch)
    for k in range(batches):
        before = list(q)
        for v in values[k::batches]:
            i = min(range(len(q)), key=lambda j: (abs(v - before[j]), j))
            if not pinned or 0 < i < len(q) - 1:
                q[i] = q[i] - rate * (q[i] - v)
    return q


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize(("bits", "batch"), [(1, 64), (2, 1), (3, 7), (4, 1024), (6, 100)])
def test_levels_are_those_of_algorithm_5_1(bits: int, batch: int, pinned: bool):
    values = normalised(skewed(2500), 100)
    expected = literal(values, even(bits), batch, pinned)
    found = learned(values, even(bits), pinned=pinned, batch=batch)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("size", "bucket_size"), [(0, 100), (1, 100), (99, 100), (250, 100), (300, None)])
def test_values_are_normalised_bucket_by_bucket(size: int, bucket_size: int | None):
    x = skewed(300)[:size]
    x[:1] = 7  # a constant bucket, where there is one value
    buckets = [x[i : i + (bucket_size or 300)].astype(np.float64) for i in range(0, size, bucket_size or 300)]
    expected = [(b - b.min()) / np.ptp(b) for b in buckets if len(b) > 1]
    np.testing.assert_allclose(
        normalised(x, bucket_size), np.concatenate([np.zeros(0), *expected]), rtol=1e-6
    )


def test_constant_buckets_teach_nothing():
    x = np.concatenate([np.full(100, 3.0), np.arange(100), np.zeros(50)]).astype(np.float32)
    np.testing.assert_allclose(normalised(x, 100), np.arange(100) / 99, rtol=1e-6)
    assert learned(np.zeros(0), even(3), pinned=False).tolist() == list(even(3))


@pytest.mark.parametrize("bits", range(1, 8))
@pytest.mark.parametrize("pinned", [False, True])
def test_levels_ascend_and_pinned_ends_stay(bits: int, pinned: bool):
    q = learned(normalised(skewed(), 1000), even(bits), pinned=pinned)
    assert (np.diff(q) >= 0).all()
    assert 0 <= q[0] <= q[-1] <= 1
    assert ((q[0], q[-1]) == (0, 1)) == pinned


def error(levels: Any, x: Any, rounding: str) -> float:
    """Of a code of levels, relative to the values, with a bucket size that does not divide them."""
    compressor = gc.Codebook(tuple(np.float32(levels).tolist()), 1000, "minmax", rounding, feedback=False)
    codec = compressor.codec_for(np.zeros(1, segments.SEGMENT))
    group = Group(codec.kind, [Segment(x, bits=compressor.code_bits, bucket_size=1000)], gap=0)
    group.magnitudes = codec.magnitudes
    value = group.values(group.encode(HOST.kernels, stochastic=codec.stochastic).payload)[0]
    return float(np.linalg.norm(value - x) / np.linalg.norm(x))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("bits", "share"), [(2, 0.85), (3, 0.8), (4, 0.85), (5, 0.98), (6, 1)])
def test_learned_levels_have_a_smaller_error_on_new_values(bits: int, share: float, rounding: str):
    q = learned(normalised(skewed(100_123), 1000), even(bits), pinned=rounding == "stochastic")
    new = skewed(50_017, seed=1)
    assert error(q, new, rounding) < share * error(even(bits), new, rounding)


@pytest.mark.parametrize("bits", range(2, 8))
def test_even_levels_are_quantize(bits: int):
    x = skewed(5001)
    even_codes = Group(segments.MINMAX, [Segment(x, bits=bits, bucket_size=1000)], gap=0)
    uniform = even_codes.values(even_codes.encode(HOST.kernels).payload)[0]
    expected = float(np.linalg.norm(uniform - x) / np.linalg.norm(x))
    assert error(even(bits), x, "nearest") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("compressor", "weights", "gradients"),
    [
        (gc.Quantize(4, 64), "stochastic", "stochastic"),
        (gc.Quantize(4, 64, rounding="shift"), "nearest", "stochastic"),
        (gc.Quantize(4, 64, rounding="nearest", feedback=False), "nearest", "nearest"),
        (gc.Codebook((0, 0.5, 1), scaling="minmax"), "stochastic", "stochastic"),
        (gc.Quantize(8), None, None),
        (gc.Quantize(4, allocate="bucket"), None, None),
        (gc.Quantize((3, 4)), None, None),
        (gc.Quantize(4, scaling="linf"), None, None),
        (gc.Codebook((0.5, 1)), None, None),
        (gc.Identity(), None, None),
    ],
    ids=str,
)
def test_shifts_become_nearest_for_weights_and_stochastic_for_gradients(
    compressor: Any, weights: str | None, gradients: str | None
):
    for unbiased, rounding in ((False, weights), (True, gradients)):
        found = with_levels(compressor, unbiased=unbiased)
        assert (found and found.rounding) == rounding
        assert found is None or not found.traits.keeps_residual


@pytest.mark.parametrize(
    ("levels", "rounding"),
    [
        ((0.1, 0.5, 1), "stochastic"),
        ((0, 0.5, 0.9), "stochastic"),
        ((0, 0.5, 0.4, 1), "stochastic"),
        ((0, 1.5), "nearest"),
        ((-0.5, 1), "nearest"),
        ((1,), "nearest"),
        ((0, 1e-40, 1), "nearest"),
        (tuple(i / 128 for i in range(129)), "stochastic"),
        ("0/1", "nearest"),
    ],
    ids=str,
)
def test_levels_that_cannot_be_are_refused(levels: Any, rounding: str):
    with pytest.raises(gc.ConfigError, match="levels between minimum and maximum must be"):
        gc.Codebook(levels, scaling="minmax", rounding=rounding, feedback=False)


@pytest.mark.parametrize(("count", "bits"), [(2, 1), (3, 2), (4, 2), (5, 3), (16, 4), (17, 5), (128, 7)])
def test_a_codebook_between_extremes_takes_the_bits_it_needs(count: int, bits: int):
    compressor = gc.Codebook(tuple(i / (count - 1) for i in range(count)), scaling="minmax")
    assert compressor.code_bits == bits
    row = compressor.codec_for(np.zeros(1, segments.SEGMENT)).magnitudes[bits]
    np.testing.assert_array_equal(np.unique(row[: 1 << bits]), np.linspace(0, 1, count, dtype=np.float32))
