"""The tables of Markov 2024, chapter 5 and appendix C (QSDP), at our scale."""

from __future__ import annotations

import math
import statistics
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
#: Seeds of table 5.2, whose rows differ by less than three seeds do.
SEEDS = 5
_EVEN = ",".join((BASELINE, *UNIFORM))
_BOTH = (*LEARNED, *FEW_BITS)
_MORE = ",".join([*(row for row in _BOTH if row not in UNIFORM), *(f"{row}-learned" for row in _BOTH)])
_LANGUAGE = "--language=pairs"
#: One run for two measurements.
_TRIED = ("--rows=plain-g16,w4g4-learned", _LANGUAGE, "--steps=4", "--seeds=1")
_CURVE = (f"--rows={BASELINE},w8g8", _LANGUAGE)
#: Figure 5.2's: the baseline's exchange takes most of a step, as it does in the thesis.
LINK = "--link=100mbit"
POINT = 30  # steps between its points

MEASUREMENTS = [
    Measurement(
        "qsdp",
        "sharded_convergence.py",
        (f"--rows={_EVEN}", f"--seeds={SEEDS}", _LANGUAGE, f"--steps={STEPS}", "--data={data}"),
        _TRIED,
        resumes=True,
    ),
    Measurement(
        "qsdp-learned",
        "sharded_convergence.py",
        (f"--rows={_MORE}", _LANGUAGE, f"--steps={STEPS}", "--data={data}"),
        _TRIED,
        resumes=True,
    ),
    Measurement(
        "qsdp-time",
        "sharded_convergence.py",
        (*_CURVE, LINK, f"--steps={STEPS}", f"--curve-every={POINT}", "--data={data}"),
        (*_CURVE, "--link=10gbit", "--steps=2", "--curve-every=2", "--seeds=1"),
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
    measured = [found.measured(name) or {"runs": []} for name in ("qsdp", "qsdp-learned")]
    runs = report.by_row(run for each in measured for run in each["runs"])
    return {
        "table-5-2": uniform(runs),
        "table-5-2-by-bits": by_both_bits(runs),
        "table-5-3": learned(runs, LEARNED),
        "table-c-3": learned(runs, FEW_BITS),
        "figure-5-2": over_time(found.measured("qsdp-time")),
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


def _paper(perplexity: float, base: float) -> float:
    """The same in percent of the loss, which is the logarithm of the perplexity."""
    return 100 * (math.log(perplexity) / math.log(base) - 1)


def uniform(runs: dict[str, dict[int, dict[str, Any]]]) -> str:
    """Tables 5.1 to 5.3: even levels beside the baseline."""
    lines: list[list[object]] = [
        [f"baseline ({BASELINE})", f"{BASE:g}", None, _losses(runs, BASELINE), None, None]
    ]
    for row, perplexity in UNIFORM.items():
        found = changes(runs, row, BASELINE)
        ours = [mean_and_range(found), order(found, None)]
        lines.append([row, f"{perplexity:g}", f"{_paper(perplexity, BASE):+.2f}", _losses(runs, row), *ours])
    return report.table(
        ["weights and gradients, bits", "paper, perplexity", "worse %, of the loss", "ours, loss by seed", "worse %",
         "order"],
        lines,
    )  # fmt: skip


def by_both_bits(runs: dict[str, dict[int, dict[str, Any]]]) -> str:
    """Table 5.2 in the mean over rows with as many bits for weights, or for gradients; what a bit less costs."""

    def worse(bits: str) -> tuple[float, list[float]]:
        """In the thesis, and here by seed."""
        rows = [row for row in UNIFORM if bits in row]
        by_row = [changes(runs, row, BASELINE) for row in rows]
        by_seed = zip(*by_row, strict=True) if len(set(map(len, by_row))) == 1 else ()
        return statistics.mean(_paper(UNIFORM[row], BASE) for row in rows), [*map(statistics.mean, by_seed)]

    found = {bits: worse(bits) for bits in ("w6", "w5", "w4", "g6", "g5", "g4")}
    for less, more in (("w5", "w6"), ("w4", "w5"), ("g5", "g6"), ("g4", "g5")):
        (there, ours), (base, reference) = found[less], found[more]
        found[f"{less} against {more}"] = there - base, [a - b for a, b in zip(ours, reference, strict=True)]
    lines: list[list[object]] = []
    for bits, (there, ours) in found.items():
        mean = None
        if len(ours) > 1:
            error = statistics.stdev(ours) / math.sqrt(len(ours))
            mean = f"{statistics.mean(ours):+.2f} ± {error:.2f}"
        lines.append([bits, f"{there:+.2f}", ", ".join(f"{each:+.2f}" for each in ours) or NOT_RUN, mean])
    return report.table(["bits", "paper, worse %", "ours, by seed", "mean"], lines)


def learned(runs: dict[str, dict[int, dict[str, Any]]], rows: Mapping[str, tuple[float, float]]) -> str:
    """Learned levels beside even ones of the same bits. ``rows``: the thesis's perplexities of both."""
    lines: list[list[object]] = []
    for row, (even, perplexity) in rows.items():
        own = f"{row}-learned"
        found = changes(runs, own, row)
        there = _paper(perplexity, even)
        ours = [mean_and_range(changes(runs, row, BASELINE)), mean_and_range(found), order(found, there)]
        paper = [f"{_paper(even, BASE):+.2f}", f"{perplexity:g}", f"{there:+.2f}"]
        lines.append([row, *paper, _losses(runs, own), *ours])
    return report.table(
        ["learned levels", "paper: even, worse %", "learned, perplexity", "worse than even %", "ours, loss by seed",
         "even, worse %", "learned, worse than even %", "order"],
        lines,
    )  # fmt: skip


def _losses(runs: dict[str, dict[int, dict[str, Any]]], row: str) -> str:
    found = runs.get(row, {})
    return ", ".join(f"{found[seed]['loss']:.4f}" for seed in sorted(found)) or NOT_RUN


def over_time(found: dict[str, Any] | None) -> str:
    """Figure 5.2: seconds of training and held-out perplexity by step, in the mean over seeds."""
    rows = (BASELINE, "w8g8")
    by_row = report.by_row(found["runs"]) if found else {}
    curves = [[run["curve"] for run in by_row.get(row, {}).values()] for row in rows]
    lines: list[list[object]] = []
    if all(curves):
        for number, (step, *_) in enumerate(curves[0][0]):
            at = [[curve[number] for curve in each] for each in curves]
            seconds = [statistics.mean(spent for _, spent, _ in points) for points in at]
            reached = [statistics.mean(math.exp(loss) for *_, loss in points) for points in at]
            both = [text for a, b in zip(seconds, reached, strict=True) for text in (f"{a:.0f}", f"{b:.1f}")]
            lines.append([step, *both, f"{seconds[0] / seconds[1]:.2f}"])
    headers = [f"{row}, {what}" for row in rows for what in ("seconds", "perplexity")]
    return report.table(["step", *headers, "times as fast"], lines or [[NOT_RUN, *[None] * 5]])


def figures(found: dict[str, Any] | None) -> str:
    """Figures C.2 and C.3: errors of W5 and G4 with even and with learned levels, relative to the values."""
    lines = learned_levels.over_steps(found["runs"]) if found else [[NOT_RUN, *[None] * 5]]
    return report.table(["layer", "values", "step", "even", "learned", "learned once"], lines)


def by_bits(found: dict[str, Any] | None) -> str:
    lines: list[list[object]] = [[NOT_RUN, *[None] * 5]]
    if found:
        lines = learned_levels.over_bits(found["runs"], round(max(LEARNS_AT) * found["steps"]))
    return report.table(["values", "bits", "even", "learned", "learned once", "learned / even"], lines)
