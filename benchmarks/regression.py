"""Linear regression with quantised weights and gradients, as in Figure C.5 of Markov 2024: QSGD beside random shifts.

    python benchmarks/regression.py [--data synthetic,digits] [--seeds 10] [--steps 5000] [--json PATH]

Weights and gradients have 8 bits, in buckets of 16. The figure's data, YearPredictionMSD, is not at hand. ``synthetic``
has its 90 features, 50,000 rows, features whose covariance has a condition number of 100, and a linear part that
explains a quarter of the target's variance. ``digits`` are the 1,797 images of scikit-learn, 8 by 8, and the target is
the digit as a number. Features and target are standardised, so the loss of weights of 0 is 1.

SGD with a constant rate, from 0; a seed draws the batches and all roundings, and the batches are those of every row.

Forms
    lattice   w <- Q_w(w - rate Q_g(g(w))), equation 5.2
    master    w <- w - rate Q_g(g(Q_w(w))), as ``compress_fsdp`` trains; the loss is that of Q_w(w)

Rows, weights and gradients
    float32          neither is quantised
    qsgd             both by stochastic rounding to multiples of a bucket's norm (``scaling="l2"``), as QSGD has it
    coins            both by stochastic rounding between a bucket's minimum and maximum
    shift            both by a random shift of such a lattice
    shift, coins     weights by shift, gradients by coins: the default of ``compress_fsdp``
    nearest, coins   weights to nearest, gradients by coins

Columns: the loss after so many steps, in thousandths: of float32 what it is above that of the least squares, of the
other rows what it is above that of float32 with the same seed. The mean over seeds, and its standard error.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import report
from buckets import lost
from options import positive

from gradcomp import Quantize

Floats = npt.NDArray[np.float32]

BITS, BUCKET = 8, 16

QUANTISERS: dict[str, dict[str, Any]] = {
    "qsgd": {"scaling": "l2"},
    "coins": {},
    "shift": {"rounding": "shift"},
    "nearest": {"rounding": "nearest", "feedback": False},
}
ROWS = {
    "float32": (None, None),
    "qsgd": ("qsgd", "qsgd"),
    "coins": ("coins", "coins"),
    "shift": ("shift", "shift"),
    "shift, coins": ("shift", "coins"),
    "nearest, coins": ("nearest", "coins"),
}
FORMS = ("lattice", "master")


def standardised(x: npt.NDArray[Any]) -> Floats:
    """Columns of mean 0 and variance 1, without those that are constant."""
    x = x[:, x.std(axis=0) > 0].astype(np.float64)
    result: Floats = ((x - x.mean(axis=0)) / x.std(axis=0)).astype(np.float32)
    return result


def synthetic(rows: int = 50_000, features: int = 90) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((features, features)))[0]
    x = standardised(rng.standard_normal((rows, features)) * np.geomspace(0.1, 1.0, features) @ basis)
    linear = x @ rng.standard_normal(features)
    y = linear / linear.std() + math.sqrt(3) * rng.standard_normal(rows)
    return x, standardised(y[:, None])[:, 0]


def digits() -> tuple[Floats, Floats]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return standardised(x), standardised(y[:, None])[:, 0]


DATA = {"synthetic": synthetic, "digits": digits}


def quantised(name: str | None, x: Floats, draw: int) -> Floats:
    """Decoded values of vectors, one in a row."""
    if name is None:
        return x
    quantiser = Quantize(BITS, BUCKET, **QUANTISERS[name])
    error = lost(quantiser, [x.shape[1]] * len(x), np.ascontiguousarray(x).reshape(-1), draw)
    result: Floats = x - error.reshape(x.shape)
    return result


class Regression:
    """A data set, and the loss of weights above that of the least squares."""

    def __init__(self, x: Floats, y: Floats) -> None:
        self.x, self.y = x, y
        doubles = x.astype(np.float64)
        self._best = np.linalg.lstsq(doubles, y.astype(np.float64), rcond=None)[0]
        self._covariance = doubles.T @ doubles / len(x)
        self.least = float(((doubles @ self._best - y) ** 2).mean())

    def excess(self, w: Floats) -> npt.NDArray[np.float64]:
        """The loss of each of the weights less the least one: (w - w*)' X'X / m (w - w*)."""
        away = w - self._best
        result: npt.NDArray[np.float64] = ((away @ self._covariance) * away).sum(axis=1)
        return result

    def train(
        self, row: str, form: str, seeds: int, steps: list[int], rate: float, batch: int
    ) -> dict[int, list[float]]:
        """The excess loss by number of steps, for every seed."""
        of_weights, of_gradients = ROWS[row]
        batches = [np.random.default_rng(seed) for seed in range(seeds)]
        w = np.zeros((seeds, self.x.shape[1]), np.float32)
        found: dict[int, list[float]] = {}
        for step in range(steps[-1]):
            chosen = np.array([rng.integers(len(self.x), size=batch) for rng in batches])
            x, y = self.x[chosen], self.y[chosen]
            seen = quantised(of_weights, w, 2 * step) if form == "master" else w
            residual = np.einsum("sbf,sf->sb", x, seen) - y
            gradient = np.einsum("sb,sbf->sf", residual, x) * np.float32(2 / batch)
            w = w - np.float32(rate) * quantised(of_gradients, gradient, 2 * step + 1)
            if form == "lattice":
                w = quantised(of_weights, w, 2 * step)
            if step + 1 in steps:
                at = quantised(of_weights, w, 2 * step + 2) if form == "master" else w
                found[step + 1] = self.excess(at).tolist()
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="synthetic,digits", help=f"of {', '.join(DATA)}")
    parser.add_argument("--seeds", type=positive, default=10)
    parser.add_argument("--steps", type=positive, default=5000)
    parser.add_argument("--rate", type=float, default=0.002)
    parser.add_argument("--batch", type=positive, default=64)
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    names = options.data.split(",")
    if unknown := [name for name in names if name not in DATA]:
        parser.error(f"unknown data {', '.join(unknown)}; there are {', '.join(DATA)}")
    machine = report.machine()
    print(report.describe(machine))
    steps = sorted({max(1, options.steps // part) for part in (50, 10, 2, 1)})
    runs: list[dict[str, Any]] = []
    for name in names:
        data = Regression(*DATA[name]())
        lines, plain = [], {}
        for form, row in itertools.product(FORMS, ROWS):
            if row == "float32" and form == "master":
                continue  # both forms are the same
            found = data.train(row, form, options.seeds, steps, options.rate, options.batch)
            runs.append({"data": name, "form": form, "row": row, "excess": found})
            if row == "float32":
                plain = found
                lines.append([row, *map(shown, found.values())])
            else:
                more = (np.subtract(each, plain[step]) for step, each in found.items())
                lines.append([f"{form}: {row}", *map(shown, more)])
        print(f"\n{name}: {data.x.shape[0]:,} x {data.x.shape[1]}, least loss {data.least:.4f}\n")
        print(report.table(["form: row", *(f"{step:,} steps" for step in steps)], lines), flush=True)
    about = {"rate": options.rate, "batch": options.batch, "bits": BITS, "bucket": BUCKET}
    report.write_json(options.json, {"machine": machine, **about, "runs": runs})
    return 0


def shown(excess: npt.ArrayLike) -> str:
    """The mean and its standard error, in thousandths."""
    excess = np.asarray(excess)
    error = np.std(excess, ddof=1) / math.sqrt(len(excess)) if len(excess) > 1 else math.nan
    return f"{1e3 * np.mean(excess):.3f} ± {1e3 * error:.3f}"


if __name__ == "__main__":
    sys.exit(main())
