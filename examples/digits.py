"""Train a small convolutional network on scikit-learn's digits, data-parallel, with compressed gradients.

    torchrun --nproc-per-node=2 examples/digits.py --compression quantize:bits=4
    python examples/digits.py --demo        # starts two ranks itself: uncompressed, then at 4 bits, and compares

The lines marked (gradcomp) are all that a script for one process needs to become this one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional

import gradcomp.torch as gc
from gradcomp.core.topology import Topology
from gradcomp.estimate.predict import PAYLOAD, Situation, estimate, host_processor, readiness
from gradcomp.reduce.model import Network

DEMO = {"uncompressed": "none", "4 bits": "quantize:bits=4"}


class Net(nn.Module):
    """Two convolutions and two linear layers for 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(1, 32, 3, padding=1)
        self.convolution2 = nn.Conv2d(32, 64, 3, padding=1)
        self.hidden = nn.Linear(64 * 4 * 4, 256)
        self.output = nn.Linear(256, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.convolution1(images))
        x = functional.max_pool2d(functional.relu(self.convolution2(x)), 2)
        return self.output(functional.relu(self.hidden(x.flatten(1))))


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels; the same split on all ranks."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16.0
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    targets = torch.tensor(labels)
    return images[train], targets[train], images[test], targets[test]


def shard(count: int, batch: int, epoch: int, rank: int, size: int) -> Iterable[Tensor]:
    """Batches of this rank's share of one epoch: every rank shuffles alike and takes every ``size``-th sample."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    own = order[: count // size * size][rank::size]
    return (part for part in own.split(batch) if len(part) == batch)


def train(options: argparse.Namespace) -> dict[str, float]:
    gc.init()  # (gradcomp)
    torch.manual_seed(options.seed)
    images, labels, test_images, test_labels = load()
    model = Net()
    gc.broadcast_parameters(model.state_dict(), root_rank=0)  # (gradcomp)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    optimizer = gc.DistributedOptimizer(  # (gradcomp)
        optimizer, named_parameters=model.named_parameters(), compression=options.compression
    )
    seconds, loss = [], torch.tensor(0.0)
    with Progress(options.epochs, options.compression, visible=gc.rank() == 0) as progress:
        for epoch in range(options.epochs):
            for part in shard(len(images), options.batch, epoch, gc.rank(), gc.size()):
                began = time.perf_counter()
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(images[part]), labels[part])
                loss.backward()
                optimizer.step()
                seconds.append(time.perf_counter() - began)
            progress.advance(loss.item())
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    sent = optimizer.statistics()
    return {
        "accuracy": accuracy,
        "bytes_per_step": sent.wire_bytes / max(sent.steps, 1),
        "ratio": sent.ratio,
        "step_seconds": statistics.median(seconds),
        "alone_seconds": statistics.median(seconds) - sent.exposed_seconds / max(sent.steps, 1),
    }


def modelled(alone: float, ranks: int, gbits: float) -> dict[str, float]:
    """Seconds of a step of each choice, if every rank had a machine of its own: what `gradcomp estimate` predicts."""
    layers = [gc.LayerSpec(name, tuple(p.shape)) for name, p in Net().named_parameters()]
    backward = alone * 2 / 3
    network = Network(alpha=1e-4, beta=8e-9 / gbits / PAYLOAD, encode_rate=1.0, decode_rate=1.0)
    hosts = Topology(tuple(range(ranks)))
    machine = host_processor(shared=(os.cpu_count() or 1) <= ranks)
    estimates = estimate(
        Situation(layers, readiness(layers, backward), backward, alone, hosts, network, machine)
    )
    return {one.choice.how: one.step for one in estimates if one.choice.kind == "gradcomp"}


class Progress:
    """A bar over epochs, if tqdm is installed; else a line now and then."""

    def __init__(self, epochs: int, title: str, visible: bool) -> None:
        self._epochs, self._title, self._visible = epochs, title, visible
        self._done = 0
        try:
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm

            # gradcomp's lines go above the bar, not through it.
            self._lines = logging_redirect_tqdm([logging.getLogger("gradcomp")])
            self._bar = tqdm(total=epochs, desc=title, unit="epoch", disable=not visible)
        except ImportError:
            self._bar = None

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._lines.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.close()
            self._lines.__exit__(*error)

    def advance(self, loss: float) -> None:
        """One more epoch."""
        self._done += 1
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            self._bar.update()
        elif self._visible and self._done % max(1, self._epochs // 4) == 0:
            print(f"{self._title}: epoch {self._done} of {self._epochs}, loss {loss:.4f}", flush=True)


def demo(options: argparse.Namespace) -> int:
    """Train with ``--ranks`` processes, uncompressed and at 4 bits, and compare."""
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for title, compression in DEMO.items():
            path = Path(directory) / "result.json"
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *(
                    f"--nproc-per-node={options.ranks}",
                    __file__,
                    f"--compression={compression}",
                    f"--json={path}",
                ),
                *(f"--epochs={options.epochs}", f"--batch={options.batch}"),
                *(f"--lr={options.lr}", f"--seed={options.seed}"),
            ]
            threads = max(1, (os.cpu_count() or 1) // options.ranks)
            code = subprocess.call(command, env={"OMP_NUM_THREADS": str(threads), **os.environ})
            if code != 0:
                print(f"{title}: training failed with exit code {code}", file=sys.stderr)
                return 1
            results[title] = json.loads(path.read_text())
    print(f"\nscikit-learn digits, {options.ranks} ranks on this machine, {options.epochs} epochs\n")
    alone = min(r["alone_seconds"] for r in results.values())
    links = [modelled(alone, options.ranks, gbits) for gbits in (1, 10)]
    print(
        f"{'':<14}{'accuracy':>10}{'bytes sent per step':>22}{'ratio':>8}{'step time':>12}"
        f"{'modelled: 1 Gbit/s':>21}{'10 Gbit/s':>12}"
    )
    for title, r in results.items():
        print(
            f"{title:<14}{r['accuracy'] * 100:>9.2f}%{r['bytes_per_step']:>22,.0f}"
            f"{r['ratio']:>7.2f}x{r['step_seconds'] * 1e3:>9.2f} ms"
            + "".join(
                f"{link[DEMO[title]] * 1e3:>{width}.2f} ms"
                for link, width in zip(links, (18, 9), strict=True)
            )
        )
    print("\nBytes: what one rank sends, scales and headers included. Ratio: to an uncompressed exchange.")
    print(
        "Step time: measured; the ranks share one machine, where no network needs to be spared. Modelled: what\n"
        "`gradcomp estimate` predicts for a machine for each rank, with such links between them."
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--compression", default="none", help="e.g. none, bf16, quantize:bits=4 (default: none)"
    )
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="rank 0 writes its result here")
    parser.add_argument("--demo", action="store_true", help="start the ranks itself and compare with 4 bits")
    parser.add_argument("--ranks", type=int, default=2, help="processes of the demo")
    options = parser.parse_args()
    if options.demo:
        return demo(options)
    result = train(options)
    if gc.rank() == 0:
        print(
            f"{options.compression}: accuracy {result['accuracy'] * 100:.2f}%, "
            f"{result['bytes_per_step']:,.0f} bytes sent per step, ratio {result['ratio']:.2f}, "
            f"step {result['step_seconds'] * 1e3:.2f} ms"
        )
        if options.json is not None:
            options.json.write_text(json.dumps(result))
    gc.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
