"""Theorem 2 of Markov 2024 and its lemmas, asked of the package's quantiser on small quadratics."""

from __future__ import annotations

import math

import numpy as np
import pytest
from theorem import Quadratic, descend

RUNS = 64


def predicted(f: Quadratic, delta: float) -> float:
    """E f(x_T), if each rounding adds an error of mean 0 and variance delta^2 / 12 to every value."""
    left = (1 - f.eta * f.curvature) ** 2
    variance = delta**2 / 12 + (f.eta * f.sigma) ** 2 / f.n
    squares = left**f.steps * (f.start - f.center) ** 2 + variance * (1 - left**f.steps) / (1 - left)
    return float((f.curvature * squares).sum() / 2)


@pytest.mark.parametrize(
    "f", [Quadratic(32, 2), Quadratic(32, 2, noise=1), Quadratic(32, 8), Quadratic(4, 8, rotated=True)]
)
def test_theorem_2_and_lemma_10_hold_with_their_constants(f: Quadratic):
    means = descend(f, 1 / f.ratio, RUNS).mean(axis=1) - f.best
    assert means[-1] <= f.epsilon
    shrinks, more = 1 - 0.75 * f.eta / f.kappa, 1.25 * (f.eta * f.sigma) ** 2
    assert (means[1:] <= shrinks * means[:-1] + more + 1e-12).all()
    if not f.rotated:
        assert means[-1] + f.best == pytest.approx(predicted(f, 1 / f.ratio), rel=0.1)


def test_lemma_9_holds_with_its_constant():
    f = Quadratic(32, 8)
    means = descend(f, 1 / math.ceil(4 * f.kappa**2), RUNS).mean(axis=1) - f.best
    assert (means[1:] <= (1 - 0.5 / f.kappa) * means[:-1] + 1e-12).all()


@pytest.mark.parametrize(("rounding", "meets"), [("shift", True), ("nearest", False)])
def test_a_lattice_far_coarser_than_the_theorems_needs_a_rounding_without_bias(rounding: str, meets: bool):
    f = Quadratic(32, 8)
    losses = descend(f, 1 / 2, RUNS, rounding=rounding)[-1]
    assert (losses.mean() <= f.best + f.epsilon) == meets
    assert (losses.mean() == pytest.approx(predicted(f, 1 / 2), rel=0.1)) == meets


def test_with_a_master_the_weights_are_as_good_as_rounding_the_best_ones():
    """The error of one rounding, and what masters add to it, which no condition number enlarges."""
    for kappa in (2, 8, 32):
        f = Quadratic(32, kappa)
        losses = descend(f, 1.0, RUNS, master=True)[-1]
        step = f.eta * f.curvature
        masters = step**2 / (1 - (1 - step) ** 2)
        expected = (f.curvature * (1 + masters)).sum() / 24
        assert losses.mean() == pytest.approx(expected, rel=0.1)


def test_the_best_point_of_a_rotated_lattice_is_no_worse_than_the_rounded_center():
    f = Quadratic(3, 8, rotated=True)
    shifts = (np.arange(64) + 0.5) / 64
    rounded = np.mean([f.loss(np.rint(f.center - r) + r) for r in shifts])
    assert 0.3 * rounded < f.best < rounded


@pytest.mark.full
def test_short_runs_of_both_benchmarks(run_json):
    found = run_json("benchmarks/theorem.py", "--dimensions=3", "--kappas=2", "--noise=0,1", "--runs=8")
    assert [row["holds"] for row in found["rows"]] == [True] * 4
    runs = run_json("benchmarks/regression.py", "--data=synthetic", "--seeds=2", "--steps=200")["runs"]
    last = {(run["form"], run["row"]): np.mean(run["excess"]["200"]) for run in runs}
    plain = last["lattice", "float32"]
    assert len(last) == 11
    assert all(each == pytest.approx(plain, rel=0.05) for each in last.values())
    assert plain < 0.5 * np.mean(runs[0]["excess"]["20"])
