"""Schedules are changes of plan: at one step on all ranks, whatever happens to the step before, and after a restart."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from gradcomp import (
    ConfigError,
    DensitySchedule,
    ErrorFeedback,
    LayerSpec,
    LocalClip,
    MomentumCorrection,
    TopK,
    Warmup,
)
from gradcomp.compress import Identity, from_string
from gradcomp.exchange.snapshot import restore, snapshot
from gradcomp.testing.simulation import Simulation, plan_for, random_gradients

LAYERS = [
    LayerSpec("a", (23, 5)),
    LayerSpec("b", (40,), "float16"),
    LayerSpec("c", (0,)),
    LayerSpec("d", (60,)),
]
TIMING = {"shuffle": True, "delay": 0.4, "slice_elements": 50}
TOP = TopK(0.05)


def densities(ranks: Simulation) -> list[float | None]:
    """The level of the plan that every rank has, which is the same for all layers."""
    found = {assignment.level for p in ranks.pipelines for assignment in p.plan.assignments}
    assert len(found) == 1
    return found.pop()


SCHEDULES = {
    "warmup": (Warmup(TOP, 3), [None] * 3 + [0.05] * 5),
    "one step": (Warmup(TOP, 1), [None] + [0.05] * 7),
    "densities": (DensitySchedule(TOP, (0.4, 0.2, 0.01), 2), [0.4, 0.4, 0.2, 0.2] + [0.05] * 4),
    "densities behind a warmup": (
        Warmup(DensitySchedule(TOP, (0.4, 0.2), 2), 3),
        [None] * 3 + [0.4, 0.4, 0.2, 0.2, 0.05],
    ),
    "a warmup among densities": (
        DensitySchedule(Warmup(TOP, 2), (0.4, 0.2), 3),
        [None] * 2 + [0.4] + [0.2] * 3 + [0.05] * 2,
    ),
    "densities twice": (
        DensitySchedule(DensitySchedule(TOP, (0.4,), 2), (0.2, 0.5), 3),
        [0.4] * 2 + [0.2] + [0.5] * 3 + [0.05] * 2,
    ),
    "two warmups": (Warmup(Warmup(TOP, 2), 3), [None] * 5 + [0.05] * 3),
    "inside of momentum": (MomentumCorrection(Warmup(TOP, 2)), [None] * 2 + [0.05] * 6),
    "around momentum": (Warmup(MomentumCorrection(TOP), 2), [None] * 2 + [0.05] * 6),
    "inside of feedback": (ErrorFeedback(Warmup(TOP, 2), decay=0.9), [None] * 2 + [0.05] * 6),
    "clipped": (LocalClip(DensitySchedule(MomentumCorrection(TOP), (0.3,), 4)), [0.3] * 4 + [0.05] * 4),
}
every_schedule = pytest.mark.parametrize(("compressor", "expected"), SCHEDULES.values(), ids=SCHEDULES)


@every_schedule
def test_what_a_schedule_gives_is_no_schedule(compressor, expected):
    found = [compressor.at_step(step) for step in range(8)]
    assert [one.level for one in found] == expected
    assert not any(
        one.changes or "warmup" in one.to_string() or "density_" in one.to_string() for one in found
    )
    changed = [step for step, (a, b) in enumerate(pairwise(found), 1) if a != b]
    assert set(changed) <= set(compressor.changes)
    assert list(compressor.changes) == sorted(set(compressor.changes))
    assert from_string(compressor.to_string()) == compressor
    assert compressor.dense(Identity()) == compressor.dense(Identity()).at_step(0)


@every_schedule
@pytest.mark.parametrize("seed", range(2))
def test_all_ranks_change_at_the_announced_step(compressor, expected, seed: int):
    ranks = Simulation(LAYERS, compressor, 3, seed=seed, **TIMING)
    for step, level in enumerate(expected):
        assert densities(ranks) == level
        absent = [3] if step % 2 else []
        # The step before a change may be refused, or discarded.
        gradients = ranks.gradients(absent)
        if step == 2:
            gradients[1][0][7] = np.nan
        ranks.step(gradients, commit=step != 1).all_means()
    assert {p.plan.version for p in ranks.pipelines} == {sum(a != b for a, b in pairwise(expected))}


def train(ranks: Simulation, first: int, last: int) -> list[bytes]:
    means = []
    for step in range(first, last):
        drawn = random_gradients(ranks.layers, ranks.size, seed=step)
        means += [mean.tobytes() for mean in ranks.step(drawn).all_means()]
    return means


@every_schedule
def test_a_run_goes_on_from_before_at_and_after_the_change(compressor, expected):
    whole = Simulation(LAYERS, compressor, 2, shuffle=True)
    means = train(whole, 0, 8)
    for stop in range(1, 7):
        first, second = (Simulation(LAYERS, compressor, 2, shuffle=True) for _ in range(2))
        found = train(first, 0, stop)
        for old, new in zip(first.pipelines, second.pipelines, strict=True):
            restore(new, snapshot(old))
        assert densities(second) == expected[stop]
        assert found + train(second, stop, 8) == means, f"stopped after {stop} steps"
        assert second.state() == whole.state()


def test_momentum_goes_on_through_the_change():
    ranks = Simulation(LAYERS, Warmup(MomentumCorrection(TopK(1.0), 0.5, mask=False), 2), 2)
    ones = [[np.ones_like(g) for g in rank] for rank in ranks.gradients()]
    for expected in (1.0, 1.5, 1.75, 1.875, 1.9375):  # u <- u / 2 + 1
        assert all((mean == expected).all() for mean in ranks.step(ones).all_means())


def test_a_warmup_loses_nothing_and_owes_nothing():
    ranks = Simulation(LAYERS, ErrorFeedback(Warmup(TopK(0.05), 3), decay=0.9), 2)
    for _ in range(3):
        assert not any(ranks.owed(layer).any() for layer in range(len(LAYERS)))
        ranks.step()
    ranks.step()
    assert ranks.owed(0).any()


@pytest.mark.parametrize(
    "text",
    [
        "warmup[topk]:steps=0",
        "warmup[topk]:steps=1.5",
        "warmup[topk]:steps=true",
        "density_schedule[topk]:steps_per_level=0",
        "density_schedule[topk]:levels=0.1",
        "density_schedule[topk]:levels=2/",
        "density_schedule[topk]:levels=none/",
        "density_schedule[none]:levels=none/",
        "density_schedule[none]",
        "density_schedule[quantize]",
    ],
)
def test_impossible_schedules_are_refused(text: str):
    with pytest.raises(ConfigError):
        from_string(text)


def test_a_change_waits_for_a_plan_that_is_under_way():
    """A controller's plan is voted on in the very step in which the schedule would have proposed its own."""
    ranks = Simulation(LAYERS, Warmup(TOP, 3), 3, **TIMING)
    other = plan_for(LAYERS, TopK(0.3), 1)
    seen = []
    for step in range(6):
        if step == 2:
            for pipeline in ranks.pipelines:
                pipeline.propose(other)
        ranks.step()
        seen.append(densities(ranks))
    assert seen == [None, None, 0.3, 0.05, 0.05, 0.05]
    assert {p.plan.version for p in ranks.pipelines} == {2}
