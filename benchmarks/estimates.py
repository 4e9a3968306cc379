"""What `gradcomp estimate` predicts and `gradcomp bench` recommends, beside real training. Needs root.

    python benchmarks/estimates.py                               # four models, three links: half an hour
    python benchmarks/estimates.py --models lstm --links 1gbit --json estimates.json

Hosts are network namespaces, one rank, one thread and one core each. Every case trains a model for real, with the rows
of step.py in alternation. The estimate gets what a user has: the shapes, the time of a step without exchange and of
backward as rank 0 measured them, and the rate of the link; unshaped links get the rate that a bare transfer reaches.
Then `gradcomp bench` runs on hosts of the same kind, with the same model as package:function.

Columns
    measured   median step of the slowest rank
    predicted  by `gradcomp estimate`
    error      predicted over measured, less one
    bench      step that `gradcomp bench` measured
A case counts as predicted if both DDP's step and that of the choice that is really the fastest are within 15%; the
worst error of all choices stands beside it. bench is right if the choice that it recommends takes, in real training, at
most 5% longer than the fastest choice of gradcomp there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import hosts
import report
import torch
from step_rank import LENGTH, MODELS, Task, make_model
from step_rows import choose

from gradcomp.core.layers import LayerSpec
from gradcomp.core.topology import Topology
from gradcomp.estimate.predict import PAYLOAD, Situation, estimate, host_processor, readiness
from gradcomp.reduce.model import Network

#: The rows of step.py that are the choices of an estimate.
ROWS = {"ddp": "ddp", "ddp-half": "ddp-fp16", "ddp-powersgd": "ddp-powersgd-4", "none": "identity", "bf16": "bf16",
        "8bit": "8bit", "4bit": "4bit", "powersgd": "powersgd-4", "topk": "topk"}  # fmt: skip
LINKS = ("unshaped", "1gbit", "100mbit")
STEP_BAR, VERDICT_BAR = 0.15, 0.05
STEP_SCRIPT = Path(__file__).with_name("step.py")


def make_for_bench(name: str) -> tuple[Any, ...]:
    """A model with a batch, for package:function."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = Task((), 0, 0, 0, 0, None, {}, False, None, name)
    model, text = make_model(task)
    return model, *next(text.batches(0, 4, LENGTH, 0))


def lstm() -> tuple[Any, ...]:
    return make_for_bench("lstm")


def gpt() -> tuple[Any, ...]:
    return make_for_bench("gpt")


def resnet() -> tuple[Any, ...]:
    return make_for_bench("resnet")


def resnet18() -> tuple[Any, ...]:
    return make_for_bench("resnet18")


def train(model: str, link: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What each rank found in real training."""
    rows = choose(",".join(["ideal", *ROWS.values()]), [])
    task = Task(
        rows, options.blocks, options.steps, options.warmup, options.seed, None, {}, True, None, model
    )
    return hosts.run_task(hosts.Hosts(options.ranks, link), str(STEP_SCRIPT), task)


def predict(
    model: str, link: str, found: list[dict[str, Any]], processor: Any
) -> tuple[Situation, dict[str, float]]:
    """The situation as a user would describe it, and the predicted step by choice."""
    made, _ = make_model(Task((), 0, 0, 0, 0, None, {}, False, None, model))
    layers = [LayerSpec(name, tuple(p.shape)) for name, p in made.named_parameters()]
    ideal = [rank["rows"]["ideal"] for rank in found]
    alone = max(map(median_step, ideal))
    # What step.py calls backward has the forward pass in it, which takes about half as long as backward.
    backward = min(max(rank["backward_seconds"] for rank in ideal) * 2 / 3, alone)
    rate = {"1gbit": 1e9 / 8 * PAYLOAD, "100mbit": 1e8 / 8 * PAYLOAD}.get(
        link, min(rank["link"]["bytes_per_second"] for rank in found)
    )
    topology, network = Topology(tuple(range(len(found)))), Network(1e-4, 1 / rate, 1.0, 1.0)
    situation = Situation(layers, readiness(layers, backward), backward, alone, topology, network, processor)
    return situation, {one.choice.key: one.step for one in estimate(situation)}


def median_step(row: dict[str, Any]) -> float:
    return statistics.median(itertools.chain.from_iterable(row["block_seconds"]))


def bench(model: str, link: str, options: argparse.Namespace) -> dict[str, Any]:
    """What `gradcomp bench` printed on hosts of the same kind."""
    command = [sys.executable, "-m", "gradcomp", "bench", "--model", f"estimates:{model}", "--json"]
    command += ["--seconds", str(options.bench_seconds)]
    with tempfile.TemporaryFile("w+") as out, hosts.Hosts(options.ranks, link) as made:
        codes = made.run(
            command,
            {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
            pin=True,
            timeout_seconds=600,
            stdout=out,
        )
        if any(codes):
            raise SystemExit(f"gradcomp bench failed; exit codes {codes}")
        out.seek(0)
        printed: dict[str, Any] = json.loads(out.read())
    return printed


def case(model: str, link: str, options: argparse.Namespace, processor: Any) -> dict[str, Any]:
    """One model on one link."""
    found = train(model, link, options)
    situation, predicted = predict(model, link, found, processor)
    measured = {key: max(median_step(rank["rows"][row]) for rank in found) for key, row in ROWS.items()}
    errors = {key: predicted[key] / measured[key] - 1 for key in ROWS}
    own = [key for key in ROWS if not key.startswith("ddp")]
    fastest = min(own, key=measured.__getitem__)
    result = {
        "alone": situation.alone,
        "backward": situation.backward,
        "measured": measured,
        "predicted": predicted,
        "errors": errors,
        "fastest": fastest,
        "estimated_fastest": min(own, key=predicted.__getitem__),
        "predicted_well": max(abs(errors["ddp"]), abs(errors[fastest])) <= STEP_BAR,
        "worst_error": max(errors.values(), key=abs),
    }
    if options.bench_seconds:
        printed = bench(model, link, options)
        benched = {one["key"]: one["step_seconds"] for one in printed["choices"] if one["step_seconds"]}
        winner = min((key for key in own if key in benched), key=benched.__getitem__)
        result |= {
            "bench": benched,
            "bench_fastest": winner,
            "verdict": printed["verdict"],
            "bench_right": measured[winner] <= (1 + VERDICT_BAR) * measured[fastest],
        }
    return result


def show(cases: dict[str, dict[str, Any]]) -> str:
    headers = ["model, link", "choice", "measured ms", "predicted ms", "error", "bench ms"]
    cells = []
    for name, found in cases.items():
        for key in ROWS:
            marks = "*" * (key == found["fastest"])
            measured, predicted = found["measured"][key], found["predicted"][key]
            benched = found.get("bench", {}).get(key)
            cells.append(
                [
                    name,
                    key + marks,
                    f"{1e3 * measured:.1f}",
                    f"{1e3 * predicted:.1f}",
                    f"{100 * found['errors'][key]:+.0f}%",
                    "-" if benched is None else f"{1e3 * benched:.1f}",
                ]
            )
    lines = [report.table(headers, cells), "", "* the fastest of gradcomp's choices, in real training"]
    good = sum(found["predicted_well"] for found in cases.values())
    rows = [error for found in cases.values() for error in found["errors"].values()]
    within = sum(abs(error) <= STEP_BAR for error in rows)
    lines.append(
        f"bar: DDP's step and the fastest within {STEP_BAR:.0%}: {good} of {len(cases)} cases; of all rows "
        f"{within} of {len(rows)}, worst {max(rows, key=abs):+.0%}"
    )
    if all("bench" in found for found in cases.values()):
        right = sum(found["bench_right"] for found in cases.values())
        lines.append(
            f"bar: bench recommends the fastest or one within {VERDICT_BAR:.0%}: {right} of {len(cases)} cases"
        )
    return "\n".join(lines)


def measure(options: argparse.Namespace) -> None:
    machine = report.machine()
    print(report.describe(machine))
    cases: dict[str, dict[str, Any]] = {}
    if options.json and options.json.exists():
        cases = json.loads(options.json.read_text())["cases"]
    processor = host_processor()
    for link in options.links:
        for model in options.models:
            cases[f"{model}, {link}"] = case(model, link, options, processor)
            print(f"{model}, {link}: done", flush=True)
            report.write_json(options.json, {"benchmark": "estimates", "machine": machine, "cases": cases})
    print(show(cases))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", type=lambda text: text.split(","), default=list(MODELS), help="comma-separated"
    )
    parser.add_argument(
        "--links", type=lambda text: text.split(","), default=list(LINKS), help="comma-separated"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="of a block, that count")
    parser.add_argument("--warmup", type=int, default=2, help="of a block, that do not")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bench-seconds", type=float, default=60.0, help="for gradcomp bench; 0: without")
    parser.add_argument(
        "--json", type=Path, help="write all figures here; cases that it has already are kept"
    )
    return hosts.exit_code(lambda: measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
