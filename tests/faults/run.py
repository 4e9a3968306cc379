"""Draw trials by seed, run them two at a time, and say what became of them; exit status 1 if one ended badly.

python tests/faults/run.py --trials 40 --seed 1
python tests/faults/run.py --trials 1 --seed 17 --verbose
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from faults.draw import FAULTS, STACKS, Trial, draw  # noqa: E402
from faults.judge import BAD, OUTCOMES, Ended, Verdict, judge  # noqa: E402
from faults.launch import Servers, run_trial  # noqa: E402

AT_A_TIME = 2

Result = tuple[Trial, Verdict, list[Ended]]


def main() -> int:
    arguments = _arguments()
    seeds = range(arguments.seed, arguments.seed + arguments.trials)
    network = os.geteuid() == 0
    trials = [draw(s, fault=arguments.fault, stack=arguments.stack, privileged=network) for s in seeds]
    if not network:
        print("not root: no faults of links and disks are drawn")
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and leave nothing mounted
    with Servers() as servers, ThreadPoolExecutor(AT_A_TIME) as pool:
        results = list(pool.map(lambda trial: _one(servers, trial, arguments.verbose), trials))
    print(table(results))
    print(f"{len(results)} trials in {time.monotonic() - began:.0f} s")
    if arguments.out:
        arguments.out.write_text(json.dumps([_plain(result) for result in results], indent=1) + "\n")
    bad = [trial.seed for trial, verdict, _ in results if verdict.outcome in BAD]
    if bad:
        print(f"{len(bad)} trials ended badly; again with: make faults N=1 SEED={bad[0]}", file=sys.stderr)
    return bool(bad)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=40, help="how many (default: 40)")
    parser.add_argument("--seed", type=int, default=1, help="of the first; the others follow (default: 1)")
    parser.add_argument("--fault", choices=FAULTS, default="", help="only this one")
    parser.add_argument("--stack", choices=STACKS, default="", help="only this one")
    parser.add_argument("--out", type=Path, help="JSON with every trial")
    parser.add_argument("--verbose", action="store_true", help="print what the ranks wrote")
    return parser.parse_args()


def _one(servers: Servers, trial: Trial, verbose: bool) -> Result:
    began = time.monotonic()
    ranks = run_trial(servers, trial)
    seconds = time.monotonic() - began
    verdict = judge(trial, ranks)
    where = f"step {trial.step} {trial.moment}".rstrip()
    drawn = (
        f"{trial.fault}, {where}, rank {trial.victim}, {trial.stack} {trial.compression} {trial.reduction}"
    )
    line = f"{trial.seed:5} {verdict.outcome:9} {seconds:5.1f} s  {drawn}"
    if verdict.outcome in BAD:
        line += f"\n      {verdict.why}"
    if verbose:
        for rank, one in enumerate(ranks):
            line += f"\n--- rank {rank}: {verdict.ranks[rank]}, status {one.status}\n{list(one.said)}\n{one.stderr}"
    print(line, flush=True)
    return trial, Verdict(verdict.outcome, verdict.ranks, verdict.why, seconds), ranks


def _plain(result: Result) -> dict[str, object]:
    trial, verdict, ranks = result
    return {
        **trial.to_plain(), "outcome": verdict.outcome, "ranks": verdict.ranks, "why": verdict.why,
        "seconds": round(verdict.seconds, 2), "status": [one.status for one in ranks],
    }  # fmt: skip


def table(results: list[Result]) -> str:
    """Markdown: faults by outcomes."""
    counts = Counter((trial.fault, verdict.outcome) for trial, verdict, _ in results)
    shown = [o for o in OUTCOMES if o in ("equal", "typed", *BAD) or any(counts[f, o] for f in FAULTS)]
    rows = [["fault", "trials", *shown], ["---", *["---:"] * (len(shown) + 1)]]
    for fault in [*FAULTS, "all"]:
        numbers = [
            sum(n for (f, o), n in counts.items() if o == out and fault in (f, "all")) for out in shown
        ]
        if sum(numbers):
            rows.append([fault, str(sum(numbers)), *[str(n) if n else "" for n in numbers]])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
