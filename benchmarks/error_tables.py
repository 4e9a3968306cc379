"""Time to measure what every layer of a model loses at every level of a range, as L-GreCo's error tables need it.

    python benchmarks/error_tables.py [--models resnet20 lstm] [--ranges bits ...] [--rounds 3] [--json PATH]

Layers are those that would be compressed; values are gradients of ten batches added up (ResNet-20: noise instead of
images; LSTM: text). *Together* is `errors` with all levels of a range, layer by layer; *one by one* compresses and
decompresses each layer once for each level (PowerSGD: five times, as Markov 2024, appendix B.2.2, has it). Milliseconds
of the thread's processor time for all layers, medians of the rounds; what takes more than 10 s is run once. *Apart*:
the largest relative difference between the two tables, of errors above 1e-4 of a layer's norm. *Above the optimum*: by
how much errors of low rank are larger than those of the singular values at most, together and one by one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import models
import numpy as np
import numpy.typing as npt
import report
import torch
from torch.nn import functional

from gradcomp import Compressor, Filter, LayerSpec, PowerSGD, Quantize, TopK
from gradcomp.compress.lowrank.base import clamped_rank, matrix_shape
from gradcomp.control.distortion.errors import errors
from gradcomp.control.distortion.round_trip import round_trip
from gradcomp.control.distortion.spectra import POWER_STEPS, squared_singular_values
from gradcomp.core.state import Fields

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Gradients = list[tuple[LayerSpec, Floats]]

BATCHES = 10
SEED = 0
LONG_SECONDS = 10.0


def _densities(reference: float) -> list[Compressor]:
    return [TopK(reference * i / 10) for i in range(1, 101)]


@dataclass(frozen=True)
class Range:
    """The levels of one family."""

    title: str
    choices: list[Compressor]


RANGES = {
    "bits": Range("Quantize, 2 to 8 bits", [Quantize(bits) for bits in range(2, 9)]),
    "density": Range("TopK, 0.1 to 10%", _densities(0.01)),
    "high-density": Range("TopK, 1 to 100%", _densities(0.1)),
    "rank": Range("PowerSGD, ranks 2 to 8", [PowerSGD(rank) for rank in range(2, 9)]),
    "high-rank": Range("PowerSGD, ranks 16 to 64", [PowerSGD(rank) for rank in range(16, 65)]),
}


def resnet20() -> Gradients:
    """As convergence.py trains it."""
    torch.manual_seed(SEED)
    model = models.ResNet((3, 3, 3), 16)
    for _ in range(BATCHES):
        images, labels = torch.randn(64, 3, 16, 16), torch.randint(10, (64,))
        functional.cross_entropy(model(images), labels).backward()
    return _compressed(model)


def lstm() -> Gradients:
    """As step.py trains it."""
    torch.manual_seed(SEED)
    model = models.WordLSTM()
    batches = models.load_text(None).batches(0, batch=4, length=14, seed=SEED)
    for _ in range(BATCHES):
        model(*next(batches)).backward()
    return _compressed(model)


def _compressed(model: torch.nn.Module) -> Gradients:
    found = [
        (LayerSpec(name, tuple(parameter.shape)), parameter.grad.numpy())
        for name, parameter in model.named_parameters()
    ]
    return [(layer, grad) for layer, grad in found if Filter().reason_to_exclude(layer) is None]


MODELS: dict[str, tuple[Callable[[], Gradients], Sequence[str]]] = {
    "resnet20": (resnet20, ("bits", "density", "rank")),
    "lstm": (lstm, tuple(RANGES)),
}


@dataclass(frozen=True)
class Row:
    """One range over one model."""

    model: str
    range: str
    layers: int
    elements: int
    levels: int
    together_milliseconds: float
    longest_layer_milliseconds: float
    one_by_one_milliseconds: float
    apart: float
    above_optimum: tuple[float, float] | None

    @property
    def ratio(self) -> float:
        return self.one_by_one_milliseconds / self.together_milliseconds


def together(choices: Sequence[Compressor], layer: LayerSpec, values: Floats) -> Doubles:
    return errors(choices, layer, values, SEED)


def one_by_one(choices: Sequence[Compressor], layer: LayerSpec, values: Floats) -> Doubles:
    return np.array([_naive(choice, layer, values.reshape(-1)) for choice in choices])


def _naive(choice: Compressor, layer: LayerSpec, values: Floats) -> float:
    fields = Fields(1)
    fields.arrange([choice.fields(layer, SEED)])
    given = values
    for _ in range(POWER_STEPS if isinstance(choice, PowerSGD) else 1):
        given = round_trip(choice, layer, values, SEED, fields)
        fields.commit(np.ones(1, np.bool_))
    return float(np.sqrt(np.square(values - given, dtype=np.float64).sum()))


Way = Callable[[Sequence[Compressor], LayerSpec, Floats], Doubles]


def timed(
    way: Way, choices: Sequence[Compressor], gradients: Gradients, rounds: int
) -> tuple[list[float], list[Doubles]]:
    """Median milliseconds of every layer, and its errors; the first round warms up, unless it takes long."""
    milliseconds: list[list[float]] = []
    tables: list[Doubles] = []
    for number in range(rounds + 1):
        times, tables = [], []
        for layer, values in gradients:
            begin = time.thread_time()
            tables.append(way(choices, layer, values))
            times.append(1e3 * (time.thread_time() - begin))
        long = sum(times) > 1e3 * LONG_SECONDS
        if number or long:
            milliseconds.append(times)
        if long:
            break
    return [statistics.median(layer) for layer in zip(*milliseconds, strict=True)], tables


def measure(model: str, name: str, gradients: Gradients, rounds: int) -> Row:
    choices = RANGES[name].choices
    fast, found = timed(together, choices, gradients, rounds)
    slow, naive = timed(one_by_one, choices, gradients, rounds)
    above = None
    if isinstance(choices[0], PowerSGD):
        best = [optimum(choices, layer, values) for layer, values in gradients]
        above = (_largest(_above, found, best, gradients), _largest(_above, naive, best, gradients))
    return Row(
        model,
        RANGES[name].title,
        len(gradients),
        sum(layer.size for layer, _ in gradients),
        len(choices),
        sum(fast),
        max(fast),
        sum(slow),
        _largest(_apart, found, naive, gradients),
        above,
    )


def optimum(choices: Sequence[PowerSGD], layer: LayerSpec, values: Floats) -> Doubles:
    """From the singular values."""
    matrix = np.ascontiguousarray(values).reshape(matrix_shape(layer.shape))
    rest = np.append(np.cumsum(squared_singular_values(matrix))[::-1], 0.0)
    ranks = [clamped_rank(layer.shape, choice.rank) for choice in choices]
    return np.array([np.sqrt(rest[rank]) if rank else 0.0 for rank in ranks])


def _apart(mine: Doubles, theirs: Doubles) -> Doubles:
    return np.abs(mine / theirs - 1)


def _above(mine: Doubles, best: Doubles) -> Doubles:
    return mine / best - 1


def _largest(
    difference: Callable[[Doubles, Doubles], Doubles],
    ours: Sequence[Doubles],
    others: Sequence[Doubles],
    gradients: Gradients,
) -> float:
    found = []
    for mine, theirs, (_, values) in zip(ours, others, gradients, strict=True):
        counts = theirs > 1e-4 * np.linalg.norm(values)
        found.append(difference(mine[counts], theirs[counts]).max(initial=0))
    return float(max(found))


def show(row: Row) -> list[Any]:
    return [
        f"{row.model}: {row.range}",
        row.layers,
        f"{row.elements / 1e6:.2f}",
        row.levels,
        f"{row.together_milliseconds:.1f}",
        f"{row.longest_layer_milliseconds:.1f}",
        f"{row.one_by_one_milliseconds:,.0f}",
        f"{row.ratio:.1f}",
        f"{row.apart:.1e}",
        row.above_optimum and " / ".join(f"{share:.2%}" for share in row.above_optimum),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--ranges", nargs="+", choices=RANGES, default=list(RANGES), metavar="RANGE")
    parser.add_argument("--rounds", type=int, default=3, help="runs per figure (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    machine = report.machine()
    print(report.describe(machine) + "\n")
    rows = []
    for model in arguments.models:
        make, ranges = MODELS[model]
        gradients = make()
        rows += [
            measure(model, name, gradients, arguments.rounds) for name in ranges if name in arguments.ranges
        ]
    headers = ("model: range", "layers", "M elements", "levels", "together ms", "longest layer", "one by one ms",
               "ratio", "apart", "above the optimum")  # fmt: skip
    print(report.table(headers, [show(row) for row in rows]))
    figures = [{**asdict(row), "ratio": row.ratio} for row in rows]
    report.write_json(
        arguments.json, {"machine": machine, "settings": {"rounds": arguments.rounds}, "rows": figures}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
