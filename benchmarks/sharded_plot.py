"""A picture from files of sharded.py: step time against the rate of the links.

    python benchmarks/sharded.py --link 100mbit --json 100mbit.json     # and others
    python benchmarks/sharded_plot.py 10mbit.json 100mbit.json 1gbit.json unshaped.json links.png

As Figure 5.3 of Markov 2024. Rates are those that were measured. Row ``null`` exchanges nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradcomp.plots.canvas import drawing, look

TITLES = {
    "null": "no exchange",
    "plain": "fully_shard alone",
    "w8g8": "8 bits",
    "w4g4": "4 bits",
    "w8g8-codes": "8 bits, codes kept for backward",
}


def curves(files: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """By row, Mbit/s and milliseconds, slow links first."""
    found: dict[str, list[tuple[float, float]]] = {}
    for each in sorted(files, key=lambda each: each["link"]["bytes_per_second"]):
        for row, figures in each["rows"].items():
            point = each["link"]["bytes_per_second"] * 8e-6, 1e3 * figures["seconds"]
            found.setdefault(row, []).append(point)
    return found


def draw(files: Sequence[dict[str, Any]], out: Path) -> None:
    """Both axes logarithmic."""
    with drawing(out, 7.5, 4) as figure:
        axis = figure.subplots()
        for number, (row, points) in enumerate(curves(files).items()):
            axis.plot(*zip(*points, strict=True), **look(number), label=TITLES.get(row, row))
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("rate of the links, Mbit/s")
        axis.set_ylabel("step, ms")
        axis.set_title(f"GPT of 8.8 M parameters, {files[0]['ranks']} hosts")
        figure.legend(loc="outside right upper", title="weights and gradients")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    files = [json.loads(path.read_text(encoding="utf-8")) for path in options.files]
    if len({each["ranks"] for each in files}) > 1:
        parser.error("the files are of different numbers of ranks")
    draw(files, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
