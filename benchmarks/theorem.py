"""Theorem 2 of Markov 2024, simulated on quadratics: its bound beside the loss that quantised weights reach.

    python benchmarks/theorem.py [--dimensions 4,32,256] [--kappas 2,8,32] [--noise 0,1,3] [--runs 64] [--json PATH]

f(x) = 1/2 (x - c)' A (x - c), with eigenvalues from alpha = 1 / kappa to beta = 1; the coarse lattice has delta_* = 1.
Gradients have Gaussian noise of variance sigma^2, given as sigma^2 / (epsilon alpha). From f and epsilon, a tenth of
E f(x*), follow the theorem's constants:

    eta = min(3/10 epsilon alpha / sigma^2, 1),    delta = eta / ceil(16 (beta / alpha)^2) delta_*,
    T = 10 / eta beta / alpha ln((f(x_0) - E f(x*)) / epsilon).

x* is the best point of delta_* Z^n + r, in expectation over r. Where A is diagonal each coordinate of x* is the nearest
one, so E f(x*) = sum a_i delta_*^2 / 24. Rotated, x* is found among all points that can be better than the rounded c.

Forms
    lattice   x <- Q(x - eta / beta g(x)), the iteration of the theorem; its loss is f(x)
    master    x <- x - eta / beta g(Q(x)), as ``compress_fsdp`` trains; its loss is f(Q(x))

Columns, losses as multiples of E f(x*)
    bound     1 + epsilon / E f(x*), the theorem's for E f(x_T)
    lattice, master    the mean over runs of the loss after T steps, at the theorem's delta
    coarsest  without noise, the least delta_* / delta at which the form still meets the bound, of eight in an octave

Q is ``Quantize``. Its lattice begins at a bucket's minimum and has 2^b points, while the theorem's has no end. So a
value is coded relative to the nearest multiple of delta, in a bucket that also holds -delta and 2 delta: the points of
its two bits are delta apart. All values of a vector share one draw.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import report
from buckets import lost
from options import positive

from gradcomp import Quantize

Doubles = npt.NDArray[np.float64]

#: epsilon / E f(x*).
SLACK = 0.1
#: Start, in multiples of delta_*: the standard deviation of x_0 - c.
FAR = 4.0
#: A step of the search for the coarsest lattice.
FINER = 2 ** (1 / 8)
#: Shifts over which the benchmark of a rotated quadratic is averaged.
SHIFTS = 64


@dataclass(frozen=True)
class Quadratic:
    """A quadratic with its start and the constants that the theorem derives for it."""

    n: int
    kappa: float
    noise: float = 0.0
    rotated: bool = False
    seed: int = 0

    @cached_property
    def curvature(self) -> Doubles:
        """Eigenvalues, from alpha to beta."""
        return np.geomspace(1 / self.kappa, 1.0, self.n)

    @cached_property
    def _made(self) -> tuple[Doubles, Doubles, Doubles]:
        """A, c and x_0."""
        rng = np.random.default_rng(self.seed)
        center, start = rng.random(self.n), FAR * rng.standard_normal(self.n)
        basis = np.linalg.qr(rng.standard_normal((self.n, self.n)))[0] if self.rotated else np.eye(self.n)
        return basis * self.curvature @ basis.T, center, center + start

    @property
    def center(self) -> Doubles:
        return self._made[1]

    @property
    def start(self) -> Doubles:
        return self._made[2]

    def gradient(self, x: Doubles) -> Doubles:
        away = x - self.center
        return away @ self._made[0] if self.rotated else away * self.curvature

    def loss(self, x: Doubles) -> Doubles:
        result: Doubles = ((x - self.center) * self.gradient(x)).sum(axis=-1) / 2
        return result

    @cached_property
    def best(self) -> float:
        """E f(x*) over the shifts of the lattice of step 1."""
        if not self.rotated:
            return float(self.curvature.sum() / 24)
        # f of the rounded c is at most n / 8, and f(x) at least |x - c|^2 / (2 kappa).
        width = math.floor(math.sqrt(self.kappa * self.n) / 2 + 0.5)
        around = np.array(list(itertools.product(range(-width, width + 1), repeat=self.n)), dtype=np.float64)
        shifts = (np.arange(SHIFTS) + 0.5) / SHIFTS
        return float(np.mean([self.loss(np.rint(self.center - r) + r + around).min() for r in shifts]))

    @property
    def epsilon(self) -> float:
        return SLACK * self.best

    @property
    def sigma(self) -> float:
        return math.sqrt(self.noise * self.epsilon / self.kappa)

    @property
    def eta(self) -> float:
        return min(0.3 / self.noise, 1.0) if self.noise else 1.0

    @property
    def ratio(self) -> float:
        """delta_* / delta."""
        return math.ceil(16 * self.kappa**2) / self.eta

    @property
    def steps(self) -> int:
        """T."""
        gap = float(self.loss(self.start)) - self.best
        return math.ceil(10 / self.eta * self.kappa * math.log(gap / self.epsilon))


def rounded(x: Doubles, delta: float, rounding: str, draw: int) -> Doubles:
    """Q of vectors, one in a row, on lattices of step delta; each vector has a shift, or coins, of its own."""
    steps = x / delta
    coded = np.empty((len(x), x.shape[1] + 2), np.float32)
    coded[:, :-2] = steps - np.rint(steps)
    coded[:, -2:] = -1, 2
    quantiser = Quantize(2, coded.shape[1], rounding=rounding, feedback=False)
    error = lost(quantiser, [coded.shape[1]] * len(x), coded.reshape(-1), draw).reshape(coded.shape)
    result: Doubles = x - delta * error[:, :-2]
    return result


def descend(
    f: Quadratic,
    delta: float,
    runs: int,
    *,
    steps: int | None = None,
    master: bool = False,
    rounding: str = "shift",
) -> Doubles:
    """Return the losses (steps + 1, runs) at the weights that gradients see; steps are the theorem's by default."""
    rng = np.random.default_rng(f.seed + 1)
    x = np.tile(f.start, (runs, 1))
    steps = f.steps if steps is None else steps
    losses = np.empty((steps + 1, runs))
    for step in range(steps + 1):
        seen = rounded(x, delta, rounding, step) if master else x
        gradient = f.gradient(seen)
        losses[step] = ((seen - f.center) * gradient).sum(axis=1) / 2
        if f.noise:
            gradient = gradient + f.sigma / math.sqrt(f.n) * rng.standard_normal(x.shape)
        x = x - f.eta * gradient
        if not master:
            x = rounded(x, delta, rounding, step)
    return losses


def coarsest(f: Quadratic, runs: int, **form: Any) -> float | None:
    """Return the least of the ratios 2^(k/8) at which the bound holds; None if that is beyond the theorem's."""
    for k in range(math.ceil(math.log(f.ratio, FINER)) + 1):
        if descend(f, FINER**-k, runs, **form)[-1].mean() <= f.best + f.epsilon:
            return float(FINER**k)
    return None


FORMS: dict[str, dict[str, Any]] = {
    "lattice": {},
    "lattice, coins": {"rounding": "stochastic"},
    "lattice, nearest": {"rounding": "nearest"},
    "master": {"master": True},
}


def measure(f: Quadratic, runs: int) -> dict[str, Any]:
    """A row: constants, the losses of both forms as multiples of the best, and their standard errors."""
    row: dict[str, Any] = {**asdict(f), "eta": f.eta, "ratio": f.ratio, "steps": f.steps, "bound": 1 + SLACK}
    for name in ("lattice", "master"):
        losses = descend(f, 1 / f.ratio, runs, **FORMS[name])[-1] / f.best
        row[name], row[f"{name} error"] = losses.mean(), losses.std(ddof=1) / math.sqrt(runs)
    row["holds"] = bool(max(row["lattice"], row["master"]) <= row["bound"])
    return row


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dimensions", type=numbers, default=[4, 32, 256])
    parser.add_argument("--kappas", type=numbers, default=[2, 8, 32])
    parser.add_argument("--noise", type=numbers, default=[0, 1, 3], help="sigma^2 / (epsilon alpha)")
    parser.add_argument("--runs", type=positive, default=64)
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    machine = report.machine()
    print(report.describe(machine))
    shapes = [
        (int(n), rotated) for n in options.dimensions for rotated in ([False, True] if n <= 4 else [False])
    ]
    grid = itertools.product(shapes, options.kappas, options.noise)
    rows = [measure(Quadratic(n, kappa, noise, rotated), options.runs) for (n, rotated), kappa, noise in grid]
    titles = ["n", "kappa", "noise", "eta", "delta_*/delta", "T", "bound", "lattice", "master"]
    print(
        report.table(
            titles,
            [
                [f"{row['n']}{', rotated' * row['rotated']}", f"{row['kappa']:g}", f"{row['noise']:g}"]
                + [f"{row['eta']:.2g}", f"{row['ratio']:.0f}", row["steps"], f"{row['bound']:.2f}"]
                + [f"{row[name]:.2g}" for name in ("lattice", "master")]
                for row in rows
            ],
        )
    )
    found = []
    for (n, rotated), kappa in itertools.product(shapes, options.kappas):
        f = Quadratic(n, kappa, rotated=rotated)
        each = {name: coarsest(f, options.runs, **form) for name, form in FORMS.items()}
        found.append({**asdict(f), "theorem": f.ratio, **each})
    print("\nThe coarsest lattice that meets the bound, as delta_* / delta\n")
    print(
        report.table(
            ["n", "kappa", "theorem", *FORMS],
            [
                [f"{row['n']}{', rotated' * row['rotated']}", f"{row['kappa']:g}", f"{row['theorem']:.0f}"]
                + [None if row[name] is None else f"{row[name]:.3g}" for name in FORMS]
                for row in found
            ],
        )
    )
    report.write_json(
        options.json, {"machine": machine, "runs": options.runs, "rows": rows, "coarsest": found}
    )
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
