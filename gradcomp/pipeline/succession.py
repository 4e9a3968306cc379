"""The next plan is one that is proposed, a schedule's, or the next on the way to another compression."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gradcomp.compress.policy import Schedule
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Plan
from gradcomp.pipeline.layout import compressors_of
from gradcomp.pipeline.switching import Mask, Switch


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
