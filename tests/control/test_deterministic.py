"""With ``deterministic=True`` decisions apply in steps that do not depend on how long anything takes."""

from __future__ import annotations

import json
import time
from itertools import count

import numpy as np
import pytest
import torch
from batch import on_ranks
from control.resumed import check_resumed
from late import Late
from loudest import LAYERS, Loudest

import gradcomp.torch as gc
from gradcomp import Quantize
from gradcomp.control.phased import Phase
from gradcomp.exchange import agreement
from gradcomp.exchange.snapshot import snapshot
from gradcomp.exchange.thread import in_background
from gradcomp.testing.simulation import Simulation

NEAREST = Quantize(4, 32, rounding="nearest")
STEPS = 18


def job(seed: int, *, deterministic: bool = True, every: int = 5, samples: int | None = None) -> Simulation:
    return Simulation(
        LAYERS,
        NEAREST,
        2,
        seed=seed,
        shuffle=True,
        delay=0.1,
        reorder=False,
        slice_elements=50,
        controller=Loudest(every, samples=samples),
        background=Late(seed),
        deterministic=deterministic,
    )


def state_of(ranks: Simulation) -> list:
    """Everything that a checkpoint would hold, without what is equal in any run."""
    states = [snapshot(pipeline) for pipeline in ranks.pipelines]
    return [
        (
            json.dumps(state.shared.to_plain(), sort_keys=True),
            {name: value.tobytes() for name, value in state.first.items()},
            state.second.tobytes(),
            {kind: {n: v.tobytes() for n, v in values.items()} for kind, values in state.control.items()},
        )
        for state in states
    ]


def step(ranks: Simulation, number: int) -> tuple:
    """What is in force, applied and kept after a step."""
    ranks.drawn = number
    means = [mean.tobytes() for mean in ranks.step().all_means()]
    return ranks.pipelines[0].plan.to_json(), means, state_of(ranks)


def history(ranks: Simulation) -> list:
    return [step(ranks, number) for number in range(STEPS)]


@pytest.mark.parametrize("samples", [None, 3])
def test_runs_repeat_whatever_the_background_takes(samples):
    first, second = (history(job(seed, samples=samples)) for seed in (1, 2))
    assert len({plan for plan, _, _ in first}) >= 3
    assert first == second


def test_without_it_they_do_not():
    plans = [[plan for plan, _, _ in history(job(seed, deterministic=False))] for seed in (1, 2)]
    assert plans[0] != plans[1]


@pytest.mark.parametrize(("samples", "first"), [(None, 5), (3, 1)])
def test_resumed_in_any_phase_is_uninterrupted(samples, first):
    seeds = count(1)
    check_resumed(lambda: job(next(seeds), samples=samples), step, STEPS, range(first, 11))


def test_decisions_take_the_same_steps_of_every_period():
    ranks = job(4, every=40)  # two steps to measure, two to decide
    for _ in range(40):
        ranks.step()
    phases = []
    for _ in range(7):
        phases.append([pipeline.controller.phase for pipeline in ranks.pipelines])
        ranks.step()
    assert ranks.pipelines[0].plan.version == 1
    assert [phase for phase, *_ in phases] == [
        *[Phase.GATHER, Phase.MEASURE, Phase.MEASURE, Phase.SHARE],
        *[Phase.DECIDE, Phase.DECIDE, Phase.ANNOUNCE],
    ]
    assert all(len(set(of_ranks)) == 1 for of_ranks in phases)


# --- real processes ------------------------------------------------------------------------------------------


class Slow:
    """A background that works in a thread, and takes a random time."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def __call__(self, work):
        pause = self.random.uniform(0.0, 0.05)

        def late():
            time.sleep(pause)
            return work()

        return in_background(late)


def make(controller, seed: int):
    """A model and its optimizer; gradients are those of a pass that any rank can repeat."""
    agreement.in_background = Slow(10 * seed + gc.rank())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5))
    policy = gc.Policy(gc.Quantize(4, 64), filter=gc.Filter(min_elements=0, exclude_kinds=()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, gc.DistributedOptimizer(optimizer, model.named_parameters(), policy, controller=controller)


def train(model, optimizer, first: int, last: int) -> list:
    """By step: the plan of the next one, and the parameters."""
    found = []
    for step in range(first, last):
        draw = torch.Generator().manual_seed(1000 * step + gc.rank())
        optimizer.zero_grad()
        model(torch.randn(16, 40, generator=draw)).square().mean().backward()
        optimizer.step()
        parameters = [p.detach().numpy().tobytes() for p in model.parameters()]
        found.append((optimizer.plan().to_json(), parameters))
    return found


@on_ranks(2, deterministic=True)
def test_real_runs_repeat_and_resume():
    controller = gc.LGreCo(8, alpha=2.0)
    expected = train(*make(controller, 1), 0, 16)
    assert len({plan for plan, _ in expected}) >= 2
    for at in (9, 11):  # while layers are measured, and while rank 0 decides
        model, optimizer = make(controller, at)
        assert train(model, optimizer, 0, at) == expected[:at]
        assert optimizer._gradcomp.exchanger.pipeline.controller.phase is (
            Phase.MEASURE if at == 9 else Phase.DECIDE
        )
        again, resumed = make(controller, 2 * at)
        again.load_state_dict(model.state_dict())
        resumed.load_compression_state(optimizer.compression_state())
        assert train(again, resumed, at, 16) == expected[at:]


@on_ranks(2, deterministic=True)
def test_what_decides_by_times_is_refused():
    for controller in (gc.LGreCo(8, objective="time"), gc.GraVAC(), gc.Auto()):
        with pytest.raises(gc.ConfigError, match="measured times"):
            make(controller, 1)
