"""A controller's state goes through checkpoints: in every phase, to the same and to another number of ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from loudest import LAYERS, Loudest, levels

from gradcomp import Quantize
from gradcomp.control.periodic import PeriodicRun
from gradcomp.control.phased import Phase
from gradcomp.exchange.checkpoint import Manifest, read_rank, write_rank
from gradcomp.exchange.snapshot import Shared, merge, restore, snapshot
from gradcomp.testing.simulation import Simulation

NEAREST = Quantize(4, 32, rounding="nearest")


def job(world: int, controller=None) -> Simulation:
    return Simulation(LAYERS, NEAREST, world, controller=controller or Loudest(3), slice_elements=50)


def through_files(states, directory):
    """As a checkpoint holds them."""
    directory.mkdir(exist_ok=True)
    files = tuple(write_rank(directory, state) for state in states)
    manifest = Manifest.from_text(Manifest(states[0].shared, files).to_text())
    return [read_rank(directory, manifest, rank) for rank in range(len(states))]


@pytest.mark.parametrize("controller", [Loudest(3), Loudest(3, samples=2)], ids=["sums", "samples"])
@pytest.mark.parametrize(
    "period", [range(1, 4), range(4, 7), pytest.param(range(7, 13), marks=pytest.mark.full)], ids=str
)
def test_resumed_is_uninterrupted_bit_for_bit_in_every_phase(period, controller, tmp_path, monkeypatch):
    finish = PeriodicRun.finish
    # All but the clock.
    monkeypatch.setattr(
        PeriodicRun, "finish", lambda running, step: finish(running, replace(step, wire=0 * step.wire))
    )

    def after(ranks, drawn):
        means = [mean.tobytes() for mean in ranks.step(drawn).all_means()]
        running = [p.controller for p in ranks.pipelines]
        shared = [json.dumps(run.shared_state()) for run in running]
        own = [
            {
                (kind, name): value.tobytes()
                for kind, values in run.own_state().items()
                for name, value in values.items()
            }
            for run in running
        ]
        return means, levels(ranks), shared, own

    whole, saved, expected = job(3, controller), {}, []
    gradients = [whole.gradients() for _ in range(period.stop + 11)]
    for step, drawn in enumerate(gradients):
        if step in period:
            states = [snapshot(p) for p in whole.pipelines]
            saved[step] = through_files(states, tmp_path / str(step))
        expected.append(after(whole, drawn))
    assert whole.pipelines[0].plan.version >= 2
    for at, states in saved.items():
        resumed = job(3, controller)
        for pipeline, state in zip(resumed.pipelines, states, strict=True):
            restore(pipeline, state)
        for step in range(at, len(gradients)):
            assert after(resumed, gradients[step]) == expected[step], f"saved before step {at}: step {step}"


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
    states = [snapshot(p) for p in old.pipelines]
    sums = {name: v for s in states for name, v in s.control[kind].items()}
    assert all(v.any() for v in sums.values())
    for rank, pipeline in enumerate(new.pipelines):
        restore(pipeline, merge(states, rank, world))
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
    for a, b in zip(old.pipelines, plain.pipelines, strict=True):
        restore(b, snapshot(a))
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
    with pytest.raises(Exception, match="not a state of"):
        running.restore({"phase": "NOWHERE"}, {})
    with pytest.raises(Exception, match="not a state of"):
        running.restore({**running.shared_state(), "phase": "CRUISE"}, {})
    with pytest.raises(Exception, match="not a state of"):
        running.restore({**running.shared_state(), "sent": [1.0]}, {})
    with pytest.raises(Exception, match="not a state of"):
        running.restore({**running.shared_state(), "choices": 3}, {})
    assert np.array_equal(running.current, running.candidates.reference)
