"""Which plan comes next: one that is proposed, a schedule's, or the next on the way to another compression."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gradcomp.compress.policy import Schedule
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Plan
from gradcomp.pipeline.layout import compressors_of
from gradcomp.pipeline.switching import Mask, Switch


class Succession:
    """The plans that follow the one in force, on one rank.

    ``schedule``: asked with a step and a version, the plan that begins then; the same on all ranks. ``next``: the plan
    that applies as soon as all ranks hold it. ``switch``: a change of compression that is not through.
    """

    def __init__(self, layers: Sequence[LayerSpec], schedule: Schedule | None) -> None:
        self._layers = layers
        self._schedule = schedule
        self._due: int | None = None  # the step of the schedule whose plan has not been proposed yet
        self.next: Plan | None = None
        self.switch: Switch | None = None

    def propose(self, plan: Plan, now: Plan) -> None:
        """Hold a plan; ConfigError for one that cannot follow."""
        plan.check_covers(self._layers)
        if plan.version != now.version + 1:
            raise ConfigError(f"the next plan must have version {now.version + 1}, not {plan.version}")
        compressors_of(self._layers, plan)
        self.next = plan

    def ask(self, target: Plan, later: Mapping[int, Plan], holding: Mask, step: int, now: Plan) -> None:
        """Go over to another plan, and to those in ``later`` at their steps: a schedule ends with it."""
        self.switch = Switch.ask(self._layers, target, later, holding, step)
        self._schedule, self._due = self.switch.schedule, None
        self.next = self.switch.plan(now.version + 1, now)

    def restore(self, switch: Switch | None, now: Plan) -> None:
        """Go on from elsewhere."""
        self.switch = switch
        self.next = None if switch is None or switch.asked is None else switch.plan(now.version + 1, now)

    def follow(self, step: int, now: Plan, behind: Collection[int]) -> None:
        """Hold what is to begin at the next step: all ranks do, in the same step. ``behind``: layers nobody waits for.

        If another plan is under way, the schedule's comes after it: as soon as it has taken over.
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
        """Of what this rank holds, for ranks to compare; zeros for nothing."""
        if self.next is None:
            return bytes(32)
        digest = self.next.digest(self._layers)
        return digest if self.switch is None else self.switch.digest(digest)

    def take(self) -> Plan | None:
        """What all ranks hold is in force."""
        plan, self.next = self.next, None
        if plan is not None and self.switch is not None:
            self.switch.accept(plan)
        return plan

    def laid_out(self, now: Plan) -> None:
        """The layout is that of the plan in force."""
        if self.switch is not None and self.switch.is_over(now):
            self.switch = None
