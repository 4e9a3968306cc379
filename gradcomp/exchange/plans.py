"""The next plan: a proposed one, a schedule's, a controller's, or the next on the way to another compression."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradcomp.compress import Compressor, ErrorFeedback, Identity
from gradcomp.compress.policy import Schedule, assign
from gradcomp.control.base import ControllerRun, Doubles, Step
from gradcomp.core.errors import ConfigError, PlanMismatchError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Assignment, Plan
from gradcomp.exchange.compiled_plan import CompiledPlan, by_layer
from gradcomp.exchange.layout import Mask, compressors_of
from gradcomp.exchange.memory import StepMemory
from gradcomp.exchange.waiting import Waiting, gather_rows
from gradcomp.kernels.codec import Group
from gradcomp.kernels.step import Observations
from gradcomp.transport.base import AllReduce, Handle, Transport


@dataclass(eq=False)
class Switch:
    """Changes the plan in force to ``target``, through plans in which some layers send gradient and residual exactly.

    A layer sends p = g + e exactly, so that e' = 0: it travels as ``error_feedback[c]``, c being its next
    compressor if that is exact, else what that one uses to warm up. Then the next plan takes the target's
    compressor.

    ``owing`` marks layers that hold a residual which their next compressor would not read. It is cleared for a
    layer once a step under such a plan was accepted in which some rank had a gradient of the layer; all ranks see
    the same. ``later`` has plans by the step at which they follow ``target``. ``asked`` is the step whose headers
    tell whether all ranks asked, and None from then on. ``begun`` is the version of the first plan.
    """

    layers: Sequence[LayerSpec]
    target: Plan
    owing: Mask
    later: Mapping[int, Plan] = field(default_factory=dict)
    asked: int | None = None
    begun: int = 0

    def plan(self, before: Plan) -> Plan:
        """Return the next intermediate plan, which follows ``before``."""
        compressors = [compressors_of(self.layers, plan) for plan in (before, self.target)]
        rows = zip(self.target.assignments, *compressors, self.owing.tolist(), strict=True)
        return Plan(
            before.version + 1,
            tuple(_exactly(row, now, next_one) if owes else row for row, now, next_one, owes in rows),
        )

    # -- what a checkpoint holds -------------------------------------------------------------------------------

    def to_plain(self) -> dict[str, Any]:
        """Return numbers, strings and lists; later plans are left out: the program sets them, as a schedule."""
        return {
            "target": Plan(0, self.target.assignments).to_json(),
            "owing": [layer.name for layer, owes in zip(self.layers, self.owing, strict=True) if owes],
            "asked": self.asked is not None,
            "begun": self.begun,
        }

    @staticmethod
    def from_plain(data: Mapping[str, Any], layers: Sequence[LayerSpec], step: int) -> Switch:
        """Invert :meth:`to_plain`; raise KeyError, TypeError, ValueError or GradcompError for anything else."""
        target = Plan.from_json(data["target"])
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
    return assign(row.layer, ErrorFeedback(exact, follow_rate=now.traits.follows_rate))


class Plans:
    """The one source of the plans that follow the one in force, on one rank; it also serves the controller.

    ``schedule(step, version)`` returns the plan that begins then, or None; it is the same on all ranks. ``proposed``
    is a plan that applies as soon as all ranks hold it: the schedule's, a user's, or the next of ``switch``, which is
    an unfinished change of compression. ``controller`` decides about plans from its first step on, without proposals.
    """

    def __init__(
        self, layers: Sequence[LayerSpec], schedule: Schedule | None, controller: ControllerRun | None
    ) -> None:
        self.proposed: Plan | None = None
        self.switch: Switch | None = None
        self.controller = controller
        #: The observations of compressors in the open step; None if no controller reads them.
        self.observations: Observations | None = None
        #: A sum over ranks that has to be complete before :meth:`next`, or None.
        self.sums: Handle | None = None
        self._layers = layers
        self._schedule = schedule
        self._due: Plan | None = None  # the schedule's plan that has not been proposed yet
        #: The controller, in steps that it takes part in.
        self.active: ControllerRun | None = None
        self._summed: Doubles | None = None
        self._opened_at = 0.0
        self._since = 0.0
        #: By bucket, the seconds that its rounds took on the wire.
        self.wire_seconds = np.zeros(0)

    def decides(self, step: int) -> bool:
        """Return whether the controller decides about plans from this step on."""
        return self.controller is not None and step >= self.controller.environment.first_step

    def propose(self, plan: Plan, now: Plan) -> None:
        """Hold a plan as the next one; raise ConfigError for one that cannot follow ``now``."""
        compressors_of(self._layers, plan)
        if plan.version != now.version + 1:
            raise ConfigError(f"the next plan must have version {now.version + 1}, not {plan.version}")
        self.proposed = plan

    def change(self, target: Plan, later: Mapping[int, Plan], holding: Mask, step: int, now: Plan) -> None:
        """Begin to change to another plan, then to those in ``later`` at their steps; a schedule ends with it.

        Layers in ``holding`` have a residual. It raises ConfigError for impossible plans.
        """
        lost = [not compressor.traits.keeps_residual for compressor in compressors_of(self._layers, target)]
        for plan in later.values():
            compressors_of(self._layers, plan)

        def begins(step: int, version: int) -> Plan | None:
            return Plan(version, later[step].assignments) if step in later else None

        self._schedule, self._due = begins if later else None, None
        self.restore(Switch(self._layers, target, holding & np.array(lost), later, asked=step), now)

    def restore(self, switch: Switch | None, now: Plan) -> None:
        """Go on with a change of compression, or with none."""
        self.switch = switch
        self.proposed = None if switch is None or switch.asked is None else switch.plan(now)

    # -- a step --------------------------------------------------------------------------------------------------

    def open(self, step: int, now: float, buckets: int) -> None:
        """Begin a step of ``buckets`` exchange buckets at the time ``now``."""
        self._since = now - self._opened_at if self._opened_at else 0.0
        self._opened_at = now
        self.wire_seconds = np.zeros(buckets)
        self.active = self.observations = None
        if self.controller is not None and self.decides(step):
            self.active = self.controller
            self.observations = Observations(len(self._layers))
            self.active.begin(step)

    def follow(self, step: int, now: Plan, behind: Collection[int]) -> None:
        """Propose the plan that is to begin at the next step, as all ranks do in the same step.

        If another plan is under way, the schedule's plan follows once that one applies. The change does not wait for
        the layers ``behind``: no rank has trained them for some steps, or their gradients are sparse.
        """
        if self._schedule is not None:
            self._due = self._schedule(step + 1, now.version + 1) or self._due
        if self.proposed is not None:
            return
        due, self._due = self._due, None
        switch = self.switch
        if switch is None:
            if due is not None and due.assignments != now.assignments:
                self.propose(Plan(now.version + 1, due.assignments), now)
            return
        switch.target = due or switch.target
        if switch.asked is None and not np.delete(switch.owing, list(behind)).any():
            plan = switch.plan(now)
            self.proposed = None if plan.assignments == now.assignments else plan

    @property
    def ready(self) -> bool:
        """Return this rank's vote for the next plan."""
        return self.proposed is not None or (self.active is not None and self.active.ready)

    def start(self, groups: Sequence[Group], memory: StepMemory, scale: float) -> None:
        """Pass the gradients of a bucket to the controller, before they are encoded."""
        if self.active is None or not self.active.accumulates:
            return
        for group in groups:
            table = group.table.copy()
            memory.gradients(table, group.layers)
            memory.residuals(table, group)
            self.active.accumulate(table, group.layers, scale)

    def contribute(self, step: int, transport: Transport) -> None:
        """Start the sum over ranks of the controller's vector, concurrently with the last buckets."""
        if self.active is None:
            return
        assert self.observations is not None, "made when the step was opened"
        self.active.observe(self.observations)
        self._summed = self.active.contribution(step)
        if self._summed is not None:
            self.sums = AllReduce(self._summed).issue(transport)

    def check(self, step: int, agreed: bool, rank: int) -> None:
        """Raise PlanMismatchError unless all ranks began to change the compression before the same step."""
        if self.switch is not None and self.switch.asked == step and not agreed:
            raise PlanMismatchError(
                f"rank {rank} called set_compression() before step {step}, and another rank did not: every rank has to "
                "call it between the same two steps"
            )

    def compare(self, transport: Transport, version: int) -> Generator[Waiting, None, None]:
        """Raise PlanMismatchError unless all ranks have the same next plan: message sizes follow from plans."""
        digest = self._digest()
        digests = yield from gather_rows(np.frombuffer(digest, dtype=np.uint8), transport)
        others = [rank for rank in range(transport.size) if digests[rank].tobytes() != digest]
        if others:
            raise PlanMismatchError(
                f"plan {version} of rank {transport.rank} differs from that of rank {', '.join(map(str, others))}; "
                "set_compression() takes the same arguments on every rank, between the same two steps"
            )

    def _digest(self) -> bytes:
        """Return 32 bytes that ranks compare: of the proposed plan and all that are to follow; zeros without one."""
        if self.proposed is None:
            return bytes(32)
        digest = self.proposed.digest(self._layers)
        if self.switch is None:
            return digest
        hashed = hashlib.sha256(digest)
        for step, plan in ((-1, self.switch.target), *sorted(self.switch.later.items())):
            hashed.update(f"{step} {Plan(0, plan.assignments).to_json()}\n".encode())
        return hashed.digest()

    def next(
        self,
        step: int,
        agreed: bool,
        now: Plan,
        laid_out: CompiledPlan,
        ready_at: Sequence[float],
        rate: float,
    ) -> Plan | None:
        """End a step; return the plan that applies after it, or None if ``now`` stays in force.

        ``agreed`` is true if all ranks were ready. ``ready_at`` has the times at which the gradients of each bucket of
        ``laid_out`` were complete. ``rate`` is the learning rate. All ranks return the same plan.
        """
        plan = None
        if agreed and self.proposed is not None:
            plan, self.proposed, agreed = self.proposed, None, False
            if self.switch is not None:
                self.controller = None  # a change of compression ends it
                if self.switch.asked is not None:
                    self.switch.asked, self.switch.begun = None, plan.version
        sums, self._summed, self.sums = self._summed, None, None
        if self.controller is None:
            return plan
        if self.active is None:
            # Choices that it made before its first step apply from that step on.
            chosen = self.decides(step + 1) and bool(self.controller.choices)
        else:
            wire = by_layer(laid_out.travels, self.wire_seconds, len(self._layers))
            ready, position = np.array(ready_at) - self._opened_at, laid_out.position
            predicted = float(laid_out.predicted.sum())
            chosen = self.active.finish(
                Step(step, agreed, sums, self._since, wire, laid_out.sent, ready, position, rate, predicted)
            )
        return self.controller.plan(plan or now) if chosen else plan

    def commit(self, plan: Plan, present: Mask) -> None:
        """Accept the step, which was laid out by ``plan``, for the layers that were ``present``."""
        if self.active is not None:
            self.active.commit(present)
        if self.switch is not None and self.switch.asked is None and plan.version >= self.switch.begun:
            self.switch.owing &= ~present  # they sent what they held

    def laid_out(self, now: Plan) -> None:
        """End a change of compression once the plan that was asked for is laid out."""
        switch = self.switch
        if switch is None or switch.asked is not None or switch.owing.any():
            return
        if now.assignments == switch.target.assignments:
            self.switch = None
