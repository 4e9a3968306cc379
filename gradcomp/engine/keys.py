"""Every key of the control channel, and what stands there. What other ranks published is checked before it is used.

A *scope* is a communicator whose ranks may wait for each other: ``exchanger/<ranks>-<number>`` or ``user/<ranks>``.
Ranks are numbers of the job, members those of the scope.

======================================  ========================================  ====================================
key                                     value                                     who reads it, and when
======================================  ========================================  ====================================
``abort``, ``<scope>/abort``            the message with which every rank raises  every watchdog, at every look
``<scope>/left``                        the member that left first, its position  who has waited two seconds
``deadlock``                            who waits where, if none can go on        every watchdog whose rank waits long
``question``                            a counter: "where are you?"               every watchdog, at every look
``at/<rank>``                           an :class:`Answer`                        who asked
``<scope>/outcome/<step>/<member>``     what became of a step                     all, where headers differ about it
``meeting/<ranks>-<number>/<rank>``     "here"                                    who makes a communicator
``joined/<ranks>-<n>/<time>/<rank>``    the step from which it stands in          who has joined, after each step
======================================  ========================================  ====================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradcomp.core.text import printable
from gradcomp.engine.deadlock import Snapshot
from gradcomp.transport.control import numbers_of

#: Step, bucket and round that a rank waits for. Round -1: the bucket's gradients. Bucket -1: between steps; round is
#: then the number of collectives that it began since the last one. Of the user's collectives: calls so far, -1, 0.
Position = tuple[int, int, int]
#: Where a rank is in a scope that it has not entered yet.
NOWHERE: Position = (0, -1, 0)

#: What a rank waits for that has called ``shutdown()``: nothing that others could give it.
LEFT = "shutdown()"

#: Why a rank ended before its work was done. The first message stays, here and in every scope.
ABORT = "abort"
QUESTION = "question"
DEADLOCK = "deadlock"

_MOST_ANSWER_BYTES = 1 << 16
_MOST = 10**15


def abort_of(scope: str) -> str:
    """Why the scope can be used no further."""
    return f"{scope}/{ABORT}"


def calls_among(ranks: str) -> str:
    """The scope of the user's collectives among some ranks, by what tells these ranks from others."""
    return f"user/{ranks}"


def left_of(scope: str) -> str:
    """Who left the scope first."""
    return f"{scope}/left"


def answer_of(rank: int) -> str:
    """Where a rank is."""
    return f"at/{rank}"


def joined_of(scope: str, rank: int) -> str:
    """From which step on a rank stands in, since it has joined."""
    return f"joined/{scope}/{rank}"


def outcome_of(scope: str, step: int, member: int) -> str:
    """What a member did with the means of a step."""
    return f"{scope}/outcome/{step}/{member}"


def arrival_of(meeting: str, rank: int) -> str:
    """Whether a rank has come to a meeting."""
    return f"meeting/{meeting}/{rank}"


@dataclass(frozen=True)
class Answer:
    """Where a rank was when it heard question number ``question``; ``positions``: what it had reached in each scope.

    ``snapshot``: what proves that ranks wait for each other; None if there was too much to tell.
    """

    question: int
    waits_for: str
    positions: Mapping[str, Position]
    snapshot: Snapshot | None = None

    @property
    def left(self) -> bool:
        """Whether this is the rank's last word."""
        return self.waits_for == LEFT

    def encode(self) -> bytes:
        """As it is published."""
        told = [self.question, self.waits_for, self.positions]
        whole = json.dumps([*told, self.snapshot and self.snapshot.as_json()]).encode()
        return whole if len(whole) <= _MOST_ANSWER_BYTES else json.dumps([*told, None]).encode()

    @staticmethod
    def parse(value: bytes | None) -> Answer | None:
        """None for everything that is no answer."""
        if value is None or len(value) > _MOST_ANSWER_BYTES:
            return None
        try:
            question, waits_for, positions, snapshot = json.loads(value)
            found = {str(scope): _position(at) for scope, at in positions.items()}
            account = None if snapshot is None else Snapshot.of_json(snapshot)
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None
        if type(question) is not int or not 0 <= question < _MOST or not isinstance(waits_for, str):
            return None
        return Answer(question, printable(waits_for), found, account)


def _position(at: Any) -> Position:
    step, bucket, round_number = at
    if not all(type(number) is int and abs(number) < _MOST for number in at):
        raise ValueError(f"{at!r:.80} is not a position")
    return step, bucket, round_number


def encode_departure(member: int, reached: Position) -> bytes:
    """What stands at :func:`left_of`."""
    return json.dumps([member, *reached]).encode()


def parse_departure(value: bytes | None) -> tuple[int, Position] | None:
    """The member that left first, and the position that it had reached; None while all are there."""
    found = numbers_of(value, 4)
    return None if found is None else (found[0], (found[1], found[2], found[3]))
