"""What the tables of Abrahamyan et al. 2021 (LGC) say of each other. Its trainings are benchmarks/learned.py's."""

from __future__ import annotations

import learned_paper
from paper_runs import Arm, Measurement, Results

ARMS: list[Arm] = []
BASES: list[Arm] = []
MEASUREMENTS: list[Measurement] = []


def tables(_: Results) -> dict[str, str]:
    return {"contradictions": learned_paper.show()}
