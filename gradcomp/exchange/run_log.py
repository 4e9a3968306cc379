"""Rank 0 logs the plans of one exchanger, and with a run log its steps and layers."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from gradcomp.core.journal import Journal, histogram
from gradcomp.exchange.layer_samples import LayerSamples
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.exchange.step import StepResult

logger = logging.getLogger("gradcomp")


class RunLog:
    """Records one exchanger's plans on rank 0; if a controller changes its plan every step, only what is notable.

    In a log line ``measured`` are the bytes sent per step under a plan, headers and votes included; ``predicted``
    are those by formula, without; ``under control`` are those predicted for the layers that the controller chooses
    for.

    With a ``journal``, it also writes the windows of steps that were gathered, the steps that were skipped, samples of
    layers, and what the controller has measured.
    """

    def __init__(
        self, pipeline: Pipeline, journal: Journal | None, controller: str, compression: str
    ) -> None:
        self._pipeline = pipeline
        self._version = -1
        self._notable = True  # whether the next step's plan is worth a line
        self._began = (0, 0)  # steps and bytes when the plan took effect
        self._reached = (0, 0)  # the same after the last step
        self._journal = journal
        self._skipped: list[tuple[int, int | None]] = []  # of the window that is not written yet
        self._discarded = 0
        if journal is not None:
            journal.run(pipeline.transport.size, controller, compression, pipeline.layers)
            if pipeline.times is not None:
                pipeline.samples = LayerSamples(
                    pipeline.layers, pipeline.device, pipeline.config.seed, journal.line
                )

    def after_step(self, result: StepResult | None) -> None:
        """Record a step that was accepted or refused, with its ``result``."""
        self._write_window()
        pipeline = self._pipeline
        statistics, version = pipeline.statistics, pipeline.laid_out_plan.version
        controller = pipeline.controller
        if version != self._version and (self._notable or self._version < 0):
            step = pipeline.step - 1
            self._end(step)
            if controller is not None:
                self._say(step, version)
            if self._journal is not None:
                self._journal.plan(step, pipeline.laid_out_plan, pipeline.predicted.tolist())
                if controller is not None and controller.reason:
                    self._journal.choice(step, controller.reason)
                self._write_account()
            self._version, self._began = version, self._reached
        self._reached = (statistics.steps, statistics.wire_bytes)
        self._notable = controller is None or controller.notable
        if result is not None:
            self._note_overflow(result)

    def skipped(self) -> None:
        """Record a step that the ranks have agreed to skip."""
        self._write_window()
        self._skipped.append((self._pipeline.step - 1, None))

    def discarded(self, result: StepResult | None) -> None:
        """Record an exchange whose means were thrown away, by a loss scaler if they are not finite."""
        self._write_window()
        if result is None or not self._note_overflow(result):
            self._discarded += 1

    def _note_overflow(self, result: StepResult) -> bool:
        """Note the first layer that is not finite; return False if there is none."""
        if not result.finite:
            self._skipped.append((result.step, int(np.argmax(result.nonfinite))))
        return not result.finite

    def close(self) -> None:
        """Record the last plan and the last steps, since the run ends."""
        self._end(self._pipeline.step)
        if self._journal is not None:
            self._write_window(ends=True)
            self._journal.close()

    # -- steps and layers -----------------------------------------------------------------------------------------

    def _write_window(self, *, ends: bool = False) -> None:
        """Write the window that was gathered, if there is one; or the rest of the steps, since the run ends."""
        times, journal = self._pipeline.times, self._journal
        if times is None or journal is None:
            return
        for window in (times.take(), times.rest() if ends else None):
            if window is None:
                continue
            journal.line(replace(window, skipped=tuple(self._skipped), discarded=self._discarded))
            self._skipped, self._discarded = [], 0
            self._write_account()

    def _write_account(self) -> None:
        controller = self._pipeline.controller
        if controller is not None and self._journal is not None:
            for line in controller.account():
                self._journal.line(line)

    # -- plans ----------------------------------------------------------------------------------------------------

    def _measured(self) -> tuple[int, float]:
        """Return the steps under the last plan, and the mean bytes that were sent in one."""
        steps, nbytes = (reached - began for reached, began in zip(self._reached, self._began, strict=True))
        return steps, nbytes / max(steps, 1)

    def _end(self, step: int) -> None:
        steps, mean = self._measured()
        if self._journal is not None and steps:
            self._journal.measured(step, self._version, steps, mean)

    def _say(self, step: int, version: int) -> None:
        pipeline = self._pipeline
        steps, mean = self._measured()
        measured = (
            f"; {mean / 1e6:.3f} MB measured, with headers, under plan {self._version}" if steps else ""
        )
        assert pipeline.controller is not None, "it has changed the plan"
        reason = f" ({pipeline.controller.reason})" if pipeline.controller.reason else ""
        controlled = pipeline.predicted[pipeline.controller.environment.controlled]
        logger.log(
            logging.INFO if step else logging.DEBUG,  # the first lines of the log name the first compression
            "step %d: plan %d by %s: %s; %.3f MB per step and rank predicted, %.3f of them under control%s%s",
            step,
            version,
            pipeline.controller.name,
            histogram(pipeline.laid_out_plan),
            pipeline.predicted.sum() / 1e6,
            controlled.sum() / 1e6,
            measured,
            reason,
        )
