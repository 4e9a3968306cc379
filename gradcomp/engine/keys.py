"""The keys of the control channel are listed here with their values, which are checked before they are used.

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
``<scope>/outcome/<step>/<member>``     the outcome of a step                     all, where headers differ about it
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

#: The step, bucket and round that a rank waits for. Round -1 stands for the bucket's gradients. Bucket -1 stands for
#: a wait between steps; the round is then the number of collectives begun since the last step. In the scope of the
#: user's collectives the position is (calls so far, -1, 0).
Position = tuple[int, int, int]
#: The position of a rank in a scope that it has not entered yet.
NOWHERE: Position = (0, -1, 0)

#: Stands in an answer for what a rank waits for, once it has called ``shutdown()``.
LEFT = "shutdown()"

#: Has the reason why a rank ended before its work was done. The first message stays, here and in every scope.
ABORT = "abort"
QUESTION = "question"
DEADLOCK = "deadlock"

_MOST_ANSWER_BYTES = 1 << 16
_MOST = 10**15


def abort_of(scope: str) -> str:
    """Return the key of the reason why the scope can be used no further."""
    return f"{scope}/{ABORT}"


def calls_among(ranks: str) -> str:
    """Return the scope of the user's collectives among some ranks, given what tells these from others."""
    return f"user/{ranks}"


def left_of(scope: str) -> str:
    """Return the key of the member that left the scope first."""
    return f"{scope}/left"


def answer_of(rank: int) -> str:
    """Return the key of a rank's :class:`Answer`."""
    return f"at/{rank}"


def joined_of(scope: str, rank: int) -> str:
    """Return the key of the step from which on a rank stands in, since it has joined."""
    return f"joined/{scope}/{rank}"


def outcome_of(scope: str, step: int, member: int) -> str:
    """Return the key of what a member did with the means of a step."""
    return f"{scope}/outcome/{step}/{member}"


def arrival_of(meeting: str, rank: int) -> str:
    """Return the key by which a rank says that it has come to a meeting."""
    return f"meeting/{meeting}/{rank}"


@dataclass(frozen=True)
class Answer:
    """Tells where a rank was when it heard question number ``question``.

    ``positions`` has what it had reached in each scope. ``snapshot`` helps to prove that ranks wait for each other;
    it is None if there was too much to tell.
    """

    question: int
    waits_for: str
    positions: Mapping[str, Position]
    snapshot: Snapshot | None = None

    @property
    def left(self) -> bool:
        """Return whether this is the last answer of a rank that has left."""
        return self.waits_for == LEFT

    def encode(self) -> bytes:
        """Return the bytes that are published, without the snapshot if it is too long."""
        told = [self.question, self.waits_for, self.positions]
        whole = json.dumps([*told, self.snapshot and self.snapshot.as_json()]).encode()
        return whole if len(whole) <= _MOST_ANSWER_BYTES else json.dumps([*told, None]).encode()

    @staticmethod
    def parse(value: bytes | None) -> Answer | None:
        """Return the answer, or None for anything that is not one."""
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
    """Return the value that is published at :func:`left_of`."""
    return json.dumps([member, *reached]).encode()


def parse_departure(value: bytes | None) -> tuple[int, Position] | None:
    """Return the member that left first and the position that it had reached; None while all are there."""
    found = numbers_of(value, 4)
    return None if found is None else (found[0], (found[1], found[2], found[3]))
