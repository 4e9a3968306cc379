"""Simulated runs that are saved, and that go on from what was saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradcomp.control.periodic import PeriodicRun
from gradcomp.exchange.checkpoint import Manifest, read_rank, write_rank
from gradcomp.exchange.snapshot import Snapshot, merge, restore, snapshot
from gradcomp.testing.simulation import Simulation


def states_of(ranks: Simulation) -> list[Snapshot]:
    return deepcopy([snapshot(pipeline) for pipeline in ranks.pipelines])


def resumed(ranks: Simulation, states: Sequence[Snapshot]) -> Simulation:
    """The ranks, which go on from these states; those of another number of ranks are merged."""
    world = len(ranks.pipelines)
    for rank, pipeline in enumerate(ranks.pipelines):
        restore(pipeline, states[rank] if len(states) == world else merge(states, rank, world))
    return ranks


def through_files(states: Sequence[Snapshot], directory: Path) -> list[Snapshot]:
    """The states as a checkpoint holds them."""
    directory.mkdir(exist_ok=True)
    files = tuple(write_rank(directory, state) for state in states)
    manifest = Manifest.from_text(Manifest(states[0].shared, files).to_text())
    return [read_rank(directory, manifest, rank) for rank in range(len(states))]


def without_times(monkeypatch: Any) -> None:
    """Periodic controllers measure no times, which differ between runs."""
    finish = PeriodicRun.finish
    monkeypatch.setattr(
        PeriodicRun, "finish", lambda running, step: finish(running, replace(step, wire=0 * step.wire))
    )


def plan_of(ranks: Simulation) -> str:
    """The plan, which must be the same on all ranks."""
    (plan,) = {pipeline.plan.to_json() for pipeline in ranks.pipelines}
    return plan


def after_step(ranks: Simulation, outcome: Any) -> tuple[Any, ...]:
    """All that ranks have after a step: means, plan and controllers' states."""
    means = [None if mean is None else mean.tobytes() for mean in outcome.all_means()]
    states = [json.dumps(pipeline.controller.shared_state()) for pipeline in ranks.pipelines]
    return means, plan_of(ranks), states


def own_states(ranks: Simulation) -> list[dict[tuple[str, str], bytes]]:
    """What controllers hold on each rank alone."""
    return [
        {(kind, n): v.tobytes() for kind, held in p.controller.own_state().items() for n, v in held.items()}
        for p in ranks.pipelines
    ]


def check_resumed(
    job: Callable[[], Simulation],
    step: Callable[[Simulation, int], Any],
    steps: int,
    moments: Collection[int],
    through: Callable[[list[Snapshot], int], list[Snapshot]] = lambda states, at: states,
) -> Simulation:
    """Runs that are resumed from each of these moments end as the uninterrupted one, which is returned.

    ``step`` takes a numbered step and returns what must be equal.
    """
    whole, saved, expected = job(), {}, []
    for number in range(steps):
        if number in moments:
            saved[number] = through(states_of(whole), number)
        expected.append(step(whole, number))
    for at, states in saved.items():
        again = resumed(job(), states)
        for number in range(at, steps):
            assert step(again, number) == expected[number], f"saved before step {at}: step {number}"
    return whole
