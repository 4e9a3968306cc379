"""Speed of the low-rank kernels on one thread, beside NumPy's matrix product and a plain sum over the same layers.

    OPENBLAS_NUM_THREADS=1 python benchmarks/lowrank.py [--ranks 1 4 32] [--rounds 9] [--json PATH]

Milliseconds, medians of runs that alternate between all kernels in one process, of the thread's processor time. "sum"
is `np.add(g, r, out=c)`, the pass over memory that makes contributions; "NumPy" is that sum and a matrix product per
layer for `project`, and a matrix product per layer for the others, for `subtract` with a subtraction behind it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import report

from gradcomp import _native
from gradcomp.kernels import dispatch, segments
from gradcomp.kernels.devices import HOST

Floats = np.ndarray[Any, np.dtype[np.float32]]

MODELS = {
    "LSTM": [(2600, 650)] * 4 + [(6000, 650)],
    "ResNet-18": [
        *[(64, 27), *[(64, 576)] * 4, (128, 576), *[(128, 1152)] * 3, (256, 1152), *[(256, 2304)] * 3],
        *[(512, 2304), *[(512, 4608)] * 3],
    ],
}


def aligned(length: int) -> Floats:
    """Numbers that begin a cache line."""
    memory = np.zeros(4 * length + 64, np.uint8)
    offset = -memory.ctypes.data % 64
    array = memory[offset : offset + 4 * length].view(np.float32)
    array[:] = np.random.default_rng(length).standard_normal(length, np.float32)
    return array


class Work:
    """The layers of a model, and what is measured on them."""

    def __init__(self, shapes: list[tuple[int, int]], rank: int) -> None:
        self.rows, self.columns = np.array(shapes, np.int64).T.copy()
        self.ranks = np.minimum(rank, np.minimum(self.rows, self.columns))
        lengths = self.rows * self.columns
        self.elements = int(lengths.sum())
        self.at = np.cumsum(lengths) - lengths
        self.table = np.zeros(len(shapes), segments.SEGMENT)
        self.table["length"] = lengths
        self.arrays = {
            name: aligned(self.elements) for name in ("gradient", "residual", "next_residual", "output")
        }
        for name, array in self.arrays.items():
            self.table[name] = array.ctypes.data + 4 * self.at
        self.flags = np.zeros(len(shapes), np.uint8)
        self.factors = np.ones(len(shapes), np.float32)
        self.p, self.p_at, self.P = self._factors(self.rows)
        self.q, self.q_at, self.Q = self._factors(self.columns)
        self.M, self.out = self._matrices("next_residual"), self._matrices("output")

    def _factors(self, lengths: Any) -> tuple[Floats, Any, list[Floats]]:
        sizes = lengths * self.ranks
        at = np.cumsum(sizes) - sizes
        flat = aligned(int(sizes.sum()))
        return flat, at, [flat[a : a + s].reshape(-1, n) for a, s, n in zip(at, sizes, lengths, strict=True)]

    def _matrices(self, name: str) -> list[Floats]:
        layers = zip(self.at, self.rows, self.columns, strict=True)
        return [self.arrays[name][a : a + n * m].reshape(n, m) for a, n, m in layers]

    def calls(self) -> dict[str, Callable[[], Any]]:
        """Everything that is measured; names that begin with "NumPy" are what a kernel is compared with."""
        shapes = segments.Shapes(self.rows, self.columns, self.ranks)
        p, q = segments.Factor(self.p, self.p_at), segments.Factor(self.q, self.q_at)
        one: dict[str, Any] = {"divisor": 1.0, "scale": 1.0}
        return {
            "sum": self.sum,
            "NumPy project": self.numpy_project,
            "project": lambda: HOST.kernels.project(
                self.table, self.flags, self.factors, shapes, q, p, decay=1.0
            ),
            "orthogonalise": lambda: HOST.kernels.orthogonalise(self.rows, self.ranks, p),
            "NumPy back_project": lambda: [p @ m for p, m in zip(self.P, self.M, strict=True)],
            "back_project": lambda: HOST.kernels.back_project(self.table, shapes, p, q),
            "NumPy expand": self.numpy_expand,
            "expand": lambda: HOST.kernels.expand(self.table, self.flags, shapes, p, q, **one),
            "NumPy subtract": self.numpy_subtract,
            "subtract": lambda: HOST.kernels.subtract(self.table, shapes, p, q),
        }

    def sum(self) -> None:
        np.add(self.arrays["gradient"], self.arrays["residual"], out=self.arrays["next_residual"])

    def numpy_project(self) -> None:
        self.sum()
        for m, p, q in zip(self.M, self.P, self.Q, strict=True):
            p[:] = (m @ q.T).T

    def numpy_expand(self) -> None:
        for p, q, out in zip(self.P, self.Q, self.out, strict=True):
            np.matmul(p.T, q, out=out)

    def numpy_subtract(self) -> None:
        self.numpy_expand()
        self.arrays["next_residual"] -= self.arrays["output"]


def measure(work: Work, rounds: int) -> dict[str, float]:
    """Median milliseconds of each call; the first round warms up."""
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        for name, call in work.calls().items():
            begin = time.thread_time()
            call()
            seconds.setdefault(name, []).append(time.thread_time() - begin)
    return {name: 1e3 * statistics.median(times[1:]) for name, times in seconds.items()}


def figures(found: dict[str, float]) -> Iterator[tuple[str, float, float | None, float]]:
    """Kernel, its milliseconds, NumPy's, and the kernel's as a multiple of the sum's."""
    for name, milliseconds in found.items():
        if not name.startswith("NumPy"):
            yield name, milliseconds, found.get(f"NumPy {name}"), milliseconds / found["sum"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8, 32], metavar="RANK")
    parser.add_argument("--rounds", type=int, default=9, help="runs per figure (default: %(default)s)")
    parser.add_argument("--isas", nargs="+", default=_native.available_isas(), metavar="ISA")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()

    machine, rows = report.machine(), []
    print(report.describe(machine))
    with dispatch.use("native"):
        for model, shapes in MODELS.items():
            for rank in arguments.ranks:
                work = Work(shapes, rank)
                for isa in arguments.isas:
                    _native.set_isa(isa)
                    found = list(figures(measure(work, arguments.rounds)))
                    print(f"\n{model}, {work.elements / 1e6:.1f} M elements, rank {rank}, {isa}\n")
                    lines = [[n, f"{t:.2f}", b and f"{b:.2f}", f"{s:.2f}"] for n, t, b, s in found]
                    print(report.table(["kernel", "ms", "NumPy ms", "of the sum"], lines))
                    keys = ("kernel", "milliseconds", "numpy_milliseconds", "of_the_sum")
                    where = {"model": model, "rank": rank, "isa": isa}
                    rows += [where | dict(zip(keys, figure, strict=True)) for figure in found]
    report.write_json(arguments.json, {"machine": machine, "rounds": arguments.rounds, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
