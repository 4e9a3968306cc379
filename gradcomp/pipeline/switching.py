"""A change of compression that the user asks for in mid-run: what residuals hold travels first, exactly."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.compress import Compressor, ErrorFeedback, Identity
from gradcomp.compress.policy import Schedule
from gradcomp.core.errors import PlanMismatchError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Assignment, Plan
from gradcomp.pipeline.layout import compressors_of

Mask = npt.NDArray[np.bool_]


@dataclass(eq=False)
class Switch:
    """From the plan in force to ``target``, by way of plans in which some layers only send what they hold.

    p = g + e, sent exactly, so that e' = 0: such a layer travels as ``error_feedback[c]``, c being what its compressor
    gives while it warms up. Then the next plan takes the target's compressor.

    ``owing``: layers that hold a residual which their next compressor would not read. A layer is done with once a step
    under such a plan was accepted in which some rank had a gradient of it; all ranks see the same. ``asked``: the step
    whose headers tell whether all ranks asked; None from then on. ``begun``: version of the first plan.
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
        """Begin. ``later``: plans by the step at which they follow ``target``. ConfigError for impossible ones."""
        for plan in (target, *later.values()):
            plan.check_covers(layers)
            compressors_of(layers, plan)
        lost = [not compressor.traits.keeps_residual for compressor in compressors_of(layers, target)]
        return Switch(layers, target, holding & np.array(lost), later, asked=step)

    @property
    def schedule(self) -> Schedule | None:
        """The plans that come later, as the pipeline asks for them."""
        later = self.later

        def begins(step: int, version: int) -> Plan | None:
            return Plan(version, later[step].assignments) if step in later else None

        return begins if later else None

    def digest(self, plan: bytes) -> bytes:
        """Of the first plan, whose digest is given, and of all that are to follow: 32 bytes that ranks compare."""
        hashed = hashlib.sha256(plan)
        for step, later in ((-1, self.target), *sorted(self.later.items())):
            hashed.update(f"{step} {Plan(0, later.assignments).to_json()}\n".encode())
        return hashed.digest()

    def check(self, step: int, ready: bool, rank: int) -> None:
        """PlanMismatchError unless all ranks asked before the same step."""
        if self.asked == step and not ready:
            raise PlanMismatchError(
                f"rank {rank} called set_compression() before step {step}, and another rank did not: every rank has to "
                "call it between the same two steps"
            )

    def plan(self, version: int, before: Plan) -> Plan:
        """The next plan on the way."""
        now = compressors_of(self.layers, before)
        rows = [
            _exactly(row, now[i], next_one) if self.owing[i] else row
            for i, (row, next_one) in enumerate(
                zip(self.target.assignments, compressors_of(self.layers, self.target), strict=True)
            )
        ]
        return Plan(version, tuple(rows))

    def follow(self, before: Plan, behind: Collection[int]) -> Plan | None:
        """The plan after ``before``, if there is one: layers ``behind``, which nobody trains, are not waited for."""
        waits = self.owing.copy()
        waits[list(behind)] = False
        if self.asked is not None or waits.any():
            return None
        plan = self.plan(before.version + 1, before)
        return None if plan.assignments == before.assignments else plan

    def accept(self, plan: Plan) -> None:
        """All ranks asked, and ``plan`` is the first one."""
        if self.asked is not None:
            self.asked, self.begun = None, plan.version

    def commit(self, plan: Plan, present: Mask) -> None:
        """A step under ``plan`` was accepted."""
        if self.asked is None and plan.version >= self.begun:
            self.owing &= ~present

    def is_over(self, plan: Plan) -> bool:
        """Whether ``plan`` is what was asked for."""
        return self.asked is None and not self.owing.any() and plan.assignments == self.target.assignments

    # -- what a checkpoint holds -------------------------------------------------------------------------------

    def to_plain(self) -> dict[str, Any]:
        """Numbers, strings and lists; plans that come later are the program's, as a schedule is."""
        names = [layer.name for layer in self.layers]
        return {
            "target": Plan(0, self.target.assignments).to_json(),
            "owing": [names[i] for i in np.flatnonzero(self.owing).tolist()],
            "asked": self.asked is not None,
            "begun": self.begun,
        }

    @staticmethod
    def from_plain(data: Mapping[str, Any], layers: Sequence[LayerSpec], step: int) -> Switch:
        """Inverse of :meth:`to_plain`; KeyError, TypeError, ValueError or GradcompError for anything else."""
        target = Plan.from_json(data["target"])
        target.check_covers(layers)
        compressors_of(layers, target)
        rows = target.by_layer
        owing = set(map(str, data["owing"]))
        if not owing <= rows.keys() or type(data["asked"]) is not bool:
            raise ValueError("the change of compression is not one for the layers")
        return Switch(
            layers,
            Plan(0, tuple(rows[layer.name] for layer in layers)),
            np.array([layer.name in owing for layer in layers]),
            asked=step if data["asked"] else None,
            begun=int(data["begun"]),
        )


def _exactly(row: Assignment, now: Compressor, next_one: Compressor) -> Assignment:
    """How a layer travels that sends all it holds."""
    exact = next_one if next_one.traits.exact else next_one.dense(Identity())
    flush = ErrorFeedback(exact, follow_rate=now.traits.follows_rate)
    return Assignment(row.layer, flush.family_string(), flush.level)
