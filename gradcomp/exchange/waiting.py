"""A step waits for numbers that a device still computes and for collectives, and says why it pauses."""

from __future__ import annotations

import enum
from collections.abc import Generator
from typing import Protocol

import numpy as np

from gradcomp.transport.base import AllGather, Bytes, Handle, Operation, Transport


class DeferredScalar(Protocol):
    """A number that a device may still be computing."""

    def done(self) -> bool:
        """Return whether it is computed, without waiting; may raise a :class:`gradcomp.GradcompError`."""
        ...

    def result(self) -> float:
        """Return the number, once it is done."""
        ...


Number = float | DeferredScalar


class Waiting(enum.Enum):
    """The reason why a pipeline cannot continue yet."""

    NOTHING = "no step is open, or the step is done"
    LAYERS = "the next bucket is not complete"
    DEVICE = "a device computes: the next bucket's gradients, or what is to be sent"
    WIRE = "a collective is under way"
    BACKGROUND = "a controller's work is due and not done"


def until_complete(handle: Handle) -> Generator[Waiting, None, None]:
    while not handle.poll():
        yield Waiting.WIRE


def collective(operation: Operation, transport: Transport) -> Generator[Waiting, None, None]:
    """Issue a collective and wait for it."""
    yield from until_complete(operation.issue(transport))


def gather_rows(row: Bytes, transport: Transport) -> Generator[Waiting, None, Bytes]:
    """Return a table with every rank's ``row`` in rank order; the rows of all ranks have the same length."""
    table = np.zeros((transport.size, len(row)), dtype=np.uint8)
    table[transport.rank] = row
    yield from collective(AllGather(table.reshape(-1), [len(row)] * transport.size), transport)
    return table
