"""A picture from files of step.py or sharded.py: step time against the rate of the links.

    python benchmarks/sharded.py --link 100mbit --json 100mbit.json     # and others
    python benchmarks/links_plot.py 10mbit.json 100mbit.json 1gbit.json unshaped.json links.png

As Figure 5.3 of Markov 2024. Rates are those that were measured. Bars, where a file has them, are quartiles of steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradcomp.contrib.figures import drawing, look

#: Rows in a legend.
TITLES = {
    "ideal": "no exchange",
    "ddp": "DistributedDataParallel",
    "ddp-fp16": "its fp16 hook",
    "ddp-powersgd-4": "its PowerSGD hook, rank 4",
    "4bit": "gradcomp, 4 bits",
    "powersgd-4": "gradcomp, PowerSGD, rank 4",
    "null": "no exchange",
    "plain": "fully_shard alone",
    "w8g8": "8 bits",
    "w4g4": "4 bits",
    "w8g8-codes": "8 bits, codes kept for backward",
}


#: Of each benchmark: the model, and what the legend is about.
ABOUT = {
    "step": ("Word LSTM of 10.6 M parameters", "exchange"),
    "sharded": ("GPT of 8.8 M parameters", "weights and gradients"),
}

#: Mbit/s, milliseconds, and how far the quartiles lie below and above.
Point = tuple[float, float, float, float]


def curves(files: Sequence[dict[str, Any]]) -> dict[str, list[Point]]:
    """By row, slow links first."""
    found: dict[str, list[Point]] = {}
    for each in sorted(files, key=lambda each: each["link"]["bytes_per_second"]):
        for row, figures in each["rows"].items():
            median = figures["seconds"] if "seconds" in figures else figures["step_seconds"]
            low, high = figures.get("quartiles_seconds", (median, median))
            point = each["link"]["bytes_per_second"] * 8e-6, 1e3 * median
            found.setdefault(row, []).append(
                (*point, 1e3 * max(median - low, 0), 1e3 * max(high - median, 0))
            )
    return found


def draw(files: Sequence[dict[str, Any]], out: Path) -> None:
    """Both axes logarithmic."""
    with drawing(out, 7.5, 4) as figure:
        axis = figure.subplots()
        for number, (row, points) in enumerate(curves(files).items()):
            rates, times, below, above = zip(*points, strict=True)
            axis.errorbar(rates, times, (below, above), **look(number), capsize=2, label=TITLES.get(row, row))
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("rate of the links, Mbit/s")
        axis.set_ylabel("step, ms")
        model, about = ABOUT[files[0]["benchmark"]]
        axis.set_title(f"{model}, {files[0]['ranks']} hosts")
        figure.legend(loc="outside right upper", title=about)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    files = [json.loads(path.read_text(encoding="utf-8")) for path in options.files]
    if len({(each["benchmark"], each["ranks"]) for each in files}) > 1:
        parser.error("the files are of different benchmarks, or numbers of ranks")
    draw(files, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
