"""Quantisation buckets of several sizes, and no layers at all: final metric, bytes and error, over paired seeds.

    python benchmarks/buckets.py --cifar cifar10_10k.npz --data wikitext2.txt --runs runs.jsonl
    python benchmarks/buckets.py --task gpt --layered 4:128,4:512 --flat none --runs runs.jsonl

The tasks are those of convergence.py and the GPT of adaptive.py. Ranks are simulated in this process, 2 by default:
they share one model, whose gradients for their batches are exchanged as real ranks exchange theirs. A run is a line of
--runs; what the file has is not run again, so a command that was stopped goes on.

A row that begins with flat is layers=False (Markov 2024, section 3.5.4); the others code layer by layer, and send
biases and norms exactly.

Columns
    worse by    the relative change of the metric for the worse against uncompressed training with the same seed, in
                the mean over seeds, and its standard error
    bytes       what a rank sends in a step, by formula, without headers
    error       ||g - decode(encode(g))|| / ||g|| over all layers of a kind that are coded, of the mean gradient g of
                uncompressed training, in the mean over 8 steps of the run with seed 0
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
from convergence_rows import GPT, LSTM, METRICS, RESNET
from convergence_tasks import Settings, load, make_job
from options import add_training, check_training

TASKS = (RESNET, LSTM, GPT)
REFERENCE = "none"
#: Steps of a run whose gradients are measured, and what is measured of them, by layer and without layers.
SAMPLES = 8
GRID = [f"quantize:bits={bits},bucket_size={size}" for bits in (2, 3, 4, 8) for size in (128, 256, 512, 1024)]

Run = dict[str, Any]


class Errors:
    """Measures what quantisers lose of the gradients of some steps, by kind of layer."""

    def __init__(self, steps: int, layers: Sequence[Any]) -> None:
        from gradcomp import Filter
        from gradcomp.compress import from_string

        self._kinds = [layer.kind for layer in layers]
        self._sizes = [layer.size for layer in layers]
        self._exact = [Filter().reason_to_exclude(layer) is not None for layer in layers]
        self._steps = {steps * (2 * i + 1) // (2 * SAMPLES) for i in range(SAMPLES)}
        self._compressors = {name: from_string(name) for name in GRID}
        #: By compression and kind, an error for each of the steps.
        self._found: dict[str, dict[str, list[float]]] = {}

    def step(self, number: int, means: Sequence[Any]) -> None:
        """Measure the mean gradients, if this is one of the chosen steps."""
        if number not in self._steps:
            return
        values = np.concatenate(means)
        norms = self._by_layer(values)
        for name, compressor in self._compressors.items():
            by_layer = self._by_layer(lost(compressor, self._sizes, values, number))
            by_layer[self._exact] = np.nan
            self._note(name, by_layer, norms)
            flat = self._by_layer(lost(compressor, [len(values)], values, number))
            self._note(f"flat[{name}]", flat, norms)

    def _by_layer(self, values: Any) -> Any:
        begins = np.cumsum([0, *self._sizes])[:-1]
        return np.add.reduceat(values.astype(np.float64) ** 2, begins)

    def _note(self, name: str, squares: Any, norms: Any) -> None:
        for kind in dict.fromkeys(self._kinds):
            chosen = np.array([k == kind for k in self._kinds]) & ~np.isnan(squares)
            if chosen.any():
                error = math.sqrt(squares[chosen].sum() / norms[chosen].sum())
                self._found.setdefault(name, {}).setdefault(kind, []).append(error)

    def found(self) -> dict[str, dict[str, float]]:
        """By compression and kind, the mean over the steps."""
        return {
            name: {kind: statistics.mean(errors) for kind, errors in kinds.items()}
            for name, kinds in self._found.items()
        }


def lost(compressor: Any, sizes: Sequence[int], values: Any, seed: int) -> Any:
    """g - decode(encode(g)) of segments of these sizes, which lie one after the other in ``values``."""
    from gradcomp.kernels.codec import Draw
    from gradcomp.kernels.devices import HOST
    from gradcomp.kernels.segments import SEGMENT

    table, error = np.zeros(len(sizes), SEGMENT), np.empty_like(values)
    begins = np.cumsum([0, *sizes])[:-1].astype(np.uint64)
    table["length"], table["layer"] = sizes, np.arange(len(sizes))
    table["gradient"] = values.ctypes.data + 4 * begins
    table["next_residual"] = error.ctypes.data + 4 * begins
    compressor.fill(table, compressor.level)
    codec = compressor.codec_for(table)
    nbytes = codec.wire_bytes(table)
    table["payload"] = np.cumsum(nbytes) - nbytes
    payload, flags = np.zeros(int(nbytes.sum()), np.uint8), np.zeros(len(sizes), np.uint8)
    codec.encode(HOST, table, payload, flags, Draw(seed, 0, 0))
    return error


def policy_of(compression: str) -> Any:
    """The policy of a row; that of a ``flat[...]`` is that of ``layers=False``."""
    from gradcomp.job.settings import Arguments

    return Arguments(compression, layers=not compression.startswith("flat")).check()


def bytes_of(compression: str, layers: Sequence[Any], ranks: int) -> float:
    """What a rank sends in a step, by formula, without headers."""
    from gradcomp.testing.simulation import Simulation

    return float(Simulation(layers, policy_of(compression), ranks).pipelines[0].predicted.sum())


def train(task: str, compression: str, seed: int, settings: Settings, data: Any, ranks: int) -> Run:
    """Train with simulated ranks, which share one model: their gradients of a step come one after the other.

    The uncompressed run with seed 0 also measures what quantisers would lose, and how much they would send.
    """
    from gradcomp.testing.simulation import Simulation
    from gradcomp.torch.layers import specs

    job, *others = (make_job(task, settings, data, seed, rank, ranks) for rank in range(ranks))
    batches = [job.batches, *(other.batches for other in others)]
    named = list(job.model.named_parameters())
    parameters = [parameter for _, parameter in named]
    layers = specs(named)
    exchange = Simulation(layers, policy_of(compression), ranks, checksums=False)
    errors = Errors(job.steps, layers) if compression == REFERENCE and seed == 0 else None
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        job.optimizer, max_lr=job.optimizer.param_groups[0]["lr"], total_steps=job.steps, pct_start=0.1,
        cycle_momentum=False,
    )  # fmt: skip
    began = time.perf_counter()
    job.model.train()
    for number in range(job.steps):
        gradients = []
        for of_rank in batches:
            job.optimizer.zero_grad()
            job.loss(job.model, *next(of_rank)).backward()
            gradients.append([parameter.grad.reshape(-1).numpy().copy() for parameter in parameters])
        means = exchange.step(gradients).all_means()
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad.copy_(torch.from_numpy(mean).view_as(parameter))
        if errors is not None:
            errors.step(number, means)
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, job.clip)
        job.optimizer.step()
        schedule.step()
    found: Run = {"metric": job.metric(), "steps": job.steps, "seconds": time.perf_counter() - began}
    if errors is not None:
        found["errors"] = errors.found()
        found["bytes"] = {name: bytes_of(name, layers, ranks) for name in (REFERENCE, *found["errors"])}
    return {"task": task, "compression": compression, "seed": seed, **found}


@contextmanager
def held(lock: str | None) -> Iterator[None]:
    """Share a lock file, so that a measurement of time can exclude training."""
    if lock is None:
        yield
        return
    with Path(lock).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


# ------------------------------------------------------------------------------------------------- all runs


def rows_of(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The compressions of layer-wise rows, and those without layers."""

    def those_of(text: str) -> list[str]:
        cells = [] if text == "none" else [cell.split(":") for cell in text.split(",")]
        return [f"quantize:bits={bits},bucket_size={size}" for bits, size in cells]

    return those_of(options.layered), [f"flat[{text}]" for text in those_of(options.flat)]


def read(path: Path) -> list[Run]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def measure(options: argparse.Namespace) -> None:
    """Run what is missing, seed by seed."""
    layered, flat = rows_of(options)
    done = {(run["task"], run["compression"], run["seed"]) for run in read(options.runs)}
    settings = Settings(
        60,
        options.lstm_steps,
        options.resnet_epochs,
        options.data and str(options.data.resolve()),
        options.cifar and str(options.cifar.resolve()),
    )
    for task in options.task or TASKS:
        data = load(task, settings)
        for seed in range(options.seeds):
            for compression in (REFERENCE, *layered, *flat):
                if (task, compression, seed) in done:
                    continue
                with held(options.lock):
                    run = train(task, compression, seed, settings, data, options.ranks)
                with options.runs.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(run) + "\n")
                told = f"{task}, {compression}, seed {seed}: {run['metric']:.4f}, {run['seconds']:.0f} s"
                print(told, file=sys.stderr, flush=True)


def evaluate(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each task and compression; those that were trained are compared with uncompressed, seed by seed."""
    rows = []
    for task in TASKS:
        by_row = report.by_row((run for run in runs if run["task"] == task), "compression")
        base = by_row.get(REFERENCE, {})
        if 0 not in base:
            continue
        sizes, errors = base[0]["bytes"], base[0]["errors"]
        for compression in sorted(sizes, key=_place):
            own = by_row.get(compression, {})
            seeds = sorted(own.keys() & base.keys())
            rows.append(
                {
                    "task": task,
                    "compression": compression,
                    "metrics": [own[s]["metric"] for s in seeds],
                    "worse": [METRICS[task][1] * (own[s]["metric"] / base[s]["metric"] - 1) for s in seeds],
                    "bytes_per_step": sizes[compression],
                    "steps": base[0]["steps"],
                    "errors": errors.get(compression, {}),
                }
            )
    return rows


def _place(compression: str) -> tuple[list[int], bool]:
    """Order by bits and bucket, without layers last."""
    return [int(number) for number in re.findall(r"\d+", compression)], compression.startswith("flat")


def show(rows: Sequence[dict[str, Any]]) -> str:
    """A table for each task."""
    parts = []
    for task in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == task]
        kinds = list(dict.fromkeys(kind for row in mine for kind in row["errors"]))
        cells = []
        for row in mine:
            count, worse = len(row["worse"]), None
            if count and row["compression"] != REFERENCE:
                worse = f"{100 * statistics.mean(row['worse']):+.2f}"
                if count > 1:
                    worse += f" ± {100 * statistics.stdev(row['worse']) / math.sqrt(count):.2f}"
            cells.append(
                [
                    f"`{row['compression']}`",
                    ", ".join(f"{m:.4g}" for m in row["metrics"]) or None,
                    worse,
                    f"{row['bytes_per_step']:,.0f}",
                    *(f"{row['errors'][kind]:.3f}" if kind in row["errors"] else None for kind in kinds),
                ]
            )
        headers = [f"{task}: row", f"{METRICS[task][0]} by seed", "worse by %", "bytes per step"]
        parts.append(report.table([*headers, *(f"error, {kind}" for kind in kinds)], cells))
        reference = mine[0]
        if len(reference["metrics"]) > 1:
            spread = statistics.stdev(reference["metrics"]) / statistics.mean(reference["metrics"])
            parts.append(
                f"{task}: {reference['steps']} steps; uncompressed runs differ by {spread:.2%} (deviation)"
            )
    return "\n\n".join(parts)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_training(parser, TASKS)
    every = ",".join(f"{bits}:{size}" for bits in (4, 8, 3, 2) for size in (128, 256, 512, 1024))
    parser.add_argument(
        "--layered", default=every, help="bits:bucket of rows by layer, comma-separated, or none"
    )
    parser.add_argument("--flat", default="4:512,4:128,2:512", help="the same of rows without layers")
    parser.add_argument("--runs", type=Path, required=True, help="a file with a line for each run")
    parser.add_argument("--lock", help="share this lock file during a run")
    options = parser.parse_args(arguments)
    check_training(parser, options)
    if options.task is None and options.cifar is None:
        parser.error("--cifar is missing: ResNet-20 reads its images there")
    return options


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    measure(options)
    rows = evaluate(read(options.runs))
    report.write_json(options.json, {"benchmark": "buckets", "machine": report.machine(), "rows": rows})
    print(report.describe(report.machine()))
    print(show(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
