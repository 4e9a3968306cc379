"""Gathers the gradients of a period, each layer's on one rank, until they are measured."""

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

#: Returns the table's rows of the given layers; the second argument limits the bytes besides the gathered values.
Measure = Callable[[Mapping[int, Vector], int | None], Doubles]

#: Arrays that ranks hold in a checkpoint: kind -> layer name -> array.
Held = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Share:
    """The layers that one rank gathers: ``own`` maps their names to numbers.

    ``sizes``: elements by layer number, 0 for a layer of another rank. ``memory_bytes``: limit on the memory of
    gathering and measuring.
    """

    environment: Environment
    own: Mapping[str, int]
    sizes: list[int]
    measure: Measure
    memory_bytes: int | None


class Gathering(ABC):
    """Gathers gradients by period: steps open, receive gradients and are committed or not; then the period closes.

    The gathered values of a closed period are kept until they have been measured and shared, while the next period
    gathers.
    """

    #: Bytes per element, and the name in errors.
    ELEMENT_BYTES: ClassVar[int]
    TITLE: ClassVar[str]

    def __init__(self, share: Share) -> None:
        self.share = share
        #: True if this step's gradients are wanted.
        self.adding = False

    @property
    def columns(self) -> int | None:
        """Returns the columns of the rows that a checkpoint holds; None if it holds none."""
        return None

    @property
    def overdue(self) -> bool:
        """Returns true if gradients must wait for background work; with ``deterministic`` only."""
        return False

    @property
    def left(self) -> int | None:
        """Returns the bytes that measuring may take, or None if there is no limit."""
        cap = self.share.memory_bytes
        return None if cap is None else max(cap - self.nbytes, 0)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Returns the memory of the gathered values."""

    @abstractmethod
    def range_over(self, candidates: CandidateLevels, width: int) -> None:
        """Replaces the candidates; the table then has ``width`` columns."""

    @abstractmethod
    def open(self, step: int) -> None:
        """Opens a step, ``step`` steps after the period began. Commits before it are final."""

    @abstractmethod
    def add(self, table: Table, layers: Numbers, scale: float) -> None:
        """Receives the gradients of a group, and residuals if there are any; it may change the table."""

    @abstractmethod
    def commit(self, present: npt.NDArray[np.bool_]) -> None:
        """Accepts the step for the layers that some rank had."""

    @abstractmethod
    def close(self) -> None:
        """Ends the period, whose values are then measured."""

    @abstractmethod
    def measuring(self) -> Callable[[], Doubles]:
        """Returns the work that computes the table's rows of the closed period."""

    @abstractmethod
    def drop(self) -> None:
        """Discards the closed period, once it was shared or cannot be used."""

    @abstractmethod
    def state(self) -> dict[str, dict[str, Floats]]:
        """Returns the arrays that a checkpoint holds of it."""

    @abstractmethod
    def resume(self, held: Held) -> bool:
        """Continues from a checkpoint's arrays as far as they fit. Returns true if the closed period is complete."""


class Windowed(Gathering):
    """Sums gradients over the last ``window`` steps of a period, as Markov et al.

    2024, section 4, "System Implementation".

    It takes 8 bytes per element, and as many again while the sums of the closed period are measured.
    """

    ELEMENT_BYTES = 8
    TITLE = "sums of gradients"

    def __init__(self, share: Share, every: int, window: int) -> None:
        super().__init__(share)
        self._first, self._end = max(every - window, 0), every
        self._sums = Accumulators(share.sizes, share.environment.zeros)
        self._taken: dict[int, Vector] = {}  # sums of the closed period

    @property
    def nbytes(self) -> int:
        return self._sums.nbytes

    def range_over(self, candidates: CandidateLevels, width: int) -> None:
        """Does nothing, since sums do not depend on the candidates."""

    def open(self, step: int) -> None:
        self.adding = self._first <= step < self._end  # later steps, while work is late, do not count

    def add(self, table: Table, layers: Numbers, scale: float) -> None:
        """Adds the gradients without their residuals."""
        self._sums.add(table, layers, scale)

    def commit(self, present: npt.NDArray[np.bool_]) -> None:
        if self.adding:
            self._sums.commit(present)

    def close(self) -> None:
        """Takes the sums; those of the next period begin at zero."""
        self._taken = self._sums.take()

    def measuring(self) -> Callable[[], Doubles]:
        taken, left = self._taken, self.left
        return lambda: self.share.measure(taken, left)

    def drop(self) -> None:
        self._taken = {}

    def state(self) -> dict[str, dict[str, Floats]]:
        """Returns the current sums, and those of the closed period."""
        own = self.share.own.items()
        sums = {name: self._sums.value(i).copy() for name, i in own}
        taken = {name: self._taken[i].read().copy() for name, i in own if i in self._taken}
        return {"sums": sums, **({"taken": taken} if taken else {})}

    def resume(self, held: Held) -> bool:
        self._taken = {}
        for name, layer in self.share.own.items():
            size = self.share.sizes[layer]
            if (value := fitting(held, "sums", name, size)) is not None:
                self._sums.set(layer, value)
            if (value := fitting(held, "taken", name, size)) is not None:
                self._taken[layer] = HostVector(value)
        return self._taken.keys() == set(self.share.own.values())


def fitting(held: Held, kind: str, name: str, size: int) -> Floats | None:
    """Returns the saved array of a layer if it exists and has ``size`` elements."""
    value = held.get(kind, {}).get(name)
    return None if value is None or value.size != size else np.array(value, dtype=np.float32).reshape(-1)
