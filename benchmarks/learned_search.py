"""Search for a training of LGC's nets whose code beats plain bits of equal bytes, on recorded values of two ranks.

    python benchmarks/learned_search.py --record FOLDER --cifar cifar10_10k.npz   # both tasks, once
    python benchmarks/learned_search.py FOLDER --task resnet --rates 0.001,0.01,0.03,0.1 --steps 300,1000,3000

The values are those of phase 2, after 200 exact steps, in a run whose nets are not trained. The nets are trained on all
recorded steps but the last 150, over and over; every fifth of the last 150 tests them. The nets have no biases, so
samples that are multiplied by s, trained at the rate r, give the same nets as samples of unit norm at the rate r s**2:
one number stands for scale and rate. ``--scale raw`` does not divide the samples at all.

Columns
    loss     ||D((1/N) sum of E(s_k)) - mean||**2 over ||mean||**2, in the mean over the tests, after so many steps; 1
             is the loss of zeros
    linear   the same of the best linear code of 16 consecutive values, fitted to the tests themselves
    bits     the same of plain bits of equal bytes: 8 bits a value beside 4 channels, 2 bits beside 1
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from pathlib import Path
from typing import Any

import convergence
import learned_record
import numpy as np
import numpy.typing as npt
import report
from convergence_rows import RESNET
from convergence_tasks import Settings
from learned_codes import losses
from learned_rows import TASKS, Arm

from gradcomp.contrib.lgc.autoencoder import STRIDE, Autoencoder

Floats = npt.NDArray[np.float32]
TESTS, EVERY = 150, 5


def record(folder: Path, task: str, lstm_steps: int, epochs: int, cifar: Path | None) -> None:
    """Train once without nets, and write the values of every step."""
    compression = Arm(task, task, learned_record.RECORDED).on(task)
    settings = Settings(0, lstm_steps, epochs, None, None if cifar is None else str(cifar.resolve()))
    plan = convergence.Plan(task, compression, 1.0, (0,), settings, watch="learned_record")
    found = convergence.launch(plan, 2, None)
    if found is None:
        raise SystemExit(f"{task}: a rank failed; its error is above")
    (folder / f"{task}.npz").write_bytes(base64.b64decode(found[0]["runs"][0]["recorded"]))


class Descent:
    """Gradient descent, with momentum, or Adam as Kingma and Ba 2015 have it."""

    def __init__(self, kind: str, rate: float) -> None:
        self._kind, self._rate, self._steps = kind, rate, 0
        self._first: Any = 0
        self._second: Any = 0

    def change(self, gradient: Floats) -> Floats:
        """Return what is added to the weights."""
        self._steps += 1
        if self._kind == "adam":
            self._first = 0.9 * self._first + 0.1 * gradient
            self._second = 0.999 * self._second + 0.001 * gradient**2
            mean, square = self._first / (1 - 0.9**self._steps), self._second / (1 - 0.999**self._steps)
            return (-self._rate * mean / (np.sqrt(square) + 1e-8)).astype(np.float32)
        self._first = (0.9 * self._first if self._kind == "momentum" else 0) + gradient
        return np.float32(-self._rate) * self._first


def loss_of(net: Autoencoder, weights: Floats, tests: Floats) -> float:
    """Return the mean over ``tests`` of the error relative to zeros."""
    found = []
    for samples in tests:
        codes = np.mean([net.encode(weights, row) for row in samples], axis=0, dtype=np.float32)
        mean = samples.mean(axis=0)
        error = net.decode(weights, codes, len(mean)) - mean
        found.append(float((error**2).sum() / (mean**2).sum()))
    return float(np.mean(found))


def search(samples: Floats, net: Autoencoder, kind: str, rate: float, steps: list[int]) -> list[float]:
    """Return the loss after each number of steps; NaN once training has left the finite numbers."""
    training, tests = samples[:-TESTS], samples[-TESTS::EVERY]
    weights, descent, found = net.first_weights(0), Descent(kind, rate), []
    for step in range(max(steps)):
        _, gradient = net.gradient(weights, training[step % len(training)])
        weights = weights + descent.change(gradient)
        if not np.isfinite(weights).all():
            break
        if step + 1 in steps:
            found.append(loss_of(net, weights, tests))
    return found + [float("nan")] * (len(steps) - len(found))


def bits_of(samples: Floats, channels: int) -> float:
    """Return the loss of the plain bits that take the bytes of so many channels."""
    return float(np.mean([losses(one)[f"bits-{2 * channels}"] for one in samples[-TESTS::EVERY]]))


def linear_of(samples: Floats, channels: int) -> float:
    """Return the loss of the best linear code of blocks of 16 values, fitted to the means that it is tested on."""
    means = samples[-TESTS::EVERY].mean(axis=1)
    means = means / np.linalg.norm(means, axis=1)[:, None]
    blocks = np.pad(means, ((0, 0), (0, -means.shape[1] % STRIDE))).reshape(-1, STRIDE).astype(np.float64)
    shares = np.linalg.eigvalsh(blocks.T @ blocks)
    return float(1 - shares[-channels:].sum() / shares.sum())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--record", action="store_true", help="record both tasks first, and search nothing")
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--lstm-steps", type=int, default=1150)
    parser.add_argument("--resnet-epochs", type=int, default=24)
    parser.add_argument("--task", action="append", choices=TASKS)
    parser.add_argument("--rates", default="0.001,0.003,0.01,0.03,0.1,0.3,1")
    parser.add_argument("--steps", default="300,1000,3000")
    parser.add_argument("--channels", type=int, default=4, choices=(1, 4))
    parser.add_argument("--deconvolutions", type=int, default=5)
    parser.add_argument("--optimizer", default="sgd", choices=("sgd", "momentum", "adam"))
    parser.add_argument("--scale", default="norm", choices=("norm", "raw"))
    return parser.parse_args()


def main() -> int:
    options = parse()
    tasks = options.task or [task for task in TASKS if task != RESNET or options.cifar or not options.record]
    if options.record:
        for task in tasks:
            record(options.folder, task, options.lstm_steps, options.resnet_epochs, options.cifar)
        return 0
    steps = [int(number) for number in options.steps.split(",")]
    net = Autoencoder(options.channels, deconvolutions=options.deconvolutions)
    for task in tasks:
        samples: Floats = np.load(options.folder / f"{task}.npz")["samples"]
        if options.scale == "norm":
            samples = samples / np.linalg.norm(samples.mean(axis=1), axis=1)[:, None, None]
        bits, linear = bits_of(samples, options.channels), linear_of(samples, options.channels)
        rows = []
        for rate in map(float, options.rates.split(",")):
            found = search(samples, net, options.optimizer, rate, steps)
            rows.append([f"{rate:g}", *(f"{loss:.3f}" for loss in found), f"{linear:.2f}", f"{bits:.2g}"])
            print(json.dumps({"task": task, **vars(options), "rate": rate, "losses": found, "bits": bits},
                             default=str), file=sys.stderr, flush=True)  # fmt: skip
        about = f"{task}, {options.channels} channels, {options.optimizer}, {options.scale}: rate"
        print(report.table([about, *(f"loss, {number:,} steps" for number in steps), "linear", "bits"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
