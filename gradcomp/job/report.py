"""Readings of an exchange for users, and log lines at the start, at intervals, and after 50 steps with a verdict."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from gradcomp.core.config import Config
from gradcomp.core.metrics import StepMetrics
from gradcomp.core.plan import Plan
from gradcomp.core.trace import Span, Statistics
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.layout import compressors_of
from gradcomp.exchange.reports import PROBE_BYTES
from gradcomp.job.state import Runtime
from gradcomp.kernels import dispatch
from gradcomp.version import __version__

if TYPE_CHECKING:
    from gradcomp.job.start import Proposal


#: Exposed communication below this share of a step is not worth another setting.
_WORTH = 0.05

logger = logging.getLogger("gradcomp")
VERDICT_STEPS = 50
WARM_UP_STEPS = 10


@dataclass(frozen=True)
class Measured:
    """Holds averages of one step: its seconds, what a rank sent, and how long it waited for the exchange.

    ``half_bytes``, ``half_exposed_seconds``: the same for a bfloat16 wire, predicted at ``seconds_per_byte``.
    ``latency_seconds``: the time of a small message.
    """

    step_seconds: float
    sent_bytes: float
    exposed_seconds: float
    half_bytes: float
    half_exposed_seconds: float
    seconds_per_byte: float
    latency_seconds: float


def verdict(measured: Measured, compressed: bool) -> str:
    """Return as text what was found, and what to do."""
    bytes_seconds = measured.sent_bytes * measured.seconds_per_byte
    latency = f"{1e3 * measured.latency_seconds:.2f} ms"
    little = _WORTH * measured.step_seconds
    worth = min(measured.exposed_seconds, bytes_seconds) > little  # fewer bytes could shorten the step
    exposed_ms, step_ms = 1e3 * measured.exposed_seconds, 1e3 * measured.step_seconds
    exposed = f"{exposed_ms:.1f} of {step_ms:.1f} ms a step are exposed communication"
    leave_it = "fewer bytes would hardly shorten it, leave it so"
    if measured.exposed_seconds > little:  # what is exposed has other causes than bytes
        leave_it = (
            f"the bytes take {1e3 * bytes_seconds:.2f} of them, the rest is latency ({latency} a message) and waiting "
            f"for other ranks; {leave_it}, and exchange less often: larger batches, or gradients of several added up"
        )
    compare = 'compare with compression="quantize:bits=4"'
    if not compressed:
        advice = f'{compare}, or let compression="auto" choose' if worth else leave_it
        return f"uncompressed; {exposed}: {advice}"
    half = f"a bfloat16 wire would send {measured.half_bytes / 1e6:.3f} MB"
    if measured.sent_bytes >= 0.95 * measured.half_bytes:
        return f"{half}; {exposed}: {compare if worth else leave_it}"
    gain_ms = 1e3 * (measured.half_exposed_seconds - measured.exposed_seconds)
    if gain_ms <= 0:
        return (
            f"{half}; compression gains nothing against it here; {exposed}, but fewer bytes do not shorten it "
            f'(a message has {latency} of latency): compare with compression="bf16" and "none"'
        )
    return (
        f"{half}; about {gain_ms:.1f} ms a step are gained against it (estimate at "
        f"{8e-9 / measured.seconds_per_byte:.2f} Gbit/s); {exposed}: "
        + ("a higher ratio may gain more" if worth else "keep it")
    )


def metrics_of(exchanger: Exchanger | None) -> dict[str, float]:
    """Return :meth:`Readers.compression_metrics` of an exchanger, which is None where nothing is exchanged."""
    return StepMetrics().read(Statistics()) if exchanger is None else exchanger.pipeline.metrics()


class Readers:
    """Gives users the readings of an exchange. No reader communicates, so any rank may call any of them at any time."""

    #: Returns the exchanger, None in a world of one. The class that mixes this in must define it. It is no abstract
    #: method, because the class of an optimizer cannot be changed in place to one with an abstract base.
    _exchanger_or_none: Callable[[], Exchanger | None]

    def statistics(self) -> Statistics:
        """Return this rank's counters since the start."""
        exchanger = self._exchanger_or_none()
        return Statistics() if exchanger is None else exchanger.pipeline.statistics

    def compression_metrics(self) -> dict[str, float]:
        """Return one flat dictionary of numbers for a logger: ``{"gradcomp/ratio": 7.6, "gradcomp/bits": 4.2, ...}``.

        Times and bytes are this rank's own, and means per step over the steps since the last call; at the first call,
        since the optimizer was wrapped. If no step has ended since the last call, the same means are returned again.

        - ``gradcomp/step_ms``: milliseconds from the end of one exchange to the end of the next, with whatever the
          program does in between. The first step counts from its first gradient.
        - ``gradcomp/exposed_ms``: milliseconds in which the training thread waited for the exchange.
        - ``gradcomp/codec_ms``: milliseconds of compressing, adding and decompressing.
        - ``gradcomp/wire_ms``: milliseconds of rounds of messages, from issue to arrival, added up over exchange
          buckets. Rounds overlap, so this may exceed the step.
        - ``gradcomp/vote_ms``: milliseconds in which the ranks agreed on steps (``on_skip="agree"``).
        - ``gradcomp/sent_mb``: millions of bytes that this rank sent, headers included.
        - ``gradcomp/ratio``: bytes of an uncompressed exchange over bytes sent.
        - ``gradcomp/bits``: bits sent for each element of the gradients, where an uncompressed exchange sends the bits
          of their dtype.
        - ``gradcomp/steps``, ``gradcomp/skipped_steps``: exchanges since the start, and those of them that changed no
          parameter because a value was not finite or the ranks agreed to skip.
        - ``gradcomp/plan_version``: the version of the next step's plan, 0 until a controller or a schedule changes it.

        In a world of one nothing is exchanged: the ratio is 1 and all other values are 0. No rank waits for another.
        Any thread may call it; while a step is under way, times of that step are in part included.
        """
        return metrics_of(self._exchanger_or_none())

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
        names = [layer.name for layer in pipeline.layers]
        buckets = [pipeline.layout.buckets[number] for number in pipeline.travel]
        return [([names[i] for i in b.layers.tolist()], b.payload_bytes) for b in buckets]

    def plan(self) -> Plan | None:
        """Return the plan of the next step: every layer's compressor and level. None in a world of one."""
        exchanger = self._exchanger_or_none()
        return None if exchanger is None else exchanger.pipeline.plan

    def plan_reason(self) -> str:
        """Return in one line why the controller chose the plan; empty without one, or on ranks that are not told."""
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
        """Log what is due after ``steps`` exchanges, before the next one. All ranks call it with the same number."""
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
        """Return the measured times, and the predicted times of a bfloat16 exchange.

        The exposed time of a bfloat16 exchange is the time of its bytes at the measured rate, less the window in which
        this run's exchange buckets became ready, but at least the time of its last exchange bucket.
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


def announce_job(runtime: Runtime) -> None:
    """Log once, on rank 0, what runs and which settings were changed. All settings are logged at level debug."""
    if runtime.rank != 0:
        return
    config, hosts = runtime.config, len(runtime.topology.leaders)
    changed = {name: value for name, value in config.changed().items() if name != "transport"}
    logger.info(
        "version %s, %d ranks on %d host%s by %s, transport %s%s",
        __version__,
        runtime.size,
        hosts,
        "s" * (hosts > 1),
        runtime.launch.launcher,
        config.transport,
        f", settings {_listed(changed)}" if changed else "",
    )
    if runtime.size == 1:
        logger.info("a world of one rank: nothing is exchanged, compression is bypassed")
    logger.debug(
        "interface %s, %s, kernels %s on %d thread%s",
        runtime.launch.interface or "chosen by the system",
        runtime.network.describe(),
        dispatch.backend(),
        dispatch.threads(),
        "s" * (dispatch.threads() > 1),
    )
    logger.debug("settings in force: %s", _listed(config.settings()))


def _listed(settings: dict[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def announce_compression(exchanger: Exchanger, proposal: Proposal) -> None:
    """Log once, on rank 0, how much is compressed, and warn of what was probably not intended.

    At level debug: the memory of the state and compressors' remarks on layers.
    """
    pipeline, policy = exchanger.pipeline, proposal.policy
    if pipeline.transport.rank != 0:
        return
    excluded = policy.excluded(pipeline.layers)
    total = sum(layer.nbytes for layer in pipeline.layers) or 1
    compressed = sum(layer.nbytes for layer in pipeline.layers if layer.name not in excluded)
    why = ", ".join(f"{count} {reason}" for reason, count in Counter(excluded.values()).items()) or "none"
    title, controller = policy.brief, proposal.controller
    if controller is not None and controller.name != title:
        title += f" under {controller.name}"
    if policy.compresses:
        logger.info(
            "%s: %.1f%% of %.2f MB in %d layers %s; %s: %s",
            title,
            100 * compressed / total,
            total / 1e6,
            len(pipeline.layers),
            "may be compressed" if proposal.chooses_by_times else "compressed",
            "exact" if policy.exact == "float32" else policy.exact,
            why,
        )
    else:
        logger.info("%s: %.2f MB in %d layers, uncompressed", policy.brief, total / 1e6, len(pipeline.layers))
    if policy.compresses and not compressed:
        logger.warning(
            "nothing is compressed: every layer is excluded (%s). Policy(filter=Filter(...)) says which to compress",
            why,
        )
    for pattern in policy.unmatched(pipeline.layers):
        logger.warning(
            "the policy's pattern %r matches no layer; the first are %s",
            pattern,
            ", ".join(layer.name for layer in pipeline.layers[:3]),
        )
    logger.debug(
        "state %.2f MB; %d buckets",
        (pipeline.residuals.nbytes + pipeline.fields.nbytes) / 1e6,
        len(pipeline.layout.buckets),
    )
    compressors = compressors_of(pipeline.layers, pipeline.plan)
    for layer, compressor in zip(pipeline.layers, compressors, strict=True):
        if remark := compressor.remark(layer):
            logger.debug("%s: %s", layer.name, remark)
