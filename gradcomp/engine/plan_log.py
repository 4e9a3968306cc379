"""Users see changes of plan in a log line each, and in the run log."""

from __future__ import annotations

import logging

from gradcomp.core.journal import Journal, histogram
from gradcomp.pipeline import Pipeline

logger = logging.getLogger("gradcomp")


class PlanLog:
    """Records one exchanger's plans on rank 0; if a controller changes its plan every step, only what is notable.

    In a log line ``measured`` are the bytes sent per step under a plan, headers and votes included; ``predicted``
    are those by formula, without; ``under control`` are those predicted for the layers that the controller chooses
    for.
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
        if journal is not None:
            journal.run(pipeline.transport.size, controller, compression, pipeline.layers)

    def after_step(self) -> None:
        """Record a step that was accepted or refused."""
        pipeline = self._pipeline
        statistics, version = pipeline.statistics, pipeline.laid_out_plan.version
        controller = pipeline.controller
        if version != self._version and (self._notable or self._version < 0):
            step = pipeline.step - 1
            self._end(step)
            if controller is not None:
                self._say(step, version)
            if self._journal is not None:
                self._journal.plan(step, pipeline.laid_out_plan, round(pipeline.predicted.sum()))
                if controller is not None and controller.reason:
                    self._journal.choice(step, controller.reason)
            self._version, self._began = version, self._reached
        self._reached = (statistics.steps, statistics.wire_bytes)
        self._notable = controller is None or controller.notable

    def _end(self, step: int) -> None:
        steps = self._reached[0] - self._began[0]
        if self._journal is not None and steps:
            mean = (self._reached[1] - self._began[1]) / steps
            self._journal.measured(step, self._version, steps, mean)

    def _say(self, step: int, version: int) -> None:
        pipeline = self._pipeline
        steps = self._reached[0] - self._began[0]
        before = ""
        if steps:
            mean = (self._reached[1] - self._began[1]) / steps
            before = f"; {mean / 1e6:.3f} MB measured, with headers, under plan {self._version}"
        assert pipeline.controller is not None, "it has changed the plan"
        reason = f" ({pipeline.controller.reason})" if pipeline.controller.reason else ""
        controlled = pipeline.predicted[pipeline.controller.environment.controlled]
        logger.log(
            logging.INFO if step else logging.DEBUG,  # the banner has said what a run begins with
            "step %d: plan %d by %s: %s; %.3f MB per step and rank predicted, %.3f of them under control%s%s",
            step,
            version,
            pipeline.controller.name,
            histogram(pipeline.laid_out_plan),
            pipeline.predicted.sum() / 1e6,
            controlled.sum() / 1e6,
            before,
            reason,
        )

    def close(self) -> None:
        """Record the last plan, since the run ends."""
        self._end(self._pipeline.step)
        if self._journal is not None:
            self._journal.close()
