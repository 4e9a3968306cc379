"""Ranges widen once, on all ranks alike, where most of a family's elements are at an end of them."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from control.observed import environment, environment_of
from control.resumed import after_step, check_resumed, resumed, states_of, without_times
from late import Late
from loudest import levels

from gradcomp import Accordion, KMeans, LayerSpec, LGreCo, PowerSGD, Quantize, TopK
from gradcomp.control.candidates import crowded_ends, default_levels, goes_on, make_candidates
from gradcomp.testing.simulation import Simulation

LAYERS = [LayerSpec("sparse", (100, 100)), LayerSpec("dense", (40, 40))]


def test_wide_ranges():
    assert default_levels(PowerSGD(4), wide=True) == list(range(1, 17))
    assert default_levels(PowerSGD(32), wide=True) == list(range(8, 129))
    assert default_levels(Quantize(4), wide=True) == default_levels(Quantize(4))
    densities = default_levels(TopK(0.01), wide=True)
    assert densities[:11] == [*(i / 10_000 for i in range(1, 10)), 0.001, 0.002]
    assert densities[9:] == default_levels(TopK(0.01))


def test_an_end_is_crowded_by_more_than_half_of_the_elements():
    # Three layers, of which the last has as many elements as the others together.
    candidates = make_candidates(environment([400, 400, 800]), None)
    last = len(candidates.choices[0]) - 1
    assert crowded_ends(candidates, np.array([1, 1, 0])) == []
    (low,) = crowded_ends(candidates, np.array([0, 1, 0]))
    assert (low.family, low.low, low.share, low.rows.tolist()) == ("quantize", True, 0.75, [0, 2])
    (high,) = crowded_ends(candidates, np.array([0, last, last]))
    assert (high.low, high.share, high.rows.tolist()) == (False, 0.75, [1, 2])


def test_families_are_looked_at_one_by_one():
    given = [2, 4, 8, "topk:density=0.01", "topk:density=0.1"]
    candidates = make_candidates(environment([400, 400, 80]), given)
    (end,) = crowded_ends(candidates, np.array([1, 1, 4]))
    assert (end.family, end.low, end.rows.tolist()) == ("topk", False, [2])


def test_a_range_of_one_level_has_no_ends():
    assert crowded_ends(make_candidates(environment([400]), [4]), np.array([0])) == []


@pytest.mark.parametrize(("own", "low", "high"), [(Quantize(4), False, False), (TopK(0.01), True, False),
                                                  (PowerSGD(4), True, True)])  # fmt: skip
def test_what_lies_beyond_an_end(own, low, high):
    setting = environment_of([LayerSpec("w", (80, 80))], [own])
    narrow, wide = (make_candidates(setting, None, wide=w) for w in (False, True))
    for k, beyond in ((0, low), (len(narrow.choices[0]) - 1, high)):
        (end,) = crowded_ends(narrow, np.array([k]))
        assert goes_on(end, narrow, wide) == beyond


def gradients(step: int, world: int):
    """A tenth of a percent of the large layer is not zero; the small one is dense, and pays for nothing."""
    draw = np.random.default_rng(step)
    found = []
    for _ in range(world):
        sparse = np.zeros(10_000, np.float32)
        sparse[::1000] = draw.standard_normal(10)
        found.append([sparse, draw.standard_normal(1600).astype(np.float32)])
    return found


def job(controller, world: int = 2, **options) -> Simulation:
    return Simulation(LAYERS, TopK(0.1), world, controller=controller, **options)


def step(ranks: Simulation, number: int):
    outcome = after_step(ranks, ranks.step(gradients(number, ranks.size)))
    assert len(set(outcome[-1])) == 1
    return outcome


def run(controller, steps: int = 40, world: int = 2, **options):
    """Levels after every step, and the ranks."""
    ranks = job(controller, world, **options)
    return go_on(ranks, steps), ranks


def go_on(ranks: Simulation, steps: int) -> list:
    found = []
    for number in range(steps):
        step(ranks, number)
        found.append(levels(ranks))
    return found


def test_densities_widen_once_and_the_log_says_so(caplog):
    caplog.set_level(logging.INFO, "gradcomp")
    found, ranks = run(LGreCo(5))
    sparse = [plan[0] for plan in found]
    assert sparse[0] == 0.1
    assert sparse.index(0.01) < sparse.index(min(sparse))
    assert min(sparse) < 0.01
    line = "of the elements under topk have the lowest level of their range: ranges are"
    assert caplog.text.count(line) == 1
    assert all(p.controller.state.wide for p in ranks.pipelines)


def test_without_widening_the_range_stays_and_the_log_says_so_once(caplog):
    caplog.set_level(logging.INFO, "gradcomp")
    for controller in (LGreCo(5, widen=False), LGreCo(5, levels=[0.01, 0.05, 0.1])):
        caplog.clear()
        found, ranks = run(controller)
        assert min(plan[0] for plan in found) == found[-1][0] == 0.01
        assert caplog.text.count("have the lowest level of their range: levels= may go further") == 1
        assert "wide" not in ranks.pipelines[0].controller.shared_state()


def test_others_than_l_greco_say_nothing(caplog):
    caplog.set_level(logging.INFO, "gradcomp")
    run(KMeans(5))
    assert "level of their range" not in caplog.text


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_widen_alike_whatever_takes_how_long(world):
    found, _ = run(LGreCo(5), steps=80, world=world, background=Late(world))
    # Alone, a rank sends nothing that it could save.
    assert world == 1 or min(plan[0] for plan in found) < 0.01


def test_resumed_is_uninterrupted_before_and_after(monkeypatch):
    without_times(monkeypatch)
    wide = {}

    def noted(states, at):
        wide[at] = states[0].shared.control["state"].get("wide")
        return states

    check_resumed(
        lambda: job(LGreCo(5)), lambda ranks, n: (step(ranks, n), ranks.state()), 30, range(6, 19), noted
    )
    assert not wide[6]
    assert wide[18]


def test_a_run_that_has_widened_goes_back_to_a_checkpoint_of_before():
    ranks = job(LGreCo(5))
    early = states_of(ranks)
    go_on(ranks, 30)
    assert ranks.pipelines[0].controller.state.wide
    assert go_on(resumed(ranks, early), 40) == run(LGreCo(5))[0]


def test_without_widening_a_wide_checkpoint_goes_on_in_the_narrow_range():
    _, wide = run(LGreCo(5))
    narrow = resumed(job(LGreCo(5, widen=False)), states_of(wide))
    assert go_on(narrow, 12)[-1][0] == 0.01
    assert narrow.pipelines[0].controller.state.wide is None


def test_ranges_around_accordions_levels_widen_too():
    controller = LGreCo(5, accordion=Accordion(0.2, 0.05, every_steps=5))
    found = controller.wider_levels(environment([6400], own=TopK(0.1)))
    assert min(c.level for c in found.choices[0]) == 0.0005
    assert LGreCo(5, levels="hybrid").wider_levels(environment([6400])) is None
