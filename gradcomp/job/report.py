"""Logs how training goes: a line now and then, and a verdict after 50 steps. Answers users' questions about it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import perf_counter

from gradcomp.core.config import Config
from gradcomp.core.plan import Plan
from gradcomp.core.statistics import Statistics
from gradcomp.core.trace import Span
from gradcomp.engine import Exchanger
from gradcomp.engine.links import PROBE_BYTES
from gradcomp.job.verdict import Measured, verdict
from gradcomp.pipeline.layout import compressors_of

logger = logging.getLogger("gradcomp")

VERDICT_STEPS = 50
WARM_UP_STEPS = 10


class Readers:
    """Gives users the readings of an exchange. No reader communicates, so any rank may call any of them at any time."""

    #: Returns the exchanger, None in a world of one. The class that mixes this in must define it. It is no abstract
    #: method, because the class of an optimizer cannot be changed in place to one with an abstract base.
    _exchanger_or_none: Callable[[], Exchanger | None]

    def statistics(self) -> Statistics:
        """Return this rank's counters since the start."""
        exchanger = self._exchanger_or_none()
        return Statistics() if exchanger is None else exchanger.pipeline.statistics

    def metrics(self) -> dict[str, float]:
        """Return this rank's counters as a flat dictionary for a logger: ``{"gradcomp/ratio": 7.6, ...}``."""
        return self.statistics().metrics()

    def reduced_statistics(self) -> Statistics | None:
        """Return the mean of all ranks' counters at the last multiple of ``statistics_every_steps``."""
        exchanger = self._exchanger_or_none()
        return None if exchanger is None else exchanger.pipeline.reduced_statistics

    def buckets(self) -> list[tuple[list[str], int]]:
        """Return the layers' names and the payload bytes of every exchange bucket, in the order in which they travel.

        The order changes once, after the first step. Payload bytes are of one direction, without headers.
        """
        exchanger = self._exchanger_or_none()
        if exchanger is None:
            return []
        pipeline = exchanger.pipeline
        return [
            (
                [pipeline.layers[layer].name for layer in bucket.layers.tolist()],
                bucket.payload_bytes,
            )
            for bucket in pipeline.layout.buckets
        ]

    def plan(self) -> Plan | None:
        """Return the plan of the next step: every layer's compressor and level. None in a world of one."""
        exchanger = self._exchanger_or_none()
        return None if exchanger is None else exchanger.pipeline.plan

    def plan_reason(self) -> str:
        """Return in one line why the controller chose the plan; empty without one, and where it tells rank 0 only."""
        exchanger = self._exchanger_or_none()
        controller = None if exchanger is None else exchanger.pipeline.controller
        return "" if controller is None else controller.reason

    def trace_spans(self) -> tuple[Span, ...]:
        """Return each exchange bucket's last spans: ready, queue, compress, send, reduce, decompress, feedback."""
        exchanger = self._exchanger_or_none()
        return () if exchanger is None else exchanger.pipeline.trace.spans()

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the last spans as Chrome trace JSON; :func:`start_timeline` records all of them."""
        exchanger = self._exchanger_or_none()
        if exchanger is not None:
            exchanger.pipeline.trace.write(path)


class Reporter:
    """Logs lines on rank 0. ``by_times``: the controller itself says what it gains.

    Statistics are local or already reduced; the one collective is the probe after 50 steps.
    """

    def __init__(self, exchanger: Exchanger, config: Config, by_times: bool = False) -> None:
        self._exchanger = exchanger
        self._pipeline = exchanger.pipeline
        self._every = config.statistics_every_steps
        self._by_times = by_times
        self._before = Statistics()
        self._began = perf_counter()

    def after_steps(self, steps: int) -> None:
        """Log what is due after ``steps`` exchanges, before the next one. All ranks call it alike."""
        if steps == WARM_UP_STEPS:
            self._before, self._began = replace(self._pipeline.statistics), perf_counter()
        if steps == VERDICT_STEPS:
            self._conclude(perf_counter() - self._began)
        if self._every and steps % self._every == 0:
            self._periodic()

    def _log(self, line: str) -> None:
        if self._pipeline.transport.rank == 0:
            logger.info(line)

    def _periodic(self) -> None:
        mean = self._pipeline.reduced_statistics
        if mean is not None and mean.steps:
            sent, codec, exposed = (
                total / mean.steps for total in (mean.wire_bytes, mean.codec_seconds, mean.exposed_seconds)
            )
            self._log(
                f"step {self._pipeline.step}: ratio {mean.ratio:.2f}, per step and rank {sent / 1e6:.3f} MB sent, "
                f"codec {1e3 * codec:.2f} ms, exposed communication {1e3 * exposed:.2f} ms"
            )

    def _conclude(self, seconds: float) -> None:
        """Log a verdict, or the controller's own, on the steps since the warm-up, which took ``seconds``."""
        latency = self._exchanger.probe(PROBE_BYTES[0])
        rate = max(self._exchanger.probe(PROBE_BYTES[1]) - latency, 1e-6) / PROBE_BYTES[1]
        measured = self._measured(seconds, rate, latency)
        controller = self._pipeline.controller
        reason = (
            f"{controller.name}: {controller.reason}" if controller is not None and controller.reason else ""
        )
        said = [f"after {VERDICT_STEPS} steps: {measured.sent_bytes / 1e6:.3f} MB sent per step and rank"]
        if not (self._by_times and reason):
            compressors = compressors_of(self._pipeline.layers, self._pipeline.plan)
            said.append(verdict(measured, compressed=not all(c.traits.exact for c in compressors)))
        self._log("; ".join([*said, reason] if reason else said))

    def _measured(self, seconds: float, seconds_per_byte: float, latency: float) -> Measured:
        """Return what was measured, and what is predicted for a bfloat16 wire.

        The exposed time of that wire is the time of its bytes at the measured rate, less the window in which this run's
        exchange buckets became ready, but at least the time of its last exchange bucket.
        """
        now, before = self._pipeline.statistics, self._before
        steps = max(now.steps - before.steps, 1)
        size = self._pipeline.transport.size
        half_bytes = [2 * 2 * bucket.elements * (size - 1) / size for bucket in self._pipeline.layout.buckets]
        whole, last = sum(half_bytes) * seconds_per_byte, half_bytes[-1] * seconds_per_byte
        return Measured(
            step_seconds=seconds / steps,
            sent_bytes=(now.wire_bytes - before.wire_bytes) / steps,
            exposed_seconds=(now.exposed_seconds - before.exposed_seconds) / steps,
            half_bytes=sum(half_bytes),
            half_exposed_seconds=max(whole - self._window(), last),
            seconds_per_byte=seconds_per_byte,
            latency_seconds=latency,
        )

    def _window(self) -> float:
        """Return the median time from the moment when the first exchange bucket is ready to that of the last."""
        ready: dict[int, list[float]] = {}
        for span in self._pipeline.trace.spans():
            if span.name == "ready":
                ready.setdefault(span.step, []).append(span.end)
        return median([max(ends) - min(ends) for ends in ready.values()]) if ready else 0.0
