"""Time of a training step of a 10.6 M-parameter word LSTM, on hosts made of network namespaces. Needs root.

    python benchmarks/step.py                        # links of 1 Gbit/s
    python benchmarks/step.py --link 100mbit --blocks 3
    python benchmarks/step.py --link unshaped
    python benchmarks/step.py --rows ddp,4bit --compression quantize:bits=3 --json step.json
    python benchmarks/step.py --model resnet --rows topk-0.1,lgc-1,lgc-untrained,lgc-trained,lgc-auto
    python benchmarks/step.py --rows 4bit --compression 'flat[quantize:bits=4]'         # that row with layers=False
    python benchmarks/step.py --rows powersgd-4 --set slice_elements=65536      # many small buckets
    python benchmarks/step.py --model deep --rows identity --forward            # finish="forward" beside "backward"

One rank per host, one thread per rank, one core per rank. All rows live in the same processes, each with its own copy
of the same model, and alternate in blocks of steps: A B C A B C ... A figure is the median over all steps of a row but
the first of each block, for the slowest rank. A row whose compression does not exist is left out, and said.

PyTorch's PowerSGD hook gets one bucket for the whole model: with several on Gloo it aborts or hangs, since it issues
collectives from callbacks in an order that the ranks have not agreed on. That is not run here. gradcomp's PowerSGD with
many small buckets is, see above: the row is valid like any other.

Columns
    x DDP      median step over that of DistributedDataParallel in the same run
    roofline   max over buckets k of (t_k + wire time of buckets k ... last) + time after backward. t_k, when the last
               gradient of bucket k is there, and the time after backward come from the row without exchange; the wire
               time from the bytes that the row's rounds sent, counted round by round, at the link's measured rate (of
               a round in which ranks send unequal amounts, the largest)
    distance   median step - roofline
    exposed    median step - median step without exchange: communication and its work that nothing hides
    waited     what gradcomp counts itself: time the training thread waited for the exchange
    rounds     collectives of a bucket, each of which waits for the one before
    wire       bytes a rank sends in a step, by gradcomp's counter; for DDP 2 d (N-1)/N of its buckets, for its
               PowerSGD hook of what that says it sent
    interface  the same by the interface's counters, without headers, whose size in each packet a bare transfer
               measures before, and without what TCP sent again. Acknowledgements are packets without anything else.
               Both are the median over blocks: gradcomp's one probe of the wire, after 50 steps, is no step's

A speed counts only if three conditions hold, each a column; a row that breaks one is marked.
    bits       parameters equal, bit for bit, on all ranks and to those of a second run with overlap=False
    bytes      wire and interface agree within 2%
    loss       mean of the last quarter of the steps within 1% of DDP's on the same batches

A row with finish="forward" must have the parameters of the same row without it, too. Its last means land in the next
step, and before the next row begins. Its roofline is left out: buckets may travel while the next forward pass runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import compressions
import hosts
import report
from options import add_timing
from step_rank import BATCH, LENGTH, MODELS, Task, run_rank
from step_results import bars, evaluate, forward_bars, judge, show
from step_rows import ROWS, Row, choose


def launch(task: Task, link: str, ranks: int) -> list[dict[str, Any]]:
    """Run a task on hosts of its own; what each rank found."""
    return hosts.run_task(hosts.Hosts(ranks, link), __file__, task)


def split(rows: tuple[Row, ...]) -> tuple[tuple[Row, ...], dict[str, str]]:
    """The rows that can be run, and why each of the others cannot."""
    reasons = {row.key: compressions.why_not(row.how) for row in rows if row.kind == "gradcomp"}
    missing = {key: reason for key, reason in reasons.items() if reason is not None}
    return tuple(row for row in rows if row.key not in missing), missing


def measure(options: argparse.Namespace) -> int:
    rows, missing = split(choose(options.rows, options.compression, forward=options.forward))
    for key, reason in missing.items():
        print(f"row {key} is left out: {reason}", file=sys.stderr)
    settings = dict(parse_setting(text) for text in options.set)
    task = Task(rows, options.blocks, options.steps, options.warmup, options.seed, options.data and str(options.data),
                settings, True, options.traces and str(options.traces), options.model)  # fmt: skip
    if options.traces:
        options.traces.mkdir(parents=True, exist_ok=True)
    found = run(task, options.link, options.ranks, verify=not options.skip_verification)
    report.write_json(options.json, {**found, "left_out": missing})
    return 1 if missing else 0


def run(task: Task, link: str, ranks: int, verify: bool = True) -> dict[str, Any]:
    """Measure and print a task's rows on hosts with such links; all figures, as JSON has them."""
    machine = report.machine()
    print(report.describe(machine))
    timed = launch(task, link, ranks)
    measured = timed[0]["link"]
    print(
        f"{ranks} hosts, {link} links: {measured['bytes_per_second'] * 8e-6:.0f} Mbit/s measured, headers of "
        f"{measured['packet_bytes']:.1f} bytes per packet add {measured['overhead'] * 100:.2f}% to a bare transfer\n"
        f"{timed[0]['parameters']:,} parameters, batch {BATCH} x {LENGTH}, {timed[0]['text']}; "
        f"{task.blocks} blocks of {task.steps} steps after {task.warmup}"
    )
    verified: list[dict[str, Any]] = []
    compressed = tuple(row for row in task.rows if row.kind == "gradcomp")
    if compressed and verify:
        # No byte of the mean depends on the link, so the second run need not wait for a slow one.
        again = dataclasses.replace(
            task,
            rows=compressed,
            settings={**task.settings, "overlap": False},
            measure_link=False,
            traces=None,
        )
        verified = launch(again, "unshaped", ranks)
    results = {row.key: evaluate(row, timed, verified) for row in task.rows}
    judge(results)
    print(show(results))
    print("\n".join((*bars(results, link), *forward_bars(results, task.model))))
    return {
        "benchmark": "step",
        "machine": machine,
        "link": {"name": link, **measured},
        "ranks": ranks,
        "task": {k: v for k, v in dataclasses.asdict(task).items() if k not in ("rows", "data", "traces")},
        "text": timed[0]["text"],
        "batch": [BATCH, LENGTH],
        "rows": results,
    }


def parse_setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SystemExit(f"--set: expected name=value, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--link", choices=hosts.LINKS, default="1gbit", help="rate of the links (default: 1gbit)"
    )
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="default: lstm")
    add_timing(parser, blocks=10, steps=8)
    parser.add_argument(
        "--rows",
        help=f"comma-separated: {', '.join(row.key for row in ROWS)} "
        f"(default: all but {', '.join(row.key for row in ROWS if row.extra)})",
    )
    parser.add_argument(
        "--forward", action="store_true", help='each row of gradcomp a second time, with finish="forward"'
    )
    parser.add_argument("--compression", action="append", default=[], help="a further row, in string form")
    parser.add_argument("--set", action="append", default=[], help="a setting of gc.init, as name=value")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--data", type=Path, help="a text file (default: the text of Python's standard library)"
    )
    parser.add_argument(
        "--skip-verification", action="store_true", help="no second run; no row is valid then"
    )
    parser.add_argument("--traces", type=Path, help="directory for Chrome traces of gradcomp's rows")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = hosts.parse(parser, lambda task, out: run_rank(Task.from_json(task), out))
    if options.data is not None:
        options.data = options.data.resolve()
        if not options.data.is_file():
            parser.error(f"--data: there is no file {options.data}")
    return hosts.exit_code(lambda: measure(options))


if __name__ == "__main__":
    sys.exit(main())
