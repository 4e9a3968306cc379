"""Speed of sparse selections on one thread, as a ratio to `torch.topk(x.abs(), k)` on the same tensor.

    python benchmarks/selection.py [--elements 10000000] [--rounds 7] [--json PATH]

Each figure is time(torch) / time(gradcomp): medians of runs that alternate between torch, the exact selection
(`select_top`), the same without zeros, and DGC's sampled one (`contribute`, `sample_thresholds` at a stride of 100,
`select_above`) in one process, torch with one thread. All of ours also write the contribution, which error
feedback needs, and give indices in order. Time is the thread's processor time, which waiting for memory is part of
and other processes' turns are not. A figure counts only if the exact selections have the magnitudes that torch found.

The bars apply to AVX-512 and AVX2; a figure below its bar is marked and the exit status is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import models
import numpy as np
import numpy.typing as npt
import report
import torch

from gradcomp import _native
from gradcomp.kernels import dispatch, segments
from gradcomp.kernels.devices import HOST

Floats = npt.NDArray[np.float32]

STRIDE = 100
DENSITIES = (0.001, 0.01, 0.1)
ROW_LENGTH = 100  # elements of an embedding's row


def normal(length: int, rng: np.random.Generator) -> Floats:
    return rng.standard_normal(length, np.float32)


def all_equal(length: int, _rng: np.random.Generator) -> Floats:
    return np.full(length, 0.7, np.float32)


def mostly_zero(length: int, rng: np.random.Generator) -> Floats:
    return np.where(rng.random(length) < 0.9, np.float32(0), normal(length, rng))


def embedding(length: int, rng: np.random.Generator) -> Floats:
    """The gradient of a word LSTM's embedding after a batch of text: the rows of the words that occur in it."""
    vocabulary = length // ROW_LENGTH
    text = models.load_text(None, vocabulary)
    torch.manual_seed(0)
    model = models.WordLSTM(vocabulary, ROW_LENGTH)
    model(*next(text.batches(0, batch=20, length=35, seed=int(rng.integers(1 << 30))))).backward()
    gradient: Floats = np.zeros(length, np.float32)
    found = model.embedding.weight.grad.numpy().reshape(-1)
    gradient[: len(found)] = found
    return gradient


INPUTS: dict[str, Callable[[int, np.random.Generator], Floats]] = {
    "normal": normal,
    "all equal": all_equal,
    "90% zero": mostly_zero,
    "embedding": embedding,
}

# Any other figure must not be slower than torch.
BARS = {
    ("normal", 0.01, "exact"): 15.0,
    ("normal", 0.01, "non-zero"): 15.0,
    ("normal", 0.01, "sampled"): 30.0,
}


@dataclass(frozen=True)
class Row:
    """One figure."""

    isa: str
    input: str
    density: float
    method: str
    milliseconds: float
    torch_milliseconds: float
    found: float  # selected elements / wanted elements
    right: bool
    bar: float | None

    @property
    def ratio(self) -> float:
        return self.torch_milliseconds / self.milliseconds

    @property
    def missed(self) -> bool:
        return not self.right or (self.bar is not None and self.ratio < self.bar)


class Workload:
    """A gradient with its next residual, and what selects from it."""

    def __init__(self, gradient: Floats, density: float) -> None:
        self.tensor = torch.from_numpy(gradient)
        self.next_residual = np.zeros_like(gradient)
        self.table = np.zeros(1, segments.SEGMENT)
        self.table["length"] = len(gradient)
        self.table["gradient"], self.table["next_residual"] = (
            gradient.ctypes.data,
            self.next_residual.ctypes.data,
        )
        self.flags, self.factors = np.zeros(1, np.uint8), np.ones(1, np.float32)
        self.thresholds = np.zeros(1, np.float32)
        self.offsets, self.found = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self.count = max(1, round(density * len(gradient)))
        self.counts = np.full(1, self.count, np.int64)
        self.limits = np.minimum(2 * self.counts, len(gradient))
        self.indices = np.zeros(self.limits[0], np.uint32)
        self.values = np.zeros(self.limits[0], np.float32)

    def torch_top(self) -> torch.Tensor:
        return torch.topk(self.tensor.abs(), self.count).values

    def exact(self, zeros: bool = True) -> None:
        HOST.kernels.select_top(
            self.table,
            self.flags,
            self.factors,
            self.counts,
            self.offsets,
            self.indices,
            self.values,
            self.found,
            decay=1.0,
            zeros=zeros,
        )

    def non_zero(self) -> None:
        self.exact(zeros=False)

    def sampled(self) -> None:
        HOST.kernels.contribute(self.table, self.flags, self.factors, decay=1.0)
        HOST.kernels.sample_thresholds(self.table, self.counts, self.thresholds, stride=STRIDE, phase=0)
        HOST.kernels.select_above(
            self.table, self.thresholds, self.limits, self.offsets, self.indices, self.values, self.found
        )

    def exact_is_right(self) -> bool:
        """Whether exact selections have torch's magnitudes, and the elements that they name."""
        top = self.torch_top().numpy()
        return self._is_right(self.exact, top) and self._is_right(self.non_zero, top[top != 0])

    def _is_right(self, select: Callable[[], None], magnitudes: Floats) -> bool:
        select()
        indices, values = self.indices[: self.found[0]], self.values[: self.found[0]]
        return bool(
            np.array_equal(np.sort(np.abs(values))[::-1], magnitudes)
            and np.array_equal(self.tensor.numpy()[indices], values)
            and (np.diff(indices.astype(np.int64)) > 0).all()
        )


def alternate(functions: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Median processor milliseconds of each, run in turn; the first round warms up."""
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds + 1):
        for function, times in zip(functions, seconds, strict=True):
            begin = time.thread_time()
            function()
            times.append(time.thread_time() - begin)
    return [1e3 * statistics.median(times[1:]) for times in seconds]


def measure(isa: str, name: str, gradient: Floats, density: float, rounds: int) -> Iterator[Row]:
    """All methods on one gradient at one density."""
    work = Workload(gradient, density)
    right = work.exact_is_right()
    methods = {"exact": work.exact, "non-zero": work.non_zero, "sampled": work.sampled}
    torch_time, *times = alternate([work.torch_top, *methods.values()], rounds)
    for (method, select), milliseconds in zip(methods.items(), times, strict=True):
        select()
        found = int(work.found[0]) / work.count
        bar = None if isa == "baseline" else BARS.get((name, density, method), 1.0)
        yield Row(isa, name, density, method, milliseconds, torch_time, found, right, bar)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=10_000_000, help="float32 (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="runs per figure (default: %(default)s)")
    parser.add_argument("--inputs", nargs="+", choices=INPUTS, default=list(INPUTS), metavar="INPUT")
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES, metavar="DENSITY")
    parser.add_argument("--isas", nargs="+", default=_native.available_isas()[:1], metavar="ISA")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    machine = report.machine()
    print(report.describe(machine) + "\n")
    rows: list[Row] = []
    with dispatch.use("native"):
        for isa in arguments.isas:
            _native.set_isa(isa)
            for name in arguments.inputs:
                gradient = INPUTS[name](arguments.elements, np.random.default_rng(0))
                for density in arguments.densities:
                    rows += measure(isa, name, gradient, density, arguments.rounds)

    headers = ("input", "isa", "density", "method", "torch ms", "ms", "found / wanted", "ratio", "bar", "")
    print(
        report.table(
            headers,
            [
                (
                    row.input,
                    row.isa,
                    f"{row.density:.1%}",
                    row.method,
                    f"{row.torch_milliseconds:.1f}",
                    f"{row.milliseconds:.2f}",
                    f"{row.found:.2f}",
                    f"{row.ratio:.1f}",
                    row.bar,
                    "WRONG" if not row.right else "MISSED" if row.missed else "",
                )
                for row in rows
            ],
        )
    )
    missed = sum(row.missed for row in rows)
    print(f"\n{missed} of {sum(row.bar is not None for row in rows)} bars missed")
    settings = {"elements": arguments.elements, "rounds": arguments.rounds, "stride": STRIDE}
    figures = [{**asdict(row), "ratio": row.ratio} for row in rows]
    report.write_json(arguments.json, {"machine": machine, "settings": settings, "rows": figures})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
