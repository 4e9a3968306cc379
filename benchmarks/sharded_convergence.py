"""Held-out loss of a GPT, sharded by fully_shard or under ZeroOptimizer, with quantised weights and gradients.

    python benchmarks/sharded_convergence.py                            # three seeds, 600 steps
    python benchmarks/sharded_convergence.py --rows plain-g16,w8g8 --seeds 1 --data wikitext2.txt --json out.json
    python benchmarks/sharded_convergence.py --json out.json --resume   # what out.json lacks
    python benchmarks/sharded_convergence.py --rows zero-exact,zero-w4,zero-w4-plain --baseline zero-exact
    python benchmarks/sharded_convergence.py --per-host 2 --rows hsdp,hybrid-4bit --baseline hsdp

The text is in byte pairs, which the package tokenizers learns from its first nine tenths: a vocabulary of 512, 4 blocks
of width 192, 8 sequences of 64 a rank, AdamW with betas of 0.9 and 0.95, and a learning rate that rises to 1e-3 and
falls to 0 as a cosine. With --language words, the model and its settings are those of benchmarks/sharded.py, and the
rate is constant.

Two hosts of network namespaces, over links that nothing limits, or of --link. With --curve-every, a run keeps the step,
the seconds of training and the held-out loss after every so many steps (Figure 5.2). Rows of one seed start from the
same values and see the same batches. The baseline is that of Markov 2024, section 5.7: float32 weights and float16
gradients. Rows that end in -learned learn their levels at the same parts of the training as the paper does: after 400,
1,900 and 3,800 of 4,800 steps.

Columns
    loss      mean cross entropy over the held-out text, with the weights that training computes with
    worse %   relative to the row --baseline of the same seed: the mean over seeds, and its standard error
    exact     the loss with the optimizer's own weights
    bytes     what rank 0 sends in a step, of weights and of gradients, in the mean over the run
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hosts
import report
from languages import LANGUAGES
from options import positive
from sharded_rank import REPLICATED, ROWS, Training, train_rank

BASELINE = "plain-g16"

Run = dict[str, Any]


def summary(runs: Sequence[Run], baseline: str = BASELINE) -> list[list[object]]:
    """A line for each row, seeds in order."""
    by_row = report.by_row(sorted(runs, key=lambda run: run["seed"]))
    base = by_row.get(baseline, {})
    lines: list[list[object]] = []
    for name, found in by_row.items():
        paired = report.pairs(found.values(), base.values())
        each = [100 * (run["loss"] / other["loss"] - 1) for run, other in paired]
        worse = None
        if each:
            error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None
            worse = f"{statistics.mean(each):+.2f}" + (f" ± {error:.2f}" if error is not None else "")
        losses, exact = (
            ", ".join(f"{run[key]:.4f}" for run in found.values()) for key in ("loss", "exact_loss")
        )
        sent = [run["bytes_per_step"] for run in found.values() if "bytes_per_step" in run]
        lines.append([name, losses, worse, exact, f"{statistics.mean(sent):,.0f}" if sent else None])
    return lines


def measure(options: argparse.Namespace) -> None:
    print(report.describe(report.machine()))
    ranks = options.ranks * options.per_host
    about = {
        "benchmark": "sharded_convergence",
        "steps": options.steps,
        "ranks": ranks,
        "language": options.language,
        "link": options.link,
    }
    runs: list[Run] = report.kept(options.json, about) if options.resume else []
    done = {(run["seed"], run["row"]) for run in runs}
    asked = itertools.product(range(options.seeds), options.rows.split(","))
    lacking = [one for one in asked if one not in done]
    if lacking:
        report.check_machine(options.json, runs)
    data = options.data and str(options.data)
    for seed, name in lacking:
        task = Training(name, options.steps, seed, data, options.language, options.curve_every)
        made = hosts.Hosts(options.ranks, options.link, options.per_host)
        found = hosts.run_task(made, __file__, task)
        assert len({rank["loss"] for rank in found}) == 1, "all ranks compute with the same weights"
        runs.append({"row": name, "seed": seed, "machine": report.processor(), **found[0]})
        print(f"seed {seed}, {name}: {found[0]['loss']:.4f}, exact {found[0]['exact_loss']:.4f}", flush=True)
        report.write_runs(options.json, about, runs)
    print(
        report.table(
            ["row", "loss by seed", "worse %", "exact", "bytes per step"], summary(runs, options.baseline)
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = ROWS | REPLICATED
    parser.add_argument("--rows", default="plain-g16,plain,w8g8,w4g4", help=f"of {', '.join(known)}")
    parser.add_argument("--baseline", default=BASELINE, help=f"a row (default: {BASELINE})")
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument(
        "--per-host", type=positive, default=1, help="ranks of each host; 2 for hybrid sharding"
    )
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, default=600)
    parser.add_argument("--language", choices=LANGUAGES, default="pairs")
    parser.add_argument("--data", type=Path, help="a text file (default: Python's standard library)")
    parser.add_argument("--link", choices=hosts.LINKS, default="unshaped", help="of each host")
    parser.add_argument(
        "--curve-every", type=positive, default=0, metavar="STEPS", help="keep the held-out loss on the way"
    )
    parser.add_argument("--json", type=Path, help="write all figures here, after each run")
    parser.add_argument("--resume", action="store_true", help="keep the runs that the file of --json holds")
    options = hosts.parse(parser, lambda task, out: train_rank(Training(**json.loads(task)), out))
    if unknown := [name for name in options.rows.split(",") if name not in known]:
        parser.error(f"unknown rows {', '.join(unknown)}; there are {', '.join(known)}")
    if options.resume and options.json is None:
        parser.error("--resume needs --json")
    if options.data is not None and not options.data.is_file():
        parser.error(f"--data: there is no file {options.data}")
    return hosts.exit_code(lambda: measure(options))


if __name__ == "__main__":
    sys.exit(main())
