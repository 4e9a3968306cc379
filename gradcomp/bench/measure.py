"""Measures the steps of all choices, then of the fastest ones in turn, A B A B, in the job's own processes.

A block of a choice wraps a copy of the module, takes a few steps that do not count and some that do, and leaves
nothing behind. All ranks compute the same numbers of steps, from predictions and from what all ranks measured.
"""

from __future__ import annotations

import copy
import gc as garbage
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradcomp.torch as gc
from gradcomp.bench.workload import Workload, make_workload
from gradcomp.control.distortion.round_trip import Rates
from gradcomp.core.errors import ConfigError
from gradcomp.estimate.choices import CHOICES, Choice
from gradcomp.estimate.predict import (
    Estimate,
    Situation,
    device_processor,
    estimate,
    host_processor,
    readiness,
    reduction,
)
from gradcomp.exchange.reports import measure, shift
from gradcomp.job import runtime

#: Steps of a block that do not count: exchange buckets are re-ordered, and memory is allocated.
_WARMUP = 3
#: The first round, of all choices, may take this share of the time. The rest goes to the choices of gradcomp whose step
#: is at most this many times the fastest one's.
_FIRST_ROUND, _CLOSE = 0.5, 1.25
_ROUNDS = 4  # of those, which alternate
_ALONE_STEPS = 20  # without exchange
_MOST_STEPS = 20  # of a block
#: The probe of the link sends messages that take about so long, of at most so many bytes.
_PROBE_SECONDS, _PROBE_BYTES = 0.1, 1 << 24
#: Building and leaving a block takes about so long.
_BLOCK_SECONDS = 0.5

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """Holds the situation as it was measured, and by choice the estimate and the measured step.

    ``steps`` lacks the choices for which no time was left.
    """

    situation: Situation
    estimates: Sequence[Estimate]
    steps: dict[str, float]

    @property
    def outcomes(self) -> list[Estimate]:
        """Returns the estimates with measured steps in the place of predicted ones."""
        return [
            replace(
                one,
                step=self.steps[one.choice.key],
                exposed=self.steps[one.choice.key] - self.situation.alone,
            )
            for one in self.estimates
            if one.choice.key in self.steps
        ]


def run(
    model: str, backward: float | None, step: float | None, seconds: float, progress: Progress
) -> tuple[Measured, int]:
    """Joins the job, measures all choices, leaves the job, and returns what was found and this rank's number.

    Args:
        model: what ``--model`` names; see :func:`make_workload`.
        backward: seconds of a backward pass, for a model that gives shapes only.
        step: seconds of a step without exchange, or None for 1.5 backward passes.
        seconds: how long the measurement may take, apart from the first steps.
        progress: receives the name of each part before it begins, on rank 0.

    Raises:
        ConfigError: for a job of one rank, ranks that did not meet through torch.distributed, and a model without a
            loss.
    """
    gc.init(log_level="error")
    try:
        return _measured(model, backward, step, seconds, progress), gc.rank()
    finally:
        gc.shutdown()


def _measured(
    model: str, backward: float | None, step: float | None, seconds: float, progress: Progress
) -> Measured:
    if gc.size() == 1:
        raise ConfigError(
            "one rank exchanges nothing: start the command on all ranks, as torchrun ... -m gradcomp bench ..."
        )
    if not dist.is_initialized():
        raise ConfigError(f"DDP needs torchrun, and the ranks met by {runtime.current().launch.launcher}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", gc.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    workload = make_workload(model, backward, step, device)
    say: Progress = progress if gc.rank() == 0 else lambda _: None
    say("a step without exchange")
    alone, took, ready = _alone(workload, device)
    say("the network")
    situation = _situation(workload, alone, took, ready, device)
    estimates = estimate(situation)
    blocks: dict[str, list[float]] = {one.choice.key: [] for one in estimates}

    def measure_in_turn(expected: dict[str, float], rounds: int, budget: float) -> dict[str, float]:
        """Returns the median step of the slowest rank by choice, as far as a choice was ever measured."""
        counts = _steps_that_fit(expected, rounds, budget)
        for _ in range(rounds):
            for choice in CHOICES:
                if counts.get(choice.key):
                    say(choice.title)
                    blocks[choice.key].extend(_block(choice, workload, counts[choice.key], device))
        own = {key: statistics.median(times) for key, times in blocks.items() if times}
        every = gc.allgather_object(own)
        return {key: max(rank[key] for rank in every) for key in own}

    steps = measure_in_turn({one.choice.key: one.step for one in estimates}, 1, _FIRST_ROUND * seconds)
    own = {
        choice.key: steps[choice.key]
        for choice in CHOICES
        if choice.kind == "gradcomp" and choice.key in steps
    }
    close = {key: step for key, step in own.items() if step <= _CLOSE * min(own.values())}
    if len(close) > 1:
        steps = measure_in_turn(close, _ROUNDS, (1 - _FIRST_ROUND) * seconds)
    return Measured(situation, estimates, steps)


def _steps_that_fit(expected: dict[str, float], rounds: int, seconds: float) -> dict[str, int]:
    """Returns the steps of a block by choice: all take equally long, and too long ones are left out (0)."""
    share = seconds / rounds / len(expected) - _BLOCK_SECONDS
    counts = {key: min(max(int(share / step) - _WARMUP, 0), _MOST_STEPS) for key, step in expected.items()}
    # What the short ones leave is enough for one step of some that are too long.
    left = seconds - rounds * sum(
        _BLOCK_SECONDS + (count + _WARMUP) * expected[key] for key, count in counts.items() if count
    )
    for key, step in sorted(expected.items(), key=lambda item: item[1]):
        needs = rounds * (_BLOCK_SECONDS + (1 + _WARMUP) * step)
        if not counts[key] and needs <= left:
            counts[key], left = 1, left - needs
    return counts


# ------------------------------------------------------------------------------------------ one choice


def _block(choice: Choice, workload: Workload, steps: int, device: torch.device) -> list[float]:
    """Returns the seconds of each step that counts."""
    module = copy.deepcopy(workload.module)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.0, momentum=0.9)
    wrapped: nn.Module = module
    if choice.kind == "ddp":
        wrapped = _ddp(choice, module, device)
    else:
        optimizer = gc.DistributedOptimizer(
            optimizer,
            named_parameters=module.named_parameters(),
            compression=choice.how,
            reduction=reduction(runtime.current().topology),
        )
    times = _steps(wrapped, optimizer, workload, steps + _WARMUP, device)[_WARMUP:]
    if choice.kind == "gradcomp":
        gc.shutdown()  # releases the exchanger, and what it keeps by layer
        gc.init(log_level="error")
    del wrapped, optimizer, module
    garbage.collect()
    return times


def _ddp(choice: Choice, module: nn.Module, device: torch.device) -> nn.Module:
    """Wraps the module in DDP with the hook of the choice; ranks have equal parameters already."""
    powersgd = choice.how == "powersgd"
    # With several buckets on Gloo the PowerSGD hook aborts or hangs, so it gets one.
    size = 1 << 12 if powersgd else None
    wrapped = DistributedDataParallel(module, init_sync=False, bucket_cap_mb=size)
    if powersgd:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif choice.how == "half":  # DDP refuses bfloat16 on CPUs
        name = "bf16_compress_hook" if device.type == "cuda" else "fp16_compress_hook"
        wrapped.register_comm_hook(None, getattr(default_hooks, name))
    return wrapped


def _steps(
    module: nn.Module, optimizer: Any, workload: Workload, count: int, device: torch.device
) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        optimizer.zero_grad()
        workload.loss(module).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        _wait(device)
        times.append(time.perf_counter() - began)
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ------------------------------------------------------------------------------------------ the situation


def _alone(
    workload: Workload, device: torch.device
) -> tuple[float, float, np.ndarray[Any, np.dtype[np.float64]]]:
    """Returns the seconds of a step without exchange, those of backward, and by layer when its gradient is there.

    On a GPU the kernels' end is not seen, so gradients are spread over backward as an estimate does it.
    """
    module = copy.deepcopy(workload.module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0, momentum=0.9)
    parameters = [p for p in module.parameters() if p.requires_grad]
    steps, begins, ends = [], [], []
    ready: list[list[float]] = [[] for _ in parameters]
    for times, parameter in zip(ready, parameters, strict=True):
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _, times=times: times.append(time.perf_counter())
        )
    for _ in range(_WARMUP + _ALONE_STEPS):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = workload.loss(module)
        _wait(device)
        begins.append(time.perf_counter())
        loss.backward()  # type: ignore[no-untyped-call]
        _wait(device)
        ends.append(time.perf_counter())
        optimizer.step()
        _wait(device)
        steps.append(time.perf_counter() - began)
    middle = slice(_WARMUP, None)
    backward = float(np.median(np.subtract(ends, begins)[middle]))
    if device.type == "cuda":
        found = readiness(workload.layers, backward)
    else:
        absent = [len(times) != len(begins) for times in ready]
        found = np.array(
            [
                backward if missing else float(np.median(np.subtract(times, begins)[middle]))
                for times, missing in zip(ready, absent, strict=True)
            ]
        )
    latest = np.max(gc.allgather_object(found.tolist()), axis=0)
    return _slowest(statistics.median(steps[middle])), _slowest(backward), latest


def _situation(
    workload: Workload, alone: float, backward: float, ready: Any, device: torch.device
) -> Situation:
    job = runtime.current()
    transport = job.make_group(job.everyone)
    try:
        network = measure(transport, job.topology)
        nbytes = 1 << 20
        seconds = shift(transport, nbytes, repeats=2)
        while nbytes < _PROBE_BYTES and _slowest(seconds) < _PROBE_SECONDS:
            nbytes *= 2
            seconds = shift(transport, nbytes, repeats=2)
        beta = _slowest(seconds) / nbytes
    finally:
        transport.close()
    if len(job.topology.leaders) > 1:
        network = replace(network, beta=beta)
    processor = device_processor() if device.type == "cuda" else host_processor(job.shares_core)
    # The slowest rank counts, and all ranks go on from the same figures.
    told = gc.allgather_object({key: [one.encode, one.decode] for key, one in processor.rates.items()})
    rates = {key: Rates(*np.min([rank[key] for rank in told], axis=0).tolist()) for key in processor.rates}
    shared = any(gc.allgather_object(processor.shared))
    processor = replace(processor, rates=rates, shared=shared)
    return Situation(workload.layers, ready, backward, alone, job.topology, network, processor)


def _slowest(seconds: float) -> float:
    return float(max(gc.allgather_object(seconds)))
