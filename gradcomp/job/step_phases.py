"""Defines the life of a step: its phases, what can be done to it, and where that leads."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Phase(enum.Enum):
    """Names the phases in a step's life."""

    IDLE = "no step has begun"
    OPEN = "a step is open"
    FLUSHED = "every gradient of the step was handed in"
    DONE = "the means of the step are there, neither applied nor thrown away"
    COMMITTED = "the last step was accepted"
    DISCARDED = "the last step was thrown away"
    RETIRED = "another exchange has the layers"


class Verb(enum.Enum):
    """Names what can be done to a step."""

    OPEN = "open a step"
    SUBMIT = "submit a gradient"
    FLUSH = "flush the step"
    WAIT = "wait for the means"
    COMMIT = "accept the step"
    KEEP = "keep the means to add to them"
    REFUSE = "end a step that is not finite"
    DISCARD = "throw the means away"
    AMEND = "correct what became of the last step"
    RETIRE = "leave the layers to another exchange"


#: Phases in which the state may be read and replaced, with nothing under way.
BETWEEN_STEPS = {phase: phase for phase in (Phase.IDLE, Phase.COMMITTED, Phase.DISCARDED)}

#: Where each verb leads from each phase; StateError from any other.
TRANSITIONS: Mapping[Verb, Mapping[Phase, Phase]] = {
    Verb.OPEN: dict.fromkeys(BETWEEN_STEPS, Phase.OPEN),
    Verb.SUBMIT: {Phase.OPEN: Phase.OPEN},
    Verb.FLUSH: {Phase.OPEN: Phase.FLUSHED},
    Verb.WAIT: {Phase.FLUSHED: Phase.DONE},
    Verb.COMMIT: {Phase.DONE: Phase.COMMITTED},
    Verb.KEEP: {Phase.DONE: Phase.COMMITTED},
    Verb.REFUSE: {Phase.DONE: Phase.DISCARDED},
    Verb.DISCARD: {Phase.DONE: Phase.DISCARDED},
    Verb.AMEND: BETWEEN_STEPS,
    Verb.RETIRE: dict.fromkeys(Phase, Phase.RETIRED),
}
