"""What logging costs a step: compression_metrics(), each logger, and a timeline; two ranks of one host.

    python benchmarks/logging_cost.py [--steps 1000] [--every N] [--json PATH]

The ranks train a small network, whose steps are short, with 4 bits. One row after another, rank 0 calls a logger after
every step, which logs after every so many of them: its default, or --every. `logs` is the median time of a call that
logs and `else` that of one that does not, on the training thread, in microseconds. `share` is all calls of the row
together over the time of its steps. `cpu` is the processor time of this process for one call that logs, whichever
thread spends it, in microseconds, and `cpu share` that time over the steps between two such calls. W&B's own process is
not in it. `timeline` is one span that is recorded; its shares are those of the spans of a step, which other threads
record and write. The bar of loggers is 0.5% for both shares. A logger whose library is not installed has no row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import report
from collectives import launch_ranks

MOST_SHARE = 0.005
_BURST = 20


Row = tuple[str, int, Callable[[int], Any], Callable[[], Any]]


def loggers(opt: Any, every: int | None, folder: str) -> Iterator[Row]:
    """Name, steps between two calls that log, the call after a step, and what waits for its work in the background."""
    given = {} if every is None else {"every": every}
    every = every or 50
    yield "compression_metrics()", every, lambda step: step % every or opt.compression_metrics(), lambda: None
    if find_spec("tensorboard"):
        from torch.utils.tensorboard import SummaryWriter

        from gradcomp.integrations import tensorboard

        writer = SummaryWriter(folder)
        log = tensorboard.CompressionLogger(opt, writer, **given)
        yield "TensorBoard", log.every, log, writer.flush
        writer.close()
    if find_spec("wandb"):
        import wandb

        from gradcomp.integrations import wandb as ours

        with wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True)) as run:
            log = ours.CompressionLogger(opt, run, **given)
            yield "Weights and Biases", log.every, log, lambda: time.sleep(1)
    if find_spec("mlflow"):
        import mlflow

        from gradcomp.integrations import mlflow as theirs

        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        with mlflow.start_run():
            log = theirs.CompressionLogger(opt, **given)
            yield "MLflow", log.every, log, mlflow.flush_async_logging


def measure(steps: int, every: int | None) -> list[dict[str, Any]]:
    """On a rank: one row per logger, from rank 0; all ranks take the same steps."""
    import torch

    import gradcomp.torch as gc

    gc.init(log_level="warning")
    torch.manual_seed(gc.rank())
    model = torch.nn.Sequential(torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))
    gc.broadcast_parameters(model.state_dict(), root_rank=0)
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    opt = gc.DistributedOptimizer(plain, model.named_parameters(), "quantize:bits=4")
    inputs, targets = torch.randn(64, 784), torch.randint(10, (64,))

    def step() -> None:
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        opt.step()

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        made = loggers(opt, every, folder) if gc.rank() == 0 else iter(())
        for _ in range(
            gc.broadcast_object(1 + sum(map(bool, map(find_spec, ("tensorboard", "wandb", "mlflow")))))
        ):
            name, every_steps, log, finish = next(made, ("", 50, lambda number: number, lambda: None))
            log(0)  # what a first call prepares is no part of a step
            times = [0.0] * steps
            began = time.perf_counter()
            for number in range(1, steps + 1):
                step()
                begin = time.perf_counter()
                log(number)
                times[number - 1] = time.perf_counter() - begin
            seconds = time.perf_counter() - began
            finish()
            cpu = time.process_time()
            for number in range(_BURST):
                log(number * every_steps)
            finish()
            cpu = (time.process_time() - cpu) / _BURST
            gc.barrier()
            step_ms = 1e3 * seconds / steps
            rows.append({
                "name": name,
                "every": every_steps,
                "step_ms": step_ms,
                "logs_us": 1e6 * statistics.median(times[every_steps - 1 :: every_steps]),
                "else_us": 1e6 * statistics.median(t for i, t in enumerate(times, 1) if i % every_steps),
                "cpu_us": 1e6 * cpu,
                "share": sum(times) / seconds,
                "cpu_share": 1e3 * cpu / every_steps / step_ms,
            })  # fmt: skip
        next(made, None)
        rows.append(timeline(opt, step, folder, rows[-1]["step_ms"]))
    gc.shutdown()
    return rows


def timeline(opt: Any, step: Callable[[], None], folder: str, step_ms: float) -> dict[str, Any]:
    """The row of one span, recorded while a timeline is written."""
    import gradcomp.torch as gc

    trace = opt._exchanger_or_none().pipeline.trace
    gc.start_timeline(f"{folder}/{{rank}}.json")
    step()
    taken = trace.spans()
    spans, count = sum(span.step == taken[-1].step for span in taken), 5000
    cpu, began = time.process_time(), time.perf_counter()
    for _ in range(count):
        trace.add(("send", 0, 0, began, began, 0, (1,)))
    seconds = time.perf_counter() - began
    gc.stop_timeline()
    cpu = time.process_time() - cpu
    each = 1e6 * seconds / count
    return {
        "name": f"timeline, {spans} spans a step",
        "every": 1,
        "step_ms": step_ms,
        "logs_us": each,
        "else_us": None,
        "cpu_us": 1e6 * cpu / count,
        "share": 1e-3 * each * spans / step_ms,
        "cpu_share": 1e3 * cpu / count * spans / step_ms,
    }


def bar(row: dict[str, Any]) -> str:
    if row["name"].startswith("timeline"):
        return ""
    return "missed" if max(row["share"], row["cpu_share"]) > MOST_SHARE else "met"


def table(rows: list[dict[str, Any]]) -> str:
    headers = ["logger", "every", "step ms", "logs us", "else us", "share", "cpu us", "cpu share", "bar"]
    return report.table(
        headers,
        [
            [
                row["name"],
                row["every"],
                f"{row['step_ms']:.2f}",
                f"{row['logs_us']:.1f}",
                None if row["else_us"] is None else f"{row['else_us']:.2f}",
                f"{row['share']:.3%}",
                f"{row['cpu_us']:.0f}",
                f"{row['cpu_share']:.3%}",
                bar(row),
            ]
            for row in rows
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out:
        arguments.out.write_text(json.dumps(measure(arguments.steps, arguments.every)))
        return
    machine = report.machine()
    print(report.describe(machine))
    every = [] if arguments.every is None else ["--every", str(arguments.every)]
    rows = launch_ranks(2, [__file__, "--steps", str(arguments.steps), *every])[0]
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
    sys.exit(any(bar(row) == "missed" for row in rows))


if __name__ == "__main__":
    main()
