"""Arguments that several benchmarks take."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import hosts
from convergence_rows import RESNET


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def add_timing(parser: argparse.ArgumentParser, blocks: int, steps: int) -> None:
    """Of those that time steps in blocks."""
    parser.add_argument("--ranks", type=positive, default=2, help="hosts, one rank each (default: 2)")
    parser.add_argument("--blocks", type=positive, default=blocks, help=f"blocks per row (default: {blocks})")
    parser.add_argument(
        "--steps", type=positive, default=steps, help=f"timed steps per block (default: {steps})"
    )
    parser.add_argument("--warmup", type=positive, default=2, help="untimed steps before them (default: 2)")


def add_training(parser: argparse.ArgumentParser, tasks: Sequence[str]) -> None:
    """Of those that train to the end, over seeds."""
    parser.add_argument("--task", choices=tasks, action="append", help="some tasks only (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="pairs (default: 3)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", choices=hosts.LINKS, help="hosts of network namespaces with such links")
    parser.add_argument("--lstm-steps", type=int, default=1000, help="of language models (default: 1000)")
    parser.add_argument("--resnet-epochs", type=int, default=18)
    parser.add_argument(
        "--data", type=Path, help="a text file (default: the text of Python's standard library)"
    )
    parser.add_argument("--cifar", type=Path, help="CIFAR-10 as .npz; without it there is no ResNet")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--resume", action="store_true", help="keep the runs that the file of --json holds")


def check_training(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program for what cannot be."""
    for name in ("data", "cifar"):
        path = getattr(options, name)
        if path is not None and not path.is_file():
            parser.error(f"--{name}: there is no file {path}")
    if options.task and RESNET in options.task and options.cifar is None:
        parser.error("--task resnet needs --cifar")
    if options.resume and options.json is None:
        parser.error("--resume needs --json")
