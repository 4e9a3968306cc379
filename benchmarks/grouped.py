"""Which form of KMEANS, Linear and Bayes saves what the thesis reports, on recorded gradients. No ranks, no network.

    python benchmarks/grouped.py --data wikitext2.txt --cifar cifar10_10k.npz [--tasks lstm ...] [--json PATH]

A model is trained without compression. At three points of the run the gradients of a period give one table of errors,
for which every form then chooses levels.

Columns
    fewer  bytes of the uniform reference over those of the choice, all layers that are compressed (mean of the periods)
    error  sum of the layers' L2 errors over that of the reference
    > 4, < 4 bits  share of the elements with more than 4 bits, and with fewer
Forms
    plain, log   what is clustered: (size, norm) as they are, or their standardised logarithms
    budget       none, as Algorithm 3.1 has it, or the error of the reference
    choices      2 to 8 bits with the reference's bucket, or with buckets that are wider for fewer bits
    gradients    summed over the period, or of eight single steps
Source: Markov 2024, section 3.6, Algorithm 3.1, Table 3.8 (KMEANS 1.47, Bayes 1.34, Accordion 1.21, Linear 1.15).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import report
from convergence_rows import GPT, LSTM, RESNET
from convergence_tasks import Settings, load, make_job

from gradcomp import Compressor, Filter, LayerSpec, Quantize
from gradcomp.control.base import Environment
from gradcomp.control.candidates import CandidateLevels, make_candidates
from gradcomp.control.distortion.errors import errors
from gradcomp.control.grouped import Bayes, KMeans, Linear
from gradcomp.control.lgreco import LGreCo
from gradcomp.control.observations import PeriodObservations
from gradcomp.control.periodic import Periodic
from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology

Doubles = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

PERIODS, SAMPLES = 3, 8
#: The thesis's buckets: 128 for Transformers, 1,024 for CNNs; and ours.
REFERENCES = {LSTM: (128, 512), GPT: (128, 512), RESNET: (1024, 512)}


def choices_of(bucket: int) -> dict[str, list[Compressor]]:
    """Returns the levels by the name of their range; all contain the reference."""
    bits = range(2, 9)
    wide = {2: 8 * bucket, 3: 4 * bucket, 4: bucket, 5: bucket}
    return {
        "bits": [Quantize(b, bucket_size=bucket) for b in bits],
        "bits and buckets": [Quantize(b, bucket_size=wide.get(b, bucket // 2)) for b in bits],
    }


def periods(
    task: str, options: argparse.Namespace
) -> Iterator[tuple[list[LayerSpec], list[Floats], list[list[Floats]]]]:
    """Yields, at three points of a run, the layers, their summed gradients, and those of single steps."""
    import torch

    settings = Settings(1, options.steps, options.epochs, options.data, options.cifar)
    job = make_job(task, settings, load(task, settings), 0, 0, 2)
    every = 100 if task != RESNET else job.steps // options.epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        job.optimizer, max_lr=job.optimizer.param_groups[0]["lr"], total_steps=job.steps, pct_start=0.1,
        cycle_momentum=False,
    )  # fmt: skip
    named = [
        (LayerSpec(name, tuple(p.shape)), p)
        for name, p in job.model.named_parameters()
        if Filter().reason_to_exclude(LayerSpec(name, tuple(p.shape))) is None
    ]
    ends = [round(job.steps * part / every) * every for part in (0.2, 0.5, 0.9)]
    sums: list[Floats] = []
    singles: list[list[Floats]] = []
    for step, (inputs, targets) in zip(range(1, ends[-1] + 1), job.batches, strict=False):
        job.optimizer.zero_grad()
        job.loss(job.model, inputs, targets).backward()
        if any(0 <= end - step < every for end in ends):
            own = [p.grad.numpy().reshape(-1).copy() for _, p in named]
            sums = [a + b for a, b in zip(sums, own, strict=True)] if sums else own
            if step % (every // SAMPLES) == 0:
                singles.append(own)
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), job.clip)
        job.optimizer.step()
        schedule.step()
        if step in ends:
            yield [layer for layer, _ in named], sums, singles
            sums, singles = [], []


def observe(
    candidates: CandidateLevels, gradients: Sequence[Sequence[Floats]], cached: dict[Any, float]
) -> PeriodObservations:
    """Returns what a controller would see: means over the given gradients."""
    rows = range(len(candidates.specs))
    found = np.full(candidates.costs.shape, np.inf)
    norm = np.zeros(len(rows))
    for row in rows:
        values = [gradient[row] for gradient in gradients]
        norm[row] = np.mean([np.linalg.norm(one.astype(np.float64)) for one in values])
        for k, choice in enumerate(candidates.choices[row]):
            key = id(gradients), row, choice
            if key not in cached:
                layer = candidates.specs[row]
                cached[key] = float(np.mean([errors([choice], layer, one, 0)[0] for one in values]))
            found[row, k] = cached[key]
    zeros = np.zeros(len(rows))
    return PeriodObservations(
        0, candidates, norm, zeros, zeros, found, zeros, zeros, np.zeros(len(rows), np.int64),
        candidates.reference, np.zeros(1),
    )  # fmt: skip


def forms(observed: PeriodObservations) -> Iterator[tuple[str, Numbers]]:
    """Yields what every form chooses."""
    rules: dict[str, Periodic] = {}
    for budget, alpha in (("no budget", None), ("budget 1", 1.0)):
        for points in ("plain", "log"):
            rules[f"KMEANS, {points}, {budget}"] = KMeans(100, points=points, alpha=alpha)
        rules[f"Linear, {budget}"] = Linear(100, alpha=alpha)
    rules["Bayes, budget 1"] = Bayes(100, trials=400, clusters=None)
    rules["L-GreCo"] = LGreCo(100, metric="norm")
    for form, rule in rules.items():
        memory = rule.begin_memory(observed.candidates)
        yield form, rule.decide(replace(observed, memory=memory)).choices


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: dict[tuple[str, ...], list[tuple[float, ...]]] = {}
    for task in options.tasks:
        for layers, sums, singles in periods(task, options):
            cached: dict[Any, float] = {}
            summed = [sums]
            for bucket in REFERENCES[task]:
                reference: Compressor = Quantize(4, bucket_size=bucket)
                environment = Environment(
                    layers, [reference] * len(layers), 0, Topology.one_host(2), Scheme("sra")
                )
                for name, levels in choices_of(bucket).items():
                    candidates = make_candidates(environment, lambda *_, levels=levels: levels)
                    for kind, gradients in (("summed", summed), ("single steps", singles)):
                        observed = observe(candidates, gradients, cached)
                        uniform = candidates.reference
                        for form, choice in forms(observed):
                            bits = np.array([candidates.choices[i][k].bits for i, k in enumerate(choice)])
                            sizes = np.array([layer.size for layer in layers])
                            rows.setdefault((task, str(bucket), name, kind, form), []).append(
                                (
                                    observed.total_bytes(uniform) / observed.total_bytes(choice),
                                    observed.total_error(choice) / observed.total_error(uniform),
                                    float(sizes[bits > 4].sum() / sizes.sum()),
                                    float(sizes[bits < 4].sum() / sizes.sum()),
                                )
                            )
            print(f"{task}: a period", file=sys.stderr, flush=True)
    keys = ("task", "bucket", "choices", "gradients", "form")
    found = []
    for key, values in rows.items():
        fewer, error, more, less = np.mean(values, axis=0)
        found.append(
            dict(zip(keys, key, strict=True)) | {"fewer": fewer, "error": error, "above": more, "below": less}
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=[LSTM, RESNET, GPT], choices=[LSTM, RESNET, GPT])
    parser.add_argument("--data")
    parser.add_argument("--cifar")
    parser.add_argument("--steps", type=int, default=1000, help="of the LSTM and the GPT")
    parser.add_argument("--epochs", type=int, default=18, help="of ResNet-20")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = report.machine()
    print(report.describe(machine))
    rows = measure(options)
    cells = [
        [r["task"], r["bucket"], r["choices"], r["gradients"], r["form"], f"{r['fewer']:.2f}", f"{r['error']:.2f}",
         f"{r['above']:.0%}", f"{r['below']:.0%}"]
        for r in rows
    ]  # fmt: skip
    heads = ["task", "bucket", "choices", "gradients", "form", "fewer", "error", "> 4 bits", "< 4 bits"]
    print(report.table(heads, cells))
    report.write_json(options.json, {"benchmark": "grouped", "machine": machine, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
