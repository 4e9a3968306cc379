"""Computes the total gradient information of a run (Abrahamyan et al. 2021, Table II)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gradcomp.core.errors import ConfigError


def total_information(phases: Iterable[tuple[int, Sequence[float]]]) -> float:
    """Returns the bytes that all ranks send during a whole training.

    B = sum over phases p of n_p sum over ranks k of b_{k,p}

    ``phases``: for each, its number of steps n_p and the bytes b_{k,p} that every rank k sends in one of them. A run
    with one compression has one phase; LGC has three.

    Raises:
        ConfigError: numbers that are negative or not finite, or phases with different numbers of ranks.

    Source: the column "Information" of Table II, which prints no formula. This one gives its rows, with 102.2 MB of
    gradient (Table IV) divided by the rows' ratios, 8 ranks, the 429,300 steps that follow from the baseline's 351 TB,
    and 200 uncompressed steps for LGC.
    """
    total, ranks = 0.0, None
    for steps, sent in phases:
        amounts = np.asarray(sent, dtype=np.float64)
        if amounts.ndim != 1 or (ranks is not None and len(amounts) != ranks):
            raise ConfigError("every phase needs the bytes of every rank")
        if not steps >= 0 or not (np.isfinite(amounts) & (amounts >= 0)).all():
            raise ConfigError("steps and bytes must be finite and 0 or more")
        ranks = len(amounts)
        total += steps * float(amounts.sum())
    return total
