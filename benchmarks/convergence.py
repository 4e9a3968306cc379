"""Final accuracy and perplexity at 4 bits beside uncompressed training, over paired seeds; 2 ranks on this machine.

    python benchmarks/convergence.py                          # digits, and a word LSTM on Python's standard library
    python benchmarks/convergence.py --data wikitext2.txt     # the LSTM on the words of a file

A pair is two runs with the same seed: same initial parameters, same batches. A row passes if its metric is, in the mean
over the pairs, at most 1% (relative) worse than uncompressed: accuracy recovery as the CGX thesis defines it. The last
row is the control: 1 bit, nearest, without feedback. If it passed as well, the test could not tell good from bad.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import report

BAR = 0.01
#: Smaller than the LSTM of step.py, so that all runs take minutes.
LSTM_VOCABULARY, LSTM_WIDTH, LSTM_TEST_WORDS = 4_000, 128, 60_000


@dataclass(frozen=True)
class Arm:
    """A compression; the control is the one that must fail."""

    title: str
    compression: str
    control: bool = False


ARMS = (
    Arm("uncompressed", "none"),
    Arm("4 bits, stochastic", "quantize:bits=4"),
    Arm("4 bits, nearest, feedback", "quantize:bits=4,rounding=nearest"),
    Arm(
        "control: 1 bit, nearest, no feedback",
        "quantize:bits=1,rounding=nearest,feedback=false",
        control=True,
    ),
)
#: Metric of each task, and the sign of a change for the worse.
METRICS = {"digits": ("accuracy", -1.0), "lstm": ("perplexity", 1.0)}


@dataclass(frozen=True)
class Plan:
    """What every rank is told to do."""

    tasks: tuple[str, ...]
    arms: tuple[Arm, ...]
    seeds: int
    digits_epochs: int
    lstm_steps: int
    data: str | None

    @staticmethod
    def from_json(text: str) -> Plan:
        data = json.loads(text)
        data["arms"] = tuple(Arm(**arm) for arm in data["arms"])
        return Plan(**{**data, "tasks": tuple(data["tasks"])})


# ------------------------------------------------------------------------------------------------- one rank


@dataclass
class Job:
    """A model with the batches of one rank, and how its final metric is found."""

    model: Any
    optimizer: Any
    batches: Iterator[tuple[Any, Any]]
    loss: Callable[[Any, Any, Any], Any]
    steps: int
    clip: float | None
    metric: Callable[[], float]


def digits_job(plan: Plan, seed: int, rank: int, size: int, data: models.Digits) -> Job:
    import torch
    from torch.nn import functional

    torch.manual_seed(seed)
    model = models.DigitsCNN()
    batch = 32
    share = len(data.images) // size

    def batches() -> Iterator[tuple[Any, Any]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(data.images), generator=generator)[: share * size][rank::size]
            for part in order[: share // batch * batch].split(batch):
                yield data.images[part], data.labels[part]

    def accuracy() -> float:
        model.eval()
        with torch.no_grad():
            return (model(data.test_images).argmax(1) == data.test_labels).float().mean().item()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    steps = plan.digits_epochs * (share // batch)
    return Job(
        model, optimizer, batches(), lambda m, x, y: functional.cross_entropy(m(x), y), steps, None, accuracy
    )


def lstm_job(plan: Plan, seed: int, rank: int, data: models.Text) -> Job:
    import torch

    torch.manual_seed(seed)
    model = models.WordLSTM(LSTM_VOCABULARY, LSTM_WIDTH)
    batch, length = 16, 20

    def perplexity() -> float:
        model.eval()
        total, words = 0.0, 0
        with torch.no_grad():
            for tokens, targets in data.test_batches(64, 48, LSTM_TEST_WORDS):
                total += model(tokens, targets).item() * targets.numel()
                words += targets.numel()
        return math.exp(total / words)

    optimizer = torch.optim.SGD(model.parameters(), lr=4.0, momentum=0.9)
    batches = data.batches(rank, batch, length, seed)
    return Job(model, optimizer, batches, lambda m, x, y: m(x, y), plan.lstm_steps, 0.25, perplexity)


def train(job: Job, compression: str) -> dict[str, Any]:
    import torch

    import gradcomp.torch as gc

    gc.broadcast_parameters(job.model.state_dict(), root_rank=0)
    optimizer = gc.DistributedOptimizer(
        job.optimizer, named_parameters=job.model.named_parameters(), compression=compression
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=job.optimizer.param_groups[0]["lr"], total_steps=job.steps, pct_start=0.1,
        cycle_momentum=False,
    )  # fmt: skip
    began = time.perf_counter()
    job.model.train()
    for _, (inputs, targets) in zip(range(job.steps), job.batches, strict=False):
        optimizer.zero_grad()
        job.loss(job.model, inputs, targets).backward()
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), job.clip)
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - began
    digest = hashlib.sha256()
    for parameter in job.model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    sent = optimizer.statistics()
    return {
        "metric": job.metric(),
        "digest": digest.hexdigest(),
        "seconds": seconds,
        "steps": job.steps,
        "bytes_per_step": sent.wire_bytes / sent.steps,
        "ratio": sent.ratio,
    }


def run_rank(plan: Plan, out: Path) -> None:
    """All runs of one rank; writes what it found to a file."""
    import torch

    import gradcomp.torch as gc

    torch.set_num_threads(1)
    gc.init()
    rank, size = gc.rank(), gc.size()
    digits = models.load_digits() if "digits" in plan.tasks else None
    text = None
    if "lstm" in plan.tasks:
        text = models.load_text(Path(plan.data) if plan.data else None, LSTM_VOCABULARY)
    found: dict[str, Any] = {"text": text and text.source, "runs": []}
    for task in plan.tasks:
        for seed in range(plan.seeds):
            for arm in plan.arms:
                if digits is not None and task == "digits":
                    job = digits_job(plan, seed, rank, size, digits)
                else:
                    assert text is not None
                    job = lstm_job(plan, seed, rank, text)
                run = {"task": task, "seed": seed, "arm": arm.title, **train(job, arm.compression)}
                found["runs"].append(run)
                if rank == 0:
                    print(
                        f"{task}, seed {seed}, {arm.title}: {METRICS[task][0]} {run['metric']:.4f}, "
                        f"{run['seconds']:.1f} s",
                        file=sys.stderr,
                        flush=True,
                    )
    out.with_name(f"{rank}.json").write_text(json.dumps(found))
    gc.shutdown()


# ------------------------------------------------------------------------------------------------- the whole


def launch(plan: Plan, ranks: int) -> list[dict[str, Any]]:
    """Run the plan in processes of its own; what each rank found."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="gradcomp-convergence-") as directory:
        out = Path(directory) / "out"
        command = [
            sys.executable,
            __file__,
            "--plan",
            json.dumps(dataclasses.asdict(plan)),
            "--out",
            str(out),
        ]
        processes = []
        for rank in range(ranks):
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks,
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
            environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
            processes.append(subprocess.Popen(command, env=environment))
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
        if any(codes):
            raise SystemExit(f"a rank failed; exit codes {codes}")
        return [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(ranks)]


def evaluate(plan: Plan, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per task and arm. ``worse``: relative change for the worse, per pair."""
    digests = [[run["digest"] for run in rank["runs"]] for rank in found]
    if any(other != digests[0] for other in digests):
        raise SystemExit("the ranks ended with different parameters")
    runs = found[0]["runs"]
    rows = []
    for task in plan.tasks:
        name, sign = METRICS[task]
        by_arm = {a.title: [r for r in runs if r["task"] == task and r["arm"] == a.title] for a in plan.arms}
        reference = [run["metric"] for run in by_arm[plan.arms[0].title]]
        for arm in plan.arms:
            own = by_arm[arm.title]
            metrics = [run["metric"] for run in own]
            worse = [sign * (m - r) / r + 0.0 for m, r in zip(metrics, reference, strict=True)]
            worse = [w if math.isfinite(w) else math.inf for w in worse]
            rows.append(
                {
                    "task": task,
                    "metric": name,
                    "arm": arm.title,
                    "compression": arm.compression,
                    "control": arm.control,
                    "metrics": metrics,
                    "worse": worse,
                    "mean_worse": statistics.mean(worse),
                    "passes": statistics.mean(worse) <= BAR,
                    "steps": own[0]["steps"],
                    "bytes_per_step": own[0]["bytes_per_step"],
                    "ratio": own[0]["ratio"],
                    "seconds": statistics.mean(run["seconds"] for run in own),
                }
            )
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        is_reference = not row["control"] and row["compression"] == "none"
        verdict = None
        if not is_reference:
            verdict = "passes" if row["passes"] else "fails"
            verdict += "" if row["passes"] != row["control"] else " (NOT as it must)"
        cells.append(
            [
                f"{row['task']}: {row['arm']}",
                row["metric"],
                ", ".join(f"{m:.4g}" for m in row["metrics"]),
                f"{statistics.mean(row['metrics']):.4g}",
                None if is_reference else ", ".join(f"{w * 100:+.2f}" for w in row["worse"]),
                None if is_reference else f"{row['mean_worse'] * 100:+.2f}",
                f"{row['bytes_per_step']:,.0f}",
                f"{row['ratio']:.2f}",
                verdict,
            ]
        )
    headers = [
        "task: row",
        "metric",
        "by seed",
        "mean",
        "worse by %",
        "mean %",
        "bytes per step",
        "ratio",
        "1% bar",
    ]
    return report.table(headers, cells)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=METRICS, action="append", help="one task only (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="pairs (default: 3)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--digits-epochs", type=int, default=15)
    parser.add_argument("--lstm-steps", type=int, default=1000)
    parser.add_argument("--compression", action="append", default=[], help="a further row, in string form")
    parser.add_argument(
        "--data", type=Path, help="a text file (default: the text of Python's standard library)"
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plan:
        run_rank(Plan.from_json(options.plan), options.out)
        return 0
    if options.data is not None and not options.data.is_file():
        parser.error(f"--data: there is no file {options.data}")
    arms = (*ARMS[:-1], *(Arm(text, text) for text in options.compression), ARMS[-1])
    data = options.data and str(options.data.resolve())
    plan = Plan(
        tuple(options.task or METRICS), arms, options.seeds, options.digits_epochs, options.lstm_steps, data
    )
    machine = report.machine()
    began = time.monotonic()
    found = launch(plan, options.ranks)
    rows = evaluate(plan, found)
    print(report.describe(machine))
    about = f"; the LSTM reads {found[0]['text']}" if found[0]["text"] else ""
    print(f"{options.ranks} ranks, {options.seeds} paired seeds, {time.monotonic() - began:.0f} s{about}")
    print(show(rows))
    as_it_must = all(row["passes"] != row["control"] for row in rows)
    print(
        f"bar: at most {BAR:.0%} worse in the mean, and the control must fail: {'met' if as_it_must else 'NOT met'}"
    )
    report.write_json(
        options.json,
        {
            "benchmark": "convergence",
            "machine": machine,
            "ranks": options.ranks,
            "plan": {k: v for k, v in dataclasses.asdict(plan).items() if k != "data"},
            "text": found[0]["text"],
            "rows": rows,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
