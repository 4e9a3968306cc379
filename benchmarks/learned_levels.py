"""What quantisation loses of a GPT's weights and gradients, with even and with learned levels (Markov 2024, 5.6.2).

    python benchmarks/learned_levels.py                                       # 1,500 steps
    python benchmarks/learned_levels.py --steps 300 --every 50 --data wikitext2.txt --json out.json

The GPT and its settings are those of benchmarks/sharded_convergence.py, trained in one process and without compression.
Levels of layers above 100,000 elements are learned after 400, 1,900 and 3,800 of 4,800 steps, or the same parts of
--steps. Errors are measured every so many steps, before anything is learned there: of values that no level was learned
from. Both codes have quantisation buckets of 1,024. Weights are rounded by a random shift of even levels, or to the
nearest learned level; gradients stochastically.

First table: an attention layer and the output layer over the steps, weights with 5 bits and gradients with 4 (figures
C.2 and C.3 of the paper). Second table: all layers above 100,000 elements, in the mean over the steps after the last
learning.

Columns
    even       ||v - decode(encode(v))|| / ||v|| with even levels
    learned    the same with the levels learned last
    once       the same with the levels learned first
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import report
import torch
from languages import BATCH, GPT, LEARNING_RATE, LENGTH, VOCABULARY
from options import positive
from sharded_rank import BUCKET, LEARNS_AT

from gradcomp import Codebook, LayerSpec, Quantize
from gradcomp.compress.quantise.learned import SMALL, exact_levels, learned, normalised, with_levels
from gradcomp.control.distortion.errors import errors

BITS = (2, 3, 4, 5, 6)
#: Kinds of values, with the bits of the first table.
KINDS = {"weights": 5, "gradients": 4}
FIGURES = ("layers.0.attention.weight", "head.weight")

Run = dict[str, Any]


@dataclass(frozen=True)
class Values:
    """The weights or gradients of a layer."""

    kind: str
    layer: str
    array: Any

    @property
    def unbiased(self) -> bool:
        return self.kind == "gradients"

    def even(self, bits: int) -> Quantize:
        return Quantize(bits, BUCKET, rounding="stochastic" if self.unbiased else "shift")


def values_of(model: GPT) -> Iterator[Values]:
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and parameter.numel() > SMALL:
            assert parameter.grad is not None, "of a backward"
            yield Values("weights", name, parameter.detach().numpy().reshape(-1))
            yield Values("gradients", name, parameter.grad.numpy().reshape(-1))


def learn(values: Values, codebook: Codebook) -> Codebook:
    q = learned(normalised(values.array, BUCKET), codebook.levels, pinned=values.unbiased)
    return replace(codebook, levels=exact_levels(q))


def measure(values: Values, choices: Sequence[Any], seed: int) -> list[float]:
    """The squared norms of the values and of the errors of codes."""
    layer = LayerSpec(values.layer, (len(values.array),))
    found = errors(choices, layer, values.array, seed)
    squares = [np.square(values.array, dtype=np.float64).sum(), *np.square(found)]
    return [float(f"{each:.6g}") for each in squares]


def train(options: argparse.Namespace) -> list[Run]:
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    text = models.load_text(options.data, VOCABULARY)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches = text.batches(0, BATCH, LENGTH, options.seed)
    points = {round(at * options.steps) for at in LEARNS_AT}
    first: dict[tuple[str, str, int], Codebook] = {}
    last: dict[tuple[str, str, int], Codebook] = {}
    runs: list[Run] = []
    for step in range(options.steps):
        optimizer.zero_grad()
        model(*next(batches)).backward()
        for values in values_of(model) if step % options.every == 0 or step in points else ():
            for bits in BITS:
                key = values.kind, values.layer, bits
                if step % options.every == 0:
                    known = [last[key], first[key]] if key in first else []
                    found = measure(values, [values.even(bits), *known], step)
                    runs.append(
                        {
                            "step": step,
                            "kind": values.kind,
                            "layer": values.layer,
                            "bits": bits,
                            "squares": found,
                        }
                    )
                if step in points:
                    start = last.get(key) or with_levels(values.even(bits), unbiased=values.unbiased)
                    assert start is not None, "even levels between minimum and maximum"
                    last[key] = learn(values, start)
                    first.setdefault(key, last[key])
        optimizer.step()
    return runs


def relative(runs: Sequence[Run]) -> list[float]:
    """The errors of codes of several layers or steps, relative to the values."""
    whole, *lost = np.sum([run["squares"] for run in runs], axis=0)
    return [math.sqrt(each / whole) for each in lost]


def over_steps(runs: Sequence[Run]) -> list[list[object]]:
    chosen = [run for run in runs if run["layer"] in FIGURES and run["bits"] == KINDS[run["kind"]]]
    chosen.sort(key=lambda run: (run["layer"], run["kind"], run["step"]))
    lines: list[list[object]] = []
    for run in chosen:
        found: list[object] = [f"{each:.4f}" for each in relative([run])]
        lines.append([run["layer"], run["kind"], run["step"], *found, *[None] * (3 - len(found))])
    return lines


def over_bits(runs: Sequence[Run], since: int) -> list[list[object]]:
    lines: list[list[object]] = []
    for kind in KINDS:
        for bits in BITS:
            chosen = [r for r in runs if r["kind"] == kind and r["bits"] == bits and r["step"] > since]
            if chosen:
                even, best, once = relative(chosen)
                lines.append(
                    [kind, bits, *(f"{each:.4f}" for each in (even, best, once)), f"{best / even:.3f}"]
                )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=positive, default=1500)
    parser.add_argument("--every", type=positive, default=100, help="steps between measurements")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="a text file (default: Python's standard library)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    machine = report.machine()
    print(report.describe(machine))
    runs = train(options)
    columns = ["even", "learned", "once"]
    print(report.table(["layer", "values", "step", *columns], over_steps(runs)))
    since = max(round(at * options.steps) for at in LEARNS_AT)
    print(report.table(["values", "bits", *columns, "learned / even"], over_bits(runs, since)))
    about = {"benchmark": "learned_levels", "steps": options.steps, "seed": options.seed, "machine": machine}
    report.write_runs(options.json, about, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
