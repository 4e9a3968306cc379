"""The two forms of LGC share the vector that is sent, the steps of training, and the interface of a form."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import Traffic
from gradcomp.compress.checks import is_number
from gradcomp.compress.messages import Bytes, Exchange, Message, Reply
from gradcomp.compress.sparse.clt_k import Rider, Shared
from gradcomp.compress.sparse.drawn import Floats
from gradcomp.compress.sparse.payload import Selection
from gradcomp.core.errors import StateError
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.step import StepContext

T = TypeVar("T")
#: With this setting all ranks measure times, and choose the share together.
AUTO: Final = "auto"
#: The number of steps that every rank measures.
MEASURED: Final = 10
#: The most time that training may take, on average, as a fraction of the rest of a step.
PART: Final = 0.05
_LEAST_SHARE = 1000
#: A function that returns the nets' weights.
Weights = Callable[[], Floats]
#: A generator function that shares the leader's indices.
Share = Callable[[Rider], Generator[Message, Reply, Shared]]


@dataclass(frozen=True, eq=False)
class Sent:
    """Locate g, the selected values of a group, with layers in the order of the model instead of the exchange.

    ``places`` has the index of each value in the arrays of ``chosen``, and ``rows`` the row of each value.
    """

    chosen: Selection
    places: Sizes
    rows: Sizes

    @staticmethod
    def of(group: Group, chosen: Selection) -> Sent:
        """Return the locations of a group's selected values."""
        order = np.argsort(group.layers, kind="stable")
        places = [np.arange(n) + begin for begin, n in zip(chosen.offsets, chosen.counts, strict=True)]
        ordered = [places[row] for row in order.tolist()]
        return Sent(
            chosen, np.concatenate([np.zeros(0, np.int64), *ordered]), np.repeat(order, chosen.counts[order])
        )

    @property
    def count(self) -> int:
        """Return the number of values."""
        return len(self.places)

    def values(self, group: Group, flags: Bytes) -> Floats:
        """Return this rank's values; zeros for rows that are flagged, because a code mixes rows."""
        chosen = self.chosen
        group.device.kernels.take(group.inputs, chosen.offsets, chosen.counts, chosen.indices, chosen.values)
        found: Floats = chosen.values[self.places]
        found[flags[self.rows] != 0] = 0
        return found

    def in_rows(self, values: Floats) -> Floats:
        """Return values of g in the order of the selection."""
        found: npt.NDArray[np.float32] = np.zeros_like(self.chosen.values)
        found[self.places] = values
        return found

    def scatter(self, group: Group, flags: Bytes, values: Floats, divisor: float, scale: float) -> None:
        """Write ``values`` / divisor * scale to the outputs at the selected indices, 0 elsewhere."""
        chosen = self.chosen
        group.device.kernels.scatter_mean(
            group.table,
            flags,
            chosen.offsets[None],
            chosen.counts[None],
            chosen.indices,
            self.in_rows(values),
            divisor=divisor,
            scale=scale,
        )


def shares(nbytes: int, counts: Sizes) -> Sizes:
    """Divide ``nbytes`` among rows in proportion to their ``counts``."""
    ends = np.cumsum(counts) * nbytes // max(int(counts.sum()), 1)
    found: Sizes = np.diff(ends, prepend=0)
    return found


class Stopwatch:
    """Measure the time of training and of the rest of a step on this rank. ``now`` is a clock in seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._lessons: list[float] = []
        self._rests: list[float] = []
        self._ended: float | None = None

    def time(self, lesson: Callable[[], T]) -> T:
        """Return the result of ``lesson``, and measure it.

        The time between two lessons is the rest of a step.
        """
        began = self._now()
        if self._ended is not None:
            self._rests.append(began - self._ended)
        found = lesson()
        self._ended = self._now()
        self._lessons.append(self._ended - began)
        return found

    @property
    def part(self) -> float:
        """Return the median time of a lesson over that of the rest of a step; 0 until enough were measured."""
        if len(self._rests) < MEASURED:
            return 0.0
        return median(self._lessons) / max(median(self._rests), 1e-9)


def every(parts: Sequence[float]) -> int:
    """Return the m for which training on every m-th sample takes at most :data:`PART`, by the parts of all ranks.

    0 while a rank has not measured enough.
    """
    slowest = max(parts)
    if not all(part > 0 for part in parts) or not math.isfinite(slowest):
        return 0
    return min(max(math.ceil(slowest / PART), 1), _LEAST_SHARE)


def is_share(share: object) -> bool:
    """Return whether a setting is :data:`AUTO`, or 1/m for a whole number m."""
    if share == AUTO:
        return True
    if not is_number(share) or not 1 / _LEAST_SHARE <= share <= 1:
        return False
    return abs(share * round(1 / share) - 1) < 1e-3


@dataclass(frozen=True, eq=False)
class Lesson:
    """Hold the data of one training step of the nets.

    ``samples``: the values of all ranks, (N, values). ``innovations``: true for values that their rank would send
    itself. ``leader``: the rank that selected the indices.
    """

    samples: Floats
    innovations: npt.NDArray[np.bool_]
    leader: int


class Network(Protocol):
    """E and the decoders for a number of ranks."""

    @property
    def deconvolutions(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def variants(self) -> Sequence[Self]: ...

    def first_weights(self, seed: int) -> Floats: ...


class Marking(Rider):
    """Add this rank's innovations to phase 2: this base class has none."""

    def marks(self) -> npt.NDArray[np.bool_]:
        """Return, by value at the leader's indices, whether it is an innovation; empty if that is not sent."""
        return np.zeros(0, np.bool_)


@dataclass(frozen=True)
class Form(ABC):
    """The base class of the forms.

    ``channels`` is the number of channels of the code, and ``indices`` the coding of indices. With ``feedback`` the
    error of the code is kept and sent later. ``deconvolutions``: those of the nets that training begins with; a resumed
    run goes on with the nets of its checkpoint. Weights are one flat float32 array, whose length tells which nets they
    are. No method keeps state, so any thread may call :meth:`train`.

    The state is one array: weights, zeros up to the number of weights of the largest nets, the loss, and the number of
    deconvolutions. That of versions whose nets had four has only the weights and the loss.
    """

    channels: int
    indices: str
    feedback: bool
    deconvolutions: int

    @property
    @abstractmethod
    def field(self) -> str:
        """Return the name of the field of the weights; a model may have nets of several sizes."""

    @abstractmethod
    def network(self, ranks: int) -> Network:
        """Return the nets that training begins with."""

    def length(self, ranks: int) -> int:
        """Return the number of floats of the state."""
        return max(net.size for net in self.network(ranks).variants) + 2

    def begin(self, saved: Floats, seed: int, ranks: int) -> Floats:
        """Return the state to begin with: that of initial weights, or a saved one in another form."""
        if not saved.size:
            return self.pack(self.network(ranks).first_weights(seed), 1.0, ranks)
        weights, loss = self.read(saved)
        return self.pack(self.adapted(weights, seed, ranks), loss, ranks)

    def read(self, saved: Floats) -> tuple[Floats, float]:
        """Return weights and loss of a saved state that has another length than :meth:`length`."""
        return saved[:-1], float(saved[-1])

    def adapted(self, weights: Floats, seed: int, ranks: int) -> Floats:
        """Return weights for this number of ranks. StateError if they are those of no nets."""
        needed = [net.size for net in self.network(ranks).variants]
        if len(weights) not in needed:
            needs = " or ".join(map(str, needed))
            raise StateError(f"{len(weights)} weights in the state's {self.field}, where {needs} are needed")
        return weights

    def pack(self, weights: Floats, loss: float, ranks: int) -> Floats:
        """Return one array: weights, zeros behind those of smaller nets, the loss, and the number of deconvolutions."""
        found = np.zeros(self.length(ranks), np.float32)
        found[: len(weights)] = weights
        (number,) = (n.deconvolutions for n in self.network(ranks).variants if n.size == len(weights))
        found[-2:] = loss, number
        return found

    def unpack(self, state: Floats, ranks: int) -> tuple[Floats, float]:
        """Return weights and loss. StateError for a number of deconvolutions that no nets have."""
        for net in self.network(ranks).variants:
            if net.deconvolutions == state[-1]:
                return state[: net.size], float(state[-2])
        raise StateError(f"nets of {state[-1]:g} deconvolutions in the state's {self.field}")

    @abstractmethod
    def code_traffic(self, table: Table, counts: Sizes) -> Traffic:
        """Return each row's bytes in phase 3, without the leader's indices; ``counts``: values of each row."""

    def marking(self, group: Group, sent: Sent) -> Marking:
        """Return the work that is added to the round of the leader's indices in phase 2."""
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
