"""A window of steps, from the ranks' times; samples of layers against their definition."""

from __future__ import annotations

import numpy as np
import pytest

import gradcomp as gc
from gradcomp.exchange.layer_samples import measured
from gradcomp.exchange.step_times import window


def table(worked: list[list[float]], end: float, totals: tuple[float, ...] = (0.0, 0.0, 0.0)) -> np.ndarray:
    """Rows of ranks that have worked so long, by step, of steps that all end at ``end``."""
    parts = np.array([[[end, 0.5 * one, end - one] for one in steps] for steps in worked])
    return np.concatenate([parts.reshape(len(worked), -1), np.tile(totals, (len(worked), 1))], axis=1)


def test_the_rank_that_worked_longest_is_waited_for():
    found = window(20, 3, table([[1, 5, 2], [2, 1, 2], [4, 1, 2]], end=10.0))
    assert (found.step, found.steps) == (20, 3)
    assert found.last == (1.0, 0.0, 1.0)  # in the last step all came together
    assert found.waited == pytest.approx(((3 + 0 + 0) / 3, (2 + 4 + 0) / 3, (0 + 4 + 0) / 3))
    assert found.seconds == (10.0,) * 3
    assert found.exposed == pytest.approx((22 / 3, 25 / 3, 23 / 3))


def test_nobody_is_waited_for_by_less_than_a_hundredth_of_a_step():
    assert window(0, 2, table([[5.0, 5.0], [5.05, 5.2]], end=10.0)).last == (0.0, 1.0)


def test_totals_are_given_by_step_and_an_unknown_rank_by_none():
    times = table([[1, 2], [2, 1]], end=4.0, totals=(6.0, 8.0, 100.0))
    times[1] = np.nan
    found = window(0, 2, times)
    assert (found.codec, found.wire, found.sent_bytes) == ((3.0, None), (4.0, None), (50.0, None))
    assert (found.seconds, found.waited, found.last) == ((4.0, None), (None, None), (None, None))


def test_a_step_that_was_not_timed_does_not_count():
    times = table([[1, 2, 3], [1, 2, 3]], end=4.0)
    times[:, :3] = np.nan
    assert window(0, 3, times).exposed == (1.5, 1.5)
    times[:, :9] = np.nan
    assert window(0, 3, times) is None


@pytest.mark.parametrize("residual", [False, True])
def test_a_sample_has_the_error_of_gradient_and_residual(residual: bool):
    draw = np.random.default_rng(3)
    gradient, left = draw.standard_normal((2, 400)).astype(np.float32)
    total = gradient + left * residual
    spec, choice = gc.LayerSpec("a", (20, 20)), gc.TopK(0.1)
    values = np.concatenate([gradient, left]) if residual else gradient
    found = measured(5, 2, choice, spec, values, residual, seed=0)
    lost = np.sort(np.abs(total))[:-40]
    assert found.error == pytest.approx(np.linalg.norm(lost) / np.linalg.norm(total), rel=1e-3)
    assert (found.step, found.layer) == (5, 2)
    assert found.norm == pytest.approx(np.linalg.norm(gradient), rel=1e-3)
    assert found.residual == (pytest.approx(np.linalg.norm(left), rel=1e-3) if residual else None)


def test_a_gradient_that_is_not_finite_or_zero_has_no_error():
    spec, values = gc.LayerSpec("a", (20, 20)), np.zeros(400, np.float32)
    assert measured(0, 0, gc.Quantize(4), spec, values, False, seed=0).error is None
    values[7] = np.inf
    assert measured(0, 0, gc.Quantize(4), spec, values, False, seed=0) is None
