"""Time of the dynamic program that chooses a level for every layer, on one thread.

    python benchmarks/program.py [--rounds 7] [--isas avx512 avx2 baseline] [--json PATH]

Milliseconds, medians of runs that alternate between the bodies in one process, of the thread's processor time, for
`discretise` and `cheapest` together as a controller calls them. Two kinds of tables of errors and costs:

    falling   errors fall with the square of the bytes kept; the reference is the level in the middle
    hardest   every choice matters, and errors between one step and a tenth of the budget fill it after few layers

A figure counts only if the choices are those of the NumPy body, which defines them. The bars apply to every compiled
body; a figure above its bar is marked and the exit status is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import report

from gradcomp import _native
from gradcomp.kernels import dispatch, program

Doubles = npt.NDArray[np.float64]
Tables = tuple[Doubles, Doubles, Doubles]  # errors, costs, errors of the reference

# Layers, choices, D: milliseconds.
BARS: dict[tuple[int, int, int], float | None] = {
    (161, 31, 1_000): None,
    (161, 31, 10_000): 25.0,
    (161, 31, 100_000): None,
    (1000, 100, 10_000): 1000.0,
    (1600, 7, 25_600): None,  # blocks=32 on GPT-2: 16 steps for each of 50 matrices' blocks
}


def falling(layers: int, choices: int, rng: np.random.Generator) -> Tables:
    kept = np.linspace(0.04, 1.0, choices)
    errors = rng.lognormal(0, 1, (layers, 1)) * (1.02 - kept) ** 2
    costs = np.floor(rng.lognormal(10, 2, (layers, 1)) * kept)
    return errors, costs, errors[:, choices // 2].copy()


def hardest(layers: int, choices: int, rng: np.random.Generator) -> Tables:
    errors = np.sort(rng.random((layers, choices)) * layers / 10, axis=1)
    errors[:, 0] = 0
    costs = -np.sort(-rng.random((layers, choices)) * 1e6, axis=1)
    return errors, costs, np.ones(layers)


TABLES: dict[str, Callable[[int, int, np.random.Generator], Tables]] = {
    "falling": falling,
    "hardest": hardest,
}


@dataclass(frozen=True)
class Row:
    """One figure."""

    tables: str
    layers: int
    choices: int
    buckets: int
    budget: int
    body: str
    milliseconds: float
    numpy_milliseconds: float
    right: bool
    bar: float | None

    @property
    def missed(self) -> bool:
        return not self.right or (self.bar is not None and self.milliseconds > self.bar)


def measure(name: str, size: tuple[int, int, int], isas: list[str], rounds: int) -> Iterator[Row]:
    """All bodies on the same tables; the first round warms up."""
    layers, choices, buckets = size
    errors, costs, reference = TABLES[name](layers, choices, np.random.default_rng(0))
    seconds: dict[str, list[float]] = {}
    answers: dict[str, Any] = {}
    _, budget = program.discretise(errors, reference, buckets)
    for _ in range(rounds + 1):
        for body in ("NumPy", *isas):
            if body != "NumPy":
                _native.set_isa(body)
            with dispatch.use("reference" if body == "NumPy" else "native"):
                begin = time.thread_time()
                steps, allowed = program.discretise(errors, reference, buckets)
                answers[body] = program.cheapest(steps, costs, allowed)
                seconds.setdefault(body, []).append(time.thread_time() - begin)
    medians = {body: 1e3 * statistics.median(times[1:]) for body, times in seconds.items()}
    for body, milliseconds in medians.items():
        right = answers[body] is not None and np.array_equal(answers[body], answers["NumPy"])
        bar = None if body == "NumPy" else BARS[size]
        yield Row(name, *size, budget, body, milliseconds, medians["NumPy"], right, bar)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="runs per figure (default: %(default)s)")
    parser.add_argument("--isas", nargs="+", default=_native.available_isas(), metavar="ISA")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()

    machine = report.machine()
    print(report.describe(machine) + "\n")
    rows = [
        row
        for name in TABLES
        for size in BARS
        for row in measure(name, size, arguments.isas, arguments.rounds)
    ]
    headers = ("tables", "layers", "choices", "D", "budget", "body", "ms", "NumPy / this", "bar ms", "")
    print(
        report.table(
            headers,
            [
                (
                    row.tables,
                    f"{row.layers:,}",
                    row.choices,
                    f"{row.buckets:,}",
                    f"{row.budget:,}",
                    row.body,
                    f"{row.milliseconds:.2f}",
                    f"{row.numpy_milliseconds / row.milliseconds:.1f}",
                    row.bar and f"{row.bar:,.0f}",
                    "WRONG" if not row.right else "MISSED" if row.missed else "",
                )
                for row in rows
            ],
        )
    )
    missed = sum(row.missed for row in rows)
    print(f"\n{missed} of {sum(row.bar is not None for row in rows)} bars missed")
    figures = [asdict(row) for row in rows]
    report.write_json(arguments.json, {"machine": machine, "rounds": arguments.rounds, "rows": figures})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
