"""Draw elastic runs by seed: ranks are killed and come at random moments; exit status 1 if one ended badly.

python tests/faults/elastic.py --runs 100 --seed 1
python tests/faults/elastic.py --runs 1 --seed 17 --verbose
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

from elastic_job import Job, job  # noqa: E402
from preloaded import TENSORFLOW, TORCH  # noqa: E402

AT_A_TIME = 2
TARGET = 0.95
#: A run in which nothing happens takes about a tenth of it.
TIMEOUT_SECONDS = 240.0
COMPRESSIONS = (
    "none",
    "topk:density=0.05",
    "quantize:bits=4,feedback=true",
    "powersgd:rank=2",
    "ef21[topk:density=0.1]",
)

#: Learns to tell ten clusters of points apart, and says where it is and how good the model is in the end.
PROGRAM = """
    import hashlib, json, sys, time
    import torch
    import gradcomp.torch as gc

    compression, steps = sys.argv[1], int(sys.argv[2])
    gc.init(timeout_seconds=60, log_level="warning")
    torch.manual_seed(gc.rank())
    drawn = torch.Generator().manual_seed(7)
    centers = torch.randn(10, 32, generator=drawn)
    labels = torch.randint(10, (4096,), generator=drawn)
    points = centers[labels] + 0.5 * torch.randn(4096, 32, generator=drawn)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    opt = gc.DistributedOptimizer(opt, model.named_parameters(), compression=compression)
    sampler = gc.elastic.ElasticSampler(points)
    state = gc.elastic.TorchState(model=model, optimizer=opt, sampler=sampler, step=0)


    @gc.elastic.run
    def train(state):
        print(json.dumps({"rank": gc.rank(), "size": gc.size(), "step": state.step}), flush=True)
        while state.step < steps:
            batches = torch.utils.data.BatchSampler(sampler, 32, drop_last=False)
            for number, batch in enumerate(batches):
                opt.zero_grad()
                torch.nn.functional.cross_entropy(model(points[batch]), labels[batch]).backward()
                opt.step()
                state.step += 1
                sampler.record_batch(number, len(batch))
                if state.step % 5 == 0:
                    state.commit()
                time.sleep(0.005)
                if state.step >= steps:
                    return
            sampler.set_epoch(sampler.epoch + 1)


    train(state)
    accuracy = (model(points).argmax(1) == labels).float().mean().item()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(json.dumps({"accuracy": accuracy, "digest": digest[:12]}), flush=True)
"""

#: The same under Keras.
KERAS_PROGRAM = """
    import hashlib, json, sys, time
    import keras
    import numpy as np
    import gradcomp.tf as gc

    compression, steps = sys.argv[1], int(sys.argv[2])
    gc.init(timeout_seconds=60, log_level="warning")
    drawn = np.random.default_rng(7)
    centers = drawn.standard_normal((10, 32)).astype("float32")
    labels = drawn.integers(0, 10, 4096)
    points = centers[labels] + 0.5 * drawn.standard_normal((4096, 32)).astype("float32")
    model = keras.Sequential([keras.Input([32]), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
    opt = gc.DistributedOptimizer(keras.optimizers.SGD(0.02, momentum=0.9), compression=compression)
    model.compile(opt, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    sampler = gc.elastic.ElasticSampler(points)
    state = gc.elastic.KerasState(model, sampler=sampler, epoch=0, step=0)


    class Record(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            sampler.record_batch(batch, 32)
            state.step += 1
            time.sleep(0.005)

        def on_epoch_end(self, epoch, logs=None):
            sampler.set_epoch(epoch + 1)


    @gc.elastic.run
    def train(state):
        print(json.dumps({"rank": gc.rank(), "size": gc.size(), "step": state.step}), flush=True)
        while state.step < steps:
            own = list(sampler)
            callbacks = [Record(), gc.elastic.UpdateEpochStateCallback(state), gc.elastic.CommitStateCallback(state, 5)]
            model.fit(points[own], labels[own], batch_size=32, shuffle=False, verbose=0, callbacks=callbacks,
                      initial_epoch=state.epoch, epochs=state.epoch + 1)


    train(state)
    accuracy = (model.predict(points, verbose=0).argmax(1) == labels).mean().item()
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in model.weights)).hexdigest()
    print(json.dumps({"accuracy": accuracy, "digest": digest[:12]}), flush=True)
"""
PROGRAMS = {"torch": (PROGRAM, TORCH), "keras": (KERAS_PROGRAM, TENSORFLOW)}


def draw(seed: int) -> dict[str, Any]:
    """What happens in a run, in seconds after the first step. More than a third of the kills is to be of rank 0."""
    chance = random.Random(seed)
    kills = [(chance.uniform(0.0, 4.0), chance.random() < 0.45) for _ in range(chance.randint(1, 2))]
    if len(kills) == 2 and chance.random() < 0.3:
        kills[1] = (kills[0][0], False)  # at once
    return {
        "seed": seed,
        "frontend": chance.choice(["torch", "torch", "keras"]),
        "compression": chance.choice(COMPRESSIONS),
        "world": chance.randint(3, 4),
        "kills": sorted(kills),
        "arrivals": sorted(chance.uniform(0.0, 4.0) for _ in range(chance.randint(1, 2))),
    }


def play(drawn: dict[str, Any]) -> dict[str, Any]:
    """Run it, and judge how it ended."""
    began, killed, zeros = time.monotonic(), set(), 0
    chance = random.Random(-drawn["seed"])
    program, imported = PROGRAMS[drawn["frontend"]]
    with job(program, imported, GRADCOMP_MIN_RANKS=1, GRADCOMP_JOIN_WINDOW_SECONDS=1) as run:
        start = lambda: run.start(drawn["compression"], 400)  # noqa: E731
        for _ in range(drawn["world"]):
            start()
        while not all(run.said(number) for number in range(drawn["world"])) and time.monotonic() - began < 60:
            time.sleep(0.02)
        first = time.monotonic()
        events = [(at, "kill", zero) for at, zero in drawn["kills"]]
        events += [(at, "come", False) for at in drawn["arrivals"]]
        for at, what, zero in sorted(events):
            time.sleep(max(0.0, first + at - time.monotonic()))
            if what == "come":
                start()
                continue
            ranks = {
                n: said[-1].get("rank")
                for n in range(len(run.processes))
                if n not in killed and (said := run.said(n))
            }
            candidates = [n for n, rank in ranks.items() if (rank == 0) == zero and rank is not None]
            if len(ranks) > 1 and candidates:
                victim = chance.choice(candidates)
                run.kill(victim)
                killed.add(victim)
                zeros += ranks[victim] == 0
        ends, hung = [], False
        for number in range(len(run.processes)):
            try:
                ends.append(run.wait(number, max(1.0, began + TIMEOUT_SECONDS - time.monotonic())))
            except subprocess.TimeoutExpired:
                ends.append(None)
                hung = True
        return {
            **drawn, "killed": len(killed), "killed_rank_0": zeros, "ends": ends, "seconds": time.monotonic() - began,
            "outcome": "hung" if hung else _outcome(run, killed, ends),
            "logs": [run.log(number) for number in range(len(run.processes))],
        }  # fmt: skip


def _outcome(run: Job, killed: set[int], ends: list[int | None]) -> str:
    finished = []
    for number, end in enumerate(ends):
        if number in killed:
            continue
        if end != 0 and "work of the job" not in run.log(number):  # it came when all was done
            return f"process {number} ended with {end}"
        finished += [one for one in run.said(number) if "digest" in one]
    if not finished:
        return "nobody finished"
    if len({one["digest"] for one in finished}) > 1:
        return "models differ"
    return "ok" if finished[0]["accuracy"] >= TARGET else f"accuracy {finished[0]['accuracy']:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20, help="how many (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="of the first; the others follow (default: 1)")
    parser.add_argument("--out", type=Path, help="JSON with every run")
    parser.add_argument("--verbose", action="store_true", help="print what the ranks logged")
    given = parser.parse_args()
    began, results = time.monotonic(), []
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for one in pool.map(play, map(draw, range(given.seed, given.seed + given.runs))):
            results.append(one)
            print(
                f"{one['seed']:5} {one['outcome']:20} {one['seconds']:5.1f} s  {one['world']} ranks, "
                f"{one['killed']} killed ({one['killed_rank_0']} rank 0), {len(one['arrivals'])} came, "
                f"{one['frontend']}, {one['compression']}",
                flush=True,
            )
            if given.verbose or one["outcome"] != "ok":
                print(
                    *(f"--- process {n}: {one['ends'][n]}\n{log}" for n, log in enumerate(one["logs"])),
                    sep="\n",
                )
    outcomes = Counter(one["outcome"] for one in results)
    total, zero = sum(one["killed"] for one in results), sum(one["killed_rank_0"] for one in results)
    came = sum(len(one["arrivals"]) for one in results)
    print(f"{len(results)} runs in {time.monotonic() - began:.0f} s: {dict(outcomes)}")
    print(f"{total} killed, {zero} of them rank 0; {came} came")
    if given.out:
        given.out.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(outcome != "ok" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
