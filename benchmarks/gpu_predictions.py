"""What was expected of an H100 before any GPU had run this, to hold beside what is measured.

The figures come from the machine code of sm_90 and a copy on the device of 3.0 TB/s, bytes read and written. They are
no bars: a figure outside of its range says that the kernel, or the idea of it, is to be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: In stages of benchmarks/gpu_hour.py; both sizes of the bars.
BARS, STEP = ("bars-256", "bars-512"), ("step",)
HEADERS = ("what", "predicted", "stage", "measured", "")

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Prediction:
    """A range. ``measured``: the figure among those that one of ``stages`` has written, or None."""

    what: str
    low: float
    high: float
    unit: str
    stages: tuple[str, ...]
    measured: Callable[[Figures], float | None]

    @property
    def text(self) -> str:
        ends = (f"{self.low:g}", f"{self.high:g}")
        return f"{' to '.join(dict.fromkeys(ends))} {self.unit}".rstrip()

    def verdict(self, figure: float) -> str:
        return "below" if figure < self.low else "above" if figure > self.high else "as predicted"


def _of_row(name: str, key: str) -> Callable[[Figures], float | None]:
    def find(found: Figures) -> float | None:
        for row in found.get("rows", ()):
            if row.get("name") == name and row.get("dtype") == "float32" and key in row:
                return float(row[key])
        return None

    return find


def _share(name: str, low: float, high: float, of: str = "of the copy") -> Prediction:
    return Prediction(name, low, high, of, BARS, _of_row(name, "share"))


def _of_step(key: str) -> Callable[[Figures], float | None]:
    """Of a step with exchange buckets of 16 Mi elements over the transport that moves nothing."""

    def find(found: Figures) -> float | None:
        row = found.get("caps", {}).get("16", {}).get("rows", {}).get("alone null", {})
        return None if row.get(key) is None else float(row[key])

    return find


PREDICTIONS = (
    Prediction("copy", 2900.0, 3100.0, "GB/s", BARS, _of_row("copy", "gigabytes_per_second")),
    _share("encode", 0.75, 0.95),
    _share("encode, stochastic", 0.55, 0.65),
    _share("encode, residual", 0.8, 0.95, "of c = a + b"),
    _share("decode", 0.85, 0.95),
    Prediction(
        "PowerSGD of rank 4, GPT of 125 M", 0.9, 1.1, "ms", BARS,
        _of_row("PowerSGD of rank 4, GPT of 125 M", "milliseconds"),
    ),
    Prediction("top-k of 1%", 0.4, 0.5, "ms", BARS, _of_row("top-k of 1%", "milliseconds")),
    Prediction("launches of a step", 103, 103, "", STEP, _of_step("launches")),
    Prediction("exchange buckets of a step", 8, 8, "", STEP, _of_step("buckets")),
    Prediction("CPU time of gradcomp's thread in a step", 0.0, 3.0, "ms", STEP, _of_step("thread_ms")),
)  # fmt: skip


def of_row(name: str, dtype: str) -> str | None:
    """What was predicted of a row of benchmarks/gpu.py, in words."""
    found = (each for each in PREDICTIONS if each.stages is BARS and each.what == name)
    first = next(found, None)
    return first.text if first is not None and dtype == "float32" else None


def beside(stages: Mapping[str, Mapping[str, Any]]) -> Sequence[tuple[object, ...]]:
    """A line for each prediction and each stage that has measured it, or one without a figure."""
    lines: list[tuple[object, ...]] = []
    for one in PREDICTIONS:
        figures = [
            (stage, figure)
            for stage in one.stages
            if (figure := one.measured(stages.get(stage, {}).get("found") or {})) is not None
        ]
        for stage, figure in figures:
            lines.append((one.what, one.text, stage, f"{figure:.3g}", one.verdict(figure)))
        if not figures:
            lines.append((one.what, one.text, ", ".join(one.stages), None, "not measured"))
    return lines
