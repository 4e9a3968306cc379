"""What a rank gathers of the gradients of a period, each layer's on one rank, until it is measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gradcomp.control.accumulators import Accumulators
from gradcomp.control.base import Doubles, Environment
from gradcomp.control.candidates import CandidateLevels
from gradcomp.control.observations import Numbers
from gradcomp.core.vectors import Floats, HostVector, Vector
from gradcomp.kernels.codec import Table

#: Rows of the table for the layers whose values are given, within so many bytes beside what is gathered.
Measure = Callable[[Mapping[int, Vector], int | None], Doubles]

#: What ranks hold: kind -> layer name -> array.
Held = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Share:
    """What one rank gathers. ``own``: numbers of its layers, by name. ``sizes``: elements of every layer, 0 if not its.

    ``memory_bytes``: the cap on what is gathered and measured.
    """

    environment: Environment
    own: Mapping[str, int]
    sizes: list[int]
    measure: Measure
    memory_bytes: int | None


class Gathering(ABC):
    """One period after the other: a step opens, gradients come, the step is committed or not; then the period closes.

    What was gathered by then is kept until it has been measured and shared, while the next period gathers.
    """

    #: What it takes by element, and what it is called in errors.
    ELEMENT_BYTES: ClassVar[int]
    TITLE: ClassVar[str]

    def __init__(self, share: Share) -> None:
        self.share = share
        #: Whether this step's gradients are wanted.
        self.adding = False

    @property
    def columns(self) -> int | None:
        """Of the rows that a checkpoint holds; None if it holds none."""
        return None

    @property
    def overdue(self) -> bool:
        """Whether the step has to wait for background work before gradients may come: with ``deterministic`` only."""
        return False

    @property
    def left(self) -> int | None:
        """Bytes that measuring may take."""
        cap = self.share.memory_bytes
        return None if cap is None else max(cap - self.nbytes, 0)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory of what is gathered."""

    @abstractmethod
    def range_over(self, candidates: CandidateLevels, width: int) -> None:
        """These are the choices from now on, in so many columns of the table."""

    @abstractmethod
    def open(self, step: int) -> None:
        """A step opens, so many after the period began. What was committed before is final."""

    @abstractmethod
    def add(self, table: Table, layers: Numbers, scale: float) -> None:
        """Gradients of a group, and residuals where there are any; the table is the callee's to change."""

    @abstractmethod
    def commit(self, present: npt.NDArray[np.bool_]) -> None:
        """The step was accepted, for the layers that some rank had."""

    @abstractmethod
    def close(self) -> None:
        """The period has ended."""

    @abstractmethod
    def measuring(self) -> Callable[[], Doubles]:
        """The work that gives the table's rows of the period that closed."""

    @abstractmethod
    def drop(self) -> None:
        """Forget the period that closed: it was shared, or is in vain."""

    @abstractmethod
    def state(self) -> dict[str, dict[str, Floats]]:
        """What a checkpoint holds of it."""

    @abstractmethod
    def resume(self, held: Held) -> bool:
        """Go on from what a checkpoint held, as far as it fits. Whether the period that closed is whole."""


class Windowed(Gathering):
    """Gradients add up over the last ``window`` steps of a period; 8 bytes per element, and again while it is measured.

    As Markov et al. 2024, section 4, "System Implementation", has it.
    """

    ELEMENT_BYTES = 8
    TITLE = "sums of gradients"

    def __init__(self, share: Share, every: int, window: int) -> None:
        super().__init__(share)
        self._first, self._end = max(every - window, 0), every
        self._sums = Accumulators(share.sizes, share.environment.zeros)
        self._taken: dict[int, Vector] = {}  # what is being measured

    @property
    def nbytes(self) -> int:
        """See :class:`Gathering`."""
        return self._sums.nbytes

    def range_over(self, candidates: CandidateLevels, width: int) -> None:
        """Sums do not depend on choices."""

    def open(self, step: int) -> None:
        """In the window."""
        self.adding = self._first <= step < self._end  # late work does not make a period longer

    def add(self, table: Table, layers: Numbers, scale: float) -> None:
        """Without residuals."""
        self._sums.add(table, layers, scale)

    def commit(self, present: npt.NDArray[np.bool_]) -> None:
        """Accept the sums."""
        if self.adding:
            self._sums.commit(present)

    def close(self) -> None:
        """The next period begins at zero."""
        self._taken = self._sums.take()

    def measuring(self) -> Callable[[], Doubles]:
        """All in one go."""
        taken, left = self._taken, self.left
        return lambda: self.share.measure(taken, left)

    def drop(self) -> None:
        """See :class:`Gathering`."""
        self._taken = {}

    def state(self) -> dict[str, dict[str, Floats]]:
        """The sums, and those that are being measured."""
        own = self.share.own.items()
        sums = {name: self._sums.value(i).copy() for name, i in own}
        taken = {name: self._taken[i].read().copy() for name, i in own if i in self._taken}
        return {"sums": sums, **({"taken": taken} if taken else {})}

    def resume(self, held: Held) -> bool:
        """See :class:`Gathering`."""
        self._taken = {}
        for name, layer in self.share.own.items():
            size = self.share.sizes[layer]
            if (value := fitting(held, "sums", name, size)) is not None:
                self._sums.set(layer, value)
            if (value := fitting(held, "taken", name, size)) is not None:
                self._taken[layer] = HostVector(value)
        return self._taken.keys() == set(self.share.own.values())


def fitting(held: Held, kind: str, name: str, size: int) -> Floats | None:
    """A saved array of one layer, if it is there and as long as it has to be."""
    value = held.get(kind, {}).get(name)
    return None if value is None or value.size != size else np.array(value, dtype=np.float32).reshape(-1)
