"""A pipeline asks and tells its running controller at fixed places of every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradcomp.control.base import ControllerRun, Doubles, Step
from gradcomp.kernels.codec import Group
from gradcomp.kernels.step import Observations
from gradcomp.pipeline.arrangement import Arrangement, by_layer
from gradcomp.pipeline.memory import StepMemory
from gradcomp.transport.base import AllReduce, Handle, Transport


class Steering:
    """Serves one rank's controller; does nothing where there is none, or before its first step."""

    def __init__(self, controller: ControllerRun | None, layers: int) -> None:
        self.controller = controller
        self.observations: Observations | None = None
        self._layers = layers
        self._active: ControllerRun | None = None
        self._summed: tuple[Handle, Doubles] | None = None
        self._opened_at = 0.0
        self._since = 0.0
        self._wire = np.zeros(0)

    def decides(self, step: int) -> bool:
        """Return whether the controller decides about plans from this step on."""
        return self.controller is not None and step >= self.controller.environment.first_step

    @property
    def ready(self) -> bool:
        """Return this rank's vote for the controller's next choices."""
        return self._active is not None and self._active.ready

    @property
    def overdue(self) -> bool:
        """Return whether the step has to wait for the controller's background work."""
        return self._active is not None and self._active.overdue

    def stop(self) -> None:
        """End the controller with this step."""
        self.controller = None

    def open(self, step: int, now: float, buckets: int) -> None:
        """Begin a step of so many ``buckets`` at the time ``now``."""
        self._since = now - self._opened_at if self._opened_at else 0.0
        self._opened_at = now
        self._wire = np.zeros(buckets)
        self._active = self.controller if self.decides(step) else None
        self.observations = None
        if self._active is not None:
            self.observations = Observations(self._layers)
            self._active.begin(step)

    def start(self, groups: Sequence[Group], memory: StepMemory, scale: float) -> None:
        """Let the controller look at the gradients of a bucket that is about to be encoded."""
        if self._active is None or not self._active.accumulates:
            return
        for group in groups:
            table = group.table.copy()
            memory.gradients(table, group.layers)
            memory.residuals(table, group)
            self._active.accumulate(table, group.layers, scale)

    def contribute(self, step: int, transport: Transport) -> None:
        """Begin to sum over ranks what the controller adds up: it travels beside the last buckets."""
        if self._active is None:
            return
        assert self.observations is not None, "made when the step was opened"
        self._active.observe(self.observations)
        vector = self._active.contribution(step)
        if vector is not None:
            self._summed = (AllReduce(vector).issue(transport), vector)

    def round_complete(self, bucket: int, seconds: float) -> None:
        """Count the seconds that a round of the bucket took on the wire."""
        self._wire[bucket] += seconds

    @property
    def sums(self) -> Handle | None:
        """Return the sum that has to be complete before :meth:`conclude`, or None."""
        return None if self._summed is None else self._summed[0]

    def conclude(
        self, step: int, agreed: bool, laid_out: Arrangement, completed: Sequence[float], rate: float
    ) -> bool:
        """End the step; return whether the controller has new choices. ``rate`` is the learning rate."""
        sums, self._summed = self._summed, None
        if self.controller is None:
            return False
        if self._active is None:
            # Choices that it made before its first step apply from that step on.
            return self.decides(step + 1) and bool(self.controller.choices)
        summed = None if sums is None else sums[1]
        wire = by_layer(laid_out.travels, self._wire, self._layers)
        ready = np.array(completed) - self._opened_at
        return self._active.finish(
            Step(step, agreed, summed, self._since, wire, laid_out.sent, ready, laid_out.position, rate)
        )

    def commit(self, present: npt.NDArray[np.bool_]) -> None:
        """Tell the controller that the step was accepted, with the layers that were ``present``."""
        if self._active is not None:
            self._active.commit(present)
