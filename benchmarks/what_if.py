"""Fake compression beside the compressors that it stands for, on hosts made of network namespaces. Needs root.

    python benchmarks/what_if.py                      # links of 1 Gbit/s
    python benchmarks/what_if.py --link 100mbit --blocks 4

The model, the hosts and the blocks A B C A B C are those of benchmarks/step.py. A first launch, on links without a
rate, counts the bytes that each compressor sends and the time that its codec takes. The second one measures, in the
same processes, each compressor, Fake at the ratio that sends as many bytes, and Fake with the codec's time.

Columns
    ratio           bytes of the uncompressed exchange over those of the compressor, without the layers that stay exact
    real ms         median step of the compressor, for the slowest rank
    codec ms        median time that gradcomp counts for its codec in a step, by the same rows
    fake ms         median step of Fake at that ratio; in brackets, what it copies and zeroes in it
    fake / (real - codec)     the bar: within 10%
    without own     the same, less what Fake itself copies and zeroes
    fake with codec           median step of Fake with codec_seconds from the first launch
    / real          that over the compressor's step
    wire MB         bytes that a rank sends in a step: the compressor's, and Fake's
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import hosts
import models
import report
from options import add_timing
from step_rank import Task, run_rank
from step_results import evaluate
from step_rows import IDEAL, IDENTITY, POWERSGD, ROWS, TOPK, Row

from gradcomp import Filter, LayerSpec
from gradcomp.torch.layers import kind_of

REAL = ("4bit", TOPK, POWERSGD)
BAR = 0.10
NOTHING = Row("nothing", "Fake, ratio 2**30", "gradcomp", f"fake:ratio={2**30}")


def gradient_bytes() -> tuple[int, int]:
    """Return the bytes of the layers that rows compress, and of those that stay exact."""
    layers = [
        LayerSpec(name, tuple(p.shape), kind=kind_of(name, p.ndim))
        for name, p in models.WordLSTM().named_parameters()
    ]
    exact = sum(layer.nbytes for layer in layers if Filter().reason_to_exclude(layer))
    return sum(layer.nbytes for layer in layers) - exact, exact


def fakes_of(counted: dict[str, dict[str, Any]], ranks: int) -> dict[str, tuple[float, Row, Row]]:
    """Return by compressor the ratio at which Fake sends its bytes, and the rows without and with its codec's time."""
    compressed, exact = gradient_bytes()
    share = 2 * (ranks - 1) / ranks
    found = {}
    for key in REAL:
        ratio = share * compressed / (counted[key]["wire_bytes"] - share * exact)
        how = f"fake:ratio={ratio:.4g}"
        seconds = counted[key]["codec_seconds"] / (1e-9 * compressed)
        found[key] = (
            ratio,
            Row(f"{key}-fake", f"Fake, ratio {ratio:.3g}", "gradcomp", how),
            Row(f"{key}-coded", f"{how} with codec", "gradcomp", f"{how},codec_seconds={seconds:.4g}"),
        )
    return found


def task_of(options: argparse.Namespace, rows: tuple[Row, ...], blocks: int, steps: int) -> Task:
    return Task(rows, blocks, steps, options.warmup, 0, None, {}, True, None)


def launch(task: Task, link: str, ranks: int) -> dict[str, dict[str, Any]]:
    """Return each row's figures over all ranks."""
    timed = hosts.run_task(hosts.Hosts(ranks, link), __file__, task)
    return {row.key: evaluate(row, timed, []) for row in task.rows}


def measure(options: argparse.Namespace) -> None:
    found_machine = report.machine()
    print(report.describe(found_machine))
    known = {row.key: row for row in ROWS}
    real = tuple(known[key] for key in REAL)
    counted = launch(task_of(options, real, 2, 6), "unshaped", options.ranks)
    fakes = fakes_of(counted, options.ranks)
    pairs = tuple(row for key in REAL for row in (known[key], *fakes[key][1:]))
    rows = (known[IDEAL], known[IDENTITY], *pairs, NOTHING)
    results = launch(task_of(options, rows, options.blocks, options.steps), options.link, options.ranks)
    print(
        f"{options.ranks} hosts, {options.link} links; {options.blocks} blocks of {options.steps} steps after "
        f"{options.warmup}"
    )
    table = []
    figures: dict[str, dict[str, float]] = {}
    for key in REAL:
        ratio, fake, coded = fakes[key]
        step, codec = results[key]["step_seconds"], results[key]["codec_seconds"]
        faked, with_codec = results[fake.key]["step_seconds"], results[coded.key]["step_seconds"]
        own = results[fake.key]["codec_seconds"]
        figures[key] = {
            "ratio": ratio,
            "real_seconds": step,
            "codec_seconds": codec,
            "fake_seconds": faked,
            "fake_to_rest": faked / (step - codec),
            "fake_own_seconds": own,
            "coded_seconds": with_codec,
            "coded_to_real": with_codec / step,
        }
        table.append(
            [
                known[key].title,
                f"{ratio:.3g}",
                f"{step * 1e3:.1f}",
                f"{codec * 1e3:.1f}",
                f"{faked * 1e3:.1f} ({own * 1e3:.1f})",
                f"{faked / (step - codec):.3f}",
                f"{(faked - own) / (step - codec):.3f}",
                f"{with_codec * 1e3:.1f}",
                f"{with_codec / step:.3f}",
                f"{results[key]['wire_bytes'] / 1e6:.3f}, {results[fake.key]['wire_bytes'] / 1e6:.3f}",
            ]
        )
    headers = ["row", "ratio", "real ms", "codec ms", "fake ms", "fake / (real - codec)", "without own",
               "fake with codec ms", "/ real", "wire MB"]  # fmt: skip
    print(report.table(headers, table))
    for row in (known[IDEAL], known[IDENTITY], NOTHING):
        print(f"{row.title}: {results[row.key]['step_seconds'] * 1e3:.1f} ms a step")
    for key, one in figures.items():
        verdict = "met" if abs(one["fake_to_rest"] - 1) <= BAR else "NOT met"
        print(
            f"bar: {known[key].title}: the fake step is {one['fake_to_rest']:.3f} x the real one less its codec, "
            f"within {BAR:.0%}: {verdict}"
        )
    report.write_json(
        options.json,
        {
            "benchmark": "what_if",
            "machine": found_machine,
            "link": options.link,
            "ranks": options.ranks,
            "blocks": [options.blocks, options.steps, options.warmup],
            "figures": figures,
            "rows": results,
            "counted": counted,
        },
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--link", choices=hosts.LINKS, default="1gbit", help="rate of the links (default: 1gbit)"
    )
    add_timing(parser, blocks=6, steps=8)
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = hosts.parse(parser, lambda task, out: run_rank(Task.from_json(task), out))
    return hosts.exit_code(lambda: measure(options))


if __name__ == "__main__":
    sys.exit(main())
