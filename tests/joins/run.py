"""Train with ranks that join at random moments, drawn by seed; exit status 1 if one run does not end equal.

python tests/joins/run.py --trials 200 --seed 1
python tests/joins/run.py --trials 1 --seed 17 --world 3
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import preloaded  # noqa: E402
from launching import run_ranks  # noqa: E402

WORLDS = (2, 3, 4)
TOGETHER = 10  # trials of one launch
MOST_SECONDS = 600.0


def _torch_ranks() -> None:
    import sys

    from joins.draw import draw
    from joins.train import run

    import gradcomp.torch as gc

    gc.init(timeout_seconds=60, log_level="error")
    for seed in map(int, sys.argv[1:]):
        trial = draw(seed, gc.size())
        run(trial)
        if gc.rank() == 0:
            print(trial.line())


def _keras_ranks() -> None:
    import sys

    from joins.draw import draw
    from joins.train_keras import run

    import gradcomp.tf as gc

    gc.init(timeout_seconds=60, log_level="error")
    for seed in map(int, sys.argv[1:]):
        trial = draw(seed, gc.size(), ("fit", "tape"))
        run(trial)
        if gc.rank() == 0:
            print(trial.line())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="of the first; the others follow (default: 1)")
    parser.add_argument("--world", type=int, choices=WORLDS, help="only this many ranks")
    parser.add_argument("--keras", action="store_true", help="TensorFlow and Keras instead of PyTorch")
    given = parser.parse_args()
    program, imported = _torch_ranks, preloaded.TORCH
    environment = {"OMP_NUM_THREADS": "1"}
    if given.keras:
        program, imported = _keras_ranks, preloaded.TENSORFLOW
        environment |= {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    began, ended = time.monotonic(), Counter[str]()
    for number, first in enumerate(range(given.seed, given.seed + given.trials, TOGETHER)):
        seeds = range(first, min(first + TOGETHER, given.seed + given.trials))
        world = given.world or WORLDS[number % len(WORLDS)]
        arguments = tuple(map(str, seeds))
        ranks = run_ranks(
            program, world, env=environment, timeout=MOST_SECONDS, arguments=arguments, imported=imported
        )
        lines = ranks[0].stdout.splitlines()
        for line in lines:
            print(f"{world} ranks;{line}", flush=True)
            ended[line.split(";")[1]] += 1
        if any(rank.returncode for rank in ranks):
            print("\n".join(rank.stderr[-3000:] for rank in ranks), file=sys.stderr)
            print(f"{world} ranks, seed {seeds[len(lines)]} ended badly", file=sys.stderr)
            return 1
    print(f"{sum(ended.values())} runs ended equal in {time.monotonic() - began:.0f} s: {dict(ended)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
