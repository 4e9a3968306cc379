"""Numbers for loggers: an exchange's counters as means over the steps since they were last read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from gradcomp.core.layers import LayerSpec
from gradcomp.core.trace import Statistics

#: The names of all metrics begin with it.
PREFIX = "gradcomp/"


class StepMetrics:
    """Reads counters as means over the steps between two readings; may be used by several threads.

    The counters that this rank adds to at the end of a step change under ``lock``, so that a reading has all of them
    or none.
    """

    def __init__(self, layers: Sequence[LayerSpec] = ()) -> None:
        elements = sum(layer.size for layer in layers)
        self._element_bits = 8 * sum(layer.nbytes for layer in layers) / max(elements, 1)
        self._before = Statistics()
        self._last: dict[str, float] | None = None
        self.lock = threading.Lock()

    def read(self, statistics: Statistics, plan_version: int = 0) -> dict[str, float]:
        """Return the metrics since the last reading; if no step has ended since, those of the last reading again."""
        with self.lock:
            now = replace(statistics)
            if self._last is None or now.steps != self._before.steps:
                self._last, self._before = self._between(self._before, now), now
            counts = {"steps": now.steps, "skipped_steps": now.skipped_steps, "plan_version": plan_version}
            return {f"{PREFIX}{name}": value for name, value in {**self._last, **counts}.items()}

    def _between(self, before: Statistics, now: Statistics) -> dict[str, float]:
        steps = max(now.steps - before.steps, 1)
        sent, dense = now.wire_bytes - before.wire_bytes, now.dense_bytes - before.dense_bytes
        ratio = dense / sent if sent else 1.0
        return {
            "step_ms": 1e3 * (now.step_seconds - before.step_seconds) / steps,
            "exposed_ms": 1e3 * (now.exposed_seconds - before.exposed_seconds) / steps,
            "codec_ms": 1e3 * (now.codec_seconds - before.codec_seconds) / steps,
            "wire_ms": 1e3 * (now.wire_seconds - before.wire_seconds) / steps,
            "vote_ms": 1e3 * (now.vote_seconds - before.vote_seconds) / steps,
            "sent_mb": sent / steps / 1e6,
            "ratio": ratio,
            "bits": self._element_bits / ratio if sent else 0.0,
        }
