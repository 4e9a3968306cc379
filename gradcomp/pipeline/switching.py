"""A user may change the compression in mid-run: what residuals hold is sent first, exactly."""

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
        """Return the plan after ``before``, or None; layers ``behind``, which nobody trains, are not waited for."""
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
