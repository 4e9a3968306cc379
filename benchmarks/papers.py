"""The tables of the papers at our scale, beside theirs: one page of docs/papers for each paper.

    python benchmarks/papers.py powersgd --data wikitext2.txt --cifar cifar10_10k.npz   # what is lacking, then the page
    python benchmarks/papers.py powersgd --page                                        # the page, of the runs there are
    python benchmarks/papers.py powersgd lgreco --quick                                # every part of both pages once

Runs are kept in benchmarks/results/papers, those of all papers together, and what is there is not run again: a command
that was stopped goes on. What others are compared with is trained on every machine on which anything is. Times are of
hosts of network namespaces, which need root. A page is text with places for tables, which this command fills. --quick
trains for a few steps, digits in place of CIFAR-10, and writes to build/papers-quick.

Columns of a table
    worse %     than the first row with the same seed on the same machine, relative; the mean, the least and the most
    deviation   our mean less the paper's, in percentage points
    order       whether the row is better or worse, and what the paper has; "not resolved" where the seeds differ by
                more than the effect
    bytes       what a rank sends in a step, headers included, in the mean over the second half of the run
    ratio       the bytes of uncompressed gradients over those that were sent
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import hosts
from paper_runs import FULL, QUICK, Arm, Measurement, Pool, Results, Scale, train

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "papers"
TRIED = ROOT / "build" / "papers-quick"
PAGES = ROOT / "docs" / "papers"
PAPERS = ("powersgd", "lgreco", "gravac", "cgx", "lgc")
_PLACE = re.compile(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->\n", re.DOTALL)


def fill(page: str, tables: Mapping[str, str]) -> str:
    """The page with its tables; SystemExit where a place has no table, or a table no place."""
    places = [match.group(1) for match in _PLACE.finditer(page)]
    if sorted(places) != sorted(tables):
        odd = sorted(set(places) ^ set(tables)) or places
        raise SystemExit(f"the page and its tables do not match: {', '.join(odd)}")
    return _PLACE.sub(lambda m: f"<!-- table: {m.group(1)} -->\n{tables[m.group(1)]}\n<!-- end -->\n", page)


def measure(found: Results, measurements: list[Measurement], scale: Scale, **data: Path | None) -> list[str]:
    """Run the benchmarks whose JSON is lacking; returns what could not be had."""
    lacking = []
    done: dict[tuple[str, ...], Path] = {}
    for each in measurements:
        path = found.folder / f"{each.name}.json"
        if path.is_file() and not each.resumes:
            continue
        if each.hosts and os.geteuid() != 0:
            reason = f"{each.name}: {each.script} makes hosts of network namespaces, and needs root"
            print(f"left out: {reason}", file=sys.stderr)
            lacking += [] if scale is QUICK else [reason]
            continue
        arguments = each.quick if scale is QUICK else each.arguments
        asked = each.script, *arguments
        if asked in done:  # tried for another name
            shutil.copy(done[asked], path)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        arguments = (*(argument.format(**data) for argument in arguments), "--json", str(path))
        arguments += ("--resume",) if each.resumes else ()
        command = [sys.executable, str(ROOT / "benchmarks" / each.script), *arguments]
        if subprocess.run(command, check=False).returncode:
            if not each.resumes:
                path.unlink(missing_ok=True)  # it may lack rows
            lacking.append(f"{each.name}: {each.script} failed; its error is above")
        else:
            done[asked] = path
    return lacking


def make(paper: str, options: argparse.Namespace) -> list[str]:
    """Run what is lacking, if it is asked for, and write the page; returns what could not be had."""
    module = importlib.import_module(f"paper_{paper}")
    scale = QUICK if options.quick else FULL
    folder = TRIED if options.quick else RESULTS
    found = Results(Pool(folder), folder)
    lacking: list[str] = []
    if not options.page:
        arms: list[Arm] = module.ARMS
        failed = train(found.pool, arms, scale, options.data, options.cifar, module.BASES)
        lacking = [f"{arm}: a rank failed; its error is above" for arm in failed]
        lacking += measure(found, module.MEASUREMENTS, scale, data=options.data, cifar=options.cifar)
    page = PAGES / f"{paper}.md"
    filled = fill(page.read_text(encoding="utf-8"), module.tables(found))
    target = folder / page.name if options.quick else page
    target.write_text(filled, encoding="utf-8")
    print(f"{target.relative_to(ROOT)} is written")
    return lacking


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paper", choices=PAPERS, nargs="+")
    parser.add_argument("--data", type=Path, help="WikiText-2, a text file")
    parser.add_argument("--cifar", type=Path, help="CIFAR-10 as .npz")
    parser.add_argument("--page", action="store_true", help="run nothing: the page, of the runs there are")
    parser.add_argument("--quick", action="store_true", help="every part once, on small data")
    options = parser.parse_args()
    if not options.page and not options.quick and None in (options.data, options.cifar):
        parser.error("training needs --data and --cifar")
    return options


def main() -> int:
    options = parse()
    hosts.exit_on_termination()
    if options.quick:
        shutil.rmtree(TRIED, ignore_errors=True)
    lacking = [each for paper in options.paper for each in make(paper, options)]
    for each in lacking:
        print(f"lacking: {each}", file=sys.stderr)
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
