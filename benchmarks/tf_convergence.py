"""Does training under Keras end where it would have ended? Compressed runs against uncompressed ones, over seeds.

    python benchmarks/tf_convergence.py                      # 2 ranks over MPI, 3 seeds
    python benchmarks/tf_convergence.py --seeds 1 --rows 4bit,topk-lgreco --json tf_convergence.json

The task: a convolutional network on scikit-learn's digits, a quarter held out, by ``model.fit`` with SGD, momentum
and a falling rate. A seed is the split, the initial weights and the order of the batches; rows of one seed are a pair.
All runs of a rank are one process, which ``mpiexec`` starts: torch is not needed.

Columns
    accuracy    on the held-out images after the last epoch, by seed
    worse by    than uncompressed, relative, in the mean over pairs; the bar is 1%
    fewer       bytes of the uncompressed run over those of the row
    equal       all ranks end with the same weights, bit for bit
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
from options import positive

BAR = 0.01
EPOCHS, BATCH, LGRECO = 30, 16, "lgreco:every_steps=100"
CONTROL = "control"


@dataclass(frozen=True)
class Row:
    """A compression, and the controller on top of it."""

    key: str
    title: str
    compression: str
    controller: str | None = None


ROWS = (
    Row("none", "uncompressed", "none"),
    Row("4bit", "4 bits", "quantize:bits=4"),
    Row("4bit-lgreco", "4 bits, L-GreCo", "quantize:bits=4", LGRECO),
    Row("topk", "TopK 1%", "topk:density=0.01"),
    Row("topk-lgreco", "TopK 1%, L-GreCo", "topk:density=0.01", LGRECO),
    Row("powersgd", "PowerSGD, rank 4", "powersgd:rank=4"),
    Row("powersgd-lgreco", "PowerSGD, rank 4, L-GreCo", "powersgd:rank=4", LGRECO),
    # What a broken exchange would look like: the task can fail.
    Row(CONTROL, "control: TopK 0.02% without feedback", "topk:density=0.0002,feedback=false"),
)


# ------------------------------------------------------------------------------------------------ one rank


def run_rank(keys: Sequence[str], seeds: int, out: Path) -> None:
    """Every run, one after another; what each ended with."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import gradcomp.tf as gc

    gc.init(log_level="warning")
    runs = [train(row, seed) for seed in range(seeds) for row in ROWS if row.key in keys]
    out.with_name(f"{gc.rank()}.json").write_text(json.dumps(runs))
    gc.shutdown()


def train(row: Row, seed: int) -> dict[str, Any]:
    import keras
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    import gradcomp.tf as gc

    keras.utils.clear_session()
    keras.utils.set_random_seed(1000 * seed + gc.rank())
    digits = load_digits()
    x, x_test, y, y_test = train_test_split(
        (digits.images / 16).astype("float32")[..., None],
        digits.target,
        random_state=seed,
        stratify=digits.target,
    )
    share = slice(gc.rank(), len(x) // gc.size() * gc.size(), gc.size())
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )
    steps = EPOCHS * -(-len(x[share]) // BATCH)
    rate = keras.optimizers.schedules.CosineDecay(0.05, steps)
    opt = gc.DistributedOptimizer(
        keras.optimizers.SGD(rate, momentum=0.9), row.compression, controller=row.controller
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(opt, loss, metrics=["accuracy"])
    model.fit(
        x[share], y[share], batch_size=BATCH, epochs=EPOCHS, verbose=0,
        callbacks=[gc.callbacks.BroadcastGlobalVariables(0)],
    )  # fmt: skip
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights()))
    counted = opt.statistics()
    return {
        "row": row.key,
        "seed": seed,
        "accuracy": accuracy,
        "bytes_per_step": counted.wire_bytes / counted.steps,
        "digest": digest.hexdigest(),
    }


# ------------------------------------------------------------------------------------------------ the table


def launch(keys: Sequence[str], seeds: int, ranks: int) -> list[list[dict[str, Any]]]:
    """What each rank found."""
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise SystemExit("there is no mpiexec: pip install gradcomp[tf-cpu]")
    with tempfile.TemporaryDirectory(prefix="gradcomp-task-") as directory:
        out = Path(directory) / "out"
        own = [sys.executable, __file__, "--rows", ",".join(keys), "--seeds", str(seeds), "--out", str(out)]
        subprocess.run([mpiexec, "-n", str(ranks), *own], check=True)
        return [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(ranks)]


def evaluate(found: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each compression, compared with the uncompressed run of the same seed."""
    runs = [
        {**ranks[0], "equal": len({one["digest"] for one in ranks}) == 1}
        for ranks in zip(*found, strict=True)
    ]
    base = {run["seed"]: run for run in runs if run["row"] == "none"}
    rows = []
    for row in ROWS:
        own = [run for run in runs if run["row"] == row.key]
        if own:
            worse = [1 - run["accuracy"] / base[run["seed"]]["accuracy"] for run in own]
            rows.append(
                {
                    "row": row.key,
                    "title": row.title,
                    "accuracies": [run["accuracy"] for run in own],
                    "worse": worse,
                    "mean_worse": statistics.mean(worse),
                    "bytes_per_step": own[0]["bytes_per_step"],
                    "fewer": statistics.mean(
                        base[run["seed"]]["bytes_per_step"] / run["bytes_per_step"] for run in own
                    ),
                    "equal": all(run["equal"] for run in own),
                }
            )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> str:
    """The table."""
    cells = [
        [
            row["title"],
            ", ".join(f"{100 * value:.2f}" for value in row["accuracies"]),
            None if row["row"] == "none" else f"{100 * row['mean_worse']:+.2f}",
            f"{row['bytes_per_step']:,.0f}",
            None if row["row"] == "none" else f"{row['fewer']:.1f}",
            "yes" if row["equal"] else "NO",
            None if row["row"] in ("none", CONTROL) else "met" if passed(row) else "NOT met",
        ]
        for row in rows
    ]
    return report.table(
        [
            "digits, Keras: row",
            "accuracy % by seed",
            "worse by %",
            "bytes per step",
            "fewer",
            "equal",
            "bar 1%",
        ],
        cells,
    )


def passed(row: dict[str, Any]) -> bool:
    """Whether a row is at most 1% worse, with equal ranks."""
    return bool(row["mean_worse"] <= BAR and row["equal"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [row.key for row in ROWS]
    parser.add_argument("--rows", default=",".join(known), help=f"some of {', '.join(known)}")
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    keys = list(dict.fromkeys(["none", *options.rows.split(",")]))
    if unknown := [key for key in keys if key not in known]:
        parser.error(f"--rows: unknown {', '.join(unknown)}; there are {', '.join(known)}")
    if options.out:
        run_rank(keys, options.seeds, options.out)
        return 0
    machine = report.machine()
    print(report.describe(machine))
    rows = evaluate(launch(keys, options.seeds, options.ranks))
    print(show(rows))
    report.write_json(
        options.json,
        {
            "benchmark": "tf_convergence",
            "machine": machine,
            "ranks": options.ranks,
            "epochs": EPOCHS,
            "rows": rows,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
