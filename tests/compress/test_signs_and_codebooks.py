"""Tests the properties of sign and codebook compressors beyond the contract of all compressors."""

from __future__ import annotations

import numpy as np
import pytest

import gradcomp as gc
from gradcomp.kernels.segments import SEGMENT
from gradcomp.testing.simulation import Simulation, same_bytes

LAYERS = [gc.LayerSpec("w", (1000,))]


def mean(compressor: gc.Compressor, gradients: list[np.ndarray], scale: float = 1.0) -> np.ndarray:
    ranks = Simulation(LAYERS, compressor, len(gradients))
    return ranks.step([[g * np.float32(scale)] for g in gradients], scale=scale).mean(0)


def normal(world: int) -> list[np.ndarray]:
    return [rank[0] for rank in Simulation(LAYERS, gc.Quantize(), world).gradients()]


# --- signs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_signum_is_the_sign_of_the_sum_of_the_signs(world: int, scale: float):
    gradients = normal(world)
    votes = sum(np.sign(g) for g in gradients)
    applied = mean(gc.Signum(100, momentum=0.0), gradients, scale) / scale
    np.testing.assert_array_equal(applied[votes != 0], np.sign(votes[votes != 0]))
    ties = applied[votes == 0]
    assert set(np.unique(ties)) == ({-1, 1} if len(ties) else set())


def test_a_rank_without_gradient_does_not_vote():
    gradient = normal(1)[0]
    silent = np.zeros_like(gradient)
    applied = mean(gc.Signum(momentum=0.0), [silent, gradient, silent])
    np.testing.assert_array_equal(applied, np.where(gradient < 0, -1, 1))


def test_signum_votes_with_its_momentum():
    ranks = Simulation(LAYERS, gc.Signum(), 3)
    momenta = [np.zeros(1000) for _ in range(3)]
    for _ in range(4):
        gradients = ranks.gradients()
        momenta = [0.9 * m + 0.1 * g[0] for m, g in zip(momenta, gradients, strict=True)]
        votes = sum(np.sign(m) for m in momenta)
        np.testing.assert_array_equal(ranks.step(gradients).mean(0), np.sign(votes))
    assert not gc.Signum().traits.keeps_residual


def test_scaled_sign_of_a_layer_has_one_magnitude():
    (gradient,) = normal(1)
    for compressor, magnitudes in ((gc.ScaledSign(None), 1), (gc.ScaledSign(100), 10)):
        applied = mean(compressor, [gradient, gradient])
        np.testing.assert_array_equal(applied < 0, gradient < 0)
        assert len(np.unique(np.abs(applied))) == magnitudes
    whole = np.abs(mean(gc.ScaledSign(None), [gradient, gradient]))
    np.testing.assert_allclose(whole, np.abs(gradient).astype(np.float64).mean(), rtol=1e-6)


def test_one_bit_keeps_the_mean_of_a_bucket():
    (gradient,) = normal(1)
    applied = mean(gc.OneBit(250), [gradient, gradient])
    assert len(np.unique(applied)) == 8
    sums = [values.astype(np.float64).reshape(4, 250).sum(axis=1) for values in (applied, gradient)]
    np.testing.assert_allclose(*sums, atol=1e-4)


# --- codebooks ----------------------------------------------------------------------------------------------


def test_terngrad_sends_nothing_or_the_largest_magnitude():
    (gradient,) = normal(1)
    applied = mean(gc.TernGrad(100), [gradient]).reshape(10, 100)
    largest = np.abs(gradient).reshape(10, 100).max(axis=1)
    # A world of one encodes twice, and the second time there is nothing left to round.
    for values, s in zip(applied, largest, strict=True):
        assert set(np.unique(values)) <= {-s, np.float32(0), s}
    assert (np.sign(applied) * np.sign(gradient).reshape(10, 100) >= 0).all()


def test_nuqsgd_uses_all_levels_of_eight_bits():
    layer = [gc.LayerSpec("w", (127,))]
    gradient = np.ldexp(np.float32(1), -np.arange(127)).astype(np.float32)
    ranks = Simulation(layer, gc.NUQSGD(8, None, "linf"), 1)
    np.testing.assert_array_equal(ranks.step([[gradient]]).mean(0), gradient)


@pytest.mark.parametrize("bits", range(2, 9))
def test_nuqsgd_is_a_codebook_of_powers_of_two(bits: int):
    gradients = normal(3)
    powers = gc.Codebook(tuple(2.0**-i for i in reversed(range(2 ** (bits - 1) - 1))), 100, "l2")
    assert same_bytes(mean(gc.NUQSGD(bits, 100), gradients), mean(powers, gradients))


def test_even_levels_are_quantize():
    (gradient,) = normal(1)
    even = gc.Codebook(tuple(i / 7 for i in range(1, 8)), 100, rounding="nearest", feedback=False)
    expected = mean(gc.Quantize(4, 100, "linf", "nearest", feedback=False), [gradient])
    np.testing.assert_allclose(mean(even, [gradient]), expected, rtol=1e-6)


@pytest.mark.parametrize(("count", "bits"), [(1, 2), (2, 3), (3, 3), (4, 4), (7, 4), (8, 5), (127, 8)])
def test_a_codebook_takes_the_bits_it_needs(count: int, bits: int):
    compressor = gc.Codebook(tuple(i / count for i in range(1, count + 1)))
    table = np.zeros(1, SEGMENT)
    compressor.fill(table, compressor.level)
    assert table["level"].tolist() == [bits]
    magnitudes = compressor.codec_for(table).magnitudes
    np.testing.assert_array_equal(np.unique(magnitudes[bits]), np.linspace(0, 1, count + 1, dtype=np.float32))


def test_nuqsgd_refuses_a_level_that_is_no_number_of_bits():
    with pytest.raises(gc.ConfigError, match="from 2 to 8"):
        gc.NUQSGD().fill(np.zeros(1, SEGMENT), None)
