"""The tables of Tyagi and Swany 2023 (GraVAC) at our scale."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import report
from adaptive import reached
from convergence_rows import LSTM, METRICS, RESNET
from paper_runs import Arm, Measurement, Pool, Results, Run
from paper_tables import NOT_RUN, by_seed, mean_and_range, order, worse

TITLES = {RESNET: "ResNet-20", LSTM: "LSTM"}
#: The paper's model, and what it wants to reach: accuracy, perplexity.
THEIRS = {RESNET: ("ResNet101", 80.0), LSTM: ("LSTM of 63 M", 22.0)}
#: Times need links that are slow beside these small models.
LINK = "100mbit"
#: Steps of a window; the paper's 500 are 3% of its runs.
WINDOW = 100


def gravac(epsilon: float, rest: str = "minimum=10,maximum=1000") -> str:
    return f"gravac:{rest},epsilon={epsilon},window={WINDOW}"


#: Figure 2, and what it shows; over random-k the other factors fail on both models.
FACTORS = {
    "TopK 10x": "topk:density=0.1",
    "TopK 100x": "topk:density=0.01",
    "TopK 1,000x": "topk:density=0.001",
    "Random-k 10x": "random_k:density=0.1",
}
FIGURE_2 = {
    RESNET: dict(zip(FACTORS, ("slower", "fastest", "slower", "fails"), strict=True)),
    LSTM: dict(zip(FACTORS, ("fastest", "slower", "slower", "converges"), strict=True)),
}


@dataclass(frozen=True)
class Line:
    """A row of Table 2: the paper's accuracy or perplexity, and how many times less time it has than TopK at 10x."""

    title: str
    compression: str
    metric: float | None = None
    faster: float | None = None
    controller: str = ""
    #: In place of a metric that the paper does not have.
    missing: str | None = None

    def arm(self, task: str) -> Arm:
        return Arm(task, self.compression, self.controller, link=LINK)


#: Momentum masking, which is a part of DGC, does not train the LSTM at 10x. DGC clips in place of the task.
_ON_LSTM = "mask=false,clip=0.25"
TABLE_2 = {
    RESNET: [
        Line("TopK 10x", FACTORS["TopK 10x"], 80.14, 1.0),
        Line("TopK 1,000x", FACTORS["TopK 1,000x"], 76.4, 3.02),
        Line("DGC 10x", "dgc:density=0.1", 80.4, 1.23),
        Line("DGC 1,000x", "dgc:density=0.001", 78.6, 5.19),
        Line("RedSync 10x", "redsync:density=0.1", 79.4, 1.2),
        Line("RedSync 1,000x", "redsync:density=0.001", 77.4, 6.94),
        Line("Random-k 10x", FACTORS["Random-k 10x"], missing="fails"),
        Line("Random-k 1,000x", "random_k:density=0.001", missing="fails"),
        Line("GraVAC, TopK, 0.7", "topk", 80.2, 4.32, gravac(0.7)),
    ],
    LSTM: [
        Line("TopK 10x", FACTORS["TopK 10x"], 22.0, 1.0),
        Line("TopK 1,000x", FACTORS["TopK 1,000x"], 26.78, 3.36),
        Line("DGC 10x", f"dgc:density=0.1,{_ON_LSTM}", 21.67, 1.23),
        Line("DGC 10x, masking", "dgc:density=0.1,clip=0.25"),
        Line("DGC 1,000x", f"dgc:density=0.001,{_ON_LSTM}", 25.14, 6.25),
        Line("DGC 1,000x, masking", "dgc:density=0.001,clip=0.25"),
        Line("RedSync 10x", "redsync:density=0.1", 21.65, 1.17),
        Line("RedSync 1,000x", "redsync:density=0.001", 24.24, 6.9),
        Line("Random-k 10x", FACTORS["Random-k 10x"], 24.15, 1.3),
        Line("Random-k 1,000x", "random_k:density=0.001", missing="fails"),
        Line("GraVAC, TopK, 0.7", "topk", 21.25, 6.67, gravac(0.7)),
    ],
}
ADAPTIVE = {task: Arm(task, "topk", gravac(0.7), link=LINK) for task in TITLES}

#: Table 4: floats sent by Accordion and by GraVAC, and how many times less time GraVAC takes.
THEIR_FLOATS = {RESNET: (4.17e11, 9.38e9, 1.94), LSTM: (4.2e11, 4e9, 2.06)}
PERIOD = {RESNET: 78, LSTM: 100}


def accordion(task: str) -> Arm:
    """Between ranks 1 and 4, as in the paper."""
    return Arm(task, "powersgd:rank=4", f"accordion:low=4,high=1,every_steps={PERIOD[task]}", link=LINK)


NONE = {task: Arm(task, "none") for task in TITLES}
#: Figures 7 and 9, beside what Table 2 has; Figure 10, and Figure 11.
CAREFUL = {task: Arm(task, "topk", gravac(0.9)) for task in TITLES}
GEOMETRIC = Arm(RESNET, "redsync", gravac(0.7, "minimum=10,maximum=2000,policy=geometric"))
RANDOM = Arm(RESNET, "random_k", gravac(0.7, "minimum=1.5,maximum=1000,policy=geometric"))

ARMS = [
    *NONE.values(),
    *(line.arm(task) for task, lines in TABLE_2.items() for line in lines),
    *(accordion(task) for task in TITLES),
    *(Arm(task, compression, link=LINK) for task in TITLES for compression in FACTORS.values()),
    *CAREFUL.values(),
    GEOMETRIC,
    RANDOM,
]
BASES = list(NONE.values())
MEASUREMENTS = [
    Measurement("gravac-multilevel", "multilevel.py", ("--rounds=31",), ("--rounds=1",), hosts=False)
]


def tables(found: Results) -> dict[str, str]:
    pool = found.pool
    return {
        **{f"table-2-{task}": table_2(pool, task) for task in TITLES},
        **{f"figure-2-{task}": figure_2(pool, task) for task in TITLES},
        "figures-4-and-6": losses_along(pool),
        "table-3": table_3(found.measured("gravac-multilevel")),
        "table-4": table_4(pool),
        "densities": densities(pool),
        "figures-7c-and-9c": throughputs(pool),
        "cost": found.cost(ARMS),
    }


def seconds_to(run: Run, base: Run) -> float | None:
    """Seconds until the loss is what uncompressed training has after 80% of its steps; None if it never is."""
    at = reached(_curves(base), _curves(run))
    if at is None:
        return None
    return list(accumulate(run["seconds_by_part"]))[round(at[0] * len(run["losses"])) - 1]


def _curves(run: Run) -> dict[str, Any]:
    return {"loss_over_time": run["losses"], "bytes_over_time": run["bytes"]}


def times(runs: Sequence[Run], base: Sequence[Run]) -> dict[int, float | None]:
    """Seconds to the loss, by seed."""
    return {run["seed"]: seconds_to(run, dense) for run, dense in report.pairs(runs, base)}


def _text(seconds: Mapping[int, float | None]) -> str:
    return ", ".join("never" if each is None else f"{each:.1f}" for each in seconds.values())


def quotient(own: Mapping[int, float | None], base: Mapping[int, float | None]) -> str | None:
    """How many times less, in the mean of the seeds that both have."""
    both = [other / each for seed, each in own.items() if (other := base.get(seed)) and each]
    return f"{statistics.mean(both):.2f} ({len(both)} seeds)" if both else None


def table_2(pool: Pool, task: str) -> str:
    base, sign = pool.of(NONE[task]), METRICS[task][1]
    reference = times(pool.of(TABLE_2[task][0].arm(task)), base)
    dense = f"{statistics.mean(run['run_bytes_per_step'] for run in base):,.0f}" if base else None
    lines: list[list[object]] = [["uncompressed", *[None] * 3, by_seed(base), None, None, dense, None, None]]
    for line in TABLE_2[task]:
        runs = pool.of(line.arm(task))
        paper = None
        cells: list[object] = [line.title, line.missing, None, None]
        if line.metric is not None:
            paper = 100 * sign * (line.metric / THEIRS[task][1] - 1) + 0.0
            cells = [line.title, f"{line.metric:g}", f"{paper:+.2f}", f"{line.faster:g}"]
        if not runs:
            lines.append([*cells, NOT_RUN, *[None] * 5])
            continue
        changes, own = worse(runs, base, task), times(runs, base)
        lines.append(
            [
                *cells,
                by_seed(runs),
                mean_and_range(changes),
                order(changes, paper),
                f"{statistics.mean(run['run_bytes_per_step'] for run in runs):,.0f}",
                _text(own),
                quotient(own, reference),
            ]
        )
    title = f"{TITLES[task]}; paper: {THEIRS[task][0]}"
    paper_has = ["paper", "paper, worse %", "paper, faster"]
    ours = ["ours, by seed", "ours, worse %", "order", "bytes a step", "seconds to the loss", "ours, faster"]
    return report.table([title, *paper_has, *ours], lines)


def figure_2(pool: Pool, task: str) -> str:
    """Metric and time by factor, where uncompressed training's loss stands for the paper's target."""
    base = pool.of(NONE[task])
    found = {name: pool.of(Arm(task, how, link=LINK)) for name, how in FACTORS.items()}
    taken = {name: times(runs, base) for name, runs in found.items()}
    lines: list[list[object]] = []
    for name, runs in found.items():
        changes = worse(runs, base, task)
        shown = [mean_and_range(changes), order(changes, None), _text(taken[name])]
        shown = [*shown, quotient(taken[name], taken["TopK 10x"])] if runs else [None] * 4
        lines.append([name, FIGURE_2[task][name], by_seed(runs), *shown])
    ours = ["ours, by seed", "worse %", "order", "seconds to the loss", "times as fast as TopK 10x"]
    return report.table([TITLES[task], "paper", *ours], lines)


def losses_along(pool: Pool) -> str:
    """Figures 4c and 6c: the training loss in the mean over seeds, after shares of the run."""
    shares = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
    lines: list[list[object]] = []
    for task, title in TITLES.items():
        static = {name: Arm(task, FACTORS[name], link=LINK) for name in ("TopK 10x", "TopK 1,000x")}
        arms = {"uncompressed": NONE[task], **static}
        for name, arm in arms.items():
            # Those of one machine: uncompressed training has run on several.
            runs = pool.of(arm)
            here = [run["losses"] for run in runs if run["machine"] == runs[0]["machine"]]
            ends = [round(share * len(here[0])) - 1 for share in shares] if here else []
            means = [f"{statistics.mean(losses[end] for losses in here):.3f}" for end in ends]
            lines.append([f"{title}, {name}", *(means or [NOT_RUN, *[None] * (len(shares) - 1)])])
    return report.table(["training loss", *(f"{share:.0%}" for share in shares)], lines)


def table_4(pool: Pool) -> str:
    lines: list[list[object]] = []
    for task, (theirs, own, faster) in THEIR_FLOATS.items():
        base = pool.of(NONE[task])
        runs = {"Accordion": pool.of(accordion(task)), "GraVAC": pool.of(ADAPTIVE[task])}
        sent = {name: {r["seed"]: r["run_bytes_per_step"] for r in found} for name, found in runs.items()}
        taken = {name: times(found, base) for name, found in runs.items()}
        for name, found in runs.items():
            is_base = name == "Accordion"
            lines.append(
                [
                    f"{TITLES[task]}, {name}",
                    f"{theirs if is_base else own:.3g}",
                    "1" if is_base else f"{theirs / own:.1f}",
                    "1" if is_base else f"{faster:g}",
                    f"{statistics.mean(sent[name].values()):,.0f}" if found else NOT_RUN,
                    quotient(sent[name], sent["Accordion"]),
                    mean_and_range(worse(found, base, task)),
                    _text(taken[name]) if found else None,
                    quotient(taken[name], taken["Accordion"]),
                ]
            )
    paper = ["paper: floats", "fewer", "less time"]
    ours = ["ours: bytes a step", "fewer", "worse %", "seconds to the loss", "less time"]
    return report.table(["", *paper, *ours], lines)


def table_3(found: dict[str, Any] | None) -> str:
    """Milliseconds of selecting twice, and of selecting among what the first factor selected."""
    paper = {
        ("resnet", "topk"): 1.83, ("resnet", "dgc"): 1.52, ("resnet", "redsync"): 1.1,
        ("lstm", "topk"): 1.59, ("lstm", "dgc"): 1.4, ("lstm", "redsync"): 1.5,
    }  # fmt: skip
    lines: list[list[object]] = []
    for row in found["rows"] if found else []:
        there = [factor for (model, method), factor in paper.items() if row["method"].lower() == method
                 and row["model"].lower().startswith(model)]  # fmt: skip
        both = row["direct_milliseconds"], row["multilevel_milliseconds"]
        lines.append(
            [
                f"{row['model']}, {row['method']}",
                f"{there[0]:g}" if there else None,
                *(f"{each:.2f}" for each in both),
                f"{row['speedup']:.2f}",
            ]
        )
    headers = ["", "paper, times faster", "direct, ms", "multi-level, ms", "times faster"]
    return report.table(headers, lines or [[NOT_RUN, *[None] * 4]])


def densities(pool: Pool) -> str:
    """Figures 7, 9, 10 and 11: how often each factor was sent, and how many times fewer floats."""
    rows: list[tuple[str, Arm, str]] = [
        ("ResNet-20, TopK, 0.7 (Figure 7)", ADAPTIVE[RESNET], "163"),
        ("ResNet-20, TopK, 0.9", CAREFUL[RESNET], "19"),
        ("LSTM, TopK, 0.7 (Figure 9)", ADAPTIVE[LSTM], "289"),
        ("LSTM, TopK, 0.9", CAREFUL[LSTM], "279"),
        ("ResNet-20, RedSync, geometric, 0.7 (Figure 10)", GEOMETRIC, "76"),
        ("ResNet-20, random-k from 1.5x, geometric, 0.7 (Figure 11)", RANDOM, "18"),
    ]
    lines: list[list[object]] = []
    for title, arm, there in rows:
        runs = pool.of(arm)
        if not runs:
            lines.append([title, there, NOT_RUN, *[None] * 4])
            continue
        changes = worse(runs, pool.of(NONE[arm.task]), arm.task)
        factors = sorted({factor for run in runs for factor in run["factors"]}, key=float)
        shares = {
            f: statistics.mean(run["factors"].get(f, 0) / run["steps"] for run in runs) for f in factors
        }
        lines.append(
            [
                title,
                there,
                f"{statistics.mean(run['fewer_floats'] for run in runs):.1f}",
                ", ".join(f"{f}x {share:.0%}" for f, share in shares.items() if share >= 0.005),
                by_seed(runs),
                mean_and_range(changes),
                order(changes, 0.0),
            ]
        )
    headers = ["", "paper, fewer floats", "ours", "steps by factor", "by seed", "worse %", "order"]
    return report.table(headers, lines)


def throughputs(pool: Pool) -> str:
    """Figures 7c and 9c: gains and compression throughputs at the end, in the mean of the seeds that have them."""
    factors = ("10", "20", "40", "160", "1000")
    lines: list[list[object]] = []
    for task, title in TITLES.items():
        runs = pool.of(ADAPTIVE[task])
        for name, key, digits in (("gain", "gains", 3), ("throughput", "throughputs", 2)):
            line: list[object] = [f"{title}, {name}"]
            for factor in factors:
                found = [run[key][factor] for run in runs if factor in run.get(key, ())]
                line.append(f"{statistics.mean(found):.{digits}f} ({len(found)})" if found else None)
            lines.append(line)
    return report.table(["mean (seeds)", *(f"{factor}x" for factor in factors)], lines)
