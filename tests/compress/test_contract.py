"""Runs the contract suite (:mod:`gradcomp.testing`) on every configuration in ``configurations.ROWS``."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import numpy as np
import pytest
from configurations import ROWS

import gradcomp
from gradcomp import Identity, LayerSpec
from gradcomp.compress.registry import registered
from gradcomp.testing import CHECKS, Check, Row, Simulation
from gradcomp.testing.cases import CAP, LAYERS, WORLDS
from gradcomp.testing.simulation import same_bytes

#: Beside those of the suite.
FURTHER = {"seed": [pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2)]}


def over_rows(check: Check) -> Callable[..., None]:
    """Makes a test of a check: for every row to which it applies, with every argument."""
    run = check.run
    assert isinstance(run, FunctionType)
    test = FunctionType(run.__code__, run.__globals__, run.__name__, run.__defaults__, run.__closure__)
    rows = {name: row for name, row in ROWS.items() if check.applies(row)}
    assert rows
    test = pytest.mark.parametrize("row", rows.values(), ids=rows)(test)
    for name, values in check.arguments.items():
        test = pytest.mark.parametrize(name, [*values, *FURTHER.get(name, ())])(test)
    return test


globals().update({f"test_{name}": over_rows(check) for name, check in CHECKS.items()})


def test_every_registered_compressor_is_public_and_has_a_row():
    # A benchmark that was imported here may have registered its own.
    ours = {kind for kind in registered().values() if kind.__module__.startswith("gradcomp.")}
    assert len(ours) >= 29
    assert {getattr(gradcomp, name) for name in gradcomp.__all__} >= ours
    assert {type(row.compressor) for row in ROWS.values()} >= ours


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_repr_evaluates_to_the_configuration(row: Row):
    assert eval(repr(row.compressor), vars(gradcomp)) == row.compressor


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_residual_is_kept_where_it_is_asked_for_and_else_where_the_mean_is_biased(row: Row):
    traits = row.compressor.traits
    if hasattr(row.compressor, "feedback") and not traits.learns:
        asked = row.compressor.feedback
        assert traits.keeps_residual == (not row.unbiased if asked is None else asked)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("scale", [1.0, 1024.0, 1000.0])
def test_identity_is_the_allreduce_divided_by_n(world: int, scale: float):
    layers = [*LAYERS, LayerSpec("double", (50,), "float64")]
    ranks = Simulation(layers, Identity(), world, slice_elements=CAP)
    gradients = ranks.gradients()
    outcome = ranks.step(gradients, scale=scale)
    for layer in range(len(layers)):
        total = gradients[0][layer].copy()
        for rank in gradients[1:]:
            total += rank[layer]
        assert same_bytes(outcome.mean(layer), total / total.dtype.type(world))


#: The others clip a rank's share of the result, which is larger where fewer ranks train.
UNCLIPPED = {name: row for name, row in ROWS.items() if row.compressor.traits.clip_norm is None}


@pytest.mark.parametrize("row", UNCLIPPED.values(), ids=UNCLIPPED)
def test_a_mean_over_the_ranks_that_train_is_that_over_all_times_their_share(row: Row):
    """The third rank has joined. What travels is the same."""
    over_all, over_active = (Simulation(LAYERS, row.compressor, 3, slice_elements=CAP) for _ in range(2))
    for rank, pipeline in enumerate(over_active.pipelines):
        pipeline.trains = rank < 2
    for _ in range(3):
        gradients = over_all.gradients()
        gradients[2] = [None] * len(LAYERS)
        means, expected = (
            [ranks.step(gradients, scale=4.0).mean(i) for i in range(len(LAYERS))]
            for ranks in (over_active, over_all)
        )
        for mean, wanted in zip(means, expected, strict=True):
            np.testing.assert_allclose(
                mean.astype(np.float64), wanted.astype(np.float64) * 1.5, rtol=2**-7, atol=1e-6
            )
        assert [pipeline.active for pipeline in over_active.pipelines] == [2, 2, 2]


def test_a_promise_that_is_not_kept_is_noticed():
    lossy = Row(gradcomp.Quantize(2, 16, rounding="nearest"), error=1e-3)
    with pytest.raises(AssertionError):
        CHECKS["error_is_bounded"](lossy)
    assert not CHECKS["error_is_bounded"](Row(lossy.compressor))  # which promises nothing of the kind
