"""The tables of Markov 2024, chapter 3 (CGX), at our scale; those of chapter 5 are paper_qsdp's."""

from __future__ import annotations

import statistics
from typing import Any

import paper_qsdp
import report
from convergence_rows import LSTM, PAIRS, RESNET
from paper_runs import Arm, Measurement, Pool, Results, step_times, timed
from paper_tables import NOT_RUN, Row, by_seed, compare, faster, fewer, mean_and_range, order, worse

FOUR = "quantize:bits=4"
#: Table 3.5: the paper's model beside ours, without CGX and with it.
RECOVERY = {
    RESNET: ("ResNet-20; paper: ResNet50", 75.8, 75.9),
    LSTM: ("LSTM; paper: Transformer-XL", 22.81, 22.9),
    PAIRS: ("GPT; paper: GPT-2", 14.1, 13.9),
}

#: Table 3.8, on the LSTM: a controller over 4 bits, times fewer bytes, and percent faster on one node and on four.
ADAPTIVE = {
    "KMEANS": ("kmeans:every_steps=100,points=plain,alpha=none", 1.47, (5, 40)),
    "Bayes": ("bayes:every_steps=100", 1.34, (3, 30)),
    "Linear": ("linear:every_steps=100,alpha=none", 1.15, (2, 13)),
    "Accordion": ("accordion:low=4,high=3,every_steps=100", 1.21, (3, 15)),
}


def adaptive(name: str) -> Arm:
    return Arm(LSTM, FOUR, ADAPTIVE[name][0] if name else "")


_SCHEMES = [adaptive(name) for name in ("", *ADAPTIVE)]
ARMS = [
    *(Arm(task, how) for task in RECOVERY for how in ("none", FOUR)),
    *_SCHEMES,
    *(timed(arm) for arm in _SCHEMES),
]

BASES = [*(Arm(task, "none") for task in RECOVERY), adaptive("")]

#: Only a header travels: what a step would take on a perfect network.
NOTHING = "fake:ratio=1073741824"
GATHERED = "quantize:bits=8"
#: Table 3.6: rows by model, with items per second there.
PEERS = {
    "lstm": ("LSTM; paper: Transformer-XL", "powersgd:rank=8", (170, 260, 220, 30)),
    "resnet18": ("ResNet-18; paper: ResNet50", "powersgd:rank=4", (1.9, 2.9, 2.6, 1.0)),
}
#: Table 3.7: percent of linear scaling on a perfect network, and with CGX.
LINEAR = {"lstm": (95, 87), "resnet18": (92, 90)}


def _steps(model: str, *size: str) -> list[Measurement]:
    """GRACE's way, which gathers what all ranks compressed, is a run of its own."""
    size = (f"--model={model}", "--ranks=4", *size)
    low_ranks = [low for _, low, _ in PEERS.values()]
    own = step_times(f"cgx-{model}", [FOUR, PEERS[model][1], NOTHING], [FOUR, *low_ranks, NOTHING], size)
    gather = ("--set=reduction=gather",)
    return [own, step_times(f"cgx-{model}-gather", [GATHERED], [GATHERED], size, gather)]


MEASUREMENTS = [
    *_steps("lstm", "--blocks=4", "--steps=4"),
    *_steps("resnet18", "--blocks=3", "--steps=2"),
    *paper_qsdp.MEASUREMENTS,
]


def tables(found: Results) -> dict[str, str]:
    steps = {name: found.measured(f"cgx-{name}") for name in PEERS}
    gathered = {name: found.measured(f"cgx-{name}-gather") for name in PEERS}
    return {
        "table-3-5": "\n\n".join(recovery(found.pool, task) for task in RECOVERY),
        "table-3-6": "\n\n".join(peers(name, steps[name], gathered[name]) for name in PEERS),
        "table-3-7": linear(steps),
        "table-3-8": schemes(found.pool),
        "cost": found.cost(ARMS),
        **paper_qsdp.tables(found),
    }


def recovery(pool: Pool, task: str) -> str:
    title, base, own = RECOVERY[task]
    return compare(
        pool, title, Row("uncompressed", Arm(task, "none"), base), [Row("CGX, 4 bits", Arm(task, FOUR), own)]
    )


def peers(model: str, found: dict[str, Any] | None, gathered: dict[str, Any] | None) -> str:
    """Step times, and throughput over that of the baseline."""
    title, low_rank, paper = PEERS[model]
    rows = {**(gathered or {}).get("rows", {}), **(found or {}).get("rows", {})}
    names = {
        "ddp": "baseline: DistributedDataParallel",
        FOUR: "CGX: 4 bits",
        low_rank: f"PowerSGD, {low_rank.partition(':')[2]}",
        GATHERED: "as GRACE: 8 bits, gathered",
    }
    lines: list[list[object]] = []
    for (key, name), there in zip(names.items(), paper, strict=True):
        line: list[object] = [name, f"{there / paper[0]:.2f}"]
        if key in rows:
            base = (gathered if key == GATHERED else found or {})["rows"]["ddp"]  # type: ignore[index]
            line += [
                f"{base['step_seconds'] / rows[key]['step_seconds']:.2f}",
                f"{1e3 * rows[key]['step_seconds']:.0f}",
                f"{1e-6 * rows[key]['wire_bytes']:.2f}" if key != "ddp" else None,
            ]
        lines.append(line if len(line) > 2 else [*line, NOT_RUN, None, None])
    return report.table([title, "paper, x baseline", "ours, x baseline", "step ms", "MB sent"], lines)


def linear(steps: dict[str, dict[str, Any] | None]) -> str:
    """Table 3.7: the step of a rank that exchanges nothing over that of a row."""
    lines: list[list[object]] = []
    for model, (perfect, cgx) in LINEAR.items():
        found = steps[model]
        cells: list[object] = [NOT_RUN, None, None]
        if found:
            rows = found["rows"]
            alone = rows["ideal"]["step_seconds"]
            cells = [f"{100 * alone / rows[key]['step_seconds']:.0f}" for key in (NOTHING, FOUR, "ddp")]
        lines.append([PEERS[model][0], perfect, cgx, *cells])
    headers = [
        "% of linear scaling",
        "paper: perfect network",
        "CGX",
        "ours: perfect network",
        "4 bits",
        "baseline",
    ]
    return report.table(headers, lines)


def schemes(pool: Pool) -> str:
    base = pool.of(adaptive(""))
    lines: list[list[object]] = []
    for name, (_, there, theirs) in ADAPTIVE.items():
        runs = pool.of(adaptive(name))
        cells: list[object] = [NOT_RUN, None, None, None]
        if runs:
            counts, changes = fewer(runs, base), worse(runs, base, LSTM)
            cells = [
                f"{statistics.mean(counts):.2f} ({min(counts):.2f} to {max(counts):.2f})",
                by_seed(runs),
                mean_and_range(changes),
                order(changes, None),
            ]
        lines.append(
            [
                name,
                f"{there}",
                f"+{theirs[0]} to +{theirs[1]}",
                *cells,
                faster(pool, adaptive(name), adaptive("")),
            ]
        )
    paper = ["paper: fewer bytes", "faster %"]
    ours_has = ["ours: fewer bytes", "perplexity by seed", "worse %", "order", "faster %"]
    return report.table(["LSTM, against 4 bits", *paper, *ours_has], lines)
