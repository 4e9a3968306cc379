"""Count the values that sparse compressors send on one rank in a run, and the smallest magnitude that a step sends."""

from __future__ import annotations

import statistics
from functools import wraps
from typing import Any

import numpy as np
from convergence_tasks import Job

from gradcomp.compress.sparse.payload import SparseFormat

_encode = SparseFormat.encode


class Watch:
    """See every payload of this rank: values sent, elements that they were chosen from, and magnitudes."""

    def __init__(self, job: Job, rank: int) -> None:
        self._sent = self._elements = 0
        self._least, self._of_step = [], np.inf

        @wraps(_encode)
        def encode(form: SparseFormat, chosen: Any, *arguments: Any) -> Any:
            count = int(chosen.counts.sum())
            self._sent += count
            self._elements += int(form._indices.lengths.sum())
            for begin, n in zip(chosen.offsets.tolist(), chosen.counts.tolist(), strict=True):
                values = np.abs(chosen.values[begin : begin + n])
                self._of_step = min(self._of_step, float(values.min(initial=np.inf)))
            return _encode(form, chosen, *arguments)

        SparseFormat.encode = encode  # type: ignore[method-assign]

    def step(self, loss: float, seconds: float, sent: Any) -> None:
        """Keep the smallest magnitude of the step."""
        if np.isfinite(self._of_step):
            self._least.append(self._of_step)
        self._of_step = np.inf

    def found(self) -> dict[str, Any]:
        """Return the density of the run; ``least``: the median over its steps of the smallest magnitude."""
        if not self._elements:
            return {}
        return {"density": self._sent / self._elements, "least": statistics.median(self._least)}
