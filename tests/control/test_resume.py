"""A controller's state goes through checkpoints: in every phase, to the same and to another number of ranks."""

from __future__ import annotations

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
from loudest import LAYERS, Loudest, levels

from gradcomp import Quantize, StateError
from gradcomp.control.periodic import PeriodicRun
from gradcomp.control.phased import Phase
from gradcomp.exchange.snapshot import Shared, snapshot
from gradcomp.testing.simulation import Simulation

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
