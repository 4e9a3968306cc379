"""TensorFlow beside PyTorch: the exchange of 10.6 M gradients, and whole training steps of the word LSTM. Needs root.

    python benchmarks/tf_step.py                       # two hosts, links of 1 Gbit/s
    python benchmarks/tf_step.py --link unshaped --blocks 6 --json tf_step.json

One rank per host, on one core, with one thread per framework's pool. All rows live in the same processes and alternate
in blocks of steps: A B C A B C ... Both frontends use the same engine over the same transport, torch.distributed. A
figure is the median over all steps of a row but the first of each block, for the slowest rank.

The exchange alone
    Given gradients of the LSTM's shapes become means; nothing else is computed. PyTorch: from the beginning of a
    backward pass that hands them out until it returns. TensorFlow: one call of a tf.function with them as inputs. The
    bar is at most 1.3 x PyTorch's.

Whole steps
    TensorFlow's are a tf.function: forward, gradients (the embedding's as a dense tensor), SGD with momentum through a
    distributed Keras optimizer. "x none" is relative to the uncompressed exchange of the same framework.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hosts
import report
from options import add_timing

COMPRESSIONS = {
    "none": "none",
    "8 bits": "quantize:bits=8",
    "4 bits": "quantize:bits=4",
    "PowerSGD, rank 4": "powersgd:rank=4",
    "TopK 1%": "topk:density=0.01",
}
EXCHANGED = ("none", "4 bits", "PowerSGD, rank 4", "TopK 1%")
BAR = 1.3
BATCH, LENGTH, RATE, MOMENTUM = 4, 14, 0.2, 0.9


@dataclass(frozen=True)
class Task:
    """What every rank is told to do."""

    blocks: int
    steps: int
    warmup: int
    data: str | None


@dataclass
class Row:
    """One thing that is timed."""

    framework: str
    what: str  # "exchange" or "step"
    compression: str
    run: Callable[[], None]
    prepare: Callable[[], None] = lambda: None
    statistics: Callable[[], Any] | None = None


# ------------------------------------------------------------------------------------------------ one rank


def torch_rows(initial: Any, text: Any, rank: int) -> list[Row]:
    import copy

    import torch

    import gradcomp.torch as gc

    def exchange(name: str) -> Row:
        model = copy.deepcopy(initial)
        parameters = list(model.parameters())
        given = [torch.randn_like(p) * 0.01 for p in parameters]
        lent = [g.clone() for g in given]

        class HandOut(torch.autograd.Function):
            @staticmethod
            def forward(_: Any, *__: Any) -> Any:
                return torch.zeros((), requires_grad=True)

            @staticmethod
            def backward(_: Any, *__: Any) -> Any:
                return tuple(g.detach() for g in lent)  # a gradient that nobody else holds is not copied

        sgd = torch.optim.SGD(parameters, lr=0.0)
        opt = gc.DistributedOptimizer(sgd, model.named_parameters(), COMPRESSIONS[name])

        def prepare() -> None:
            opt.zero_grad()
            for mine, value in zip(lent, given, strict=True):
                mine.copy_(value)

        def run() -> None:
            HandOut.apply(*parameters).backward()

        def settle() -> None:
            if parameters[0].grad is not None:
                opt._gradcomp.commit()
            prepare()

        return Row("PyTorch", "exchange", name, run, settle, opt.statistics)

    def step(name: str | None) -> Row:
        model = copy.deepcopy(initial)
        opt: Any = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        if name is not None:
            opt = gc.DistributedOptimizer(opt, model.named_parameters(), COMPRESSIONS[name])
        batches = text.batches(rank, BATCH, LENGTH, 0)

        def run() -> None:
            tokens, targets = next(batches)
            opt.zero_grad()
            model(tokens, targets).backward()
            opt.step()

        return Row("PyTorch", "step", name or "no exchange", run, statistics=name and opt.statistics)

    return [*(exchange(name) for name in EXCHANGED), *(step(name) for name in (None, *COMPRESSIONS))]


def tensorflow_rows(initial: Any, text: Any, rank: int) -> list[Row]:
    import keras
    import numpy as np
    import tensorflow as tf

    import gradcomp.tf as gc
    from gradcomp.job.settings import Arguments
    from gradcomp.tf.exchange import Exchange

    shapes = [tuple(p.shape) for p in initial.parameters()]

    def exchange(name: str) -> Row:
        draw = np.random.default_rng(rank)
        variables = [tf.Variable(tf.zeros(shape), name=f"layer{i}") for i, shape in enumerate(shapes)]
        given = [tf.constant(draw.normal(size=shape).astype("f") * 0.01) for shape in shapes]
        made = Exchange(variables, Arguments(COMPRESSIONS[name]))

        @tf.function
        def means(*gradients: Any) -> Any:
            return made.exchange(gradients)

        def run() -> None:
            means(*given)

        return Row("TensorFlow", "exchange", name, run, statistics=lambda: made.exchanger.pipeline.statistics)

    def step(name: str | None) -> Row:
        keras.utils.set_random_seed(0)
        vocabulary, width = initial.embedding.weight.shape
        model = keras.Sequential(
            [
                keras.layers.Input((LENGTH,), dtype="int32"),
                keras.layers.Embedding(vocabulary, width),
                keras.layers.LSTM(width, return_sequences=True, unroll=True),
                keras.layers.LSTM(width, return_sequences=True, unroll=True),
                keras.layers.Dense(vocabulary),
            ]
        )
        opt: Any = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
        if name is not None:
            opt = gc.DistributedOptimizer(opt, compression=COMPRESSIONS[name], sparse_as_dense=True)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        batches = text.batches(rank, BATCH, LENGTH, 0)

        @tf.function(jit_compile=False)
        def train(tokens: Any, targets: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(targets, model(tokens, training=True))
            opt.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        def run() -> None:
            tokens, targets = next(batches)
            train(tf.constant(tokens.numpy(), tf.int32), tf.constant(targets.numpy(), tf.int32)).numpy()

        return Row("TensorFlow", "step", name or "no exchange", run, statistics=name and opt.statistics)

    return [*(exchange(name) for name in EXCHANGED), *(step(name) for name in (None, *COMPRESSIONS))]


def run_rank(task: Task, out: Path) -> None:
    """Everything one rank does; writes what it found to a file."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import models
    import tensorflow as tf
    import torch
    import torch.distributed as dist

    import gradcomp.torch as gc

    torch.set_num_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    dist.init_process_group("gloo")
    gc.init()
    torch.manual_seed(0)
    initial = models.WordLSTM()
    text = models.load_text(Path(task.data) if task.data else None)
    # Frameworks alternate row by row.
    pairs = zip(torch_rows(initial, text, gc.rank()), tensorflow_rows(initial, text, gc.rank()), strict=True)
    rows = [row for pair in pairs for row in pair]
    seconds: list[list[float]] = [[] for _ in rows]
    for _ in range(task.blocks):
        for row, times in zip(rows, seconds, strict=True):
            dist.barrier()
            for number in range(task.warmup + task.steps):
                row.prepare()
                began = time.perf_counter()
                row.run()
                if number >= task.warmup:
                    times.append(time.perf_counter() - began)
    found = []
    for row, times in zip(rows, seconds, strict=True):
        counted = row.statistics() if row.statistics else None
        found.append(
            {
                "framework": row.framework,
                "what": row.what,
                "compression": row.compression,
                "seconds": statistics.median(times),
                "wire_bytes": counted.wire_bytes / counted.steps if counted else 0.0,
            }
        )
    parameters = sum(p.numel() for p in initial.parameters())
    out.with_name(f"{gc.rank()}.json").write_text(json.dumps({"parameters": parameters, "rows": found}))
    dist.barrier()
    gc.shutdown()
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------ the table


def evaluate(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The slowest rank's figures, and what they are relative to."""
    rows = [
        {**ranks[0], "seconds": max(rank["seconds"] for rank in ranks)}
        for ranks in zip(*(rank["rows"] for rank in found), strict=True)
    ]
    by_key = {(row["framework"], row["what"], row["compression"]): row["seconds"] for row in rows}
    for row in rows:
        row["x_torch"] = row["seconds"] / by_key["PyTorch", row["what"], row["compression"]]
        row["x_none"] = row["seconds"] / by_key[row["framework"], row["what"], "none"]
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    """One table, the exchange first."""
    cells = [
        [
            f"{row['framework']}, {row['what']}: {row['compression']}",
            f"{1e3 * row['seconds']:.1f}",
            f"{row['wire_bytes'] / 1e6:.2f}" if row["wire_bytes"] else None,
            f"{row['x_none']:.3f}",
            f"{row['x_torch']:.2f}" if row["framework"] == "TensorFlow" else None,
        ]
        for row in sorted(rows, key=lambda row: row["what"])
    ]
    return report.table(["row", "ms", "MB sent", "x none", "x PyTorch"], cells)


def verdict(rows: list[dict[str, Any]]) -> list[str]:
    """The bar, in words."""
    timed = [row for row in rows if row["what"] == "exchange" and row["framework"] == "TensorFlow"]
    return [
        f"exchange, {row['compression']}: {row['x_torch']:.2f} x PyTorch's, "
        f"bar {BAR}: {'met' if row['x_torch'] <= BAR else 'NOT met'}"
        for row in timed
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link", choices=hosts.LINKS, default="1gbit")
    add_timing(parser, blocks=6, steps=6)
    parser.add_argument(
        "--data", type=Path, help="a text file (default: the text of Python's standard library)"
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = hosts.parse(parser, lambda task, out: run_rank(Task(**json.loads(task)), out))
    hosts.exit_on_termination()
    task = Task(options.blocks, options.steps, options.warmup, options.data and str(options.data.resolve()))
    machine = report.machine()
    print(report.describe(machine))
    try:
        found = hosts.run_task(hosts.Hosts(options.ranks, options.link), __file__, task)
    except hosts.HostsError as error:
        print(error, file=sys.stderr)
        return 2
    rows = evaluate(found)
    print(
        f"{options.ranks} hosts, {options.link} links; {found[0]['parameters']:,} parameters; {task.blocks} blocks of "
        f"{task.steps} steps after {task.warmup}"
    )
    print(show(rows))
    print("\n".join(verdict(rows)))
    report.write_json(
        options.json,
        {
            "benchmark": "tf_step",
            "machine": machine,
            "link": options.link,
            "ranks": options.ranks,
            "rows": rows,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
