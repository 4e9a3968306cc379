"""The step of step.py over links of several rates in one run: a table, a picture and JSON. Needs root.

    python benchmarks/links.py --json build/links.json --plot docs/step-links.png
    python benchmarks/links.py --links 1gbit,10gbit --json build/links.json    # these again; others are kept

Rows, columns and the conditions under which a figure counts are those of step.py. Figures of several machines or days
make no table: what the file holds must be of this machine and of today.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import hosts
import links_plot
import report
import step
from step_rank import Task
from step_rows import DDP, IDEAL, choose

#: Slow links first, with the blocks and the steps in a block that fit into a few minutes.
BLOCKS = {"100mbit": (3, 3), "1gbit": (6, 8), "10gbit": (8, 8), "unshaped": (8, 8)}
NAMES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s", "unshaped": "not limited"}
#: Bytes a second. A link whose measured rate is further from it is shown with that rate.
NOMINAL, TOLERANCE = {"100mbit": 12.5e6, "1gbit": 125e6, "10gbit": 1.25e9}, 0.1
HOOK, FOUR = "ddp-fp16", "4bit"
WARMUP, RANKS, SEED = 2, 2, 0
#: Of a machine, what must be the same for all links.
SAME = ("cpu", "cores", "isa", "python", "torch", "gradcomp")


def measure(link: str) -> dict[str, Any]:
    blocks, steps = BLOCKS[link]
    task = Task(choose(f"{HOOK},{FOUR}", []), blocks, steps, WARMUP, SEED, None, {}, True, None)
    found = step.run(task, link, RANKS)
    return {**found, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}


def kept(path: Path | None, again: list[str]) -> list[dict[str, Any]]:
    """The figures of other links that a file holds."""
    if path is None or not path.exists():
        return []
    return [each for each in json.loads(path.read_text())["links"] if each["link"]["name"] not in again]


def origin(each: dict[str, Any]) -> tuple[Any, ...]:
    """The machine and the day of one link's figures."""
    return each["date"], *(each["machine"][name] for name in SAME)


def name(link: dict[str, Any]) -> str:
    """A link, and its measured rate where that is not the nominal one."""
    rate, nominal = link["bytes_per_second"], NOMINAL.get(link["name"])
    if nominal is not None and abs(rate / nominal - 1) <= TOLERANCE:
        return NAMES[link["name"]]
    return f"{NAMES[link['name']]} ({rate * 8e-9:.1f} Gbit/s measured)"


def table(links: list[dict[str, Any]]) -> str:
    """Milliseconds by link, with the ratio to DDP; the last row is what a rank sends in a step."""
    headers = ["links", "no exchange", "DDP", "DDP, fp16 hook", "gradcomp, 4 bits"]
    cells: list[list[str]] = []
    for each in links:
        rows = each["rows"]
        cells.append([name(each["link"])])
        cells[-1] += [f"{rows[key]['step_seconds'] * 1e3:,.0f} ms" for key in (IDEAL, DDP)]
        for key in (HOOK, FOUR):
            ratio = rows[key]["step_seconds"] / rows[DDP]["step_seconds"]
            mark = " (does not count)" if rows[key].get("invalid") else ""
            cells[-1].append(f"{rows[key]['step_seconds'] * 1e3:,.0f} ms ({ratio:.2f}){mark}")
    sent = [links[0]["rows"][key]["wire_bytes"] for key in (DDP, HOOK, FOUR)]
    cells.append(["sent per step and rank", report.NOTHING, *(f"{each / 1e6:.1f} MB" for each in sent)])
    return report.table(headers, cells)


def run(options: argparse.Namespace) -> int:
    links = kept(options.json, options.links)
    for link in options.links:
        links.append(measure(link))
        report.write_json(options.json, {"benchmark": "links", "links": links})
    links.sort(key=lambda each: list(BLOCKS).index(each["link"]["name"]))
    if len({origin(each) for each in links}) > 1:
        print("the links were measured on different machines or days: no table, no picture", file=sys.stderr)
        return 1
    print(f"\n{report.describe(links[0]['machine'])}; {links[0]['date']}\n\n{table(links)}")
    if options.plot is not None:
        links_plot.draw(links, options.plot)
    return 0


def names(text: str) -> list[str]:
    if unknown := [name for name in text.split(",") if name not in BLOCKS]:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; there are {', '.join(BLOCKS)}")
    return text.split(",")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--links", type=names, default=list(BLOCKS), help=f"comma-separated (default: {','.join(BLOCKS)})"
    )
    parser.add_argument("--json", type=Path, help="write all figures here; keep those of other links")
    parser.add_argument("--plot", type=Path, help="draw the picture here (needs matplotlib)")
    options = parser.parse_args()
    return hosts.exit_code(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
