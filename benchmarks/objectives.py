"""L-GreCo's objectives "time" and "position" beside "bytes", on hosts made of network namespaces. Needs root.

    python benchmarks/objectives.py --link 1gbit --json objectives.json
    python benchmarks/objectives.py --link 100mbit --steps 12 --warmup 2 --blocks 2 --block-steps 6 --decisions 3

The LSTM of step.py (10.6 M parameters) or --model resnet18 (11.2 M) under 4 bits, two ranks, one core each. Three
parts, in the same processes:

1.  Regression (Markov et al. 2024, section 5.5). In each setting every layer gets a level drawn from 2 to 8 bits, for
    50 steps after 5 warm-up steps. The synchronisation time of a step is that from the start of its first exchange
    bucket's first round to the end of the last round, on the slower rank; the median over a setting's steps is one
    sample. It is regressed, by least squares, on all bytes, and on the bytes of each bucket, T(b), if there are more
    settings than buckets whose bytes vary independently: the buckets of one layer all have its level. A slower link
    has more and smaller buckets. R^2 is that of the fit, and of settings that were left out one at a time.
2.  Plans. L-GreCo(objective="time") decides --decisions times. Its last table, with its fitted T(l), is then given to
    all three objectives.
3.  Steps. Uniform 4 bits and the three plans alternate in blocks. A step is the median over its steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import hosts
import numpy as np
import report
from options import positive
from step_rank import BATCH, LENGTH, MODELS, Task, make_model

OBJECTIVES = ("bytes", "time", "position")
LEVELS = (2, 3, 4, 5, 6, 7, 8)
EVERY = 20


@dataclass(frozen=True)
class Work:
    """What every rank is told to do."""

    settings: int
    steps: int
    warmup: int
    blocks: int
    block_steps: int
    seed: int
    model: str
    decisions: int


class Recorder:
    """Reads along in a pipeline's trace: by step, when its first round began and its last one ended."""

    def __init__(self, trace: Any) -> None:
        self.spans: dict[int, tuple[float, float]] = {}
        trace.listen(self._take)

    def _take(self, name: str, step: int, bucket: int, begin: float, end: float, *_: Any) -> None:
        if name == "send":
            first, last = self.spans.get(step, (begin, end))
            self.spans[step] = min(first, begin), max(last, end)


class Training:
    """One model under a controller, with the times of its steps."""

    def __init__(self, controller: Any, work: Work) -> None:
        import torch

        import gradcomp.torch as gc

        torch.manual_seed(work.seed)
        task = Task((), 1, 1, 0, work.seed, None, {}, False, None, work.model)
        self.model, source = make_model(task)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.optimizer: Any = gc.DistributedOptimizer(
            optimizer, self.model.named_parameters(), "quantize:bits=4", controller=controller
        )
        self.pipeline = self.optimizer._exchanger_or_none().pipeline
        self.recorder = Recorder(self.pipeline.trace)
        self.batches = source.batches(gc.rank(), BATCH, LENGTH, work.seed)
        self.seconds: list[float] = []
        self.buckets: list[list[int]] = []

    def step(self) -> None:
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(*next(self.batches)).backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - began)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            # The plan of the step that follows; the order of the buckets is the final one after the first step.
            self.buckets.append([bucket.payload_bytes for bucket in self.pipeline.layout.buckets])
            self.step()

    def found(self) -> dict[str, Any]:
        spans = [self.recorder.spans[step] for step in range(len(self.seconds))]
        return {"seconds": self.seconds, "synchronised": [b - a for a, b in spans], "buckets": self.buckets}


def schedule(names: list[str], plans: list[list[int]], steps: int) -> Any:
    import gradcomp.torch as gc

    return gc.Schedule({n * steps: dict(zip(names, plan, strict=True)) for n, plan in enumerate(plans)})


def run_rank(text: str, out: Path) -> None:
    import torch

    import gradcomp.torch as gc

    work = Work(**json.loads(text))
    torch.set_num_threads(1)
    gc.init(seed=work.seed, log_level="warning")
    chooser = Training(gc.LGreCo(EVERY, levels=list(LEVELS), objective="time"), work)
    observed = None
    decisions = 0
    while decisions < work.decisions:
        chooser.run(1)
        now = chooser.pipeline.controller.observations
        if now is not None and (observed is None or now.step > observed.step):
            observed, decisions = now, decisions + 1
    names, plans, weights = decide(observed)
    del chooser
    found: dict[str, Any] = {"names": names, "plans": plans, "weights": weights}
    draw = np.random.default_rng(work.seed)
    drawn = [draw.choice(LEVELS, len(names)).tolist() for _ in range(work.settings)]
    each = work.warmup + work.steps
    drawing = Training(schedule(names, drawn, each), work)
    drawing.run(each * work.settings)
    found["drawn"] = drawing.found()
    arms = {"uniform": [4] * len(names), **plans}
    each = work.warmup + work.block_steps
    compared = Training(schedule(names, [*arms.values()] * work.blocks, each), work)
    compared.run(each * len(arms) * work.blocks)
    found |= {"compared": compared.found(), "arms": arms}
    out.with_name(f"{gc.rank()}.json").write_text(json.dumps(found))
    gc.shutdown()


def decide(observed: Any) -> tuple[list[str], dict[str, list[int]], list[float]]:
    """The layers, the levels that each objective gives them, and T(l) in seconds per byte."""
    import gradcomp.torch as gc
    from gradcomp.control.lgreco import seconds_per_byte

    names = [spec.name for spec in observed.candidates.specs]
    plans = {}
    for objective in OBJECTIVES:
        controller = gc.LGreCo(EVERY, levels=list(LEVELS), objective=objective)
        seen = observed
        if objective != "time":
            seen = replace(observed, memory=controller.begin_memory(observed.candidates))
        decision = controller.decide(seen)
        options = zip(observed.candidates.choices, decision.choices.tolist(), strict=True)
        plans[objective] = [int(choices[k].level) for choices, k in options]
        if objective == "time":
            memory = decision.memory
    rows = len(names)
    slopes = seconds_per_byte(memory[rows : 6 * rows].reshape(5, rows))
    return names, plans, [] if slopes is None else slopes.tolist()


# ------------------------------------------------------------------------------------------------- figures


def samples(ranks: list[dict[str, Any]], each: int, warmup: int, count: int) -> tuple[Any, Any]:
    """By setting: the bytes of each bucket, and the median synchronisation time of the slower rank."""
    times = np.max([rank["synchronised"] for rank in ranks], axis=0)
    kept = [slice(n * each + warmup, (n + 1) * each) for n in range(count)]
    return (
        np.array([ranks[0]["buckets"][one.start] for one in kept], dtype=np.float64),
        np.array([np.median(times[one]) for one in kept]),
    )


def regress(x: Any, y: Any) -> dict[str, Any]:
    """Least squares with a constant: coefficients, R^2, and R^2 of samples that were left out one at a time.

    Of buckets whose bytes are in a fixed proportion, those of one layer, the coefficients are the smallest that fit.
    """

    def fit(rows: Any) -> tuple[float, Any]:
        middle, height = x[rows].mean(axis=0), float(y[rows].mean())
        slopes = np.linalg.lstsq(x[rows] - middle, y[rows] - height, rcond=1e-10)[0]
        return height - float(middle @ slopes), slopes

    everything = np.arange(len(y))
    constant, slopes = fit(everything)
    around = float(((y - y.mean()) ** 2).sum())
    left_out = 0.0
    for i in everything.tolist():
        without, others = fit(np.delete(everything, i))
        left_out += float(y[i] - without - x[i] @ others) ** 2
    return {
        "constant": constant,
        "slopes": slopes.tolist(),
        "r2": 1 - float(((y - constant - x @ slopes) ** 2).sum()) / around,
        "r2_left_out": 1 - left_out / around,
    }


def regress_by_bucket(x: Any, y: Any) -> dict[str, Any] | None:
    """Return :func:`regress` on the bytes of each bucket; None if some setting, left out, leaves too few others."""
    independent = int(np.linalg.matrix_rank(x - x.mean(axis=0)))
    return regress(x, y) if independent < len(y) - 1 else None


def evaluate(work: Work, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    x, y = samples([rank["drawn"] for rank in ranks], work.warmup + work.steps, work.warmup, work.settings)
    total = regress(x.sum(axis=1, keepdims=True), y)
    by_bucket = regress_by_bucket(x, y)
    arms, each = ranks[0]["arms"], work.warmup + work.block_steps
    sizes, synchronised = samples(
        [rank["compared"] for rank in ranks], each, work.warmup, len(arms) * work.blocks
    )
    steps = np.max([rank["compared"]["seconds"] for rank in ranks], axis=0)
    times: dict[str, list[float]] = defaultdict(list)
    for n, name in zip(range(len(arms) * work.blocks), itertools.cycle(arms), strict=False):
        times[name] += steps[n * each + work.warmup : (n + 1) * each].tolist()
    rows = {}
    for n, name in enumerate(arms):
        nbytes = float(sizes[n].sum())
        predicted = total["constant"] + total["slopes"][0] * nbytes
        rows[name] = {
            "bytes": nbytes,
            "predicted": predicted,
            "predicted_by_bucket": None
            if by_bucket is None
            else by_bucket["constant"] + float(np.dot(by_bucket["slopes"], sizes[n])),
            "synchronised": float(np.median(synchronised[n :: len(arms)])),
            "step": statistics.median(times[name]),
            "levels": arms[name],
        }
    return {"samples": [x.tolist(), y.tolist()], "by_bytes": total, "by_bucket": by_bucket, "rows": rows}


def show(found: dict[str, Any], names: list[str], weights: list[float]) -> str:
    total, by_bucket = found["by_bytes"], found["by_bucket"]
    x, y = (np.array(each) for each in found["samples"])
    sizes = x.sum(axis=1) / 1e6
    span = f"{sizes.min():.2f} to {sizes.max():.2f} MB in {x.shape[1]} buckets"
    lines = [f"{len(y)} settings of {span}, synchronised in {y.min() * 1e3:.1f} to {y.max() * 1e3:.1f} ms"]
    for where, fit in (("all bytes", total), ("the bytes of each bucket", by_bucket)):
        if fit is not None:
            slopes = sorted({f"{slope * 1e9:.2f}" for slope in fit["slopes"]}, key=float)
            shown = " to ".join(dict.fromkeys((slopes[0], slopes[-1])))
            about = f"R^2 {fit['r2']:.4f}, of settings left out {fit['r2_left_out']:.4f}"
            lines.append(f"on {where}: {fit['constant'] * 1e3:.2f} ms + {shown} ns per byte, {about}")
    cells = []
    for name, row in found["rows"].items():
        times = [f"{row[key] * 1e3:.1f}" for key in ("predicted", "synchronised", "step")]
        cells.append([name, f"{row['bytes']:,.0f}", *times])
    lines.append(report.table(["plan", "payload bytes", "predicted ms", "synchronised ms", "step ms"], cells))
    levels = [
        [
            name,
            f"{weights[i] * 1e9:.2f}" if weights else None,
            *(found["rows"][o]["levels"][i] for o in OBJECTIVES),
        ]
        for i, name in enumerate(names)
    ]
    lines.append(report.table(["layer", "T(l), ns per byte", *OBJECTIVES], levels))
    return "\n\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link", choices=hosts.LINKS, default="1gbit")
    parser.add_argument("--settings", type=positive, default=24, help="drawn levels (default: 24)")
    parser.add_argument("--steps", type=positive, default=50, help="timed steps of a setting (default: 50)")
    parser.add_argument("--warmup", type=positive, default=5, help="untimed steps before them (default: 5)")
    parser.add_argument("--blocks", type=positive, default=6, help="of each plan (default: 6)")
    parser.add_argument("--block-steps", type=positive, default=15)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--decisions", type=positive, default=4, help="of the objective time (default: 4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = hosts.parse(parser, run_rank)
    work = Work(
        options.settings,
        options.steps,
        options.warmup,
        options.blocks,
        options.block_steps,
        options.seed,
        options.model,
        options.decisions,
    )
    machine = report.machine()
    print(report.describe(machine))
    began = time.monotonic()
    ranks = hosts.run_task(hosts.Hosts(2, options.link), __file__, work)
    found = evaluate(work, ranks)
    names, weights = ranks[0]["names"], ranks[0]["weights"]
    about = {"benchmark": "objectives", "machine": machine, "link": options.link, "work": asdict(work)}
    report.write_json(options.json, {**about, "names": names, "weights": weights, **found})
    print(f"{time.monotonic() - began:.0f} s, {options.link}")
    print(show(found, names, weights))
    return 0


if __name__ == "__main__":
    sys.exit(main())
