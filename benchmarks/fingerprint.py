"""What the fingerprint of every exchange finds, and what it costs.

    python benchmarks/fingerprint.py                        # trials, and steps over links of 1 Gbit/s, which need root
    python benchmarks/fingerprint.py --only trials --trials 100 --seed 1
    python benchmarks/fingerprint.py --only steps --pairs 500 --link 1gbit

Trials: two ranks train a small model; behind a step drawn by the seed one of them is changed, and the exchanges are
counted until both raise a StateError. The comparison of all parameters is off, so that the sample is alone. Changes are
of 1% of one layer's elements, scattered, side by side or a column; of one element; of one number of the optimizer; of
the gradients that one rank steps on. The bars: within two exchanges in 99 of 100 trials, an element within 256.

Steps: the word LSTM of ``benchmarks/step.py`` at 4 bits. Steps with the fingerprint and without alternate. Its own time
is what its functions take on whatever thread runs them, a step, over all steps that have it. The bars: at most 0.5% of
the step, and at most 1.02 at the upper end of the 95% interval of the median ratio of neighbouring steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hosts
import report
from options import positive
from soak import launch

CHANGES = ("1% scattered", "1% side by side", "a column", "an element", "a number", "gradients")
FRONTENDS = ("optimizer", "hook", "keras")
BARS = {"an element": 256}
TRIALS_OF_A_JOB = 20
SHARE_BAR, RATIO_BAR = 0.005, 1.02


# -------------------------------------------------------------------------------------------------- what it finds


def torch_runs(hook: bool) -> Iterator[tuple[list[Any], Callable[[bool], None], Callable[[], None]]]:
    """For each run: its parameters as arrays, a step, which may change gradients, and a change of a number."""
    import torch

    import gradcomp.torch as gc

    torch.set_num_threads(1)
    gc.init(log_level="error", fingerprint_steps=0)
    while True:
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(
            torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 700), torch.nn.Linear(700, 10)
        )
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        module = model
        if hook:
            module = torch.nn.parallel.DistributedDataParallel(model)
            module.register_comm_hook(*gc.ddp_comm_hook(model, "quantize:bits=4"))
        else:
            optimizer = gc.DistributedOptimizer(optimizer, model.named_parameters(), "quantize:bits=4")

        def step(edit: bool, model: Any = module, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(torch.randn(4, 64)).square().mean().backward()
            if edit:
                for parameter in model.parameters():
                    parameter.grad.mul_(0.5)
            optimizer.step()

        def set_number(optimizer: Any = optimizer) -> None:
            optimizer.param_groups[0]["lr"] = 0.02

        yield [parameter.detach().numpy() for parameter in model.parameters()], step, set_number


def keras_runs() -> Iterator[tuple[list[Any], Callable[[bool], None], Callable[[], None]]]:
    """The same for Keras; variables are changed by assignment."""
    import keras
    import tensorflow as tf

    import gradcomp.tf as gc

    gc.init(log_level="error", fingerprint_steps=0)
    while True:
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(300, "tanh"), keras.layers.Dense(10)]
        )
        optimizer = gc.DistributedOptimizer(keras.optimizers.SGD(0.01, 0.9), compression="quantize:bits=4")
        optimizer.build(model.trainable_variables)
        changed = [variable.numpy() for variable in model.trainable_variables]

        def step(edit: bool, model: Any = model, optimizer: Any = optimizer, changed: Any = changed) -> None:
            for variable, array in zip(model.trainable_variables, changed, strict=True):
                variable.assign(array)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(tf.random.normal((4, 64)))))
            optimizer.apply(tape.gradient(loss, model.trainable_variables))
            for variable, array in zip(model.trainable_variables, changed, strict=True):
                array[:] = variable.numpy() * (1.01 if edit else 1.0)

        def set_number(optimizer: Any = optimizer) -> None:
            optimizer.momentum = 0.5

        yield changed, step, set_number


def change(arrays: Sequence[Any], kind: str, draw: random.Random) -> None:
    """Of one layer's elements, on one rank."""
    array = draw.choice([array for array in arrays if array.size >= 100])
    flat, count = array.reshape(-1), -(-array.size // 100)
    if kind == "1% scattered":
        flat[draw.sample(range(array.size), count)] += 1e-3
    elif kind == "1% side by side":
        begin = draw.randrange(array.size - count + 1)
        flat[begin : begin + count] += 1e-3
    elif kind == "a column":
        columns = min(100, array.shape[-1])
        array.reshape(-1)[draw.randrange(columns) :: columns] += 1e-3
    else:
        flat[draw.randrange(array.size)] += 1e-3


def run_trials(frontend: str, kind: str, trials: Iterable[int], seed: int) -> list[int]:
    """The exchanges of each trial until this rank raised; 0 if it did not in time."""
    from gradcomp import StateError
    from gradcomp.job import runtime

    runs = keras_runs() if frontend == "keras" else torch_runs(frontend == "hook")
    found = []
    for trial in trials:
        arrays, step, set_number = next(runs)
        draw = random.Random(f"{seed} {kind} {trial}")
        others = runtime.rank() == draw.randrange(2)
        for _ in range(draw.randrange(2, 6)):
            step(False)
        if others and kind == "a number":
            set_number()
        elif others and kind != "gradients":
            change(arrays, kind, draw)
        took = 0
        try:
            if kind == "gradients":
                step(others)
            for exchange in range(1, BARS.get(kind, 2) + 2):
                took = exchange
                step(False)
            took = 0
        except StateError:
            pass
        found.append(took)
    return found


def trials(options: argparse.Namespace) -> tuple[list[list[Any]], dict[str, Any]]:
    rows, kept = [], {}
    for frontend, kind in itertools.product(options.frontend or FRONTENDS, CHANGES):
        each: list[int] = []
        # A few in a job: optimizers that failed keep their threads until it ends.
        for first in range(0, options.trials, TRIALS_OF_A_JOB):
            last = min(first + TRIALS_OF_A_JOB, options.trials)
            ranks = launch(
                [__file__, "--rank-of", frontend, kind, str(first), str(last), "--seed", str(options.seed)]
            )
            each += [max(a, b) if a and b else 0 for a, b in zip(*ranks, strict=True)]
        most = BARS.get(kind, 2)
        good = sum(0 < took <= most for took in each)
        kept[f"{frontend}, {kind}"] = each
        rows.append(
            [
                f"{frontend}, {kind}",
                len(each),
                f"{good} within {most}",
                max(each),
                _met(good >= 0.99 * len(each)),
            ]
        )
    return rows, kept


# -------------------------------------------------------------------------------------------------- what it costs


@dataclass(frozen=True)
class Task:
    """What ranks run."""

    pairs: int
    seed: int


class OwnTime:
    """Seconds that functions took on any thread, since the last look."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def run_steps(task: Task, out: Path) -> None:
    """Times of steps in turn with and without, and the fingerprint's own in those that have it."""
    import models
    import torch

    import gradcomp.torch as gc
    from gradcomp.exchange.fingerprint import Fingerprint
    from gradcomp.reduce.header import BucketFlags

    torch.set_num_threads(1)
    gc.init(seed=task.seed, log_level="error")
    torch.manual_seed(task.seed)
    model, text = models.WordLSTM(), models.load_text(None)
    optimizer = gc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), "quantize:bits=4"
    )
    exchanger: Any = optimizer._exchanger_or_none()
    own = OwnTime()
    take = own.of(exchanger._fingerprint)
    BucketFlags.compare = own.of(BucketFlags.compare)  # type: ignore[method-assign]
    Fingerprint.value = property(own.of(Fingerprint.value.fget))  # type: ignore[assignment]
    batches = text.batches(gc.rank(), 20, 35, task.seed)
    seconds: list[list[float]] = [[], []]
    owned = []
    for number in range(2 * task.pairs + 20):
        with_it = number % 2 == 0
        exchanger._fingerprint = take if with_it else None
        own.seconds = 0.0
        tokens, targets = next(batches)
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(tokens, targets).backward()
        optimizer.step()
        seconds[with_it].append(time.perf_counter() - begin)
        if with_it:
            owned.append(own.seconds)
    gc.shutdown()
    out.with_name(
        f"{gc.rank() if gc.is_initialized() else exchanger.pipeline.transport.rank}.json"
    ).write_text(json.dumps({"without": seconds[0][10:], "with": seconds[1][10:], "own": owned[10:]}))


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and its 95% interval, by order statistics."""
    ordered, count = sorted(values), len(values)
    reach = 0.98 * count**0.5
    low, high = int(count / 2 - reach), int(count / 2 + reach)
    return statistics.median(ordered), ordered[max(low, 0)], ordered[min(high, count - 1)]


def steps(options: argparse.Namespace) -> tuple[list[list[Any]], dict[str, Any]]:
    task = Task(options.pairs, options.seed)
    ranks = hosts.run_task(hosts.Hosts(2, options.link), __file__, task)
    slowest = {
        name: [max(pair) for pair in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ("with", "without", "own")
    }
    ratio, low, high = interval([a / b for a, b in zip(slowest["with"], slowest["without"], strict=True)])
    step = statistics.median(slowest["with"])
    share = statistics.fmean(slowest["own"]) / step
    rows = [
        ["step with it", f"{1e3 * step:.2f} ms", ""],
        ["step without", f"{1e3 * statistics.median(slowest['without']):.2f} ms", ""],
        ["median ratio of neighbours", f"{ratio:.4f} ({low:.4f} to {high:.4f})", _met(high <= RATIO_BAR)],
        [
            "its own time",
            f"{1e6 * statistics.fmean(slowest['own']):.0f} us, {share:.3%}",
            _met(share <= SHARE_BAR),
        ],
    ]
    return rows, {"ranks": ranks, "link": options.link}


def _met(met: bool) -> str:
    return "yes" if met else "NO"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=("trials", "steps"))
    parser.add_argument("--trials", type=positive, default=100, help="of each kind (default: 100)")
    parser.add_argument("--frontend", choices=FRONTENDS, action="append", help="some only (default: all)")
    parser.add_argument("--pairs", type=positive, default=500, help="pairs of steps (default: 500)")
    parser.add_argument("--link", choices=hosts.LINKS, default="1gbit")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-of", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        frontend, kind, first, last = options.rank_of
        print(json.dumps(run_trials(frontend, kind, range(int(first), int(last)), options.seed)))
        return 0
    if options.task:
        run_steps(Task(**json.loads(options.task)), options.out)
        return 0
    found: dict[str, Any] = {"machine": report.machine()}
    print(report.describe(found["machine"]))
    tables = (("trials", trials, ["", "trials", "found", "latest", "met"]), ("steps", steps, ["", "", "met"]))
    bad = False
    for name, measure, headers in tables:
        if options.only in (None, name):
            rows, found[name] = measure(options)
            print(f"\n{report.table(headers, rows)}")
            bad |= any("NO" in row for row in rows)
    if options.json:
        options.json.write_text(json.dumps(found))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
