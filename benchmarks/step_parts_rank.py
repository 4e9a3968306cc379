"""Where a step's time goes, seen by one rank: rows in alternation, with processor time by thread and spans by phase."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpu_by_thread
import models
import numpy as np
from step_rank import BATCH, LENGTH, Task, Trainer, make_trainer, measure_link
from step_rows import DDP, IDEAL, ROWS, Row

#: Bytes of the arrays whose copy shows the bandwidth of one core's memory.
COPIED_BYTES = 64 << 20
#: Spans that are kept, more than a block of steps has.
SPANS = 1 << 17
#: Steps in which calls on the engine's thread are counted.
COUNTED_STEPS = 3


@dataclass(frozen=True)
class Parts:
    """What every rank is told to do: rows of one compression, by elements of an exchange bucket."""

    compression: str
    slices: tuple[int, ...]
    blocks: int
    steps: int
    warmup: int
    seed: int
    data: str | None

    @staticmethod
    def from_json(text: str) -> Parts:
        data = json.loads(text)
        return Parts(**{**data, "slices": tuple(data["slices"])})


def run_rank(task: Parts, out: Path) -> None:
    """Everything one rank does; writes what it found to a file."""
    import torch
    import torch.distributed as dist

    import gradcomp.torch as gc
    from gradcomp.job import runtime

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {"link": measure_link(rank, world), "copy_bytes_per_second": copy_rate()}
    gc.init(seed=task.seed, trace_spans=SPANS)
    state = runtime.current()
    torch.manual_seed(task.seed)
    initial, text = models.WordLSTM(), models.load_text(Path(task.data) if task.data else None)
    shape = Task((), task.blocks, task.steps, task.warmup, task.seed, task.data, {}, False, None)
    trainers = {
        row.key: make_trainer(row, copy.deepcopy(initial), text, rank, shape)
        for row in ROWS
        if row.key in (IDEAL, DDP)
    }
    for elements in task.slices:
        # One process has exchangers of several settings here; a job has one setting.
        state.config = dataclasses.replace(state.config, slice_elements=elements)
        row = Row(str(elements), str(elements), "gradcomp", task.compression)
        trainers[row.key] = make_trainer(row, copy.deepcopy(initial), text, rank, shape)
    rows: dict[str, dict[str, Any]] = {key: {"seconds": [], "threads": [], "phases": []} for key in trainers}
    for _ in range(task.blocks):
        for key, trainer in trainers.items():
            run_block(trainer, task, rows[key], dist.barrier)
    for key, trainer in trainers.items():
        if trainer.row.kind == "gradcomp":
            buckets = trainer.optimizer.buckets()
            rows[key] |= {"buckets": len(buckets), "wire_bytes": trainer.wire_bytes() / trainer_steps(task)}
            rows[key]["calls"] = count_calls(trainer) / len(buckets)
    found |= {"rows": rows, "parameters": sum(p.numel() for p in initial.parameters()), "text": text.source}
    found["batch"] = [BATCH, LENGTH]
    out.with_name(f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    gc.shutdown()
    dist.destroy_process_group()


def trainer_steps(task: Parts) -> int:
    return task.blocks * (task.warmup + task.steps)


def run_block(trainer: Trainer, task: Parts, row: dict[str, Any], barrier: Any) -> None:
    for _ in range(task.warmup):
        trainer.step()
    barrier()
    before, since = cpu_by_thread.seconds(), time.perf_counter()
    for _ in range(task.steps):
        began = time.perf_counter()
        trainer.step()
        row["seconds"].append(time.perf_counter() - began)
    used = cpu_by_thread.difference(before)
    row["threads"].append({name: [each.seconds, each.wakeups] for name, each in used.items()})
    row["phases"].append(phase_seconds(trainer, since))
    barrier()


def phase_seconds(trainer: Trainer, since: float) -> Counter[str]:
    """Seconds of the spans that began after ``since``, by phase, and in which any round was under way."""
    totals: Counter[str] = Counter()
    if trainer.row.kind != "gradcomp":
        return totals
    spans = trainer.optimizer._exchanger_or_none().pipeline.trace.spans()
    ends = since
    for span in sorted((span for span in spans if span.begin > since), key=lambda span: span.begin):
        totals[span.name] += span.end - span.begin
        if span.name == "send":
            totals["under way"] += max(0.0, span.end - max(span.begin, ends))
            ends = max(ends, span.end)
    return totals


def count_calls(trainer: Trainer) -> float:
    """Calls of Python functions on the engine's thread in a step."""
    from gradcomp.exchange.thread import Progress

    counts: list[int] = []
    poll = Progress.poll

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        if event == "call":
            counts[-1] += 1

    def counted(self: Progress) -> Any:
        sys.setprofile(profile)
        try:
            return poll(self)
        finally:
            sys.setprofile(None)

    Progress.poll = counted  # type: ignore[method-assign]
    try:
        for _ in range(COUNTED_STEPS):
            counts.append(0)
            trainer.step()
    finally:
        Progress.poll = poll  # type: ignore[method-assign]
    return statistics.median(counts)


def copy_rate() -> float:
    """Bytes read and written per second when one core copies an array that no cache holds."""
    source, target = np.ones(COPIED_BYTES, np.uint8), np.zeros(COPIED_BYTES, np.uint8)
    times = [time.perf_counter()]
    for _ in range(9):
        np.copyto(target, source)
        times.append(time.perf_counter())
    return 2 * COPIED_BYTES / min(b - a for a, b in itertools.pairwise(times))
