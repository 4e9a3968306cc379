"""L-GreCo: never over the budget, never dearer than uniform, across families, by bytes, time and position."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from late import Late
from loudest import levels
from simulation import Simulation

from gradcomp import Accordion, ConfigError, LayerSpec, LGreCo, PowerSGD, Quantize, TopK
from gradcomp.control import PeriodObservations, controller_from_string
from gradcomp.control.candidates import make_candidates
from gradcomp.core.scheme import parse
from gradcomp.core.topology import Topology

LAYERS = [
    LayerSpec("a", (64, 96)),
    LayerSpec("b", (300, 20)),
    LayerSpec("c", (40, 500)),
    LayerSpec("d", (9, 11)),
]
QUANTIZE = [Quantize(4)] * 4


def see(controller: LGreCo, compressors=QUANTIZE, layers=LAYERS, **given) -> PeriodObservations:
    """What a controller decides from: errors that fall with every further choice, larger for later layers."""
    candidates = make_candidates(
        layers, compressors, controller.candidates(), parse("sra"), Topology.one_host(2)
    )
    generator = np.random.default_rng(given.pop("seed", 0))
    rows = len(layers)
    errors = np.full(candidates.costs.shape, np.inf)
    for row, choices in enumerate(candidates.choices):
        drawn = np.sort(generator.random(len(choices)))[::-1] * (row + 1.0)
        by_cost = np.argsort(np.argsort(candidates.costs[row, : len(choices)], kind="stable"))
        errors[row, : len(choices)] = drawn[by_cost]
    about = {
        "step": 10,
        "candidates": candidates,
        "norm": np.arange(1.0, rows + 1),
        "mean": np.zeros(rows),
        "deviation": np.ones(rows),
        "errors": errors,
        "wire": np.zeros(rows),
        "sent": np.ones(rows),
        "position": np.arange(rows),
        "current": candidates.reference.copy(),
        "memory": controller.begin_memory(candidates),
    }
    return PeriodObservations(**{**about, **given})


def total(observed: PeriodObservations, choices, values) -> float:
    return float(values[np.arange(len(choices)), choices].sum())


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("metric", ["norm", "squared"])
@pytest.mark.parametrize("alpha", [0.7, 1.0, 1.5])
def test_within_the_budget_and_never_dearer_than_the_reference(seed, metric, alpha):
    controller = LGreCo(10, alpha=alpha, metric=metric)
    observed = see(controller, seed=seed)
    errors = observed.errors**2 if metric == "squared" else observed.errors
    found = controller.decide(observed).choices
    budget = alpha * total(observed, observed.candidates.reference, errors)
    assert total(observed, found, errors) <= budget * (1 + len(LAYERS) / controller.buckets)
    if alpha >= 1:
        assert total(observed, found, observed.candidates.costs) <= total(
            observed, observed.candidates.reference, observed.candidates.costs
        )


@pytest.mark.parametrize("seed", range(5))
def test_the_optimum_up_to_rounding(seed):
    controller = LGreCo(10, levels=[2, 4, 6])
    observed = see(controller, seed=seed)
    budget = total(observed, observed.candidates.reference, observed.errors)
    every = itertools.product(range(3), repeat=4)
    strict = 1 - len(LAYERS) / controller.buckets
    best = min(
        total(observed, c, observed.candidates.costs)
        for c in every
        if total(observed, c, observed.errors) <= budget * strict
    )
    assert total(observed, controller.decide(observed).choices, observed.candidates.costs) <= best


def test_positions_and_times_weigh_bytes():
    plain, late = LGreCo(10), LGreCo(10, objective="position")
    observed = see(plain)
    by_bytes, by_place = plain.decide(observed).choices, late.decide(observed).choices
    weighted = observed.candidates.costs * (1.0 + observed.position[:, None])
    assert total(observed, by_place, weighted) <= total(observed, by_bytes, weighted)
    # Seconds per byte rise with the layer; the coefficients remember earlier periods.
    timed = LGreCo(10, objective="time")
    sent = total(observed, observed.current, observed.candidates.costs) * np.ones(4)
    observed = see(timed, wire=np.arange(1, 5) * sent * 1e-9, sent=sent)
    first = timed.decide(observed)
    weighted = observed.candidates.costs * np.arange(1, 5)[:, None]
    assert total(observed, first.choices, weighted) <= total(observed, by_bytes, weighted)
    again = timed.decide(see(timed, memory=first.memory))  # no times in this period
    np.testing.assert_array_equal(again.choices, first.choices)


def test_without_times_a_byte_is_a_byte():
    timed = LGreCo(10, objective="time")
    np.testing.assert_array_equal(
        timed.decide(see(timed)).choices, LGreCo(10).decide(see(LGreCo(10))).choices
    )


def test_layers_without_gradient_keep_their_level():
    controller = LGreCo(10)
    observed = see(controller, norm=np.array([1.0, 0.0, 2.0, 0.0]), current=np.array([0, 6, 2, 5]))
    found = controller.decide(observed).choices
    assert (found[1], found[3]) == (6, 5)
    silent = see(controller, norm=np.zeros(4))
    np.testing.assert_array_equal(controller.decide(silent).choices, silent.current)


def test_what_nothing_fits_falls_back_to_the_reference_and_warns_once(caplog):
    controller = LGreCo(10, alpha=1e-3)
    observed = see(controller)
    first = controller.decide(observed)
    np.testing.assert_array_equal(first.choices, observed.candidates.reference)
    second = controller.decide(see(controller, memory=first.memory))
    np.testing.assert_array_equal(second.choices, observed.candidates.reference)
    assert caplog.text.count("budget") == 1


def test_a_reference_that_loses_nothing():
    controller = LGreCo(10)
    observed = see(controller)
    observed.errors[:, 2:] = 0
    np.testing.assert_array_equal(controller.decide(observed).choices, [2, 2, 2, 2])


def test_several_families_in_one_program():
    levels = [2, 3, 4, 5, "topk:density=0.01", "topk:density=0.1", PowerSGD(1), PowerSGD(4)]
    ranks = Simulation(LAYERS, Quantize(4), 3, controller=LGreCo(4, levels=levels), shuffle=True, delay=0.3)
    rng = np.random.default_rng(0)
    low = [rng.standard_normal((s.shape[0], 1)) @ rng.standard_normal((1, s.shape[1])) for s in LAYERS]
    sparse = np.zeros(20000)
    sparse[::200] = 5
    for _ in range(12):
        gradients = [
            [
                (low[0] + 0.001 * rng.standard_normal(low[0].shape)).astype(np.float32).ravel(),
                rng.standard_normal(6000).astype(np.float32),
                (sparse + 0.001 * rng.standard_normal(20000)).astype(np.float32),
                rng.standard_normal(99).astype(np.float32),
            ]
            for _ in range(3)
        ]
        ranks.step(gradients).all_means()
    chosen = [a.compressor.partition(":")[0] for a in ranks.pipelines[0].plan.assignments]
    assert chosen[0] == "powersgd"
    assert chosen[1] == "quantize"
    assert chosen[2] == "topk"


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("compression", [Quantize(4), TopK(0.01), PowerSGD(4)], ids=lambda c: c.name)
def test_over_every_family(compression, world):
    controller = LGreCo(5)
    ranks = Simulation(
        LAYERS, compression, world, controller=controller, background=Late(0), shuffle=True, delay=0.2
    )
    for _ in range(30):
        gradients = ranks.gradients()
        for rank in gradients:
            for i in range(4):
                rank[i] *= np.float32(10.0**-i)
        ranks.step(gradients).all_means()
    found = levels(ranks)
    assert found != [compression.level] * 4
    # Loud layers pay for what quiet ones save.
    assert found[0] > found[2]


def test_with_accordion_the_budget_follows_the_regime():
    rule = Accordion(low=4, high=2, every_steps=1)
    controller = LGreCo(10, accordion=rule)
    ranks = Simulation(LAYERS, PowerSGD(3), 2, controller=controller)
    candidates = ranks.pipelines[0].controller.candidates
    assert {c.rank for c in candidates.choices[0]} >= {1, 2, 3, 4, 5, 6, 7, 8}
    observed = see(controller, candidates=candidates, errors=None)
    errors = np.where(
        np.isinf(candidates.costs),
        np.inf,
        1.0
        / np.array(
            [[c.rank for c in row] + [1] * (candidates.width - len(row)) for row in candidates.choices]
        ),
    )
    first = controller.decide(
        see(controller, candidates=candidates, errors=errors, memory=controller.begin_memory(candidates))
    )
    settled = controller.decide(see(controller, candidates=candidates, errors=errors, memory=first.memory))
    assert total(observed, first.choices, errors) <= 4 / 4 * 1.001
    assert total(observed, settled.choices, errors) > total(observed, first.choices, errors)
    assert total(observed, settled.choices, candidates.costs) < total(
        observed, first.choices, candidates.costs
    )
    moved = see(
        controller, candidates=candidates, errors=errors, memory=settled.memory, norm=10.0 * np.arange(1, 5)
    )
    np.testing.assert_array_equal(controller.decide(moved).choices, first.choices)


@pytest.mark.parametrize(
    "bad",
    [
        {"every_steps": 0},
        {"alpha": 0},
        {"alpha": float("nan")},
        {"buckets": 0},
        {"buckets": 2.5},
        {"objective": "money"},
        {"metric": "max"},
        {"accordion": 3},
        {"window": 0},
        {"memory_bytes": -1},
    ],
)
def test_bad_arguments(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        LGreCo(**{"every_steps": 5, **bad})


def test_empty_ranges_and_references_outside_of_them():
    for levels_, match in (([], "empty"), ([6, 7], "outside")):
        with pytest.raises(ConfigError, match=match):
            Simulation(LAYERS, Quantize(4), 2, controller=LGreCo(5, levels=levels_))


def test_string_form():
    text = "lgreco:every_steps=7,objective=time,levels=2/4/[topk:density=0.1]"
    assert controller_from_string(text) == LGreCo(7, levels=(2, 4, TopK(0.1)), objective="time")
    nested = "lgreco:every_steps=7,accordion=[accordion:low=4,high=2,every_steps=7]"
    assert controller_from_string(nested) == LGreCo(7, accordion=Accordion(low=4, high=2, every_steps=7))
    for wrong in ("lgrec:every_steps=5", "lgreco:every=5", "lgreco", "lgreco:every_steps=5,every_steps=6"):
        with pytest.raises(ConfigError):
            controller_from_string(wrong)
