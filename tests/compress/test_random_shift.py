"""Tests what the thesis proves of random shifts (Markov 2024, chapter 5 and appendix C.5) on the codec.

Expectations are exact but for their grid: a bucket is encoded with each of many shifts, evenly spread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.groups import Group, Segment

from gradcomp.kernels import philox, reference, segments
from gradcomp.kernels.quantisers import QUANTISER, Level

SHIFTS = ((np.arange(4096) + 0.5) / 4096 - 0.5).astype(np.float32)
GRID = 1 / len(SHIFTS)

Doubles = Any


def normal(size: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def every_code(x: Any, bits: int, u: Any, codec: int) -> tuple[Doubles, Doubles, float]:
    """Returns codes and values (draws, elements) of a bucket for every draw, and its unit."""
    c = np.tile(x.astype(np.float32), (len(u), 1))
    with np.errstate(all="ignore"):
        record, code = QUANTISER[codec].quantise(c, np.repeat(u[:, None], len(x), axis=1), Level(bits))
    value = QUANTISER[codec].dequantise(code, [column[:, None] for column in record], Level(bits))
    return code.astype(np.float64), value.astype(np.float64), float(record[1][0])


def shifted(x: Any, bits: int) -> tuple[Doubles, Doubles, float]:
    return every_code(x, bits, SHIFTS, segments.MINMAX_SHIFT)


def flipped(x: Any, bits: int) -> tuple[Doubles, Doubles, float]:
    """Definition 12 flips a coin for each value."""
    return every_code(x, bits, SHIFTS + np.float32(0.5), segments.MINMAX)


bits_of = pytest.mark.parametrize("bits", [1, 2, 4, 8])


# --- definition 1 -------------------------------------------------------------------------------------------------


@bits_of
def test_values_are_the_nearest_of_the_shifted_lattice(bits: int) -> None:
    x = normal(200)
    code, value, unit = shifted(x, bits)
    assert code.min() == 0
    assert code.max() == 2**bits - 1
    lo, r = float(x.min()), SHIFTS[:, None].astype(np.float64) * unit
    steps = (x - lo - r) / unit
    no_tie = np.abs(np.mod(steps, 1) - 0.5) > 1e-4
    np.testing.assert_allclose(value[no_tie], (unit * np.rint(steps) + r + lo)[no_tie], atol=1e-5)
    assert np.abs(value - x).max() <= unit / 2 * (1 + 1e-4)


def test_few_units_of_the_last_place_apart() -> None:
    """If float32 cannot represent the shift, the error grows by its rounding, and no code overflows."""
    x = np.float32(2.0**20) + np.arange(0, 300, dtype=np.float32) * np.float32(0.125)
    for size in (2, 3, 200, 257, 300):
        _, value, unit = shifted(x[:size], 8)
        assert np.abs(value - x[:size]).max() <= unit / 2 + 2 * 0.125


@pytest.mark.parametrize("number", [0.0, -0.0, 2.5, -1e-3, 3e38])
def test_equal_numbers_stay_what_they_are(number: float) -> None:
    _, value, unit = shifted(np.full(40, number, np.float32), 4)
    assert unit == 0
    assert (value == np.float32(number)).all()


def test_what_decodes_beyond_float32_is_flagged_by_its_encoder() -> None:
    largest = np.finfo(np.float32).max
    group = Group(segments.MINMAX_SHIFT, [Segment(np.array([largest, 1e38], np.float32), bits=2)])
    found = [group.encode(reference, stochastic=True, step=step) for step in range(40)]
    flags = [encoded.flags[0] for encoded in found]
    assert set(flags) == {0, 1}
    assert all(group.decode(reference, each.payload).flags == [0] for each in found if each.flags == [0])


# --- lemmas 5 and 15 ----------------------------------------------------------------------------------------------


@bits_of
def test_lemma_5_and_15_mean_and_variance_of_the_codes(bits: int) -> None:
    """The mean is exact for all values, also the least and the largest, and for codes without the shift."""
    x = normal(200)
    for code, value, unit in (shifted(x, bits), flipped(x, bits)):
        sent = float(x.min()) + code * unit
        for means in (value.mean(axis=0), sent.mean(axis=0)):
            np.testing.assert_allclose(means, x, rtol=0, atol=unit * (GRID + 1e-4))
        f = np.mod((x.astype(np.float64) - float(x.min())) / unit, 1)
        f[x == x.max()] = 0  # up to rounding
        np.testing.assert_allclose(((sent - x) ** 2).mean(axis=0), unit**2 * f * (1 - f), atol=unit**2 * 1e-3)


@bits_of
def test_values_have_the_variance_of_a_uniform_error(bits: int) -> None:
    """With the shift added back, which the proof of lemma 5 omits, the variance is half that of coins."""
    x = normal(200)
    _, value, unit = shifted(x, bits)
    np.testing.assert_allclose(((value - x) ** 2).mean(axis=0), unit**2 / 12, rtol=5e-3)
    even = np.random.default_rng(0).random(1000, dtype=np.float32)
    (_, by_shift, unit), (_, by_coin, _) = shifted(even, bits), flipped(even, bits)
    times = ((by_coin - even) ** 2).mean() / ((by_shift - even) ** 2).mean()
    assert times == pytest.approx(2, rel=0.05)


@bits_of
def test_lemma_5_and_15_sparsity(bits: int) -> None:
    x = np.concatenate((normal(100) ** 4, [0.0])).astype(np.float32)
    for code, _, unit in (shifted(x, bits), flipped(x, bits)):
        steps = (x - x.min()) / unit
        sent = (code != 0).mean(axis=0)
        np.testing.assert_allclose(sent, np.minimum(steps, 1), atol=GRID + 1e-4)
        assert sent.sum() <= steps.sum() + 1e-3


# --- the draw -----------------------------------------------------------------------------------------------------


def test_shifts_are_uniform_and_their_own_for_each_layer_and_step() -> None:
    at = {"seed": 1, "layer": 2, "step": 3, "rank": 4}
    for name in at:
        drawn = np.array([philox.shift(**(at | {name: i})) for i in range(2000)])
        assert len(np.unique(drawn)) > 1990
        assert np.abs(drawn).max() < 0.5
        counts, _ = np.histogram(drawn, 20, (-0.5, 0.5))
        assert ((counts - 100) ** 2 / 100).sum() < 45  # chi-square of 19 degrees: 0.999
        assert (np.float64(drawn) * 2**24 % 2 == 1).all()  # both signs alike: the mean of all is zero


def test_all_of_a_layer_has_one_shift() -> None:
    rows = [
        Segment(normal(n, n), bits=5, bucket_size=64, start=start, layer=7)
        for n, start in ((300, 0), (64, 300), (17, 1000))
    ]
    rows.append(Segment(rows[0].gradient, bits=5, bucket_size=64, layer=8))
    group = Group(segments.MINMAX_SHIFT, rows)
    encoded = group.encode(reference, stochastic=True, step=5, seed=11)
    found = []
    for row, place in zip(rows, group.table, strict=True):
        buckets = -(-row.length // 64)
        at = int(place["payload"])
        records = np.frombuffer(encoded.payload[at : at + 8 * buckets], "<f4").reshape(-1, 2)
        least = np.array([row.gradient[64 * k : 64 * (k + 1)].min() for k in range(buckets)])
        found.append((records[:, 0] - least) / records[:, 1])
    u = [float(philox.shift(seed=11, layer=layer, step=5, rank=3)) for layer in (7, 7, 7, 8)]
    for own, drawn in zip(found, u, strict=True):
        np.testing.assert_allclose(own, drawn, atol=1e-4)
    assert abs(u[0] - u[3]) > 1e-3
