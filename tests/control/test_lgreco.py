"""L-GreCo: never over the budget, never dearer than uniform, across families, by bytes, time and position."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from control.observed import environment_of, observations
from control.resumed import resumed, states_of
from late import Late
from loudest import levels

from gradcomp import Accordion, ConfigError, KMeans, LayerSpec, LGreCo, PowerSGD, Quantize, TopK
from gradcomp.control import PeriodObservations, controller_from_string
from gradcomp.control.candidates import make_candidates
from gradcomp.control.lgreco import seconds_per_byte
from gradcomp.testing.simulation import Simulation

LAYERS = [
    LayerSpec("a", (64, 96)),
    LayerSpec("b", (300, 20)),
    LayerSpec("c", (40, 500)),
    LayerSpec("d", (9, 11)),
]
QUANTIZE = [Quantize(4)] * 4


def see(controller: LGreCo, compressors=QUANTIZE, layers=LAYERS, **given) -> PeriodObservations:
    """What a controller decides from: errors that fall with every further choice, larger for later layers."""
    candidates = given.pop("candidates", None)
    candidates = candidates or make_candidates(environment_of(layers, compressors), controller.candidates())
    generator = np.random.default_rng(given.pop("seed", 0))
    rows = len(layers)
    errors = np.full(candidates.costs.shape, np.inf)
    for row, choices in enumerate(candidates.choices):
        drawn = np.sort(generator.random(len(choices)))[::-1] * (row + 1.0)
        by_cost = np.argsort(np.argsort(candidates.costs[row, : len(choices)], kind="stable"))
        errors[row, : len(choices)] = drawn[by_cost]
    about = {"norm": np.arange(1.0, rows + 1), "errors": errors, "sent": np.ones(rows)}
    return observations(controller, candidates, **{**about, **given})


def total(choices, values: np.ndarray) -> float:
    return float(values[np.arange(len(choices)), choices].sum())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("metric", ["norm", "squared", "adam"])
@pytest.mark.parametrize("alpha", [0.7, 1.0, 1.5])
def test_within_the_budget_and_never_dearer_than_the_reference(seed, metric, alpha):
    controller = LGreCo(10, alpha=alpha, metric=metric)
    observed = see(controller, seed=seed)
    errors = observed.errors if metric == "norm" else observed.errors**2
    if metric == "adam":
        sizes = np.array([layer.size for layer in LAYERS])
        errors = errors / (observed.norm / np.sqrt(sizes))[:, None]
    found = controller.decide(observed).choices
    budget = alpha * total(observed.candidates.reference, errors)
    assert total(found, errors) <= budget * (1 + len(LAYERS) / controller.buckets)
    if alpha >= 1:
        costs = observed.candidates.costs
        assert total(found, costs) <= total(observed.candidates.reference, costs)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("options", [{}, {"window": 6}], ids=["single steps", "added up"])
def test_adam_weighs_by_the_root_of_what_squares_weigh_by(world, options):
    """Layers that are alike but for a power of two: its metric is the squared one of half the power."""
    layers, half = [LayerSpec(name, (40, 32)) for name in "abcd"], np.array([0, -1, -3, -3])

    def found(metric, powers):
        controller = LGreCo(6, levels=[1, 2, 3, 4, 5, 6, 7, 8], metric=metric, **options)
        ranks = Simulation(layers, Quantize(4, 32), world, controller=controller)
        for _ in range(14):
            drawn = ranks.gradients()
            ranks.step([[np.ldexp(g, p) for g, p in zip(rank, powers, strict=True)] for rank in drawn])
        return levels(ranks)

    assert found("adam", 0 * half) == found("squared", 0 * half) == [4] * 4
    assert found("adam", 2 * half) == found("squared", half) != found("squared", 2 * half)


def test_adam_has_nothing_to_say_of_silent_and_empty_layers():
    layers = [*LAYERS, LayerSpec("empty", (0,))]
    controller = LGreCo(10, metric="adam")
    observed = see(controller, [Quantize(4)] * 5, layers, norm=np.array([1.0, 0.0, 2.0, 1e-20, 0.0]))
    decision = controller.decide(replace(observed, current=np.array([0, 6, 2, 5, 1])))
    assert (decision.choices[1], decision.choices[4]) == (6, 1)
    assert "nan" not in decision.reason


@pytest.mark.parametrize("seed", range(5))
def test_the_optimum_up_to_rounding(seed):
    controller = LGreCo(10, levels=[2, 4, 6])
    observed = see(controller, seed=seed)
    squares = observed.errors**2
    budget = total(observed.candidates.reference, squares)
    strict, costs = budget * (1 - len(LAYERS) / controller.buckets), observed.candidates.costs
    every = itertools.product(range(3), repeat=4)
    best = min(total(choices, costs) for choices in every if total(choices, squares) <= strict)
    assert total(controller.decide(observed).choices, costs) <= best


def test_positions_and_times_weigh_bytes():
    plain, late = LGreCo(10), LGreCo(10, objective="position")
    observed = see(plain)
    by_bytes, by_place = plain.decide(observed).choices, late.decide(observed).choices
    weighted = observed.candidates.costs * (1.0 + observed.position[:, None])
    assert total(by_place, weighted) <= total(by_bytes, weighted)
    # Seconds per byte rise with the layer; the coefficients remember earlier periods.
    timed = LGreCo(10, objective="time")
    sent = total(observed.current, observed.candidates.costs) * np.ones(4)
    observed = see(timed, wire=np.arange(1, 5) * sent * 1e-9, sent=sent)
    first = timed.decide(observed)
    weighted = observed.candidates.costs * np.arange(1, 5)[:, None]
    assert total(first.choices, weighted) <= total(by_bytes, weighted)
    again = timed.decide(see(timed, memory=first.memory))  # no times in this period
    np.testing.assert_array_equal(again.choices, first.choices)


def sums_of(samples) -> np.ndarray:
    """Of bytes x and seconds y by layer: xy, x x, x, y and 1."""
    x, y = np.array(samples, dtype=np.float64).T
    return np.stack([x * y, x * x, x, y, np.ones(len(x))])


def test_a_latency_is_not_laid_on_the_bytes_of_short_buckets():
    sizes = np.array([1e3, 1e4, 1e5, 1e6, 4e6])
    found = seconds_per_byte(sums_of([(x, 2e-3 + 1e-8 * x) for x in sizes]))
    np.testing.assert_allclose(found, 1e-8, rtol=1e-6)
    # Noise of a tenth of the latency, in a bucket of 1 KB, would be 20 times the slope.
    noisy = seconds_per_byte(sums_of([(x, 2e-3 + 1e-8 * x + 2e-4 * (x == 1e3)) for x in sizes]))
    np.testing.assert_allclose(noisy, 1e-8, rtol=0.1)


def test_buckets_that_are_slow_for_their_bytes_are_dear():
    found = seconds_per_byte(sums_of([(1e6, 1e-3 + 1e-2), (2e6, 1e-3 + 2e-2), (3e6, 1e-3 + 6e-2)]))
    assert found[2] > 1.5 * found[1]
    assert (found > 0).all()


@pytest.mark.parametrize(
    "samples", [[(1e3, 2e-3), (1e6, 2e-3)], [(1e3, 3e-3), (1e6, 1e-3)]], ids=["latency only", "falling"]
)
def test_where_time_does_not_rise_with_bytes_there_is_no_slope(samples):
    assert seconds_per_byte(sums_of(samples)) is None
    assert seconds_per_byte(np.zeros((5, 3))) is None


def test_equal_buckets_have_their_mean_times():
    found = seconds_per_byte(sums_of([(1e6, 1e-2), (1e6, 3e-2)]))
    assert found[0] < 2e-8 < found[1]
    assert found.mean() == pytest.approx(2e-8)


def test_small_buckets_are_not_dear_under_the_time_objective():
    """Times of a latency and a rate: the choices are those by bytes, which through the origin they were not."""
    timed, plain = LGreCo(10, objective="time"), LGreCo(10)
    sent = np.array([2e3, 2e4, 2e5, 2e6])
    for seed in range(5):
        observed = see(timed, seed=seed, wire=1e-3 + 1e-8 * sent, sent=sent)
        expected = plain.decide(see(plain, seed=seed)).choices
        np.testing.assert_array_equal(timed.decide(observed).choices, expected)


def test_a_memory_of_times_through_the_origin_begins_anew():
    """A checkpoint of before times had a latency."""
    old, new = (Simulation(LAYERS, Quantize(4), 2, controller=LGreCo(4, objective="time")) for _ in range(2))
    for _ in range(7):
        old.step()
    states = states_of(old)
    for state in states:
        saved = state.shared.control["state"]
        saved["memory"] = [*saved["memory"][: 3 * len(LAYERS)], saved["memory"][-1]]
    resumed(new, states)
    assert levels(new) == levels(old)
    assert len(new.pipelines[0].controller.shared_state()["memory"]) == 6 * len(LAYERS) + 1
    for _ in range(9):
        new.step()
    levels(new)


@pytest.mark.parametrize("own", [Quantize(4), TopK(0.1), PowerSGD(4)], ids=lambda c: c.name)
def test_hybrid_is_thirteen_levels_of_three_families(own):
    layers = [LayerSpec("matrix", (512, 512)), LayerSpec("convolution", (64, 64, 3, 3))]
    for controller in (LGreCo(10, levels="hybrid"), KMeans(10, levels="hybrid")):
        candidates = make_candidates(environment_of(layers, [own] * 2), controller.candidates())
        found = [{c.to_string() for c in choices if c != own} for choices in candidates.choices]
        for row, (densities, ranks) in enumerate(
            [((0.02, 0.05, 0.1, 0.2), (8, 16, 32, 64)), ((0.005, 0.01, 0.02, 0.05), (1, 2, 4, 8))]
        ):
            thirteen = [*map(Quantize, (2, 3, 4, 6, 8)), *map(TopK, densities), *map(PowerSGD, ranks)]
            assert found[row] == {c.to_string() for c in thirteen if c != own}
            assert own in candidates.choices[row]


def test_hybrid_beside_accordion_and_in_string_form():
    controller = controller_from_string(
        "lgreco:every_steps=7,levels=hybrid,accordion=[accordion:low=8,high=2,every_steps=7]"
    )
    assert controller == LGreCo(7, levels="hybrid", accordion=Accordion(8, 2, every_steps=7))
    ranks = Simulation(LAYERS, Quantize(4), 2, controller=controller)
    choices = ranks.pipelines[0].controller.candidates.choices[0]
    assert {c.name for c in choices} == {"quantize", "topk", "powersgd"}


def test_with_accordion_a_fall_of_the_learning_rate_is_critical():
    rule = Accordion(low=4, high=2, every_steps=1)
    controller = LGreCo(10, accordion=rule)
    candidates = Simulation(LAYERS, PowerSGD(3), 2, controller=controller).pipelines[0].controller.candidates
    norm = np.arange(1.0, 5.0)
    memory = controller.begin_memory(candidates)
    memory[:4] = norm
    steady = see(controller, candidates=candidates, norm=norm, memory=memory)
    fallen = replace(steady, rate_fall=0.9)
    settled, cautious = (controller._reference(observed, norm) for observed in (steady, fallen))
    for row, choices in enumerate(candidates.choices):
        assert (choices[settled[row]].rank, choices[cautious[row]].rank) == (2, 4)


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
    ranks_of = [[c.rank for c in row] + [1] * (candidates.width - len(row)) for row in candidates.choices]
    about = {
        "candidates": candidates,
        "errors": np.where(np.isinf(candidates.costs), np.inf, 1 / np.array(ranks_of)),
    }
    first = controller.decide(see(controller, memory=controller.begin_memory(candidates), **about))
    later = controller.decide(see(controller, memory=first.memory, **about))
    cautious, bold = (total(d.choices, about["errors"]) for d in (first, later))
    assert cautious <= 4 / 4 * 1.001
    assert bold > cautious
    assert total(later.choices, candidates.costs) < total(first.choices, candidates.costs)
    moved = see(controller, memory=later.memory, norm=10.0 * np.arange(1, 5), **about)
    np.testing.assert_array_equal(controller.decide(moved).choices, first.choices)


def test_string_form():
    text = "lgreco:every_steps=7,objective=time,levels=2/4/[topk:density=0.1]"
    assert controller_from_string(text) == LGreCo(7, levels=(2, 4, TopK(0.1)), objective="time")
    nested = "lgreco:every_steps=7,accordion=[accordion:low=4,high=2,every_steps=7]"
    assert controller_from_string(nested) == LGreCo(7, accordion=Accordion(low=4, high=2, every_steps=7))
    for wrong in ("lgrec:every_steps=5", "lgreco:every=5", "lgreco:every_steps=5,every_steps=6"):
        with pytest.raises(ConfigError):
            controller_from_string(wrong)


def test_levels_of_bits_by_bucket_are_those_of_uniform_bits():
    """What is budgeted is the error of uniform bits, which bits by bucket keep."""
    chosen = []
    for allocate in (None, "bucket"):
        compressor = Quantize(4, 64, allocate=allocate)
        ranks = Simulation(LAYERS, compressor, 2, controller=LGreCo(4))
        for step in range(12):
            sizes = 10.0 ** np.arange(len(LAYERS))
            drawn = ranks.gradients()
            ranks.drawn = step + 1
            ranks.step(
                [[g * np.float32(size) for g, size in zip(rank, sizes, strict=True)] for rank in drawn]
            )
        chosen.append(levels(ranks))
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) > 1
