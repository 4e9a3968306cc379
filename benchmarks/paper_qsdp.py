"""The tables of Markov 2024, chapter 5 and appendix C (QSDP), at our scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import learned_levels
import report
from paper_runs import Measurement, Results
from paper_tables import NOT_RUN, mean_and_range, order
from sharded_rank import LEARNS_AT

#: Perplexity of GPT-2 with 125 M parameters, and of its rows: tables 5.1 to 5.3.
BASE = 35.81
UNIFORM = {
    "w8g8": 35.58,
    "w6g6": 35.74, "w6g5": 36.08, "w6g4": 35.84,
    "w5g6": 36.01, "w5g5": 35.94, "w5g4": 36.36,
    "w4g6": 37.11, "w4g5": 37.38, "w4g4": 37.61,
}  # fmt: skip
#: Even and learned levels: table 5.3, whose even ones are not all table 5.2's, and table C.3.
LEARNED = {"w6g4": (35.81, 35.75), "w5g4": (36.34, 36.01), "w4g4": (37.61, 36.94), "w4g32": (37.11, 36.55)}
FEW_BITS = {"w3g32": (45.53, 42.31), "w2g32": (57.92, 56.54), "w8g3": (39.91, 37.72), "w8g2": (44.79, 44.65)}
BASELINE = "plain-g16"
STEPS = 300
_TRAINED = dict.fromkeys(
    [BASELINE, *UNIFORM, *LEARNED, *FEW_BITS, *(f"{row}-learned" for row in (*LEARNED, *FEW_BITS))]
)
_ROWS = f"--rows={','.join(_TRAINED)}"
_LANGUAGE = "--language=pairs"

MEASUREMENTS = [
    Measurement(
        "qsdp",
        "sharded_convergence.py",
        (_ROWS, _LANGUAGE, f"--steps={STEPS}", "--data={data}"),
        ("--rows=plain-g16,w4g4-learned", _LANGUAGE, "--steps=4", "--seeds=1"),
        resumes=True,
    ),
    Measurement(
        "qsdp-levels",
        "learned_levels.py",
        ("--steps=300", "--every=60", "--data={data}"),
        ("--steps=4", "--every=4"),
        hosts=False,
    ),
]


def tables(found: Results) -> dict[str, str]:
    measured = found.measured("qsdp")
    runs: dict[str, dict[int, dict[str, Any]]] = report.by_row(measured["runs"]) if measured else {}
    return {
        "table-5-2": uniform(runs),
        "table-5-3": learned(runs, LEARNED),
        "table-c-3": learned(runs, FEW_BITS),
        "figures-c-2": figures(found.measured("qsdp-levels")),
        "levels-by-bits": by_bits(found.measured("qsdp-levels")),
    }


def changes(runs: dict[str, dict[int, dict[str, Any]]], row: str, base: str) -> list[float]:
    """By seed, how much higher the loss is, in percent."""
    own, reference = runs.get(row, {}), runs.get(base, {})
    by_seed = [own[seed] for seed in sorted(own)]
    return [
        100 * (run["loss"] / other["loss"] - 1) for run, other in report.pairs(by_seed, reference.values())
    ]


def _paper(perplexity: float, base: float) -> str:
    """The same in percent of the loss, which is the logarithm of the perplexity."""
    return f"{100 * (math.log(perplexity) / math.log(base) - 1):+.2f}"


def uniform(runs: dict[str, dict[int, dict[str, Any]]]) -> str:
    """Tables 5.1 to 5.3: even levels beside the baseline."""
    lines: list[list[object]] = [
        [f"baseline ({BASELINE})", f"{BASE:g}", None, _losses(runs, BASELINE), None, None]
    ]
    for row, perplexity in UNIFORM.items():
        found = changes(runs, row, BASELINE)
        ours = [mean_and_range(found), order(found, None)]
        lines.append([row, f"{perplexity:g}", _paper(perplexity, BASE), _losses(runs, row), *ours])
    return report.table(
        ["weights and gradients, bits", "paper, perplexity", "worse %, of the loss", "ours, loss by seed", "worse %",
         "order"],
        lines,
    )  # fmt: skip


def learned(runs: dict[str, dict[int, dict[str, Any]]], rows: Mapping[str, tuple[float, float]]) -> str:
    """Learned levels beside even ones of the same bits. ``rows``: the thesis's perplexities of both."""
    lines: list[list[object]] = []
    for row, (even, perplexity) in rows.items():
        own = f"{row}-learned"
        found = changes(runs, own, row)
        there = _paper(perplexity, even)
        ours = [
            mean_and_range(changes(runs, row, BASELINE)),
            mean_and_range(found),
            order(found, float(there)),
        ]
        paper = [_paper(even, BASE), f"{perplexity:g}", there]
        lines.append([row, *paper, _losses(runs, own), *ours])
    return report.table(
        ["learned levels", "paper: even, worse %", "learned, perplexity", "worse than even %", "ours, loss by seed",
         "even, worse %", "learned, worse than even %", "order"],
        lines,
    )  # fmt: skip


def _losses(runs: dict[str, dict[int, dict[str, Any]]], row: str) -> str:
    found = runs.get(row, {})
    return ", ".join(f"{found[seed]['loss']:.4f}" for seed in sorted(found)) or NOT_RUN


def figures(found: dict[str, Any] | None) -> str:
    """Figures C.2 and C.3: errors of W5 and G4 with even and with learned levels, relative to the values."""
    lines = learned_levels.over_steps(found["runs"]) if found else [[NOT_RUN, *[None] * 5]]
    return report.table(["layer", "values", "step", "even", "learned", "learned once"], lines)


def by_bits(found: dict[str, Any] | None) -> str:
    lines: list[list[object]] = [[NOT_RUN, *[None] * 5]]
    if found:
        lines = learned_levels.over_bits(found["runs"], round(max(LEARNS_AT) * found["steps"]))
    return report.table(["values", "bits", "even", "learned", "learned once", "learned / even"], lines)
