"""Periodic controllers: one table on all ranks, one decision, one step for the change, whatever takes how long."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from control.resumed import (
    after_step,
    check_resumed,
    own_states,
    resumed,
    states_of,
    through_files,
    without_times,
)
from late import Late
from loudest import LAYERS, Loudest, levels

from gradcomp import ConfigError, Quantize, StateError, TopK, Warmup
from gradcomp.control import Decision, Periodic, PeriodObservations
from gradcomp.control.measurement import share_out
from gradcomp.control.periodic import PeriodicRun
from gradcomp.control.phased import Phase
from gradcomp.exchange.snapshot import Shared, snapshot
from gradcomp.testing.simulation import Simulation


@pytest.mark.parametrize("samples", [None, 2])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_plans_agree_in_every_step(world, samples):
    ranks = Simulation(
        LAYERS, Quantize(4, 32), world, shuffle=True, delay=0.3, slice_elements=50,
        controller=Loudest(5, samples=samples), background=Late(world),
    )  # fmt: skip
    observed, versions = [], []
    for _ in range(60 if samples is None else 90):
        ranks.step().all_means()
        observed.append(tuple(levels(ranks)))
        versions.append(ranks.pipelines[0].plan.version)
    assert len(set(observed)) >= 4
    assert max(np.diff(versions)) == 1
    assert all(plan[4] is None for plan in observed)  # float64 stays exact


def test_what_ranks_see_is_the_sum_of_the_owners_gradients():
    world, every = 3, 4
    ranks = Simulation(LAYERS, Quantize(4, 32), world, controller=Loudest(every))
    running = [p.controller for p in ranks.pipelines]
    owners = share_out({i: LAYERS[i].size for i in range(4)}, world)
    totals = [np.zeros(layer.size, np.float64) for layer in LAYERS]
    for step in range(every + 2):
        gradients = ranks.gradients(absent=[1] if step == 2 else [])
        # The loss scale is taken out; a step that does not count leaves no trace.
        ranks.step(ranks.gradients(), commit=False)
        ranks.step(gradients, scale=1.0)
        for layer, owner in owners.items():
            found = gradients[owner][layer]
            if step * 2 + 1 < every and found is not None:
                totals[layer] += found
        observed = [run.observations for run in running]
        if observed[0] is not None:
            break
    for one in observed:
        np.testing.assert_allclose(one.norm, [np.linalg.norm(t) for t in totals[:4]], rtol=1e-5)
        assert one.norm.tobytes() == observed[0].norm.tobytes()
        assert one.errors.tobytes() == observed[0].errors.tobytes()


def test_the_loss_scale_is_taken_out():
    plain, scaled = (Simulation(LAYERS, Quantize(4, 32), 2, controller=Loudest(2)) for _ in range(2))
    for _ in range(3):
        gradients = plain.gradients()
        eight = [[np.asarray(8 * g, g.dtype) for g in rank] for rank in gradients]
        plain.step(gradients)
        scaled.step(eight, scale=8.0)
    for pair in zip(plain.pipelines, scaled.pipelines, strict=True):
        a, b = (pipeline.controller.own_state() for pipeline in pair)
        assert a["sums"].keys() == b["sums"].keys()
        for name, value in a["taken"].items():
            np.testing.assert_allclose(value, b["taken"][name], rtol=1e-5)


def test_only_the_window_counts():
    ranks = Simulation(LAYERS, Quantize(4, 32), 2, controller=Loudest(6, window=2))
    for step in range(6):
        ranks.step()
        added = any(v.any() for p in ranks.pipelines for v in p.controller.own_state()["sums"].values())
        assert added == (step >= 4)


def test_a_period_with_nan_is_skipped_with_a_warning(caplog):
    @dataclass(frozen=True)
    class Broken(Loudest):
        name: ClassVar[str] = "broken"

        def begin(self, environment):
            running = super().begin(environment)
            share, factor = running._gathering.share, np.nan if environment.rank == 1 else 1
            running._gathering.share = replace(share, measure=lambda *sums: share.measure(*sums) * factor)
            return running

    ranks = Simulation(LAYERS, Quantize(4, 32), 3, controller=Broken(3))
    for _ in range(9):
        ranks.step()
    assert levels(ranks) == [4, 4, 4, 4, None]
    assert "not finite" in caplog.text


def test_non_finite_steps_do_not_spoil_the_period():
    ranks = Simulation(LAYERS, Quantize(4, 32), 2, controller=Loudest(4))
    for step in range(9):
        gradients = ranks.gradients()
        if step % 3 == 1:
            gradients[0][0][3] = np.inf
        ranks.step(gradients)
    assert levels(ranks) != [4, 4, 4, 4, None]


def test_it_begins_when_the_warm_up_has_ended():
    ranks = Simulation(LAYERS, Warmup(Quantize(4, 32), 10), 2, controller=Loudest(3))
    for step in range(1, 30):
        ranks.step()
        if step < 10:
            assert levels(ranks) == [None] * 5
        elif step < 13:
            assert levels(ranks) == [4, 4, 4, 4, None]
    assert levels(ranks) != [4, 4, 4, 4, None]


def test_means_telescope_through_changes_of_plan():
    ranks = Simulation(LAYERS[:1], TopK(0.1), 2, controller=Loudest(2))
    total, applied = np.zeros(115), np.zeros(115)
    for _ in range(30):
        gradients = ranks.gradients()
        total += sum(r[0].astype(np.float64) for r in gradients) / 2
        applied += ranks.step(gradients).mean(0)
    left = sum(p.residuals.first.value(0).astype(np.float64) for p in ranks.pipelines) / 2
    np.testing.assert_allclose(total - applied, left, atol=1e-4)


def test_proposals_are_refused():
    ranks = Simulation(LAYERS, Quantize(4, 32), 2, controller=Loudest(3))
    with pytest.raises(StateError, match="controller"):
        ranks.pipelines[0].propose(ranks.pipelines[0].plan)


def several_steps(ranks: Simulation) -> None:
    for _ in range(8):
        ranks.step()


@dataclass(frozen=True)
class Raises(Loudest):
    name: ClassVar[str] = "raises"

    def decide(self, observed):
        raise ConfigError("nothing to decide")


@dataclass(frozen=True)
class Wild(Loudest):
    name: ClassVar[str] = "wild"

    def decide(self, observed):
        return Decision(np.full(4, 99), observed.memory)


@pytest.mark.parametrize(
    ("controller", "error", "words"),
    [(Raises(1), ConfigError, "nothing to decide"), (Wild(1), StateError, "do not exist")],
)
def test_decisions_that_fail_or_do_not_exist_are_every_ranks_error(controller, error, words):
    ranks = Simulation(LAYERS, Quantize(4, 32), 2, controller=controller)
    with pytest.raises(error, match=words):
        several_steps(ranks)


def test_layers_are_shared_out_by_size():
    owners = share_out({0: 100, 1: 60, 2: 50, 3: 0, 4: 1}, 2)
    assert owners == {0: 0, 1: 1, 2: 1, 4: 0, 3: 0}


def test_the_controller_of_the_page_takes_the_next_level_of_every_layer():
    page = Path(__file__).resolve().parents[2] / "docs/controllers.md"
    (code,) = re.findall(r"```python\n(@dataclass.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {one.__name__: one for one in (dataclass, Periodic, PeriodObservations, Decision)}
    names |= {"ClassVar": ClassVar, "np": np, "__name__": __name__}
    exec(code, names)
    observed = SimpleNamespace(
        candidates=SimpleNamespace(choices=[("a", "b", "c"), ("a",), ("a", "b")]),
        current=np.array([2, 0, 0]),
        memory=np.array([1.5]),
    )
    decision = names["RoundRobin"](10).decide(observed)
    assert decision.choices.tolist() == [0, 0, 1]
    assert decision.memory.tolist() == [1.5]


# --- checkpoints --------------------------------------------------------------------------------------------

NEAREST = Quantize(4, 32, rounding="nearest")


def job(world: int, controller=None) -> Simulation:
    return Simulation(LAYERS, NEAREST, world, controller=controller or Loudest(3), slice_elements=50)


@pytest.mark.parametrize("controller", [Loudest(3), Loudest(3, samples=2)], ids=["sums", "samples"])
@pytest.mark.parametrize(
    "period", [range(1, 4), range(4, 7), pytest.param(range(7, 13), marks=pytest.mark.full)], ids=str
)
def test_resumed_is_uninterrupted_bit_for_bit_in_every_phase(period, controller, tmp_path, monkeypatch):
    without_times(monkeypatch)
    source = job(3, controller)
    gradients = [source.gradients() for _ in range(period.stop + 11)]
    whole = check_resumed(
        lambda: job(3, controller),
        lambda ranks, n: (after_step(ranks, ranks.step(gradients[n])), own_states(ranks)),
        len(gradients),
        period,
        lambda states, at: through_files(states, tmp_path / str(at)),
    )
    assert whole.pipelines[0].plan.version >= 2


def test_the_saved_phases_are_all_of_them():
    ranks, phases = job(2), set()
    for _ in range(12):
        ranks.step()
        snapshot(ranks.pipelines[0])
        phases.add(ranks.pipelines[0].controller.phase)
    # MEASURE begins and is agreed on within one step.
    assert phases == set(PeriodicRun.PHASES) - {Phase.MEASURE}


@pytest.mark.parametrize("kind", ["sums", "sampled"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_was_gathered_goes_to_its_new_owners(world, kind):
    controller = Loudest(30, samples=None if kind == "sums" else 8)
    old, new = job(3, controller), job(world, controller)
    for _ in range(7):
        old.step()
    states = states_of(old)
    sums = {name: v for s in states for name, v in s.control[kind].items()}
    assert all(v.any() for v in sums.values())
    resumed(new, states)
    found = {}
    for pipeline in new.pipelines:
        mine = pipeline.controller.own_state()[kind]
        assert not mine.keys() & found.keys()
        found |= mine
    assert found.keys() == sums.keys()
    for name, value in sums.items():
        assert found[name].tobytes() == value.tobytes()
    assert levels(new) == levels(old)


def test_another_controller_is_warned_about(caplog):
    old, plain = job(2), Simulation(LAYERS, NEAREST, 2, slice_elements=50)
    for _ in range(3):
        old.step()
    resumed(plain, states_of(old))
    assert "controller" in caplog.text


def test_an_older_state_has_none():
    ranks = job(2)
    ranks.step()
    plain = snapshot(ranks.pipelines[0]).shared.to_plain()
    del plain["control"]
    assert Shared.from_plain(plain).control is None
    with pytest.raises(Exception, match="controller"):
        Shared.from_plain({**plain, "control": {"x": 1}})


def test_a_state_that_is_none_is_refused():
    running = job(2).pipelines[0].controller
    for wrong in ({"phase": "NOWHERE"}, {"phase": "CRUISE"}, {"sent": [1.0]}, {"choices": 3}):
        with pytest.raises(StateError, match="not a state of"):
            running.restore({**running.shared_state(), **wrong}, {})
    with pytest.raises(StateError, match="not a state of"):
        running.restore({"phase": "NOWHERE"}, {})
    assert np.array_equal(running.current, running.candidates.reference)
