"""``metric="loss"``: tables of changes of the loss, from a loss whose changes are known in closed form."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from control.resumed import check_resumed, own_states, plan_of, through_files, without_times
from loudest import levels

from gradcomp import BestRank, ConfigError, LayerSpec, LGreCo, PowerSGD, Quantize, TopK
from gradcomp.control.distortion.errors import errors
from gradcomp.control.periodic import Phase
from gradcomp.control.sensitivity import Lost
from gradcomp.testing.simulation import Simulation

LAYERS = [LayerSpec("a", (40, 32)), LayerSpec("b", (24, 40)), LayerSpec("c", (16, 48))]
#: Curvatures: L(w) = sum over layers of h / 2 ||w||^2, at w = 0, so that an error e changes it by h / 2 ||e||^2.
CURVATURES = np.array([1.0, 64.0, 1.0])
LEVELS = [2, 3, 4, 5, 6]


def probe(cells, asked=None, curvatures=CURVATURES):
    if asked is not None:
        asked.append(len(cells))
    return [float(curvatures[layer] / 2 * np.square(e, dtype=np.float64).sum()) for layer, e in cells]


def job(world=2, compression=Quantize(4, 32), deterministic=False, **arguments):  # noqa: B008
    controller = LGreCo(8, **{"levels": LEVELS, "metric": "loss", "probes_per_step": 2, **arguments})
    return Simulation(LAYERS, compression, world, controller=controller, deterministic=deterministic)


def step(ranks, number=None, measure=probe):
    gradients = None
    if number is not None:
        draw = np.random.default_rng(number)
        gradients = [[draw.standard_normal(s.size).astype(np.float32) for s in LAYERS] for _ in ranks.ranks]
    ranks.step(gradients)
    for pipeline in ranks.pipelines:
        pipeline.controller.probe(measure)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "compression", [Quantize(4, 32), TopK(0.1), PowerSGD(4)], ids=["quantize", "topk", "powersgd"]
)
def test_the_table_is_that_of_the_closed_form_on_all_ranks(world, compression):
    given = {TopK: [0.05, 0.1, 0.5], PowerSGD: [2, 4, 8]}.get(type(compression), LEVELS)
    ranks, found = job(world, compression, levels=given), []
    for _ in range(60):
        step(ranks)
        found = [pipeline.controller.observations for pipeline in ranks.pipelines]
        if found[0] is not None:
            break
    first = found[0]
    assert len({seen.losses.tobytes() for seen in found}) == 1
    expected = CURVATURES[:, None] / 2 * first.errors**2
    # The norms of low rank are those of power steps at the largest rank, which come nearer to the optimum.
    tolerance = 0.12 if isinstance(compression, PowerSGD) else 1e-4
    np.testing.assert_allclose(first.losses, expected, rtol=tolerance)
    assert (first.losses >= expected * (1 - 1e-4)).all()


def test_a_layer_that_the_loss_depends_on_gets_more_bits_than_its_norm_would():
    by_loss, by_norm = job(), job(metric="norm", window=8)
    for number in range(30):
        step(by_loss, number)
        step(by_norm, number)
    assert levels(by_loss)[1] > max(levels(by_loss)[0], levels(by_loss)[2])
    assert levels(by_loss)[1] > levels(by_norm)[1]


def test_losses_are_spread_over_steps():
    """5 choices of 3 layers, of which one rank has 2 and the other 1, at 2 a step: 5 and 3 steps."""
    asked = [[], []]
    ranks = job()
    for number in range(16):
        ranks.step()
        for rank, pipeline in enumerate(ranks.pipelines):
            pipeline.controller.probe(partial(probe, asked=asked[rank]))
        if number < 8:
            assert asked == [[], []], "the period has not ended"
    assert sorted(asked) == [[2, 2, 1], [2, 2, 2, 2, 2]]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_run_that_is_resumed_while_losses_are_measured_ends_the_same(tmp_path, monkeypatch, deterministic):
    without_times(monkeypatch)
    phases, halves = set(), []

    def one(ranks, number):
        phases.add(ranks.pipelines[0].controller.phase)
        step(ranks, number)
        held = own_states(ranks)
        halves.append(
            any(-1.0 in np.frombuffer(v, "f4") for s in held for (k, _), v in s.items() if k == "losses")
        )
        return plan_of(ranks), held

    through = lambda states, at: through_files(states, tmp_path / str(at))  # noqa: E731
    ranks = check_resumed(partial(job, deterministic=deterministic), one, 24, range(6, 18), through)
    assert ranks.pipelines[0].plan.version > 0, "a decision was made"
    assert {Phase.MEASURE, Phase.GATHER} <= phases
    assert any(halves)
    assert not all(halves)


def test_losses_that_are_not_finite_rule_choices_out():
    """Every level below 6 bits makes the loss infinite, so only 6 bits, the reference, are chosen."""

    def exploding(cells):
        return [np.nan if np.abs(e).max() > 0.08 else 1.0 for _, e in cells]

    ranks = job(compression=Quantize(6, 32), window=1)
    for number in range(40):
        step(ranks, number, exploding)
    seen = levels(ranks)
    assert seen == [6, 6, 6], seen


def test_layers_without_a_gradient_cost_no_loss():
    ranks, asked = job(world=1), []
    for _ in range(14):
        ranks.step(ranks.gradients(absent=[0, 1]))
        ranks.pipelines[0].controller.probe(partial(probe, asked=asked))
    assert sum(asked) == len(LEVELS)


@pytest.mark.parametrize("shape", [(48, 33), (300, 200)])
@pytest.mark.parametrize("choice", [BestRank(3), PowerSGD(1), TopK(0.02), Quantize(3, 32)])
def test_what_is_lost_has_the_measured_norm(choice, shape):
    """Norms of low rank are exact, from the singular values, or from the same power steps at the largest rank."""
    spec, choices = LayerSpec("one", shape), [choice, PowerSGD(4)]
    values = np.random.default_rng(0).standard_normal(spec.size).astype(np.float32)
    lost = Lost(choices, spec, values, 7)
    for one, norm in zip(choices, errors(choices, spec, values, 7), strict=True):
        exact = shape == (48, 33) and isinstance(one, BestRank | PowerSGD)
        assert 1 - 1e-4 <= np.linalg.norm(lost.by(one)) / norm <= (1.02 if exact else 1 + 1e-4)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"samples": 4}, "window="), ({"blocks": 8}, "blocks=8"), ({"probes_per_step": 0}, "probes")],
)
def test_arguments_that_do_not_fit(given, named):
    with pytest.raises(ConfigError, match=named):
        LGreCo(metric="loss", **given)


def test_a_window_is_fifty_steps_by_default():
    kept = [LGreCo(n, metric="loss", window=w).summed for n, w in ((500, None), (20, None), (500, 100))]
    assert kept == [50, 20, 100]
    assert LGreCo(500).summed == 500
