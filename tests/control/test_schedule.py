"""Schedule: levels change at the steps that it names, on every rank, and a run goes on where it was."""

from __future__ import annotations

import json

import pytest
from control.observed import environment
from loudest import LAYERS, levels

from gradcomp import ConfigError, Quantize, StateError, TopK, Warmup
from gradcomp.control.schedule import Schedule
from gradcomp.exchange.snapshot import merge, restore, snapshot
from gradcomp.testing.simulation import Simulation

STEPS = Schedule({0: 8, 3: {"a": 2, "[bd]": "topk:density=0.1"}, 7: {"*": Quantize(3, 64)}})
EXPECTED = [[8, 8, 8, 8, None]] * 3 + [[2, 0.1, 8, 0.1, None]] * 4 + [[3, 3, 3, 3, None]] * 3


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("warm_up", [0, 4])
def test_levels_change_at_their_steps(world, warm_up):
    compression = Warmup(Quantize(4, 32), warm_up) if warm_up else Quantize(4, 32)
    ranks = Simulation(LAYERS, compression, world, shuffle=True, delay=0.3, controller=STEPS)
    for _ in range(warm_up):
        assert levels(ranks) == [None] * 5
        ranks.step().all_means()
    for expected in EXPECTED:
        assert levels(ranks) == expected
        ranks.step().all_means()


def test_until_the_first_entry_layers_keep_what_they_have():
    ranks = Simulation(LAYERS, Quantize(4, 32), 2, controller=Schedule({2: 8}))
    found = []
    for _ in range(4):
        found.append(levels(ranks)[0])
        ranks.step()
    assert found == [4, 4, 8, 8]
    assert ranks.pipelines[0].plan.version == 1


def test_entries_need_not_be_in_order():
    assert Schedule({5: 2, 0: 8}).to_string() == Schedule({0: 8, 5: 2}).to_string()
    ranks = Simulation(LAYERS, Quantize(4, 32), 2, controller=Schedule({2: 2, 0: 8}))
    assert levels(ranks)[0] == 8


def test_string_forms_differ_where_schedules_do():
    forms = [Schedule(s).to_string() for s in ({0: 8}, {1: 8}, {0: 4}, {0: {"a": 8}}, {0: TopK(0.1)})]
    assert len(set(forms)) == len(forms)


@pytest.mark.parametrize("at", range(1, 10))
@pytest.mark.parametrize("world", [2, 3])
def test_a_run_goes_on_where_it_was(at, world):
    def job(ranks):
        return Simulation(LAYERS, Quantize(4, 32), ranks, controller=STEPS)

    first, second = job(2), job(world)
    for _ in range(at):
        first.step()
    states = [snapshot(p) for p in first.pipelines]
    for rank, pipeline in enumerate(second.pipelines):
        restore(pipeline, states[rank] if world == 2 else merge(states, rank, world))
    for expected in EXPECTED[at:]:
        assert levels(second) == expected
        second.step().all_means()
    shared = [p.controller.shared_state() for p in second.pipelines]
    assert json.dumps(shared[0]) == json.dumps(shared[1])


def test_another_schedule_takes_over_after_a_step():
    first = Simulation(LAYERS, Quantize(4, 32), 2, controller=Schedule({0: 8}))
    second = Simulation(LAYERS, Quantize(4, 32), 2, controller=Schedule({0: 2}))
    first.step()
    for a, b in zip(first.pipelines, second.pipelines, strict=True):
        restore(b, snapshot(a))
    found = []
    for _ in range(3):
        found.append(levels(second)[0])
        second.step()
    assert found == [8, 2, 2]


@pytest.mark.parametrize("bad", [{}, {"choices": 3}, {"choices": {"a": "nothing"}}, {"choices": {"a": 4}}])
def test_a_state_that_is_none_is_refused(bad):
    with pytest.raises(StateError, match="not a state of schedule"):
        Schedule({0: 8}).begin(environment([64])).restore(bad, {})


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ({}, "empty"),
        (4, "mapping"),
        ({-1: 4}, "whole numbers"),
        ({1.5: 4}, "whole numbers"),
        ({True: 4}, "whole numbers"),
        ({"0": 4}, "whole numbers"),
        ({0: None}, "step 0"),
        ({0: {}}, "step 0 is empty"),
        ({0: {4: 4}}, "strings"),
        ({5: {"a": float("inf")}}, "step 5, 'a'"),
        ({0: "nothing"}, "unknown compression"),
        ({0: Warmup(Quantize(4), 5)}, "schedule itself"),
    ],
)
def test_bad_input(steps, words):
    with pytest.raises(ConfigError, match=words):
        Schedule(steps)


def test_later_steps_are_checked_at_the_start():
    with pytest.raises(ConfigError, match="bits"):
        Schedule({0: 4, 900: 99}).begin(environment([64]))
    with pytest.raises(ConfigError, match=r"step 900.*'x' \(closest: 'l0'\)"):
        Schedule({0: 4, 900: {"x": 4}}).begin(environment([64]))
