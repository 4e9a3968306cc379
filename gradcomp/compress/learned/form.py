"""What the forms of LGC differ in: the nets, a step of their training, and how a code travels."""

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

#: Gives the nets' weights.
Weights = Callable[[], Floats]
#: Shares the leader's indices.
Share = Callable[[Rider], Generator[Message, Reply, Shared]]


@dataclass(frozen=True, eq=False)
class Lesson:
    """What one step of training learns from.

    ``samples``: the values of all ranks, (N, values). ``innovations``: which of them their rank would send itself.
    ``leader``: the rank that drew the indices.
    """

    samples: Floats
    innovations: npt.NDArray[np.bool_]
    leader: int


class Marking(Rider):
    """A rider of phase 2."""

    def marks(self) -> npt.NDArray[np.bool_]:
        """Which of this rank's values at the leader's indices are innovations; empty if that does not travel."""
        return np.zeros(0, np.bool_)


@dataclass(frozen=True)
class Form(ABC):
    """Base of the forms. ``channels``: of the code. ``indices``: their coding. ``feedback``: keep what the code loses.

    Weights are one flat float32 array. No method keeps anything, so any thread may call :meth:`train`.
    """

    channels: int
    indices: str
    feedback: bool

    @property
    @abstractmethod
    def field(self) -> str:
        """The name of the weights' field; a model may have nets of several sizes."""

    @abstractmethod
    def size(self, ranks: int) -> int:
        """Weights in all."""

    @abstractmethod
    def first_weights(self, seed: int, ranks: int) -> Floats:
        """Those that training begins with."""

    def adapted(self, weights: Floats, seed: int, ranks: int) -> Floats:
        """Weights that another number of ranks had. StateError for an impossible number of weights."""
        raise StateError(f"{len(weights)} weights in {self.field}, {self.size(ranks)} are needed")

    @abstractmethod
    def code_traffic(self, table: Table, counts: Sizes) -> Traffic:
        """Each row's bytes in phase 3, beside the leader's indices; ``counts``: values of each row."""

    def marking(self, group: Group, sent: Sent) -> Marking:
        """What ranks do in phase 2 while the indices are shared."""
        return Marking()

    def marked(self, values: int) -> int:
        """Of how many values it is told in phase 2 whether they are innovations: of all or none."""
        return 0

    @abstractmethod
    def unit(self, lesson: Lesson) -> float:
        """What samples are divided by, the same on all ranks."""

    @abstractmethod
    def train(self, weights: Floats, lesson: Lesson, rate: float) -> tuple[Floats, float]:
        """Weights after one step of gradient descent, and the loss before it, which is 1 for zeros."""

    @abstractmethod
    def code(
        self, group: Group, context: StepContext, sent: Sent, weights: Weights, share: Share
    ) -> Exchange:
        """A step of phase 3. Layouts ask for the first message, before there are weights."""
