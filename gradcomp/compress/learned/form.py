"""The forms of LGC differ in their nets, in a step of training, and in how a code travels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import Traffic
from gradcomp.compress.learned.sent import Sent
from gradcomp.compress.messages import Exchange, Message, Reply
from gradcomp.compress.sparse.clt_k import Rider, Shared
from gradcomp.compress.sparse.summed import Floats
from gradcomp.core.errors import StateError
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.step import StepContext

#: A function that returns the nets' weights.
Weights = Callable[[], Floats]
#: A generator function that shares the leader's indices.
Share = Callable[[Rider], Generator[Message, Reply, Shared]]


@dataclass(frozen=True, eq=False)
class Lesson:
    """Hold what one step of training learns from.

    ``samples``: the values of all ranks, (N, values). ``innovations``: true for values that their rank would send
    itself. ``leader``: the rank that selected the indices.
    """

    samples: Floats
    innovations: npt.NDArray[np.bool_]
    leader: int


class Marking(Rider):
    """Add this rank's innovations to phase 2: this base class has none."""

    def marks(self) -> npt.NDArray[np.bool_]:
        """Return, by value at the leader's indices, whether it is an innovation; empty if that is not sent."""
        return np.zeros(0, np.bool_)


@dataclass(frozen=True)
class Form(ABC):
    """Base of the forms. ``channels``: of the code. ``indices``: their coding. ``feedback``: keep what the code loses.

    Weights are one flat float32 array. No method keeps state, so any thread may call :meth:`train`.
    """

    channels: int
    indices: str
    feedback: bool

    @property
    @abstractmethod
    def field(self) -> str:
        """Return the name of the field of the weights; a model may have nets of several sizes."""

    @abstractmethod
    def size(self, ranks: int) -> int:
        """Return the number of weights."""

    @abstractmethod
    def first_weights(self, seed: int, ranks: int) -> Floats:
        """Return the weights that training begins with."""

    def adapted(self, weights: Floats, seed: int, ranks: int) -> Floats:
        """Return weights for this number of ranks, from those of another. StateError for an impossible number."""
        raise StateError(
            f"{len(weights)} weights in the state's {self.field}, where {self.size(ranks)} are needed"
        )

    @abstractmethod
    def code_traffic(self, table: Table, counts: Sizes) -> Traffic:
        """Return each row's bytes in phase 3, without the leader's indices; ``counts``: values of each row."""

    def marking(self, group: Group, sent: Sent) -> Marking:
        """Return what ranks do in phase 2 while the indices are shared."""
        return Marking()

    def marked(self, values: int) -> int:
        """Return the number of values that phase 2 marks as innovations or not: all or none."""
        return 0

    @abstractmethod
    def unit(self, lesson: Lesson) -> float:
        """Return the number that samples are divided by, the same on all ranks."""

    @abstractmethod
    def train(self, weights: Floats, lesson: Lesson, rate: float) -> tuple[Floats, float]:
        """Return the weights after one step of gradient descent, and the loss before it, which is 1 for zeros."""

    @abstractmethod
    def code(
        self, group: Group, context: StepContext, sent: Sent, weights: Weights, share: Share
    ) -> Exchange:
        """Run a step of phase 3.

        The first message is also asked for when the layout is planned, before there are weights.
        """
