"""What the user sees: a banner at the start, a line now and then, one verdict after 50 steps."""

from __future__ import annotations

import logging
from time import perf_counter

from gradcomp.compress import Policy
from gradcomp.core.config import Config
from gradcomp.core.statistics import Statistics
from gradcomp.engine import Exchanger

logger = logging.getLogger("gradcomp")

VERDICT_STEPS = 50
WARM_UP_STEPS = 10


def banner(exchanger: Exchanger, policy: Policy) -> None:
    """Say once, on rank 0, what is compressed, what is not and why, and what it costs in memory."""
    pipeline = exchanger.pipeline
    if pipeline.transport.rank != 0:
        return
    excluded = policy.excluded(pipeline.layers)
    total = sum(layer.nbytes for layer in pipeline.layers) or 1
    compressed = sum(layer.nbytes for layer in pipeline.layers if layer.name not in excluded)
    reasons: dict[str, int] = {}
    for reason in excluded.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"
    logger.info(
        "%s over %d layers: %.1f%% of %.2f MB compressed; exact: %s; residuals %.2f MB; %d buckets",
        policy.default.to_string(),
        len(pipeline.layers),
        100 * compressed / total,
        total / 1e6,
        why,
        pipeline.residuals.nbytes / 1e6,
        len(pipeline.layout.buckets),
    )


class Reporter:
    """Rank 0's log lines. Reads counters that are local or already reduced; never communicates."""

    def __init__(self, exchanger: Exchanger, config: Config) -> None:
        self._pipeline = exchanger.pipeline
        self._every = config.statistics_every_steps
        self._steps = 0
        self._mark: tuple[float, Statistics] | None = None

    def after_step(self) -> None:
        """Count a step; log what is due."""
        self._steps += 1
        if self._pipeline.transport.rank != 0:
            return
        if self._steps == WARM_UP_STEPS:
            self._mark = (perf_counter(), self._snapshot())
        if self._steps == VERDICT_STEPS and self._mark is not None:
            logger.info(self._verdict(*self._mark))
        if self._every and self._steps % self._every == 0:
            self._periodic()

    def _snapshot(self) -> Statistics:
        statistics = self._pipeline.statistics
        return Statistics(*statistics.vector().tolist())  # a copy; the engine goes on counting

    def _periodic(self) -> None:
        mean = self._pipeline.reduced_statistics
        if mean is not None and mean.steps:
            logger.info(
                "step %d: ratio %.2f, per step and rank %.3f MB sent, codec %.2f ms, exposed communication %.2f ms",
                self._pipeline.step,
                mean.ratio,
                mean.wire_bytes / mean.steps / 1e6,
                1e3 * mean.codec_seconds / mean.steps,
                1e3 * mean.exposed_seconds / mean.steps,
            )

    def _verdict(self, begin: float, before: Statistics) -> str:
        """What compression gains against a bfloat16 wire here: an estimate from this run's own timings."""
        now = self._snapshot()
        steps = now.steps - before.steps
        sent = (now.wire_bytes - before.wire_bytes) / steps
        exposed = (now.exposed_seconds - before.exposed_seconds) / steps
        codec = (now.codec_seconds - before.codec_seconds) / steps
        half = sum(2 * layer.size for layer in self._pipeline.layers)
        size = self._pipeline.transport.size
        half_bytes = 2 * half * (size - 1) / size
        step_ms = 1e3 * (perf_counter() - begin) / max(1, self._steps - WARM_UP_STEPS)
        # The wire's rate while the training thread waited: codec work is the only other thing in that time.
        waited = max(exposed - codec, 1e-9)
        gain = waited * (half_bytes / max(sent, 1.0) - 1.0) - codec
        head = f"after {VERDICT_STEPS} steps of {step_ms:.1f} ms: {sent / 1e6:.3f} MB sent per step and rank"
        if sent >= half_bytes:
            return (
                f"{head}; a bfloat16 wire would send {half_bytes / 1e6:.3f} MB: no bytes are saved against it"
            )
        if gain <= 0:
            return f"{head}; compression gains nothing here against a bfloat16 wire (estimate)"
        return (
            f"{head}; compared with a bfloat16 wire about {1e3 * gain:.1f} ms per step are gained (estimate)"
        )
