"""Record the values that LGC's nets would be trained on: see learned_search.py."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from convergence_tasks import Job

from gradcomp.contrib.lgc.lgc import LGC

#: The nets are not trained, so the run is the ring without codes. The server form marks innovations too.
RECORDED = "lgc:form=server,train_share=1.0,train_steps=1000000"


class Watch:
    """Keep the values of all ranks, their innovations and the leader of every step after the exact ones."""

    def __init__(self, job: Job, rank: int) -> None:
        self._rank = rank
        self._lessons: list[Any] = []

        def learn(_: Any, weights: Any, kept: float, lesson: Any) -> Any:
            self._lessons.append(lesson)
            return weights, kept

        LGC._learn = learn  # type: ignore[method-assign]

    def step(self, loss: float, seconds: float, sent: Any) -> None:
        """Nothing is kept of a step but its lesson."""

    def found(self) -> dict[str, Any]:
        """Return the recording of rank 0 as the text of an npz file."""
        if self._rank:
            return {}
        into = io.BytesIO()
        np.savez_compressed(
            into,
            samples=np.stack([lesson.samples for lesson in self._lessons]),
            innovations=np.stack([lesson.innovations for lesson in self._lessons]),
            leaders=np.array([lesson.leader for lesson in self._lessons]),
        )
        return {"recorded": base64.b64encode(into.getvalue()).decode()}
