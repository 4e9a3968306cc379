"""What every rank of benchmarks/local_steps.py does: it trains a row, or times the rounds of rows in turns."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hosts
import torch
import torch.distributed as dist
from languages import GPT, HELD_OUT, LANGUAGES, Language
from step_rank import measure_link
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import gradcomp.torch as gc

_PAIRS = LANGUAGES["pairs"]
#: As in both papers; without it, runs at more than 1e-3 end at a plateau.
CLIP_NORM = 1.0
#: Words of the held-out text that a curve is made of; the loss at the end is that of HELD_OUT of them.
CURVE_WORDS = 8_192


@dataclass(frozen=True)
class Row:
    """How ranks exchange: a compression in every step, or a method of local steps after every ``every`` steps.

    ``compression="ddp-fp16"``: DistributedDataParallel with its float16 hook; torch refuses the bfloat16 one without
    CUDA. ``method``: "average", "diloco" or "sparseloco", with further arguments ``given``.
    """

    compression: str | None = None
    method: str | None = None
    every: int = 1
    delay: int = 0
    given: dict[str, float] = field(default_factory=dict)
    #: Of a GPT of width 64, over 3,000 steps of one seed: of 2e-3 and 4e-3; DiLoCo's of 5e-4, 1e-3 and 2e-3.
    rate: float = 4e-3

    def make(self, model: GPT) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """The module to call in a step, and its optimizer."""
        adamw = torch.optim.AdamW(model.parameters(), **{**_PAIRS.adamw, "lr": self.rate})
        if self.method is not None:
            make = {"average": gc.LocalSteps, "diloco": gc.DiLoCo, "sparseloco": gc.SparseLoCo}[self.method]
            return model, make(model, adamw, self.every, delay=self.delay, **self.given)
        if self.compression == "ddp-fp16":
            ddp = DistributedDataParallel(model)
            ddp.register_comm_hook(None, fp16_compress_hook)
            return ddp, adamw
        if self.compression is not None:
            return model, gc.DistributedOptimizer(adamw, model.named_parameters(), self.compression)
        return model, adamw


ROWS = {
    "alone": Row(),
    "ddp-fp16": Row("ddp-fp16"),
    "every-4bit": Row("quantize:bits=4,bucket_size=128"),
    "every-2bit": Row("quantize:bits=2,bucket_size=128,rounding=nearest"),
    "every-topk1": Row("topk:density=0.01,values=[quantize:bits=4,bucket_size=64,rounding=nearest]"),
    "every-powersgd4": Row("powersgd:rank=4"),
    "average-15": Row(method="average", every=15),
    "average-30": Row(method="average", every=30),
    "diloco-15": Row(method="diloco", every=15, rate=1e-3),
    "diloco-30": Row(method="diloco", every=30, rate=1e-3),
    "sparseloco-15": Row(method="sparseloco", every=15),
    "sparseloco-30": Row(method="sparseloco", every=30),
    "sparseloco-15-outer2": Row(method="sparseloco", every=15, given={"density": 0.03, "outer_lr": 2.0}),
    "sparseloco-30-outer2": Row(method="sparseloco", every=30, given={"density": 0.03, "outer_lr": 2.0}),
    "sparseloco-15-delay1": Row(method="sparseloco", every=15, delay=1),
    "sparseloco-30-delay1": Row(method="sparseloco", every=30, delay=1),
}


def row_of(name: str) -> Row:
    """The row of a name, which may end in another learning rate: "diloco-15@2e-3"; KeyError if there is none."""
    base, _, rate = name.partition("@")
    return replace(ROWS[base], rate=float(rate)) if rate else ROWS[base]


@dataclass(frozen=True)
class Size:
    """The width of the GPT, and how many sequences a rank's batch has."""

    width: int
    sequences: int

    @property
    def language(self) -> Language:
        return replace(_PAIRS, width=self.width, batch=self.sequences)

    @property
    def tokens(self) -> int:
        """Those of a rank's batch."""
        return self.sequences * _PAIRS.length


@dataclass(frozen=True)
class Training:
    """A row to be trained, from a seed; the loss is taken every ``eval_every`` steps."""

    row: str
    size: Size
    steps: int
    warmup: int
    seed: int
    data: str | None
    eval_every: int

    def rate_factor(self, step: int) -> float:
        """The part of the learning rate of a step: it rises for ``warmup`` steps, then falls as a cosine to 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return (1 + math.cos(math.pi * (step - self.warmup) / (self.steps - self.warmup))) / 2


@dataclass(frozen=True)
class Timing:
    """Rows whose rounds are timed in turns. A row without rounds is timed in ``steps`` steps."""

    rows: tuple[str, ...]
    size: Size
    blocks: int
    steps: int
    data: str | None


class Trainer:
    """A row, its model and its batches."""

    def __init__(self, row: Row, size: Size, data: str | None, rank: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.language = size.language
        self.model = GPT(self.language)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.module, self.optimizer = row.make(self.model)
        self.text = self.language.text(Path(data) if data else None)
        self.batches: Iterator[tuple[Tensor, Tensor]] = self.text.batches(
            rank, self.language.batch, self.language.length, seed
        )

    def step(self) -> None:
        tokens, targets = next(self.batches)
        self.optimizer.zero_grad()
        self.module(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()

    @property
    def sent_bytes(self) -> int:
        """By gradcomp's own count."""
        read: Callable[[], Any] | None = getattr(self.optimizer, "statistics", None)
        return 0 if read is None else read().wire_bytes

    @torch.no_grad()
    def held_out(self, words: int) -> float:
        batches = self.text.test_batches(64, self.language.length, words)
        return statistics.mean(self.model(tokens, targets).item() for tokens, targets in batches)


def run_rank(task: Training | Timing, out: Path) -> None:
    """Do a task; write what was found to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gc.init(log_level="warning", seed=getattr(task, "seed", 0))
    found = train(task, rank) if isinstance(task, Training) else time_rounds(task, rank)
    out.with_name(f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    gc.shutdown()
    dist.destroy_process_group()


def train(task: Training, rank: int) -> dict[str, Any]:
    trainer = Trainer(row_of(task.row), task.size, task.data, rank, task.seed)
    schedule = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, task.rate_factor)
    curve = []
    for step in range(1, task.steps + 1):
        trainer.step()
        schedule.step()
        if step % task.eval_every == 0:
            curve.append([step, trainer.held_out(CURVE_WORDS) if rank == 0 else 0.0])
    return {
        "loss": trainer.held_out(HELD_OUT) if rank == 0 else 0.0,
        "curve": curve,
        "bytes_per_step": trainer.sent_bytes / task.steps,
        "parameters": trainer.parameters,
        "tokens": task.size.tokens,
    }


def time_rounds(task: Timing, rank: int) -> dict[str, Any]:
    world = dist.get_world_size()
    links = [measure_link(rank, world)] * world
    dist.all_gather_object(links, links[rank])
    trainers = {name: Trainer(row_of(name), task.size, task.data, rank, 0) for name in task.rows}
    seconds: dict[str, list[float]] = {name: [] for name in task.rows}
    sent: dict[str, list[float]] = {name: [] for name in task.rows}
    for block in range(task.blocks + 1):
        for name, trainer in trainers.items():
            row = row_of(name)
            steps = row.every if row.method else task.steps
            dist.barrier()
            before, begin = hosts.Traffic.now(), time.perf_counter()
            for _ in range(steps):
                trainer.step()
            # With a delay a round ends with an exchange under way, and has waited for that of the round before.
            took = time.perf_counter() - begin
            dist.barrier()
            if block:  # the first one warms up
                seconds[name].append(took / steps)
                sent[name].append((hosts.Traffic.now() - before).sent_bytes / steps)
    return {
        "link": links[0],
        "seconds": seconds,
        "sent": sent,
        "parameters": next(iter(trainers.values())).parameters,
        "tokens": task.size.tokens,
    }
