"""Runs of every controller whose plans do not depend on the clock, and what a checkpoint holds of them.

``python tests/control/golden_runs.py NAME...`` (with ``tests`` on the path) writes these cases, or else all, into
``golden/controllers.json`` anew. It was written by the code before controllers shared one phased base, and GraVAC by
energy before there was another gain: checkpoints of that code must load, and lead to the same plans. That of
lgreco_time is younger: its times are fitted with a latency. L-GreCo's gradients add up, as they did by default.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from control.resumed import resumed
from late import After

from gradcomp import LayerSpec, Quantize, TopK
from gradcomp.compress.policy import Automatic
from gradcomp.control import auto, controller_from_string
from gradcomp.control.distortion.round_trip import Rates
from gradcomp.control.gravac_gains import UNBOUNDED
from gradcomp.core.topology import Topology
from gradcomp.exchange.snapshot import Snapshot, snapshot
from gradcomp.reduce.model import Network
from gradcomp.testing.simulation import Simulation

GOLDEN = Path(__file__).parent / "golden" / "controllers.json"
WORLD, STEPS = 2, 64
LAYERS = [
    LayerSpec("a", (8, 6)),
    LayerSpec("b", (40,), "float16"),
    LayerSpec("c", (0,)),
    LayerSpec("d", (24,)),
    LayerSpec("e", (9,), "float64"),
    LayerSpec("f", (10, 12)),
]
MODEL = [LayerSpec("a", (64, 64)), LayerSpec("bias", (64,), kind="bias"), LayerSpec("b", (64, 128))]
FOUR = Quantize(4, 32, rounding="nearest")


@dataclass(frozen=True)
class Case:
    """A controller in string form, and what it works on."""

    controller: str
    compression: Any = FOUR
    layers: list[LayerSpec] = field(default_factory=lambda: LAYERS)
    options: dict[str, Any] = field(default_factory=dict)


OF_BEFORE = "gravac_norm"
"""A run of when ``gain="norm"`` named the unbounded form: its checkpoints go on with it, and a whole run is made so."""
AUTO = {"layers": MODEL, "options": {"topology": Topology(tuple(range(WORLD)))}}
CASES = {
    "accordion": Case("accordion:low=8,high=2,eta=3.0,every_steps=7"),
    "adaqs": Case("adaqs:low=8,high=1,factor=0.9,every_steps=7"),
    "kmeans": Case("kmeans:every_steps=7,levels=2/4/8,alpha=1.5"),
    "linear": Case("linear:every_steps=7,levels=2/4/8,window=3,alpha=none"),
    "bayes": Case("bayes:every_steps=7,levels=2/3/4/8,alpha=3.0,trials=8"),
    "lgreco": Case("lgreco:every_steps=7,window=7"),
    "lgreco_time": Case("lgreco:every_steps=7,window=7,objective=time,levels=2/4/6,alpha=1.5"),
    "schedule": Case(""),
    "fixed_plan": Case(""),
    "gravac": Case("gravac:minimum=2,maximum=16,window=6,epsilon=0.5,gain=energy", TopK(0.1)),
    "gravac_layers": Case(
        "gravac:minimum=2,maximum=16,window=6,epsilon=0.5,gain=energy,per_layer=true", TopK(0.1)
    ),
    OF_BEFORE: Case("gravac:minimum=2,maximum=16,window=6", TopK(0.1)),
    "gravac_bounded": Case("gravac:minimum=2,maximum=16,window=6", TopK(0.1)),
    "gravac_released": Case("gravac:minimum=2,maximum=16,window=6,gain=released", TopK(0.1)),
    "auto": Case("auto:warmup_steps=4,check_every=10", Automatic(), **AUTO),
}


def controller_of(name: str) -> Any:
    """The controller; those whose string form does not hold a mapping are made here."""
    from gradcomp import FixedPlan, Schedule

    if name == "schedule":
        return Schedule({3: 8, 9: {"a": 2}, 17: TopK(0.1)})
    if name == "fixed_plan":
        return FixedPlan({"a": 2, "[bd]": "topk:density=0.1"})
    return controller_from_string(CASES[name].controller)


def drawn(ranks: Simulation, step: int, era_steps: int) -> list[list[Any]]:
    """Gradients whose norms, order and noise change by era; the large layer is always quiet."""
    era = step // era_steps
    gradients = ranks.gradients(absent=[3] if step % 5 == 2 and len(ranks.layers) > 3 else [])
    for rank in gradients:
        for i, gradient in enumerate(rank):
            if gradient is not None and gradient.size:
                norm = 4.0 ** ((i + era) % 3) if i < 5 else 0.01 * 3 ** (era % 2)
                noise = gradient / np.linalg.norm(gradient.astype(np.float32))
                mean = (0.1 if era % 2 else 1.0) / np.sqrt(gradient.size)
                gradient[:] = (norm * (noise + mean)).astype(gradient.dtype)
    return gradients


def _fix_clock(run: Any) -> None:
    """What the clock shows is a function of step and rank; from step 30 on steps take longer."""
    finish, begin, rank = run.finish, run.begin, run.environment.rank
    ended = [0.0]

    def timed_begin(step: int) -> None:
        run.clock = lambda: ended[0] + 0.004 + 0.001 * rank
        begin(step)

    def timed_finish(step: Any) -> bool:
        ended[0] = 100.0 * step.number
        run.clock = lambda: ended[0]
        seconds = (0.010 + 0.002 * (step.number % 3)) * (1 if step.number < 30 else 2)
        ready = np.linspace(0.006, 0.001, len(step.ready))[::-1]
        wire = 1e-3 * (1.0 + np.arange(len(step.wire)) + step.number % 3)
        return finish(replace(step, seconds=seconds, ready=ready, wire=wire))

    run.begin, run.finish = timed_begin, timed_finish


class Run:
    """One simulated run, of the case's controller or another one."""

    def __init__(self, name: str, controller: Any = None) -> None:
        case = CASES[name]
        self.background = After(2)
        self.ranks = Simulation(
            case.layers, case.compression, WORLD, controller=controller or controller_of(name),
            background=self.background, slice_elements=100, **case.options,
        )  # fmt: skip
        self.runs = [p.controller for p in self.ranks.pipelines]
        for run in self.runs:
            _fix_clock(run)
            if name == OF_BEFORE:
                run.form, run.search.of_averages = UNBOUNDED, True

    def step(self, number: int) -> None:
        """One exchange, as an exchanger does it."""
        self.background.step = number
        if self.runs[0].wants_network:
            for run in self.runs:
                run.hear(Network(1e-6, 1e-6 if number < 30 else 3e-9, 1e9, 1e9))
        self.ranks.drawn = number
        gradients = drawn(self.ranks, number, 12)
        self.means = self.ranks.step(gradients).all_means()

    def plan(self) -> list[list[Any]]:
        """What layers travel as in the next step; the same on all ranks."""
        plans = [[[a.compressor, a.level] for a in p.plan.assignments] for p in self.ranks.pipelines]
        assert all(plan == plans[0] for plan in plans)
        return plans[0]

    def plans(self, begin: int, after: Callable[[int], None] | None = None) -> dict[str, list[list[Any]]]:
        """The plans from a step on, each under the step after which it is in force; ``after`` is told every step."""
        found, last = {}, None
        for number in range(begin, STEPS):
            self.step(number)
            if after is not None:
                after(number)
            if (plan := self.plan()) != last:
                found[str(number)] = last = plan
        return found

    def resume(self, states: list[Snapshot]) -> None:
        """Go on from a checkpoint."""
        resumed(self.ranks, states)
        self.background.step = states[0].shared.step


def kinds_of_moment(run: Run, number: int) -> str | None:
    """The phase after a step, where there are phases; else a few steps."""
    phase = getattr(run.runs[0], "phase", None)
    return phase.name if phase is not None else str(number) if number in (1, 10, 20) else None


@cache
def whole(name: str) -> tuple[dict[str, list[list[Any]]], dict[str, tuple[int, list[Snapshot]]]]:
    """The plans of an uninterrupted run, each under the step after which it is in force; and its checkpoints.

    There is one of every moment: the last of its kind in the run's first 50 steps, so that plans have changed before.
    """
    run, found = Run(name), {}

    def keep(number: int) -> None:
        kind = kinds_of_moment(run, number)
        if number < 50 and kind is not None:
            found[kind] = (number + 1, [snapshot(p) for p in run.ranks.pipelines])

    return run.plans(0, keep), found


def encoded(states: list[Snapshot]) -> list[dict[str, Any]]:
    """What the controller has in a checkpoint, as JSON."""
    return [
        {
            "shared": state.shared.control,
            "own": {
                kind: {name: base64.b64encode(value.tobytes()).decode() for name, value in values.items()}
                for kind, values in state.control.items()
            },
        }
        for state in states
    ]


def with_control(states: list[Snapshot], saved: list[dict[str, Any]]) -> list[Snapshot]:
    """The states, but the controller's part is the saved one."""
    return [
        replace(
            state,
            shared=replace(state.shared, control=one["shared"]),
            control={
                kind: {n: np.frombuffer(base64.b64decode(v), np.float32).copy() for n, v in values.items()}
                for kind, values in one["own"].items()
            },
        )
        for state, one in zip(states, saved, strict=True)
    ]


def fixed_rates(compressor: Any) -> Rates:
    """Codecs have these speeds."""
    speed = {"none": 8e9, "cast": 8e9, "quantize": 5e9}[compressor.name]
    return Rates(speed, speed)


def main() -> None:
    """Write the file."""
    auto.measure_rates = fixed_rates
    golden = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.is_file() else {}
    for name in sys.argv[1:] or CASES:
        moments = {}
        plans, found = whole(name)
        for kind, (at, states) in found.items():
            saved = encoded(states)
            again = Run(name)
            again.resume(with_control(states, json.loads(json.dumps(saved))))
            moments[kind] = {"at": at, "ranks": saved, "plans": again.plans(at)}
        golden[name] = {"plans": plans, "checkpoints": moments}
        print(name, sorted(moments), len(plans))
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(golden, separators=(",", ":")))


if __name__ == "__main__":
    main()
