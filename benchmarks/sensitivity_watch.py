"""What rank 0 sees of L-GreCo's tables while it trains by the loss: norms and losses of the same gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
from convergence_tasks import Job

from gradcomp import LGreCo
from gradcomp.control import PeriodObservations


class Watch:
    """Keeps the table of every decision, and what both metrics would decide from it."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank = job, rank
        self._seen = -1
        self._tables: list[dict[str, Any]] = []

    def step(self, loss: float, seconds: float, sent: Any) -> None:
        exchanger = self._job.optimizer._exchanger_or_none()
        observed = None if exchanger is None else getattr(exchanger.pipeline.controller, "observations", None)
        if (
            self._rank == 0
            and observed is not None
            and observed.losses is not None
            and observed.step > self._seen
        ):
            self._seen = observed.step
            self._tables.append(table(observed))

    def found(self) -> dict[str, Any]:
        return {"tables": self._tables}


def table(observed: PeriodObservations) -> dict[str, Any]:
    """Numbers for JSON, by layer; a layer without a gradient is left out."""
    rows = np.flatnonzero(~observed.silent).tolist()
    counts = [len(observed.candidates.choices[row]) for row in rows]

    def by_choice(values: Any) -> list[list[float]]:
        return [values[row, :count].tolist() for row, count in zip(rows, counts, strict=True)]

    chosen = {
        metric: LGreCo(metric=metric).decide(observed).choices.tolist()
        for metric in ("norm", "squared", "loss")
    }
    return {
        "step": observed.step,
        "layers": [observed.candidates.specs[row].name for row in rows],
        "sizes": [observed.candidates.specs[row].size for row in rows],
        "levels": [[choice.level for choice in observed.candidates.choices[row]] for row in rows],
        "reference": observed.candidates.reference[rows].tolist(),
        "norms": by_choice(observed.errors),
        "losses": by_choice(observed.losses),
        "costs": by_choice(observed.costs),
        "chosen": {metric: [choices[row] for row in rows] for metric, choices in chosen.items()},
    }
