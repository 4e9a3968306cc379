"""The tables of Markov et al. 2024 (L-GreCo) at our scale."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import report
from convergence_rows import LSTM, METRICS, PAIRS, RESNET
from paper_runs import Arm, Measurement, Pool, Results, Run, timed
from paper_shapes import ratio, resnet50, transformer_lm, transformer_xl
from paper_tables import NOT_RUN, Row, by_seed, compare, faster, fewer, mean_and_range, order, worse

TITLES = {RESNET: "ResNet-20", LSTM: "LSTM", PAIRS: "GPT"}
#: The paper's model of each task, and the metric of uncompressed training.
THEIRS = {RESNET: ("ResNet-18", 76.60), LSTM: ("Transformer-XL", 23.82), PAIRS: ("Transformer-LM", 29.34)}
EXACT = "exact"
#: Steps between decisions: an epoch of ResNet-20, a tenth of the others.
EVERY = {RESNET: 78, LSTM: 100, PAIRS: 300}


@dataclass(frozen=True)
class Family:
    """A compressor at the paper's uniform level; the paper's metrics and ratios, uniform and with L-GreCo."""

    title: str
    task: str
    compression: str
    metrics: tuple[float, float]
    ratios: tuple[float, float]

    def arm(self, controller: str = "") -> Arm:
        return Arm(self.task, self.compression, controller)

    @property
    def uniform(self) -> Row:
        return Row(f"{self.title}, uniform", self.arm(), self.metrics[0])

    @property
    def adaptive(self) -> Row:
        return Row(f"{self.title}, L-GreCo", self.arm(lgreco(self.task)), self.metrics[1])

    @property
    def of_sums(self) -> Row:
        """With the paper's errors: of gradients that are added up between decisions."""
        arm = self.arm(f"{lgreco(self.task)},window={EVERY[self.task]}")
        return Row(f"{self.title}, L-GreCo, sums", arm, self.metrics[1])

    @property
    def for_adam(self) -> Row:
        return Row(f"{self.title}, L-GreCo, metric=adam", self.arm(f"{lgreco(self.task)},metric=adam"))


def lgreco(task: str) -> str:
    return f"lgreco:every_steps={EVERY[task]}"


FAMILIES = [
    Family("4 bits", RESNET, "quantize:bits=4", (76.80, 76.46), (7.8, 8.6)),
    Family("TopK 1%", RESNET, "topk:density=0.01", (75.73, 75.66), (48.1, 182.0)),
    Family("PowerSGD 4", RESNET, "powersgd:rank=4", (76.36, 76.43), (72.2, 133.9)),
    Family("4 bits", LSTM, "quantize:bits=4", (23.82, 24.11), (7.8, 9.1)),
    Family("TopK 10%", LSTM, "topk:density=0.1", (24.13, 24.19), (4.9, 12.8)),
    Family("PowerSGD 8", LSTM, "powersgd:rank=8", (24.08, 24.09), (14.0, 20.8)),
    Family("4 bits", PAIRS, "quantize:bits=4", (29.39, 30.03), (7.8, 9.9)),
    Family("TopK 10%", PAIRS, "topk:density=0.1", (29.29, 29.08), (4.9, 25.6)),
    Family("PowerSGD 4", PAIRS, "powersgd:rank=4", (29.98, 30.19), (15.0, 26.5)),
]
BASE = {task: Row("uncompressed", Arm(task, "none"), metric) for task, (_, metric) in THEIRS.items()}

#: Errors that count as suits AdamW, on the task that is trained with it.
FOR_ADAM = [family for family in FAMILIES if family.task == PAIRS]

SINGLE_STEPS = [
    *((family, family.adaptive, "") for family in FAMILIES),
    *((family, family.for_adam, ", metric=adam") for family in FOR_ADAM),
]
SUMS = [(family, family.of_sums, "") for family in FAMILIES]

#: Figure 2: ranks of PowerSGD on the LSTM.
RANKS = (4, 8, 16, 32)


def at_rank(rank: int, controller: str = "") -> Arm:
    return Arm(LSTM, f"powersgd:rank={rank}", controller)


#: Table 4, over PowerSGD on the LSTM: the paper's ratio, and thousands of tokens a second on one node and on four.
_ENDS = "low=16,high=4,every_steps=100"
SCHEMES = {
    "uniform": ("", 14.1, (110, 72)),
    "L-GreCo": (lgreco(LSTM), 23.5, (144, 150)),
    "Accordion": (f"accordion:{_ENDS}", 23.9, (114, 107)),
    "CGX, KMEANS": ("kmeans:every_steps=100", 21.6, (124, 112)),
    "L-GreCo and Accordion": (f"{lgreco(LSTM)},accordion=[accordion:{_ENDS}]", 36.9, (138, 176)),
}


def scheme(name: str) -> Arm:
    return Arm(LSTM, "powersgd:rank=8", SCHEMES[name][0])


_ARMS = [
    *(row.arm for row in BASE.values()),
    *(row.arm for family in FAMILIES for row in (family.uniform, family.adaptive)),
    *(family.for_adam.arm for family in FOR_ADAM),
    *(family.of_sums.arm for family in FAMILIES),
    *(at_rank(rank, controller) for rank in RANKS for controller in ("", lgreco(LSTM))),
    *(scheme(name) for name in SCHEMES),
]
ARMS = [*_ARMS, *(timed(arm) for arm in _ARMS)]
BASES = [
    *(row.arm for row in BASE.values()),
    *(family.arm() for family in FAMILIES),
    *(at_rank(rank) for rank in RANKS),
]
MEASUREMENTS: list[Measurement] = []


def tables(found: Results) -> dict[str, str]:
    pool = found.pool
    of = {task: [family for family in FAMILIES if family.task == task] for task in BASE}
    metrics = {
        task: compare(
            pool,
            f"{TITLES[task]}; paper: {THEIRS[task][0]}",
            BASE[task],
            [row for family in of[task] for row in (family.uniform, family.adaptive)],
        )
        for task in BASE
    }
    return {
        "table-1": overheads(pool),
        "table-2": metrics[RESNET],
        "table-3-lstm": metrics[LSTM],
        "table-3-gpt": metrics[PAIRS],
        "against-uniform": against_uniform(pool, SINGLE_STEPS, uncompressed=True),
        "sums": against_uniform(pool, SUMS),
        "figure-2": ranks(pool),
        "ratios": ratios(),
        "table-4": schemes(pool),
        "figure-1": "\n\n".join(profile(pool, task, of[task]) for task in BASE),
        "figure-6": over_time(pool),
        "cost": found.cost(ARMS),
    }


def against_uniform(pool: Pool, rows: Sequence[tuple[Family, Row, str]], uncompressed: bool = False) -> str:
    """L-GreCo beside the uniform level of its family: bytes, metric and time in a row."""
    lines: list[list[object]] = [
        [f"{TITLES[task]}, uncompressed", *[None] * 6, milliseconds(pool, row.arm), None]
        for task, row in BASE.items()
        if uncompressed
    ]
    for family, row, more in rows:
        base, own = pool.of(family.uniform.arm), pool.of(row.arm)
        there: list[object] = [None, None]
        paper = None
        if row.paper is not None:
            paper = 100 * METRICS[family.task][1] * (row.paper / family.metrics[0] - 1)
            there = [f"{family.ratios[1] / family.ratios[0]:.2f}", f"{paper:+.2f}"]
        line: list[object] = [f"{TITLES[family.task]}, {family.title}{more}", there[0]]
        changes = worse(own, base, family.task)
        if not changes:
            lines.append([*line, NOT_RUN, None, there[1], *[None] * 4])
            continue
        whole, half = (fewer(own, base, key) for key in ("run_bytes_per_step", "bytes_per_step"))
        lines.append(
            [
                *line,
                f"{statistics.mean(whole):.2f} ({min(whole):.2f} to {max(whole):.2f})",
                f"{statistics.mean(half):.2f}",
                there[1],
                mean_and_range(changes),
                order(changes, paper),
                *(milliseconds(pool, arm) for arm in (family.uniform.arm, row.arm)),
            ]
        )
    headers = ["", "paper, fewer", "ours, fewer", "second half", "paper, worse %", "ours, worse %", "order"]
    return report.table([*headers, "uniform, ms", "L-GreCo, ms"], lines)


def ranks(pool: Pool) -> str:
    """Figure 2: perplexity and time of a step by rank, uniform and with L-GreCo."""
    lines: list[list[object]] = []
    for rank in RANKS:
        base = pool.of(at_rank(rank))
        for name, controller in (("uniform", ""), ("L-GreCo", lgreco(LSTM))):
            arm = at_rank(rank, controller)
            runs = pool.of(arm)
            changes = worse(runs, base, LSTM) if controller else []
            sent = f"{statistics.mean(run['run_bytes_per_step'] for run in runs):,.0f}" if runs else None
            compared = [mean_and_range(changes), order(changes, None)]
            lines.append([f"rank {rank}, {name}", by_seed(runs), sent, milliseconds(pool, arm), *compared])
    headers = ["LSTM, PowerSGD", "perplexity by seed", "bytes a step", "step ms", "than uniform, worse %"]
    return report.table([*headers, "order"], lines)


def milliseconds(pool: Pool, arm: Arm) -> str | None:
    runs = pool.of(timed(arm))
    return f"{1e3 * runs[0]['step_seconds']:.1f}" if runs else None


def overheads(pool: Pool) -> str:
    """Processor time of error tables, and of the program, over training time; the most of the seeds."""
    paper = {"4 bits": "0.04 to 0.14", "TopK": "0.33 to 0.38", "PowerSGD": "0.15 to 0.56"}
    lines: list[list[object]] = []
    for family in FAMILIES:
        there = next(text for name, text in paper.items() if family.title.startswith(name))
        runs = pool.of(family.adaptive.arm)
        parts: list[object] = [
            f"{max(100 * run['spent_seconds'][kind] / run['seconds'] for run in runs):.2f}" if runs else None
            for kind in ("measure", "decide", "add")
        ]
        lines.append([f"{TITLES[family.task]}, {family.title}", there, *parts])
    return report.table(["% of training", "paper, in all", "error tables", "program", "adding up"], lines)


def ratios() -> str:
    """Ratios of the paper's own models at the uniform levels."""
    language = ("quantize:bits=4,bucket_size=1024", "topk:density=0.1,indices=raw", "powersgd:rank=32")
    images = ("quantize:bits=4,bucket_size=1024", "topk:density=0.01,indices=raw", "powersgd:rank=4")
    rows = [
        ("ResNet-50", resnet50(), images, (7.7, 45.6, 66.5)),
        ("Transformer-XL", transformer_xl(), language, (7.8, 4.9, 14.0)),
        ("Transformer-LM", transformer_lm(), language, (7.8, 4.9, 15.0)),
    ]
    return report.table(
        ["uniform level", "paper", "by formula"],
        [
            [f"{name}, {how}", f"{there:g}", f"{ratio(shapes, how):.2f}"]
            for name, shapes, compressions, of_paper in rows
            for how, there in zip(compressions, of_paper, strict=True)
        ],
    )


def schemes(pool: Pool) -> str:
    base = pool.of(scheme("uniform"))
    lines: list[list[object]] = []
    for name, (_, there, tokens) in SCHEMES.items():
        arm = scheme(name)
        runs = pool.of(arm)
        speeds = [f"{100 * (a / b - 1):+.0f}" for a, b in zip(tokens, SCHEMES["uniform"][2], strict=True)]
        if not runs:
            lines.append([name, f"{there:g}", f"{there / 14.1:.2f}", *speeds, NOT_RUN, *[None] * 6])
            continue
        changes, counts = worse(runs, base, LSTM), fewer(runs, base)
        lines.append(
            [
                name,
                f"{there:g}",
                f"{there / 14.1:.2f}",
                *speeds,
                f"{statistics.mean(run['ratio'] for run in runs):.1f}",
                f"{statistics.mean(counts):.2f}",
                by_seed(runs),
                mean_and_range(changes) if arm.controller else None,
                order(changes, None) if arm.controller else None,
                milliseconds(pool, arm),
                faster(pool, arm, scheme("uniform")),
            ]
        )
    paper = ["paper: ratio", "fewer", "one node, %", "four, %"]
    ours = ["ours: ratio", "fewer", "perplexity by seed", "worse %", "order", "step ms", "faster %"]
    return report.table(["LSTM, PowerSGD", *paper, *ours], lines)


def profile(pool: Pool, task: str, families: Sequence[Family]) -> str:
    """What L-GreCo's last plan gives each layer, by seed. Layers are in the order of the backward pass."""
    found = [pool.of(family.adaptive.arm) for family in families]
    layers = next((plan_of(runs[0]) for runs in found if runs), {})
    lines: list[list[object]] = []
    for layer in reversed(layers):
        levels = [[plan_of(run)[layer] for run in runs] for runs in found]
        if any(level != EXACT for each in levels for level in each):
            lines.append([layer, *(", ".join(each) or NOT_RUN for each in levels)])
    return report.table([TITLES[task], *(family.title for family in families)], lines)


def plan_of(run: Run) -> dict[str, str]:
    """Level by layer of the last plan."""
    _, assignments = run["plan"]
    return {layer: EXACT if level is None else str(level) for layer, _, level in assignments}


def over_time(pool: Pool) -> str:
    """Figure 6a: how many times fewer bytes than uncompressed training each part of a run sends, the mean of seeds."""
    dense = pool.of(BASE[LSTM].arm)
    lines: list[list[object]] = []
    for name in SCHEMES:
        tenths: list[list[float]] = [[] for _ in range(10)]
        for run, base in report.pairs(pool.of(scheme(name)), dense):
            count = len(run["bytes"])
            for number, tenth in enumerate(tenths):
                part = slice(number * count // 10, (number + 1) * count // 10)
                tenth.append(sum(base["bytes"][part]) / sum(run["bytes"][part]))
        lines.append([name, *(f"{statistics.mean(tenth):.1f}" if tenth else NOT_RUN for tenth in tenths)])
    return report.table(["LSTM, PowerSGD", *(f"{n}0%" for n in range(1, 11))], lines)
