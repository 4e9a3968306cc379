"""Final accuracy and perplexity under every compression beside uncompressed training, over paired seeds; 2 ranks.

    python benchmarks/convergence.py                          # digits, and a word LSTM on Python's standard library
    python benchmarks/convergence.py --data wikitext2.txt     # the LSTM on the words of a file
    python benchmarks/convergence.py --cifar cifar10_10k.npz  # and a ResNet-20
    python benchmarks/convergence.py --task digits --rows topk,dgc --seeds 2 --json table.json
    python benchmarks/convergence.py --json table.json --resume      # what table.json lacks
    python benchmarks/convergence.py --merge digits.json lstm.json   # one table of several parts, nothing is run

A pair is two runs with the same seed: same initial parameters, same batches. A row passes if its metric is, in the mean
over the pairs, at most 1% (relative) worse than uncompressed: accuracy recovery as Markov 2024 defines it. The bar
applies to the main rows; the verdicts of others are in brackets. Where a paper says that a method fails, the table may
show it, and nothing is tuned. The last row is the control: 1 bit, nearest, without feedback. If it passed as well, the
test could not tell good from bad. A row whose compression does not exist, or whose processes fail, costs only itself;
the file is written after every row.

Tasks
    digits   a small CNN on scikit-learn's digits; all compressions. 840 steps: at a density of 1% it takes about 100
             until every element was sent once, and a much shorter run would measure that delay
    lstm     a word LSTM; the main ones
    resnet   ResNet-20 (0.27 M parameters) on 10,000 images of CIFAR-10 averaged to 16 x 16, so that a row of 3 seeds
             takes about 4 minutes on 2 cores; 18 epochs end at about 65%. The main ones and the ablations of Vogels
             et al. 2019
    gpt      where it is asked for: 12 blocks on the LSTM's text, under AdamW
    pairs    where it is asked for: a GPT of 4 blocks (0.27 M parameters) on byte pairs, under AdamW, which 3,000 steps
             take far from its first plateau

Where a compression has momentum, the optimizer has none; where it clips, nothing else does.

Columns
    worse by    per pair; then the mean, and its standard error
    bytes       what a rank sends in a step, by gradcomp's counter, headers included; the mean over the second half of
                the steps, after warm-ups
    step ms     median over the second half, for the slowest rank; on this machine's loopback, or on hosts made of
                network namespaces with --link (root)
    1 Gbit/s    without --link only, and modelled: step ms + bytes per step at 125 MB/s, as if nothing overlapped
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compressions
import hosts
import report
from convergence_results import BAR, Run, as_it_must, evaluate, merge, show
from convergence_rows import METRICS, ON_REQUEST, RESNET, TASKS, Arm, choose
from convergence_tasks import Settings, load, make_job, train
from options import add_training, check_training

#: The other ranks' time to say what they know, once one has failed.
GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Plan:
    """What every rank is told to do: the runs of one row."""

    task: str
    compression: str
    rate: float
    seeds: tuple[int, ...]
    settings: Settings
    controller: str = ""
    exact: str = "float32"
    watch: str = ""  # a module beside this one, whose Watch sees every step

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Plan:
        return Plan(**{**data, "seeds": tuple(data["seeds"]), "settings": Settings(**data["settings"])})


def run_rank(plans: Sequence[Plan], out: Path) -> None:
    """All runs of one rank; writes what it found to a file."""
    import torch

    import gradcomp.torch as gc

    torch.set_num_threads(1)
    gc.init(log_level="warning")
    rank, size = gc.rank(), gc.size()
    loaded: dict[tuple[str, Settings], Any] = {}
    found = []
    for plan in plans:
        key = plan.task, plan.settings
        if key not in loaded:
            loaded[key] = load(*key)
        data = loaded[key]
        runs = []
        for seed in plan.seeds:
            job = make_job(plan.task, plan.settings, data, seed, rank, size)
            watch = importlib.import_module(plan.watch).Watch(job, rank) if plan.watch else None
            trained = train(job, plan.compression, plan.rate, plan.controller, plan.exact, watch)
            runs.append({"seed": seed, **trained})
        found.append({"source": getattr(data, "source", None), "runs": runs})
    out.with_name(f"{rank}.json").write_text(json.dumps(found))
    gc.shutdown()


# ------------------------------------------------------------------------------------------------- the whole


def launch(plan: Plan, ranks: int, link: str | None) -> list[dict[str, Any]] | None:
    """Run the plan in processes of its own; what each rank found, None if one failed."""
    found = launch_all([plan], ranks, link)
    return None if found is None else found[0]


def launch_all(plans: Sequence[Plan], ranks: int, link: str | None) -> list[list[dict[str, Any]]] | None:
    """Run the plans one after another in the same processes; what each rank found by plan, None if one failed."""
    with tempfile.TemporaryDirectory(prefix="gradcomp-convergence-") as directory:
        out = Path(directory) / "out"
        text = json.dumps([dataclasses.asdict(plan) for plan in plans])
        command = [sys.executable, str(Path(__file__).resolve()), "--plans", text, "--out", str(out)]
        if link is None:
            codes = _run_here(command, ranks)
        else:
            with hosts.Hosts(ranks, link) as made:
                codes = made.run(command, pin=True)
        if any(codes):
            return None
        by_rank = [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(ranks)]
        return [list(found) for found in zip(*by_rank, strict=True)]


def _run_here(command: Sequence[str], ranks: int) -> list[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks,
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        # As torchrun has it: the ranks share the cores, and LAPACK would start as many threads as there are.
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            **{name: str(value) for name, value in place.items()},
        }
        processes.append(subprocess.Popen(command, env=environment))
    try:
        deadline = None
        while any(process.poll() is None for process in processes):
            if deadline is None and any(process.returncode for process in processes):
                deadline = time.monotonic() + GRACE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return [1 if process.poll() is None else process.returncode for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()


def by_seed(found: Sequence[dict[str, Any]], name: str) -> Iterator[tuple[Run, ...]]:
    """The runs of all ranks for each seed; SystemExit where ranks ended with different parameters."""
    for ranks in zip(*(rank["runs"] for rank in found), strict=True):
        if len({run["digest"] for run in ranks}) > 1:
            raise SystemExit(f"{name}: the ranks ended with different parameters")
        yield ranks


def collect(task: str, arm: Arm, found: list[dict[str, Any]], settings: dict[str, Any]) -> list[Run]:
    """The runs of a row, all ranks together."""
    runs = []
    for ranks in by_seed(found, f"{task}, {arm.title}"):
        slowest = max(run["step_seconds"] for run in ranks)
        where = {"task": task, "row": arm.key, "compression": arm.on(task)}
        about = {**settings, "steps": ranks[0]["steps"], "source": found[0]["source"]}
        runs.append({**where, **ranks[0], "step_seconds": slowest, "settings": about})
    return runs


def measure(options: argparse.Namespace, runs: list[Run], failures: dict[str, str]) -> list[Run]:
    """Every row that is asked for and not in ``runs`` yet; ``failures`` gets those that could not be had."""
    settings = Settings(
        options.digits_epochs,
        options.lstm_steps,
        options.resnet_epochs,
        options.data and str(options.data.resolve()),
        options.cifar and str(options.cifar.resolve()),
    )
    for task in options.task:
        for arm in choose(options.rows, options.compression, task):
            done = {run["seed"] for run in runs if (run["task"], run["row"]) == (task, arm.key)}
            seeds = tuple(seed for seed in range(options.seeds) if seed not in done)
            if not seeds:
                continue
            name = f"{task}, {arm.title}"
            reason = compressions.why_not(arm.on(task))
            found = None
            if reason is None:
                plan = Plan(task, arm.on(task), arm.rates.get(task, 1.0), seeds, settings)
                found = launch(plan, options.ranks, options.link)
            if found is None:
                failures[name] = reason or "a rank failed; its error is above"
                print(f"{name}: left out: {failures[name]}", file=sys.stderr, flush=True)
                continue
            new = collect(task, arm, found, {"ranks": options.ranks, "link": options.link})
            runs = merge([runs, new])
            for run in new:
                print(
                    f"{name}, seed {run['seed']}: {METRICS[task][0]} {run['metric']:.4f}, {run['seconds']:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
            save(options.json, runs, failures)
    return runs


def save(path: Path | None, runs: list[Run], failures: dict[str, str]) -> list[dict[str, Any]]:
    """Write runs and rows, if a path was given; returns the rows."""
    rows = evaluate(runs)
    report.write_json(
        path,
        {
            "benchmark": "convergence",
            "machine": report.machine(),
            "left_out": failures,
            "rows": rows,
            "runs": runs,
        },
    )
    return rows


def read_runs(path: Path) -> list[Run]:
    """The runs of an earlier invocation."""
    try:
        runs: list[Run] = json.loads(path.read_text(encoding="utf-8"))["runs"]
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"{path} holds no runs of this benchmark: {error!r}") from error
    return runs


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_training(parser, (*TASKS, *ON_REQUEST))
    parser.add_argument("--rows", help="some rows only, comma-separated; see convergence_rows.py")
    parser.add_argument("--digits-epochs", type=int, default=60)
    parser.add_argument("--compression", action="append", default=[], help="a further row, in string form")
    parser.add_argument("--merge", type=Path, nargs="+", help="run nothing: the table of these files' runs")
    parser.add_argument("--plans", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    check_training(parser, options)
    return options


def main() -> int:
    options = parse()
    if options.plans:
        run_rank([Plan.from_dict(plan) for plan in json.loads(options.plans)], options.out)
        return 0
    if options.task is None:
        options.task = list(TASKS)
        if options.cifar is None and not options.merge:
            options.task.remove(RESNET)
            print("resnet is left out: its images come with --cifar", file=sys.stderr)
    failures: dict[str, str] = {}
    began = time.monotonic()
    hosts.exit_on_termination()
    if options.merge:
        runs = merge(read_runs(path) for path in options.merge)
    else:
        kept = read_runs(options.json) if options.resume and options.json.is_file() else []
        try:
            runs = measure(options, kept, failures)
        except hosts.HostsError as error:
            print(error, file=sys.stderr)
            return 2
    rows = save(options.json, runs, failures)
    print(report.describe(report.machine()))
    sources = sorted({run["settings"]["source"] for run in runs if run["settings"]["source"]})
    about = f"; the LSTM reads {', '.join(sources)}" if sources else ""
    print(f"{time.monotonic() - began:.0f} s{about}")
    print(show(rows))
    asked = [row for row in rows if row["bar"] or row["control"]]
    missed = [f"{row['task']}: {row['title']}" for row in asked if not as_it_must(row)]
    print(f"bar: at most {BAR:.0%} worse in the mean where it applies, and controls must fail: "
          f"{'NOT met by ' + ', '.join(missed) if missed else 'met'}")  # fmt: skip
    for name, reason in failures.items():
        print(f"left out: {name}: {reason}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
