"""The trainings that the pages of the papers are made of: one file of runs for each task, which all papers share."""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import convergence
import report
from convergence_rows import DIGITS, METRICS, PAIRS, RESNET
from convergence_tasks import LSTM_TEST_WORDS, Settings

Run = dict[str, Any]

SEEDS = 3
#: What a run keeps of what a rank found.
KEPT = ("metric", "seconds", "steps", "bytes_per_step", "run_bytes_per_step", "compressible_bytes_per_step", "ratio",
        "step_seconds", "factors", "gains", "throughputs", "fewer_floats", "spent_seconds")  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """A training, over seeds. ``rate`` and ``length`` are factors on the task's learning rate and number of steps.

    ``link``: the rate of the links between the ranks, each on a host of its own; "" is one host. Times need a link.
    """

    task: str
    compression: str
    controller: str = ""
    rate: float = 1.0
    length: float = 1.0
    link: str = ""
    seeds: int = SEEDS

    @property
    def key(self) -> tuple[str, str, str, float, float, str]:
        return self.task, self.compression, self.controller, self.rate, self.length, self.link


def timed(arm: Arm) -> Arm:
    """A run that times the arm's steps: over links of 1 Gbit/s, of 30% of the steps, with as many decisions."""
    periods = re.sub(r"(every_steps|window)=(\d+)", lambda m: f"{m[1]}={int(m[2]) // 3}", arm.controller)
    return Arm(arm.task, arm.compression, periods, length=0.3, link="1gbit", seeds=1)


@dataclass(frozen=True)
class Scale:
    """How long the tasks are trained."""

    digits_epochs: int = 60
    resnet_epochs: int = 9
    lstm_steps: int = 1_000
    pairs_steps: int = 3_000
    seeds: int = SEEDS
    #: What is trained in place of a task.
    instead: dict[str, str] = field(default_factory=dict)
    test_words: int = LSTM_TEST_WORDS
    #: Steps of a controller's period or window, in place of what the arm says.
    period: int | None = None
    #: Many arms in the same processes: a failure costs them all, but starting takes as long as so short a run.
    together: bool = False

    def settings(self, arm: Arm, data: Path | None, cifar: Path | None) -> Settings:
        def times(number: int) -> int:
            return max(round(number * arm.length), 1)

        steps = self.pairs_steps if arm.task == PAIRS else self.lstm_steps
        paths = [None if path is None else str(path.resolve()) for path in (data, cifar)]
        epochs = times(self.digits_epochs), times(self.resnet_epochs)
        return Settings(epochs[0], times(steps), epochs[1], *paths, self.test_words)

    def controller(self, arm: Arm) -> str:
        if self.period is None:
            return arm.controller
        return re.sub(r"(every_steps|window)=\d+", rf"\1={self.period}", arm.controller)


FULL = Scale()
#: Every part of a command once: digits stand for CIFAR-10, and texts are the standard library's.
QUICK = Scale(
    digits_epochs=1,
    lstm_steps=12,  # a controller's first plan comes a few steps after its first period
    pairs_steps=12,
    seeds=1,
    instead={RESNET: DIGITS},
    test_words=4_000,
    period=3,
    together=True,
)


class Pool:
    """Runs that are kept in a folder, in a file for each task."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[str, list[Run]] = {}

    def of(self, arm: Arm) -> list[Run]:
        """The runs of an arm, by machine and seed."""
        found = [run for run in self._of_task(arm.task) if _key(run) == arm.key and run["seed"] < arm.seeds]
        return sorted(found, key=lambda run: (run["machine"], run["seed"]))

    def add(self, arm: Arm, runs: Sequence[Run]) -> None:
        """Written at once, a run a line."""
        kept = self._of_task(arm.task)
        kept += [{**asdict(arm), **run} for run in runs]
        report.write_runs(self._folder / f"{arm.task}.json", {"benchmark": "papers"}, kept)

    def _of_task(self, task: str) -> list[Run]:
        if task not in self._runs:
            path = self._folder / f"{task}.json"
            self._runs[task] = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.is_file() else []
        return self._runs[task]


@dataclass(frozen=True)
class Measurement:
    """A benchmark whose JSON a page reads. ``quick``: its arguments where every part is tried once.

    In arguments {data} is the text and {cifar} the images. ``resumes``: it goes on with a JSON that lacks runs.
    ``hosts``: it makes hosts, for which it needs root.
    """

    name: str
    script: str
    arguments: tuple[str, ...]
    quick: tuple[str, ...]
    resumes: bool = False
    hosts: bool = True


def step_times(
    name: str,
    compressions: Sequence[str],
    every: Sequence[str],
    size: Sequence[str],
    more: Sequence[str] = (),
) -> Measurement:
    """Times of steps with these compressions and with DistributedDataParallel, over links of 1 Gbit/s.

    ``every``: what is tried once in their place, the same for several measurements. ``size``: model, ranks and steps.
    """
    common = ("--rows=ddp", "--skip-verification", "--link=1gbit", *more)
    own, tried = ([f"--compression={how}" for how in chosen] for chosen in (compressions, every))
    quick = ("--model=resnet", "--ranks=2", "--blocks=1", "--steps=2", "--warmup=1")
    return Measurement(name, "step.py", (*common, *own, *size), (*common, *tried, *quick))


@dataclass(frozen=True)
class Results:
    """What was found: trainings, and the JSON of benchmarks by name, None where there is none."""

    pool: Pool
    folder: Path

    def measured(self, name: str) -> dict[str, Any] | None:
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def cost(self, arms: Sequence[Arm]) -> str:
        return cost([run for arm in dict.fromkeys(arms) for run in self.pool.of(arm)])


def cost(runs: Sequence[Run]) -> str:
    """What the trainings of a page took, on which machines and days."""
    if not runs:
        return "No training has run."
    machines = "; ".join(sorted({run["machine"] for run in runs}))
    days = sorted({run["date"] for run in runs})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"{len(runs)} trainings, {sum(run['seconds'] for run in runs) / 3600:.1f} hours; {machines}; {when}."
    )


def _key(run: Run) -> tuple[Any, ...]:
    return tuple(run[name] for name in ("task", "compression", "controller", "rate", "length", "link"))


def train(
    pool: Pool,
    arms: Sequence[Arm],
    scale: Scale,
    data: Path | None,
    cifar: Path | None,
    bases: Sequence[Arm] = (),
) -> list[Arm]:
    """Train what the pool lacks; returns the arms whose processes failed.

    ``bases``: those that others are compared with. Arithmetic differs between processors, and with it a run's metric by
    as much as seeds differ, so that a base is trained once more on a machine on which anything is trained.
    """
    asked: dict[tuple[Any, ...], Arm] = {}
    for arm in arms:  # of those that differ by the number of seeds alone, the one with the most
        if arm.key not in asked or asked[arm.key].seeds < arm.seeds:
            asked[arm.key] = arm
    here = report.processor()

    def seeds_of(arm: Arm, machines: Collection[str]) -> tuple[int, ...]:
        done = {run["seed"] for run in pool.of(arm) if run["machine"] in machines or not machines}
        return tuple(seed for seed in range(min(arm.seeds, scale.seeds)) if seed not in done)

    seeds = {arm.key: seeds_of(arm, ()) for arm in asked.values()}
    if any(seeds.values()):
        seeds |= {arm.key: seeds_of(arm, (here,)) for arm in bases}
    lacking = []
    for arm in asked.values():
        if seeds[arm.key]:
            plan = convergence.Plan(
                scale.instead.get(arm.task, arm.task),
                arm.compression,
                arm.rate,
                seeds[arm.key],
                scale.settings(arm, data, cifar),
                scale.controller(arm),
            )
            lacking.append((arm, plan))
    failed = []
    if os.geteuid() != 0:
        linked = [arm for arm, _ in lacking if arm.link]
        lacking = [one for one in lacking if not one[0].link]
        if linked:
            print("left out: trainings over links, which make hosts and need root", file=sys.stderr)
        failed += [] if scale is QUICK else linked
    links = dict.fromkeys(arm.link for arm, _ in lacking)
    groups = [[one for one in lacking if one[0].link == link] for link in links]
    for group in groups if scale.together else [[one] for one in lacking]:
        found = convergence.launch_all([plan for _, plan in group], 2, group[0][0].link or None)
        if found is None:
            failed += [arm for arm, _ in group]
            continue
        for (arm, _), ranks in zip(group, found, strict=True):
            runs = collect(arm, ranks)
            pool.add(arm, runs)
            _say(arm, runs)
    return failed


def collect(arm: Arm, ranks: Sequence[dict[str, Any]]) -> list[Run]:
    """An arm's runs, of what each rank found; SystemExit where ranks ended with different parameters."""
    runs = []
    for of_ranks in convergence.by_seed(ranks, str(arm)):
        first = of_ranks[0]
        runs.append(
            {
                **{name: first[name] for name in KEPT if name in first},
                **({"plan": first["plans"][-1]} if first.get("plans") else {}),
                "seed": first["seed"],
                "step_seconds": max(run["step_seconds"] for run in of_ranks),
                "losses": [round(loss, 4) for loss in first["loss_over_time"]],
                "bytes": [round(sent) for sent in first["bytes_over_time"]],
                "source": ranks[0]["source"],
                "machine": report.processor(),
                "date": datetime.date.today().isoformat(),
            }
        )
        if arm.link:
            runs[-1]["seconds_by_part"] = [round(seconds, 3) for seconds in first["seconds_over_time"]]
    return runs


def _say(arm: Arm, runs: Sequence[Run]) -> None:
    metric = METRICS[arm.task][0]
    for run in runs:
        text = f"{arm.task}, {arm.compression} {arm.controller} x{arm.rate:g}, seed {run['seed']}: {metric} "
        print(f"{text}{run['metric']:.4f}, {run['seconds']:.0f} s", file=sys.stderr, flush=True)
