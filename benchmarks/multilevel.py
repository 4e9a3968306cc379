"""Two densities of one selection, the second among what the first selected, beside selecting twice.

    python benchmarks/multilevel.py [--factors 10 1000] [--rounds 15] [--json PATH]

As in Tyagi and Swany 2023, Table 3: *direct* selects from all layers of a model at both factors; *multi-level*
selects at the first factor, and the second among that, as `TwoLevelSelection` does: milliseconds on one thread, medians
of runs that alternate in one process, of the thread's processor time. *Norms* is what GraVAC reads besides: squared
norms of the gradient, p and both selections. Gradients are those of a batch, residuals those of three others. A figure
counts only if an exact top-k comes out the same both ways.

*Swaps*: microseconds for a change between plans of GraVAC, on wall clock: to choose (write the plan) and to lay out,
for plans that are new and for plans that were in force a few steps ago.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import models
import numpy as np
import report
import torch
from selection import alternate
from torch.nn import functional

from gradcomp import DGC, Config, Filter, LayerSpec, Policy, RedSync, TopK
from gradcomp.compress.groups import Piece, group_of
from gradcomp.compress.sparse.base import ByDensity, Sparse
from gradcomp.compress.sparse.payload import Selection
from gradcomp.compress.sparse.two_level_selection import Levels, TwoLevelSelection
from gradcomp.control import Environment
from gradcomp.control.gravac import GraVAC, GraVACRun
from gradcomp.core.scheme import parse
from gradcomp.core.topology import Topology
from gradcomp.exchange.compiled_plan import CompiledPlans
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.exchange.settings import Settings
from gradcomp.kernels.codec import Draw
from gradcomp.kernels.step import Observations, StepContext
from gradcomp.transport.inprocess import World

METHODS: dict[str, type[TopK] | type[DGC] | type[RedSync]] = {"TopK": TopK, "DGC": DGC, "RedSync": RedSync}

#: Speedups of Tyagi and Swany 2023, Table 3, for ResNet101 and the LSTM.
PAPER = {"TopK": "1.83, 1.59", "DGC": "1.52, 1.40", "RedSync": "1.10, 1.50"}


@dataclass(frozen=True)
class Row:
    """One model under one method."""

    model: str
    method: str
    layers: int
    elements: int
    first_milliseconds: float
    direct_milliseconds: float
    multilevel_milliseconds: float
    norms_milliseconds: float
    right: bool

    @property
    def speedup(self) -> float:
        return self.direct_milliseconds / self.multilevel_milliseconds


@dataclass(frozen=True)
class Swap:
    """What a change of plan takes."""

    model: str
    method: str
    layers: int
    choose_microseconds: float
    new_microseconds: float
    kept_microseconds: float


def lstm() -> tuple[torch.nn.Module, list[list[np.ndarray]]]:
    """The word LSTM, and the gradients of four batches of text."""
    text = models.load_text(None, limit_words=60_000)
    torch.manual_seed(0)
    model = models.WordLSTM()
    batches = text.batches(0, batch=20, length=35, seed=0)
    return model, [gradients(model, model(*next(batches))) for _ in range(4)]


def resnet() -> tuple[torch.nn.Module, list[list[np.ndarray]]]:
    """ResNet-20, and the gradients of four batches of noise."""
    torch.manual_seed(0)
    model = models.ResNet((3, 3, 3), 16)
    losses = (
        functional.cross_entropy(model(torch.randn(16, 3, 16, 16)), torch.randint(10, (16,)))
        for _ in range(4)
    )
    return model, [gradients(model, loss) for loss in losses]


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> list[np.ndarray]:
    model.zero_grad()
    loss.backward()
    return [p.grad.numpy().reshape(-1).copy() for p in model.parameters()]


MODELS = {"ResNet-20": resnet, "LSTM": lstm}


def specs(model: torch.nn.Module) -> list[LayerSpec]:
    return [
        LayerSpec(name, tuple(p.shape), kind="bias" if "bias" in name else "weight")
        for name, p in model.named_parameters()
    ]


class Work:
    """A model's compressed layers under one method."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        batches: Sequence[Sequence[np.ndarray]],
        method: str,
        factors: Sequence[float],
    ) -> None:
        first, second = (METHODS[method](1 / factor) for factor in factors)
        self.compressor = TwoLevelSelection(first, 1 / factors[1])
        self.members = [i for i, layer in enumerate(layers) if Filter().reason_to_exclude(layer) is None]
        self.gradients = [batches[0][i] for i in self.members]
        self.residuals = [sum(batch[i] for batch in batches[1:]) for i in self.members]
        self.next_residuals = [np.zeros_like(g) for g in self.gradients]
        self.context = StepContext(Draw(0, 0, 0), 2)
        self.sides = [self._side(layers, compressor) for compressor in (first, second, first)]
        group, self.first, flags = self.sides[2]
        self.levels = Levels(group, first, self.compressor.wanted(group.table))
        self.levels.group.inputs[:] = group.inputs
        self.flags = flags

    def _side(self, layers: Sequence[LayerSpec], compressor: ByDensity):
        pieces = [Piece(i, 0, layers[i].size) for i in self.members]
        group = group_of(pieces, layers, [compressor] * len(layers))
        assert isinstance(compressor, Sparse)
        for column, arrays in (
            ("gradient", self.gradients),
            ("residual", self.residuals),
            ("next_residual", self.next_residuals),
        ):
            group.inputs[column] = [array.ctypes.data for array in arrays]
        # What is measured is the selection: momentum is the same for all, and made before.
        group.inputs["dtype"] = 0
        return group, Selection.allocate(compressor.limits(group.table)), np.zeros(len(pieces), np.uint8)

    def once(self) -> None:
        """The first factor alone."""
        group, chosen, flags = self.sides[0]
        group.compressor.select(group, self.context, chosen, flags)

    def direct(self) -> None:
        """Both factors, from the layers."""
        for group, chosen, flags in self.sides[:2]:
            group.compressor.select(group, self.context, chosen, flags)

    def multilevel(self) -> Selection:
        """Both factors, the second from the first."""
        levels = self.levels
        levels.select(self.context, self.flags)
        levels.refine(self.context)
        return levels.candidate()

    def norms(self) -> None:
        """What is noted for the controller."""
        self.levels.note(Observations(max(self.members) + 1), 1.0)

    def is_right(self) -> bool:
        """Whether an exact top-k is the same both ways; others only select about as many."""
        self.direct()
        wanted, found = self.sides[1][1], self.multilevel()
        if not isinstance(self.sides[0][0].compressor, TopK):
            return bool((found.counts > 0).all())
        return np.array_equal(wanted.indices, found.indices) and np.array_equal(wanted.values, found.values)


def measure(name: str, factors: Sequence[float], rounds: int) -> Iterator[Row]:
    """All methods on one model."""
    model, batches = MODELS[name]()
    for method in METHODS:
        work = Work(specs(model), batches, method, factors)
        right = work.is_right()
        once, direct, multilevel, norms = alternate(
            [work.once, work.direct, work.multilevel, work.norms], rounds
        )
        elements = sum(len(g) for g in work.gradients)
        yield Row(name, method, len(work.members), elements, once, direct, multilevel, norms, right)


def swaps(name: str, layers: Sequence[LayerSpec], method: str, rounds: int) -> Swap:
    """GraVAC's plans in turn: candidate, minimum, dense."""
    policy = Policy(METHODS[method]())
    environment = Environment(layers, policy.adjustable(layers), 0, Topology.one_host(2), parse("sra"))
    running = GraVAC().begin(environment)
    assert isinstance(running, GraVACRun)
    pipeline = Pipeline(
        layers,
        policy.plan(layers),
        World(2).transports()[0],
        Config(),
        lambda layer: 0,
        Settings(controller=running),
    )
    running.search.minimum[:], running.search.candidate[:] = 1, 2
    times: dict[str, list[float]] = {"choose": [], "new": [], "kept": []}
    for number in range(3 * (2 * rounds + 1)):
        running.search.sent[:] = number % 3
        kind = "new" if number < 3 * rounds else "kept"
        if kind == "new":
            pipeline._compiled_plans = CompiledPlans()
        begin = time.perf_counter()
        running._choose()
        pipeline.plan, pipeline._stale = running.plan(pipeline.plan), True
        chosen = time.perf_counter()
        pipeline.lay_out()
        if not 3 * rounds <= number < 3 * (rounds + 1):  # which makes what is kept
            times["choose"].append(chosen - begin)
            times[kind].append(time.perf_counter() - chosen)
    found = (1e6 * statistics.median(times[key]) for key in ("choose", "new", "kept"))
    return Swap(name, method, len(layers), *found)


def show_rows(rows: Sequence[Row], factors: Sequence[float]) -> str:
    first, second = (f"{factor:g}x" for factor in factors)
    headers = ("model", "method", f"{first} ms", f"{first} and {second}, direct ms", "multi-level ms")
    cells = [
        (
            row.model,
            row.method,
            f"{row.first_milliseconds:.3f}",
            f"{row.direct_milliseconds:.3f}",
            f"{row.multilevel_milliseconds:.3f}",
            f"{row.speedup:.2f}",
            PAPER[row.method],
            f"{row.norms_milliseconds:.3f}",
            "" if row.right else "WRONG",
        )
        for row in rows
    ]
    return report.table((*headers, "speedup", "Tyagi and Swany 2023", "norms ms", ""), cells)


def show_swaps(found: Sequence[Swap]) -> str:
    headers = ("layers", "method", "number", "choose us", "new layout us", "kept layout us")
    cells = [
        (
            swap.model,
            swap.method,
            swap.layers,
            f"{swap.choose_microseconds:.0f}",
            f"{swap.new_microseconds:.0f}",
            f"{swap.kept_microseconds:.0f}",
        )
        for swap in found
    ]
    return report.table(headers, cells)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--factors", nargs=2, type=float, default=(10.0, 1000.0), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="runs per figure (default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    machine = report.machine()
    print(report.describe(machine) + "\n")
    rows = [row for name in arguments.models for row in measure(name, arguments.factors, arguments.rounds)]
    print(show_rows(rows, arguments.factors))
    layers = {"LSTM": models.WordLSTM(), "ResNet-20": models.ResNet((3, 3, 3), 16)}
    lists = {name: specs(model) for name, model in layers.items() if name in arguments.models}
    lists["160 of 64 x 64"] = [LayerSpec(str(i), (64, 64)) for i in range(160)]
    changes = [
        swaps(name, each, method, arguments.rounds) for name, each in lists.items() for method in METHODS
    ]
    print("\n" + show_swaps(changes))
    figures = [{**asdict(row), "speedup": row.speedup} for row in rows]
    settings = {"factors": list(arguments.factors), "rounds": arguments.rounds}
    report.write_json(
        arguments.json,
        {
            "machine": machine,
            "settings": settings,
            "rows": figures,
            "swaps": [asdict(swap) for swap in changes],
        },
    )
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
