"""What the forms of LGC differ in: the nets, a step of their training, and how a code travels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from gradcomp.compress.learned.sent import Sent
from gradcomp.compress.messages import Bytes, Exchange
from gradcomp.compress.sparse.summed import Floats
from gradcomp.kernels.codec import Group, Sizes
from gradcomp.kernels.step import StepContext


@dataclass(frozen=True, eq=False)
class Lesson:
    """What one step of training learns from.

    ``samples``: the values of all ranks, (N, values).
    """

    samples: Floats


@dataclass(frozen=True)
class Form(ABC):
    """Base of the forms. ``channels``: of the code. ``feedback``: keep what the code loses.

    Weights are one flat float32 array. No method keeps anything, so any thread may call :meth:`train`.
    """

    channels: int
    feedback: bool

    @property
    @abstractmethod
    def field(self) -> str:
        """The name of the weights' field; a model may have nets of several sizes."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Weights in all."""

    @abstractmethod
    def first_weights(self, seed: int) -> Floats:
        """Those that training begins with."""

    @abstractmethod
    def code_bytes(self, counts: Sizes) -> Sizes:
        """Each row's share of the values' bytes in phase 3; ``counts``: values of each row."""

    @abstractmethod
    def unit(self, lesson: Lesson) -> float:
        """What samples are divided by, the same on all ranks."""

    @abstractmethod
    def train(self, weights: Floats, lesson: Lesson, rate: float) -> tuple[Floats, float]:
        """Weights after one step of gradient descent, and the loss before it, which is 1 for zeros."""

    @abstractmethod
    def code(self, group: Group, context: StepContext, sent: Sent, flags: Bytes, weights: Floats) -> Exchange:
        """A step of phase 3, behind the leader's indices."""
