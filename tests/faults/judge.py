"""What became of a trial: of every rank, and of all together."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from faults.draw import LATE, ON_THE_WAY, TIMEOUT_SECONDS, UNDER_MPI, Trial

#: From good to bad; a trial counts as the worst of its ranks.
OUTCOMES = ("equal", "launcher", "typed", "untyped", "silent", "abort", "hang")
BAD = ("untyped", "silent", "abort", "hang")

#: What the fault itself may do to its rank.
_OWN_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM}
_DEADLY = (*_OWN_SIGNALS, "exception in backward", "exception in a hook", "exception in a logging handler")
_ENDED_BY_LAUNCHER = (signal.SIGKILL, signal.SIGTERM)


@dataclass(frozen=True)
class Ended:
    """How a rank ended. ``status``: exit code, negative for a signal, None if it had to be killed at the deadline."""

    status: int | None
    said: Sequence[dict[str, Any]] = ()
    stderr: str = ""

    def event(self, name: str) -> dict[str, Any] | None:
        """The first event of that name."""
        return next((line for line in self.said if line["event"] == name), None)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a trial, that of each rank, and a line that says why."""

    outcome: str
    ranks: tuple[str, ...]
    why: str = ""
    seconds: float = field(default=0.0, compare=False)


def judge(trial: Trial, ranks: Sequence[Ended]) -> Verdict:
    """The outcome of every rank, and the worst of them; ``silent`` where parameters differ and training went on."""
    died = any(one.status != 0 for one in ranks)
    verdicts = [_of_rank(trial, number, one, died) for number, one in enumerate(ranks)]
    outcome = max((kind for kind, _ in verdicts if kind != "own"), key=OUTCOMES.index, default="typed")
    why = next((why for kind, why in verdicts if kind == outcome), "")
    if outcome == "launcher" and trial.fault not in _DEADLY:
        outcome, why = "untyped", "the launcher ended the ranks, and none of them said why"
    if OUTCOMES.index(outcome) < OUTCOMES.index("silent") and (
        difference := _difference(ranks, LATE.get(trial.fault, 0))
    ):
        outcome, why = "silent", difference
    struck = ranks[trial.victim].event("fault") is not None
    if outcome == "equal" and trial.fault in ON_THE_WAY and struck:
        outcome, why = "silent", "a message that is not what its sender sent was used"
    if outcome == "typed" and trial.fault == "ends at once" and (seconds := _waited(trial, ranks)):
        outcome, why = "hang", f"a rank waited {seconds:.1f} s for one that had ended"
    return Verdict(outcome, tuple(kind for kind, _ in verdicts), why)


def _of_rank(trial: Trial, number: int, one: Ended, died: bool) -> tuple[str, str]:
    """``own``: what the fault is expected to do to its rank, which says nothing about gradcomp."""
    error, victim = one.event("error"), number == trial.victim
    text = f"rank {number}: {error['kind']}: {error['text']}" if error else ""
    if one.status is None:
        return "hang", f"rank {number} had to be killed; " + (text or one.stderr[-300:])
    if one.status < 0:
        number_of = -one.status
        if victim and number_of == _OWN_SIGNALS.get(trial.fault):
            return "own", ""
        if trial.stack in UNDER_MPI and died and number_of in _ENDED_BY_LAUNCHER:
            return ("typed", text) if error and error["typed"] else ("launcher", "")
        return "abort", f"rank {number}: {signal.Signals(number_of).name}; {one.stderr[-400:]}"
    if one.status == 0:
        if one.event("end"):
            if trial.fault == "launcher killed":
                return "hang", f"rank {number} lived on without its launcher"
            return "equal", ""
        return "untyped", f"rank {number} ended with status 0 in the middle; {text}"
    if error is None:
        return "untyped", f"rank {number}: status {one.status}; {one.stderr[-400:]}"
    if error["typed"]:
        return "typed", text
    if victim and "InjectedFault" in error["kind"] + one.stderr:
        # TensorFlow raises an error of its own about it.
        return "own", ""
    return "untyped", text


def _waited(trial: Trial, ranks: Sequence[Ended]) -> float:
    """How long a rank waited for the victim, which had ended; 0 if that is not long."""
    end = ranks[trial.victim].event("end")
    errors = [error for one in ranks if (error := one.event("error"))]
    longest = max((error["at"] - end["at"] for error in errors), default=0.0) if end else 0.0
    return float(longest) if longest > TIMEOUT_SECONDS + 4 else 0.0


def _difference(ranks: Sequence[Ended], late: int = 0) -> str:
    """How ranks differ that ended well, or trained on after they had begun to differ, whatever they said in the end.

    ``late``: for so many steps they may.
    """
    found = [(number, one, _history(one)) for number, one in enumerate(ranks)]
    for (first, a, one), (second, b, other) in combinations(found, 2):
        well = a.status == 0 and b.status == 0
        common = min(len(one), len(other))
        step = next((i for i in range(common) if one[i] != other[i]), common)
        if step < common and (well or step < common - 1 - late):
            return f"ranks {first} and {second} differ after step {step}, and went on"
        if well and len(one) != len(other):
            return f"rank {first} applied {len(one)} steps, rank {second} {len(other)}, and both ended well"
    return ""


def _history(one: Ended) -> list[str]:
    said = one.event("end") or one.event("error") or {}
    return list(said.get("history", ()))
