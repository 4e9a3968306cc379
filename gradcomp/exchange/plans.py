"""The next plan: a proposed one, a schedule's, a controller's, or the next on the way to another compression."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.compress import Compressor, ErrorFeedback, Identity
from gradcomp.compress.policy import Schedule
from gradcomp.control.base import ControllerRun, Doubles, Step
from gradcomp.core.errors import ConfigError, PlanMismatchError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Assignment, Plan
from gradcomp.exchange.compiled_plan import CompiledPlan, by_layer
from gradcomp.exchange.layout import compressors_of
from gradcomp.exchange.memory import StepMemory
from gradcomp.kernels.codec import Group
from gradcomp.kernels.step import Observations
from gradcomp.transport.base import AllReduce, Handle, Transport

Mask = npt.NDArray[np.bool_]


@dataclass(eq=False)
class Switch:
    """Leads from the plan in force to ``target``, by plans in which some layers only send what they hold.

    A layer sends p = g + e exactly, so that e' = 0: it travels as ``error_feedback[c]``, c being its next
    compressor if that is exact, else what that one uses to warm up. Then the next plan takes the target's
    compressor.

    ``owing`` marks layers that hold a residual which their next compressor would not read. It is cleared for a
    layer once a step under such a plan was accepted in which some rank had a gradient of the layer; all ranks see
    the same. ``asked`` is the step whose headers tell whether all ranks asked, and None from then on. ``begun`` is
    the version of the first plan.
    """

    layers: Sequence[LayerSpec]
    target: Plan
    owing: Mask
    later: Mapping[int, Plan] = field(default_factory=dict)
    asked: int | None = None
    begun: int = 0

    @staticmethod
    def ask(
        layers: Sequence[LayerSpec], target: Plan, later: Mapping[int, Plan], holding: Mask, step: int
    ) -> Switch:
        """Begin a change of compression; raise ConfigError for impossible plans.

        ``later`` has plans by the step at which they follow ``target``. Layers in ``holding`` have a residual.
        """
        for plan in (target, *later.values()):
            plan.check_covers(layers)
            compressors_of(layers, plan)
        lost = [not compressor.traits.keeps_residual for compressor in compressors_of(layers, target)]
        return Switch(layers, target, holding & np.array(lost), later, asked=step)

    @property
    def schedule(self) -> Schedule | None:
        """Return the later plans as a schedule, or None without any."""
        later = self.later

        def begins(step: int, version: int) -> Plan | None:
            return Plan(version, later[step].assignments) if step in later else None

        return begins if later else None

    def digest(self, plan: bytes) -> bytes:
        """Return 32 bytes that ranks compare, of the first plan's digest and of all plans that are to follow."""
        hashed = hashlib.sha256(plan)
        for step, later in ((-1, self.target), *sorted(self.later.items())):
            hashed.update(f"{step} {Plan(0, later.assignments).to_json()}\n".encode())
        return hashed.digest()

    def check(self, step: int, ready: bool, rank: int) -> None:
        """Raise PlanMismatchError unless all ranks asked before the same step."""
        if self.asked == step and not ready:
            raise PlanMismatchError(
                f"rank {rank} called set_compression() before step {step}, and another rank did not: every rank has to "
                "call it between the same two steps"
            )

    def plan(self, version: int, before: Plan) -> Plan:
        """Return the next plan on the way."""
        now = compressors_of(self.layers, before)
        rows = [
            _exactly(row, now[i], next_one) if self.owing[i] else row
            for i, (row, next_one) in enumerate(
                zip(self.target.assignments, compressors_of(self.layers, self.target), strict=True)
            )
        ]
        return Plan(version, tuple(rows))

    def follow(self, before: Plan, behind: Collection[int]) -> Plan | None:
        """Return the plan after ``before``, or None.

        Layers ``behind`` are not waited for: nobody has trained them for some steps, or their gradients are sparse.
        """
        waits = self.owing.copy()
        waits[list(behind)] = False
        if self.asked is not None or waits.any():
            return None
        plan = self.plan(before.version + 1, before)
        return None if plan.assignments == before.assignments else plan

    def accept(self, plan: Plan) -> None:
        """Begin with ``plan``, the first one, since all ranks asked."""
        if self.asked is not None:
            self.asked, self.begun = None, plan.version

    def commit(self, plan: Plan, present: Mask) -> None:
        """Release layers that sent what they held in an accepted step under ``plan``."""
        if self.asked is None and plan.version >= self.begun:
            self.owing &= ~present

    def is_over(self, plan: Plan) -> bool:
        """Return whether ``plan`` is what was asked for."""
        return self.asked is None and not self.owing.any() and plan.assignments == self.target.assignments

    # -- what a checkpoint holds -------------------------------------------------------------------------------

    def to_plain(self) -> dict[str, Any]:
        """Return numbers, strings and lists; later plans are left out: the program sets them, as a schedule."""
        names = [layer.name for layer in self.layers]
        return {
            "target": Plan(0, self.target.assignments).to_json(),
            "owing": [names[i] for i in np.flatnonzero(self.owing).tolist()],
            "asked": self.asked is not None,
            "begun": self.begun,
        }

    @staticmethod
    def from_plain(data: Mapping[str, Any], layers: Sequence[LayerSpec], step: int) -> Switch:
        """Invert :meth:`to_plain`; raise KeyError, TypeError, ValueError or GradcompError for anything else."""
        target = Plan.from_json(data["target"])
        target.check_covers(layers)
        compressors_of(layers, target)
        rows = target.by_layer
        owing = set(map(str, data["owing"]))
        if not owing <= rows.keys() or type(data["asked"]) is not bool:
            raise ValueError("the change of compression is not for these layers")
        return Switch(
            layers,
            Plan(0, tuple(rows[layer.name] for layer in layers)),
            np.array([layer.name in owing for layer in layers]),
            asked=step if data["asked"] else None,
            begun=int(data["begun"]),
        )


def _exactly(row: Assignment, now: Compressor, next_one: Compressor) -> Assignment:
    """Return how a layer travels that sends all it holds."""
    exact = next_one if next_one.traits.exact else next_one.dense(Identity())
    flush = ErrorFeedback(exact, follow_rate=now.traits.follows_rate)
    return Assignment(row.layer, flush.family_string(), flush.level)


class Succession:
    """Keeps the plans that follow the one in force, on one rank.

    ``schedule(step, version)`` returns the plan that begins then, or None; it is the same on all ranks. ``next`` is
    the plan that applies as soon as all ranks hold it. ``switch`` is an unfinished change of compression.
    """

    def __init__(self, layers: Sequence[LayerSpec], schedule: Schedule | None) -> None:
        self._layers = layers
        self._schedule = schedule
        self._due: int | None = None  # the step whose plan, by the schedule, has not been proposed yet
        self.next: Plan | None = None
        self.switch: Switch | None = None

    def propose(self, plan: Plan, now: Plan) -> None:
        """Hold a plan as the next one; raise ConfigError for one that cannot follow ``now``."""
        plan.check_covers(self._layers)
        if plan.version != now.version + 1:
            raise ConfigError(f"the next plan must have version {now.version + 1}, not {plan.version}")
        compressors_of(self._layers, plan)
        self.next = plan

    def ask(self, target: Plan, later: Mapping[int, Plan], holding: Mask, step: int, now: Plan) -> None:
        """Begin to change to another plan, then to those in ``later`` at their steps; a schedule ends with it."""
        self.switch = Switch.ask(self._layers, target, later, holding, step)
        self._schedule, self._due = self.switch.schedule, None
        self.next = self.switch.plan(now.version + 1, now)

    def restore(self, switch: Switch | None, now: Plan) -> None:
        """Go on with a saved change of compression, or with none."""
        self.switch = switch
        self.next = None if switch is None or switch.asked is None else switch.plan(now.version + 1, now)

    def follow(self, step: int, now: Plan, behind: Collection[int]) -> None:
        """Hold the plan that is to begin at the next step, as all ranks do in the same step.

        If another plan is under way, the schedule's follows once that one applies. Layers ``behind`` are not waited
        for.
        """
        if self._schedule is not None and self._schedule(step + 1, 0) is not None:
            self._due = step + 1
        if self.next is not None:
            return
        if self._schedule is not None and self._due is not None:
            plan, self._due = self._schedule(self._due, now.version + 1), None
            if plan is not None and self.switch is not None:
                self.switch.target = plan
            elif plan is not None and plan.assignments != now.assignments:
                self.propose(plan, now)
        if self.switch is not None:
            self.next = self.switch.follow(now, behind)

    def digest(self) -> bytes:
        """Return a digest of what this rank holds, for ranks to compare; zeros stand for nothing."""
        if self.next is None:
            return bytes(32)
        digest = self.next.digest(self._layers)
        return digest if self.switch is None else self.switch.digest(digest)

    def take(self) -> Plan | None:
        """Return the plan that all ranks hold, which is in force from now on."""
        plan, self.next = self.next, None
        if plan is not None and self.switch is not None:
            self.switch.accept(plan)
        return plan

    def laid_out(self, now: Plan) -> None:
        """End a change of compression once the plan that was asked for is laid out."""
        if self.switch is not None and self.switch.is_over(now):
            self.switch = None


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
        self, step: int, agreed: bool, laid_out: CompiledPlan, completed: Sequence[float], rate: float
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
