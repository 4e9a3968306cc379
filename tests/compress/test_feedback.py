"""Tests error feedback around every codec: declared bounds hold, residuals stay bounded, everything is sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from configurations import ROWS
from tiers import every_value

import gradcomp as gc
from gradcomp.compress import from_string
from gradcomp.compress.base import Coded
from gradcomp.control.candidates import default_levels
from gradcomp.control.distortion.round_trip import round_trip
from gradcomp.testing.simulation import Simulation

NOISE, CONSTANT = LAYERS = [gc.LayerSpec("noise", (16, 32)), gc.LayerSpec("constant", (16, 32))]
SIZE = NOISE.size
STEPS = 300

#: At the default bucket size, beside the rows.
DEFAULTS = (
    "quantize:bits=1,rounding=nearest",
    "quantize:bits=1,scaling=l2,rounding=nearest",
    "quantize:bits=1,scaling=linf,rounding=nearest",
    "quantize:bits=4,rounding=nearest",
    "quantize:bits=2,feedback=true",
    "quantize:bits=4,feedback=true",
    "quantize:bits=5,scaling=l2,rounding=nearest",
    "nuqsgd:rounding=nearest",
    "topk:values=[quantize:bits=4]",
    "topk:density=0.1,values=[one_bit]",
    "topk:density=0.5,values=[quantize:bits=2]",
)
EVERY = [row.compressor for row in ROWS.values()] + [from_string(text) for text in DEFAULTS]


def without_index_coding(compressor: gc.Compressor) -> gc.Compressor:
    """Returns one form for all index codings and wrappers, which change nothing here."""
    bare = compressor.bare()
    return replace(bare, indices="auto") if hasattr(bare, "indices") else bare


KEEPING = {
    (without_index_coding(c).to_string(), c.traits.residual_decay): c
    for c in reversed(EVERY)
    if c.traits.keeps_residual and not c.traits.learns  # nets that have learned nothing send next to nothing
}
BOUNDED = {b.to_string(): b for c in EVERY if (b := without_index_coding(c)).distortion(NOISE) is not None}


def kept_alone(compressor: gc.Compressor) -> gc.Compressor:
    """Returns the compressor with its residual and decay, but without momentum and clipping."""
    bare, decay = without_index_coding(compressor), compressor.traits.residual_decay
    keeps = bare.traits.keeps_residual and bare.traits.residual_decay == decay
    return bare if keeps else gc.ErrorFeedback(bare, decay)


def kind_of(compressor: gc.Compressor) -> list[tuple[object, ...]]:
    """Returns what makes residuals behave in another way: everything but the level, unless that is one bit."""
    bare = compressor.bare()
    codec = getattr(bare, "values", bare)
    words = ("rounding", "scaling", "allocate", "zeros", "alternate", "warm_start", "refresh")
    fields = [getattr(each, word, None) for each in (bare, codec) for word in words]
    bits, decays = getattr(codec, "bits", None), compressor.traits.residual_decay != 1
    return [(type(bare), type(codec), decays, bits == 1, isinstance(bits, tuple), *fields)]


@pytest.mark.parametrize(
    "compressor", every_value(KEEPING.values(), kind_of), ids=[text for text, _ in KEEPING]
)
def test_residuals_stay_bounded_and_everything_is_sent(compressor: gc.Compressor):
    distortion = without_index_coding(compressor).distortion(NOISE)
    in_time = min(STEPS, np.ceil(10 / max(distortion.delta, 0.01))) if distortion else STEPS
    generator = np.random.default_rng(5)
    gradients = generator.standard_normal((2, SIZE)).astype(np.float32)
    gradients[1] += np.copysign(np.float32(0.5), gradients[1])  # none is near zero
    ranks = Simulation(LAYERS, kept_alone(compressor), 1, config_seed=1)
    owed, sent = [], np.zeros(SIZE, np.bool_)
    for step in range(STEPS):
        gradients[0] = generator.standard_normal(SIZE)
        applied = ranks.step([list(gradients)]).mean(1)
        if step < in_time:
            sent |= applied != 0
        owed.append([np.linalg.norm(ranks.owed(layer)) for layer in range(2)])
    middle, late = np.mean(owed[STEPS // 3 : STEPS // 2], axis=0), np.mean(owed[-STEPS // 6 :], axis=0)
    # What is never sent grows from the middle to the end: by 1.48, the root of the steps, or by 2.2, as they do.
    assert late[0] <= 1.3 * middle[0]
    assert late[1] <= 1.8 * middle[1]
    assert sent.mean() >= 0.95


# --- what is said of the error ------------------------------------------------------------------------------


def vectors() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    normal = generator.standard_normal(SIZE)
    spike = np.full(SIZE, 1e-4)
    spike[77] = 1.0
    between = np.zeros(SIZE)  # half way between two steps, and at both ends of every bucket that has them
    between[::32], between[1::32] = 1.0, -1.0
    alternating = np.where(np.arange(SIZE) % 2, 1.0, -0.01)
    rank_one = np.outer(generator.standard_normal(16), generator.standard_normal(32)).reshape(-1)
    found = {
        "normal": normal,
        "cauchy": generator.standard_cauchy(SIZE),
        "cubes": normal**3,
        "lognormal": np.exp(3 * normal),
        "flat": np.ones(SIZE),
        "signs": np.sign(normal),
        "spike": spike,
        "between": between,
        "alternating": alternating,
        "rank one": rank_one,
        "identity": np.eye(16, 32).reshape(-1),
        "zero": np.zeros(SIZE),
        "tiny": 1e-30 * normal,
    }
    return {name: values.astype(np.float32) for name, values in found.items()}


@pytest.mark.parametrize("compressor", BOUNDED.values(), ids=BOUNDED)
def test_no_vector_exceeds_the_bounds(compressor: gc.Compressor):
    distortion = compressor.distortion(NOISE)
    for name, values in vectors().items():
        x = values.astype(np.float64)
        errors = np.array([round_trip(compressor, NOISE, values, seed) - x for seed in range(12)])
        squared = (errors**2).sum(axis=1)
        by_chance = 5 * squared.std() / np.sqrt(len(squared))
        assert squared.mean() - by_chance <= (distortion.bound + 1e-5) * (x**2).sum(), name
        if np.isfinite(distortion.peak):
            assert np.abs(errors).max() <= (distortion.peak + 1e-5) * np.abs(x).max(), name


def test_every_coded_compressor_says_what_it_is():
    coded = [c for c in EVERY if isinstance(c, Coded) and c.traits.accounts]
    assert all(c.distortion(NOISE) is not None for c in coded)
    assert {c.distortion(NOISE).unbiased for c in coded} == {True, False}


# --- what is allowed ----------------------------------------------------------------------------------------


SMALL = [gc.RandomK(1.0, scaled=True), gc.Quantize(4), gc.NUQSGD(4), "fp16", "none"]
# Their errors may exceed what they code in sum, not in any element that is sent.
LARGEST = [
    gc.TopK(values=gc.Quantize(4)),
    gc.TopK(1.0, values=gc.Quantize(3, 37, "linf")),
    gc.TopK(values=gc.Quantize(2)),
]


@pytest.mark.parametrize("inner", SMALL + LARGEST)
def test_feedback_around_a_small_variance_or_the_largest_elements_is_taken(inner):
    assert gc.ErrorFeedback(inner).traits.keeps_residual


@pytest.mark.parametrize(
    ("own", "levels"),
    [
        (gc.Quantize(5, scaling="l2", rounding="nearest"), [5, 6, 7, 8]),
        (gc.Quantize(4, rounding="nearest"), [2, 3, 4, 5, 6, 7, 8]),
        (gc.Quantize(2, rounding="nearest"), [1, 2, 3, 4]),
        (gc.Quantize(2, feedback=True), [2, 3, 4]),
        (gc.NUQSGD(4, rounding="nearest"), [4, 5, 6, 7, 8]),
    ],
    ids=str,
)
def test_default_ranges_leave_out_what_would_be_refused(own: gc.Compressor, levels: list[int]):
    assert default_levels(own) == levels


# --- votes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 4])
def test_noise_and_silence_move_nothing_under_signum(world: int):
    ranks = Simulation([gc.LayerSpec("w", (2000,))], gc.Signum(500), world)
    total = np.zeros(2000)
    for _ in range(40):
        gradients = ranks.gradients()
        for (gradient,) in gradients:
            gradient[100:500] = 0  # coordinates that no rank has a gradient for
            gradient[1500:] = 0  # a whole bucket of them
        total += ranks.step(gradients).mean(0)
    for drawn in (total[:100], total[100:500], total[500:1500]):
        # Momenta of 0.9 make some ten steps alike.
        assert abs(drawn.mean()) <= 5 * np.sqrt(10 * 40 / len(drawn))
    assert not total[1500:].any()
