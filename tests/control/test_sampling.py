"""Error tables from single steps: which steps, what of them, and what it changes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from control.golden_runs import GOLDEN, Run, whole, with_control
from control.observed import shared
from control.resumed import resumed, states_of
from late import After, Late
from loudest import LAYERS, Loudest, levels

from gradcomp import Accordion, ConfigError, KMeans, LayerSpec, LGreCo, PowerSGD, Quantize, TopK
from gradcomp.compress import at_level
from gradcomp.control import periodic
from gradcomp.control.candidates import CandidateLevels, layer_bytes
from gradcomp.control.distortion import Budget
from gradcomp.control.distortion.errors import errors
from gradcomp.control.distortion.magnitudes import rest_norms
from gradcomp.control.measurement import COLUMNS, folded, measure, sample_steps, share_out
from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.testing.simulation import Simulation

FOUR = Quantize(4, 32, rounding="nearest")


@pytest.mark.parametrize(("every", "samples"), [(100, 4), (7, 4), (5, 4), (3, 8), (1, 1), (12, 12)])
def test_samples_are_spread_over_the_period(every, samples):
    steps = sample_steps(every, samples)
    assert len(steps) == len(set(steps)) == min(every, samples)
    assert 0 <= steps[0] <= steps[-1] < every
    assert max(np.diff([-1, *steps, every])) <= -(-every // min(every, samples)) + 1


def test_tables_are_root_mean_squares_of_single_steps():
    ranks = Simulation(LAYERS, FOUR, 2, controller=Loudest(9, samples=3))
    observed, drawn = shared(ranks)
    owners = share_out({i: LAYERS[i].size for i in range(4)}, 2)
    for row, layer in enumerate(observed.candidates.layers.tolist()):
        choices, spec = observed.candidates.choices[row], observed.candidates.specs[row]
        own = [drawn[step][owners[layer]][layer].astype(np.float32) for step in sample_steps(9, 3)]
        lost = [errors(choices, spec, g, ranks.pipelines[0].controller.environment.seed) for g in own]
        np.testing.assert_allclose(
            observed.errors[row, : len(choices)], np.sqrt(np.mean(np.square(lost), axis=0)), rtol=1e-6
        )
        norms = [np.linalg.norm(g.astype(np.float64)) for g in own]
        np.testing.assert_allclose(observed.norm[row], np.sqrt(np.mean(np.square(norms))), rtol=1e-6)
        if spec.size:
            np.testing.assert_allclose(observed.mean[row], np.mean([g.mean() for g in own]), atol=1e-6)


def test_a_step_that_does_not_count_is_sampled_no_more_than_it_is_added_up():
    controller = Loudest(6, samples=1)  # step 3
    ranks = Simulation(LAYERS, FOUR, 2, controller=controller)
    for step in range(6):
        ranks.step(ranks.gradients(), commit=step != 3)
        samples = [p.controller.own_state()["sampled"] for p in ranks.pipelines]
        assert all(row[0] == row[1] == (step >= 4) for rank in samples for row in rank.values())


def test_a_layer_without_a_gradient_is_averaged_over_the_samples_that_have_one():
    def draw(step):
        return Simulation(LAYERS, FOUR, 2, seed=step).gradients(absent=[3] if step == 1 else [])

    ranks = Simulation(LAYERS, FOUR, 2, controller=Loudest(4, samples=2))  # steps 1 and 3
    observed, drawn = shared(ranks, draw)
    owner = share_out({i: LAYERS[i].size for i in range(4)}, 2)[3]
    assert observed.norm[3] == pytest.approx(np.linalg.norm(drawn[3][owner][3]), rel=1e-5)


def test_an_average_goes_on_where_it_was():
    rows, measured = np.zeros((3, 1 + COLUMNS + 1), np.float32), np.ones((3, COLUMNS + 1))
    once = folded(rows, 3 * measured, np.array([0, 2]))
    twice = folded(once, 4 * measured, np.array([0]))
    np.testing.assert_allclose(twice[0], [2, np.sqrt(12.5), 3.5, np.sqrt(12.5), np.sqrt(12.5)], rtol=1e-6)
    np.testing.assert_array_equal(twice[2], [1, 3, 3, 3, 3])
    assert not twice[1].any()
    endless = folded(twice, np.where(np.arange(COLUMNS + 1) == COLUMNS, np.inf, measured), np.array([0]))
    assert endless[0, -1] == np.inf
    assert np.isfinite(endless[0, :-1]).all()


MATRICES = [LayerSpec("a", (24, 20)), LayerSpec("b", (16, 30))]


@pytest.mark.parametrize(
    ("compression", "with_residual"),
    [(PowerSGD(2), True), (PowerSGD(2, feedback=False), False), (TopK(0.1), False)],
)
def test_low_rank_alone_is_measured_with_its_residual(compression, with_residual):
    ranks = Simulation(MATRICES, compression, 2, controller=Loudest(4, samples=1))  # step 2
    left = []

    def draw(step):
        if step == 2:
            left.extend(p.residuals.first.value(i).copy() for i, p in enumerate(ranks.pipelines))
        return ranks.gradients()

    observed, drawn = shared(ranks, draw)
    for row in range(2):  # layer i is looked after by rank i
        expected = drawn[2][row][row] + (left[row] if with_residual else 0)
        assert observed.norm[row] == pytest.approx(np.linalg.norm(expected), rel=1e-5)


def test_late_measuring_leaves_samples_out_and_never_mixes_them():
    background = After(3)
    ranks = Simulation(LAYERS, FOUR, 2, controller=Loudest(8, samples=8), background=background)
    for step in range(8):
        background.step = step
        ranks.step()
    rows = ranks.pipelines[0].controller.own_state()["sampled"].values()
    assert {int(row[1]) for row in rows} == {2}
    assert {int(row[0]) for row in rows} <= {5, 6, 7, 8}


def test_a_sample_takes_a_fourth_of_the_memory_of_the_sums_of_two_periods():
    sizes = sum(layer.size for layer in LAYERS[:4])
    for samples, each in ((2, 4), (None, 16)):
        need = each * sizes
        Simulation(LAYERS, FOUR, 1, controller=Loudest(5, samples=samples, memory_bytes=need))
        with pytest.raises(ConfigError, match=f"take {need} bytes"):
            Simulation(LAYERS, FOUR, 1, controller=Loudest(5, samples=samples, memory_bytes=need - 1))


@pytest.mark.parametrize(("samples", "each"), [(2, 4), (None, 16)])
def test_measuring_gets_what_the_gathered_gradients_leave_of_the_limit(samples, each, monkeypatch):
    """While sums are measured, those of the next period are gathered beside them."""
    left = []
    monkeypatch.setattr(periodic, "measure", lambda *given: left.append(given[-1]) or measure(*given))
    layer = LayerSpec("a", (32, 16))
    limited = Loudest(3, samples=samples, memory_bytes=each * layer.size + 100_000)
    ranks = Simulation([layer], FOUR, 1, controller=limited)
    for _ in range(5):
        ranks.step()
    assert left
    assert set(left) == {100_000}


def test_what_l_greco_does_by_default():
    assert (LGreCo().sampled, LGreCo().squared) == (4, True)
    assert (LGreCo(samples=8).sampled, LGreCo(metric="norm").squared) == (8, False)
    paper = LGreCo(window=50)
    assert (paper.sampled, paper.squared, LGreCo(window=50, metric="squared").squared) == (0, False, True)
    rule = Accordion(low=4, high=2, every_steps=5)
    assert LGreCo(accordion=rule).sampled == 0
    assert LGreCo(accordion=rule, samples=2).squared
    assert KMeans(5).sampled == 0
    assert KMeans(5, samples=3).sampled == 3


def embedding(step: int) -> list:
    """A layer of which two rows of 200 have a gradient, other ones in every step, and a dense one."""
    rng = np.random.default_rng(step)
    found = []
    for _ in range(2):
        sparse = np.zeros((200, 32), np.float32)
        sparse[rng.choice(200, 2, replace=False)] = rng.standard_normal((2, 32))
        found.append([sparse.reshape(-1), rng.standard_normal(2000).astype(np.float32)])
    return found


def test_what_is_sparse_in_a_step_is_cheap():
    layers = [LayerSpec("embedding", (200, 32)), LayerSpec("dense", (50, 40))]
    found = {}
    for name, controller in (("single steps", LGreCo(8)), ("added up", LGreCo(8, window=8))):
        ranks = Simulation(layers, TopK(0.1), 2, controller=controller)
        for step in range(12):
            ranks.step(embedding(step)).all_means()
        run, (sparse, dense) = ranks.pipelines[0].controller, levels(ranks)
        found[name] = run.candidates.costs[np.arange(2), run.current].sum()
        if name == "single steps":
            assert sparse <= 0.02
            assert dense >= 0.1
    assert found["single steps"] < 0.7 * found["added up"]


@pytest.mark.parametrize("size", [1, 100, 40000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.4])
@pytest.mark.parametrize("nbytes", [None, 32_000_000])
def test_zeros_do_not_change_what_is_left(size, share, nbytes):
    rng = np.random.default_rng(size)
    values = (rng.standard_normal(size) * (rng.random(size) < share)).astype(np.float32)
    counts = np.unique(np.linspace(0, size, 20).astype(np.int64))
    ascending = np.concatenate(([0.0], np.cumsum(np.sort(np.square(values, dtype=np.float64)))))
    found = rest_norms(values, counts, Budget(nbytes, "a test"))
    np.testing.assert_allclose(found, np.sqrt(ascending[size - counts]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("moment", ["GATHER", "MEASURE", "SHARE", "DECIDE", "ANNOUNCE"])
def test_a_checkpoint_of_sums_goes_on_with_samples(moment):
    """One that was written before there were samples: its choices are in force, and tables come from then on."""
    saved = json.loads(GOLDEN.read_text(encoding="utf-8"))["lgreco"]["checkpoints"][moment]
    now = whole("lgreco")[1][moment][1]
    sampling = Run("lgreco", LGreCo(7))
    sampling.resume(with_control(now, saved["ranks"]))
    before = sampling.plan()
    chosen = saved["ranks"][0]["shared"]["state"]["choices"]
    names = [layer.name for layer in sampling.ranks.layers]
    in_force = {name: at_level(*choice) for name, choice in zip(names, before, strict=True) if name in chosen}
    assert in_force == {name: at_level(*choice) for name, choice in chosen.items()}
    assert len({run.phase for run in sampling.runs}) == 1
    assert (sampling.runs[0].phase.name == moment) == (moment not in ("MEASURE", "SHARE"))
    assert len(sampling.plans(saved["at"])) >= 2


def test_a_checkpoint_of_samples_goes_on_with_sums():
    old, new = (Simulation(LAYERS, FOUR, 3, controller=c) for c in (LGreCo(4), LGreCo(4, window=4)))
    for at in range(12):
        old.step()
        if at < 3:
            continue
        resumed(new, states_of(old))
        assert levels(new) == levels(old)
        new.step()
        assert len({p.controller.phase for p in new.pipelines}) == 1


def test_a_table_of_other_choices_is_not_used():
    """A rank that looks after no layer holds no rows that could not fit: all begin anew."""
    layers = [LayerSpec("a", (40, 8)), LayerSpec("b", (0,))]
    old, new = (
        Simulation(layers, FOUR, 2, controller=LGreCo(3, levels=given), background=After(np.inf))
        for given in ([2, 4, 8], [2, 3, 4, 6, 8])
    )
    for _ in range(5):
        old.step()
    assert {p.controller.phase.name for p in old.pipelines} == {"MEASURE"}
    resumed(new, states_of(old))
    assert {p.controller.phase.name for p in new.pipelines} == {"GATHER"}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_zeros_that_are_not_sent_cost_nothing(world):
    """A layer with few non-zeros, which differ from sample to sample: more elements than those cost no more."""
    layers, nonzero = [LayerSpec("dense", (40, 50)), LayerSpec("rows", (100, 20))], (60, 100, 80)

    def draw(step):
        drawn = [[g.copy() for g in rank] for rank in Simulation(layers, FOUR, world, seed=step).gradients()]
        for rank in drawn:
            rank[1][nonzero[step // 3 % 3] :] = 0
        return drawn

    def seen(compression):
        controller = Loudest(9, samples=3)  # steps 1, 4 and 7
        return shared(Simulation(layers, compression, world, controller=controller), draw)[0]

    observed = seen(TopK(0.1))
    np.testing.assert_allclose(observed.nonzero, [2000, 80], rtol=1e-6)
    costs, of_all = observed.costs, observed.candidates.costs
    np.testing.assert_allclose(costs[0], of_all[0])
    assert len(set(costs[1][[c.density > 0.04 for c in observed.candidates.choices[1]]])) == 1
    for choice, cost, full in zip(observed.candidates.choices[1], costs[1], of_all[1], strict=True):
        sent = min(round(2000 * choice.density), 80)
        expected = layer_bytes(TopK(sent / 2000), layers[1], Scheme("sra"), Topology.one_host(world))
        assert cost == pytest.approx(expected), choice
        assert cost <= full * (1 + 1e-12)
    with_zeros = seen(TopK(0.1, zeros=True))
    assert with_zeros.nonzero is None
    np.testing.assert_array_equal(with_zeros.costs, with_zeros.candidates.costs)


def test_topk_takes_a_sparse_layer_whole_where_bits_are_dearer():
    """By k elements 40% cost more than 4 bits, and by those that are not 0 less."""
    sparse = LayerSpec("rows", (100, 20))

    def draw(step):
        rng = np.random.default_rng(step)
        gradient = np.zeros((100, 20), np.float32)
        gradient[:2] = rng.standard_normal((2, 20))
        return [[gradient.ravel()]] * 2

    controller = LGreCo(4, levels=[2, TopK(0.4), 4])
    ranks = Simulation([sparse], FOUR, 2, controller=controller)
    for step in range(10):
        ranks.step(draw(step)).all_means()
    assert ranks.pipelines[0].plan.assignments[0].compressor.startswith("topk")


def test_a_checkpoint_without_counts_of_zeros_goes_on_with_them(monkeypatch):
    """One of before they were counted: its choices are in force, and the period that it is in begins anew."""
    saved = {}
    with monkeypatch.context() as before:
        none = property(lambda candidates: np.zeros(len(candidates.choices), dtype=np.bool_))
        before.setattr(CandidateLevels, "leaves_zeros", none)
        old = Simulation(LAYERS, TopK(0.1), 2, controller=LGreCo(4), background=Late(1))
        while len(saved) < 5:  # phases
            old.step()
            saved[old.pipelines[0].controller.phase] = states_of(old), levels(old)
    for states, chosen in saved.values():
        new = resumed(Simulation(LAYERS, TopK(0.1), 2, controller=LGreCo(4)), states)
        assert levels(new) == chosen
        observed, _ = shared(new, steps=9)
        assert observed.nonzero is not None
