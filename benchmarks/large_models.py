"""Time and memory of an exchange by the size of the model, up to GPT-2 large (774 M parameters).

    python benchmarks/large_models.py [--models lstm,gpt2,gpt2-medium,gpt2-large] [--compression quantize:bits=4]

Two ranks on this host, over Gloo. A model has the shapes of its parameters and no layers that compute: backward
gives each parameter a gradient of random numbers, in the order in which a real model does, and sleeps between
them, so that it takes 1 ms for each million parameters. The processor is free meanwhile, as it is where a GPU
computes. Each model has processes of its own.

Columns
    backward   the stated time of backward, and of a step without exchange
    step       median step of the slower rank
    tail       step - step without exchange
    ns, bytes  the tail's nanoseconds for each parameter, and its peak memory in bytes for each parameter, in addition
               to parameters and gradients, on the rank that needs more
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import report
from memory import peak_bytes, settle
from options import positive
from soak import launch, resident_bytes

#: Width and number of blocks of a GPT-2.
GPT2 = {"gpt2": (768, 12), "gpt2-medium": (1024, 24), "gpt2-large": (1280, 36)}
MODELS = ("lstm", *GPT2)
SECONDS_PER_PARAMETER = 1e-9
#: Time and memory of the largest model over those of the smallest, per parameter, at most.
GROWTH_BAR = 1.15


def shapes_of(name: str) -> list[tuple[int, ...]]:
    """The shapes of a model's parameters, in the order of its forward pass."""
    if name == "lstm":
        width, words = 400, 10_000
        cell = [(4 * width, width), (4 * width, width), (4 * width,), (4 * width,)]
        return [(words, width), *cell, *cell, (words, width), (words,)]
    width, blocks = GPT2[name]
    norm = [(width,), (width,)]
    attention = [(3 * width, width), (3 * width,), (width, width), (width,)]
    feed_forward = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(50_257, width), (1_024, width), *([*norm, *attention, *norm, *feed_forward] * blocks), *norm]


def run_rank(name: str, compression: str, steps: int) -> dict[str, Any]:
    """What one rank found."""
    import torch

    import gradcomp.torch as gc

    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes_of(name)]
    count = sum(p.numel() for p in parameters)
    longest = max(p.numel() for p in parameters)
    noise = torch.randn(longest, generator=torch.Generator().manual_seed(int(os.environ["RANK"])))

    class Late(torch.autograd.Function):
        """Passes the loss on; in backward it sleeps for the parameter's share, then returns its gradient."""

        @staticmethod
        def forward(context: Any, loss: Any, parameter: Any) -> Any:
            context.parameter = parameter
            return loss.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            size = context.parameter.numel()
            time.sleep(size * SECONDS_PER_PARAMETER)
            return gradient, noise[:size].view_as(context.parameter)

    def step(optimizer: Any) -> float:
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        loss = torch.zeros((), requires_grad=True)
        for parameter in parameters:
            loss = Late.apply(loss, parameter)  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return time.perf_counter() - began

    plain = torch.optim.SGD(parameters, lr=0.0)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    alone = statistics.median(step(plain) for _ in range(steps))
    gc.init(log_level="warning")
    settle()
    before = resident_bytes()
    named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    optimizer = gc.DistributedOptimizer(plain, named, compression)
    times = [step(optimizer) for _ in range(2 + steps)][2:]
    found = {"parameters": count, "alone": alone, "step": statistics.median(times)}
    found |= {"peak": peak_bytes() - before, "layers": len(parameters)}
    gc.shutdown()
    return found


def evaluate(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    slower = max(ranks, key=lambda rank: rank["step"] - rank["alone"])
    count, tail = slower["parameters"], slower["step"] - slower["alone"]
    peak = max(rank["peak"] for rank in ranks)
    return slower | {"tail": tail, "ns": 1e9 * tail / count, "peak_per_parameter": peak / count}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--compression", default="quantize:bits=4")
    parser.add_argument("--steps", type=positive, default=3)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        print(json.dumps(run_rank(options.rank, options.compression, options.steps)))
        return 0
    machine = report.machine()
    print(report.describe(machine))
    arguments = [__file__, "--steps", str(options.steps), "--compression", options.compression]
    found = {name: evaluate(launch([*arguments, "--rank", name])) for name in options.models}
    cells = [
        [
            name,
            f"{1e-6 * one['parameters']:.1f}",
            one["layers"],
            f"{1e3 * SECONDS_PER_PARAMETER * one['parameters']:.0f}",
            f"{1e3 * one['alone']:.0f}",
            f"{1e3 * one['step']:.0f}",
            f"{1e3 * one['tail']:.0f}",
            f"{one['ns']:.2f}",
            f"{one['peak_per_parameter']:.2f}",
        ]
        for name, one in found.items()
    ]
    headers = [
        "model",
        "M parameters",
        "layers",
        "backward ms",
        "alone ms",
        "step ms",
        "tail ms",
        "ns",
        "bytes",
    ]
    print(report.table(headers, cells))
    first, last = found[options.models[0]], found[options.models[-1]]
    for what, key in (("time", "ns"), ("memory", "peak_per_parameter")):
        growth = last[key] / first[key]
        verdict = "met" if growth <= GROWTH_BAR else "MISSED"
        print(
            f"bar: {what} per parameter, {options.models[-1]} over {options.models[0]}: {growth:.2f}, {verdict}"
        )
    figures = {"benchmark": "large_models", "machine": machine, "compression": options.compression}
    report.write_json(options.json, {**figures, "rows": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
