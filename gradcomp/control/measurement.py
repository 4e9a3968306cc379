"""Gathers the gradients of a period, each layer's on one rank, and measures them there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from gradcomp.compress.lowrank.base import LowRank
from gradcomp.control.base import Doubles, Environment, Mask, Numbers, at_once
from gradcomp.control.candidates import CandidateLevels
from gradcomp.control.distortion import energies
from gradcomp.control.distortion.code_errors import block_errors
from gradcomp.control.distortion.errors import errors
from gradcomp.core.state import DoubleBuffer
from gradcomp.core.vectors import LINE, Floats, Vector
from gradcomp.kernels.codec import Table
from gradcomp.kernels.devices import Device
from gradcomp.kernels.segments import SEGMENT

#: Columns before those of the errors: norm, mean, standard deviation.
COLUMNS = 3
#: A function of gathered values by layer and of the most bytes that it may allocate; it returns the table's rows.
Measure = Callable[[Mapping[int, Vector], int | None], Doubles]
#: Arrays that ranks hold in a checkpoint: kind -> layer name -> array.
Held = Mapping[str, Mapping[str, Any]]
#: A row begins with this many columns before those of the table: the number of samples that it is the mean of.
_COUNT = 1
#: The column of the table that is averaged arithmetically; all others are norms, and get root mean squares.
_MEAN = 1


def share_out(sizes: Mapping[int, int], world: int) -> dict[int, int]:
    """Maps each layer to the rank that owns it.

    The largest layer is assigned first; each goes to the rank that has the fewest elements so far.
    """
    loads = [0] * world
    owners: dict[int, int] = {}
    for layer in sorted(sizes, key=lambda layer: (-sizes[layer], layer)):
        rank = loads.index(min(loads))
        owners[layer] = rank
        loads[rank] += max(sizes[layer], 1)
    return owners


def measure(
    candidates: CandidateLevels,
    sums: Mapping[int, Vector],
    width: int,
    seed: int,
    device: Device,
    memory_bytes: int | None,
) -> Doubles:
    """Returns the rows of the layers whose ``sums`` are given, by layer number; zeros for all others.

    The columns after the first :data:`COLUMNS` have the L2 norm of each candidate's error. For rows with choices that
    do not send zeros, the last column has the square root of the number of nonzero elements. The root makes it a norm,
    as every column except the mean is.
    """
    table = np.zeros((len(candidates.layers), width))
    layers = {layer: rows for layer, rows in candidates.items.items() if layer in sums}
    begins = [candidates.starts[rows] for rows in layers.values()]
    moments = _moments(device, [sums[layer] for layer in layers], begins)
    for (layer, rows), starts, (mean, square) in zip(layers.items(), begins, moments, strict=True):
        values, choices, spec = sums[layer], candidates.choices[rows.start], candidates.specs[rows.start]
        sizes = np.diff(starts, append=values.size)
        with np.errstate(all="ignore"):  # values that are not finite are checked once rows are shared
            deviation = np.sqrt(np.maximum(square / sizes - mean * mean, 0.0))
        table[rows, :COLUMNS] = np.stack([np.sqrt(square), mean, deviation], axis=1)
        if width > COLUMNS:
            if len(rows) == 1:
                lost = errors(choices, spec, values, seed, memory_bytes=memory_bytes, device=device)
            else:
                whole = replace(spec, shape=(values.size,))
                lost = block_errors(choices, whole, values, starts, seed, memory_bytes, device)
            table[rows, COLUMNS : COLUMNS + len(choices)] = lost
        if width > COLUMNS + candidates.width and candidates.leaves_zeros[rows.start]:
            table[rows, -1] = np.sqrt(np.count_nonzero(values.read()))
    return table


def _moments(
    device: Device, vectors: Sequence[Vector], begins: Sequence[Numbers]
) -> list[tuple[Doubles, Doubles]]:
    """Returns, by vector, means and sums of squares of its parts, which begin at ``begins``; computed on its device."""
    lengths = [np.diff(starts, append=v.size) for v, starts in zip(vectors, begins, strict=True)]
    table = np.zeros(sum(map(len, begins)), dtype=SEGMENT)
    if not len(table):
        return []
    table["gradient"] = np.concatenate([v.address + 4 * at for v, at in zip(vectors, begins, strict=True)])
    table["length"] = np.concatenate(lengths)
    ends = np.cumsum([len(starts) for starts in begins])[:-1]
    if device.driver is not None:
        sums, squares = device.kernels.moments(table).T
        means = sums / table["length"]
    else:
        squares = energies(table)
        parts = zip(vectors, begins, lengths, strict=True)
        means = np.concatenate([_means(v.read(), at, sizes) for v, at, sizes in parts])
    return list(zip(np.split(means, ends), np.split(squares, ends), strict=True))


def _means(values: Floats, begins: Numbers, lengths: Numbers) -> Doubles:
    if len(begins) == 1:
        return np.array([values.mean(dtype=np.float64)])
    found: Doubles = np.add.reduceat(values, begins, dtype=np.float64) / lengths
    return found


@dataclass(frozen=True)
class Share:
    """The layers that one rank gathers: ``own`` maps their names to numbers.

    ``sizes`` has the number of elements by layer number, 0 for a layer of another rank. ``memory_bytes`` limits the
    memory of gathering and measuring.
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

    #: The columns of the rows that a checkpoint holds; None if it holds none.
    columns: int | None = None
    #: True if this step's gradients are wanted.
    adding = False

    def __init__(self, share: Share, nbytes: int) -> None:
        self.share = share
        #: Sums of gradients of the closed period, by layer, until they are shared; empty if single steps are measured.
        self.taken: dict[int, Vector] = {}
        self._own = np.array([size > 0 for size in share.sizes], dtype=np.bool_)
        #: The bytes that measuring may take besides the gathered values, or None if there is no limit.
        self.left = None if share.memory_bytes is None else max(share.memory_bytes - nbytes, 0)

    @property
    def overdue(self) -> bool:
        """Returns true if gradients must wait for background work; with ``deterministic`` only."""
        return False

    def range_over(self, candidates: CandidateLevels, width: int) -> None:  # noqa: B027  (sums do not depend on them)
        """Replaces the candidates; the table then has ``width`` columns."""

    @abstractmethod
    def open(self, step: int) -> None:
        """Opens a step, ``step`` steps after the period began. Commits before it are final."""

    def add(self, table: Table, layers: Numbers, scale: float) -> None:
        """Receives the gradients of a group, and residuals if there are any; it may change the table."""
        own = self._own[layers]
        if own.any():
            self._add_own(table[own], layers[own], np.full(np.count_nonzero(own), scale, dtype=np.float32))

    @abstractmethod
    def _add_own(self, table: Table, layers: Numbers, scales: Floats) -> None:
        """Receives the gradients of a group's layers that this rank owns."""

    @abstractmethod
    def commit(self, present: Mask) -> None:
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
        """Returns the arrays that a checkpoint stores."""

    @abstractmethod
    def resume(self, held: Held) -> bool:
        """Continues from a checkpoint's arrays as far as they fit. Returns true if the closed period is complete."""


class Windowed(Gathering):
    """Sums the rank's own gradients over the last ``window`` steps of a period: a_t = a_{t-1} + scale g_t.

    Source: Markov et al. 2024, section 4, "System Implementation".

    The sums take 8 bytes per element, because they are double-buffered: a step that is not accepted must not count.
    They take another 8 bytes while the sums of the closed period are measured.
    """

    ELEMENT_BYTES = 16
    TITLE = "sums of gradients of two periods"

    def __init__(self, share: Share, every: int, window: int) -> None:
        self._first, self._end = max(every - window, 0), every
        self._sums = DoubleBuffer(share.sizes, share.environment.device.zeros)
        super().__init__(share, 2 * self._sums.nbytes)

    def open(self, step: int) -> None:
        # Steps from ``every`` on, while work is late, do not count.
        self.adding = self._first <= step < self._end

    def _add_own(self, table: Table, layers: Numbers, scales: Floats) -> None:
        """Adds the gradients, without their residuals, to the sums."""
        table["residual"], table["next_residual"] = self._sums.addresses(layers, table["start"])
        self.share.environment.device.kernels.contribute(
            table, np.zeros(len(table), dtype=np.uint8), scales, decay=1.0
        )

    def commit(self, present: Mask) -> None:
        if self.adding:
            self._sums.commit(present & self._own)

    def close(self) -> None:
        """Takes the sums; those of the next period begin at zero."""
        self.taken = {layer: self._sums.vector(layer) for layer in self.share.own.values()}
        self._sums = DoubleBuffer(self.share.sizes, self.share.environment.device.zeros)

    def measuring(self) -> Callable[[], Doubles]:
        taken = self.taken
        return lambda: self.share.measure(taken, self.left)

    def drop(self) -> None:
        self.taken = {}

    def state(self) -> dict[str, dict[str, Floats]]:
        """Returns the current sums, and those of the closed period."""
        own = self.share.own.items()
        sums = {name: self._sums.value(i).copy() for name, i in own}
        taken = {name: self.taken[i].read().copy() for name, i in own if i in self.taken}
        return {"sums": sums, **({"taken": taken} if taken else {})}

    def resume(self, held: Held) -> bool:
        self.taken = {}
        for name, layer in self.share.own.items():
            size = self.share.sizes[layer]
            if (value := fitting(held, "sums", name, size)) is not None:
                self._sums.set(layer, value)
            if (value := fitting(held, "taken", name, size)) is not None:
                self.taken[layer] = vector = self.share.environment.device.zeros(size)
                vector.write(value)
        return self.taken.keys() == set(self.share.own.values())


def fitting(held: Held, kind: str, name: str, size: int) -> Floats | None:
    """Returns the saved array of a layer if it exists and has ``size`` elements."""
    value = held.get(kind, {}).get(name)
    return None if value is None or value.size != size else np.array(value, dtype=np.float32).reshape(-1)


def sample_steps(every: int, samples: int) -> list[int]:
    """Returns the steps of a period that are sampled: the middles of its equal parts."""
    samples = min(samples, every)
    return [(2 * i + 1) * every // (2 * samples) for i in range(samples)]


def folded(rows: Floats, measured: Doubles, heard: Numbers) -> Floats:
    """Adds one more sample to the means of k samples, for the layers in rows ``heard``.

    Norms, including errors, become root mean squares: x_{k+1} = sqrt((k x_k^2 + x^2) / (k + 1)).
    """
    after = rows.copy()
    count, before, now = rows[heard, :_COUNT].astype(np.float64), rows[heard, _COUNT:], measured[heard]
    means: Doubles = (count * before + now) / (count + 1)
    norms: Doubles = np.sqrt((count * np.square(before, dtype=np.float64) + np.square(now)) / (count + 1))
    norms[:, _MEAN] = means[:, _MEAN]
    after[heard, :_COUNT] = count + 1
    after[heard, _COUNT:] = norms
    return after


class Sampled(Gathering):
    """Samples the gradients of ``samples`` single steps of a period, and measures each before the next one is taken.

    A sample takes 4 bytes per element. It is measured in the background. If the next sample is due before the
    measurement ends, it is taken later, when the measurement has ended, or skipped if yet another sample is due by
    then. With ``deterministic`` the step waits for the measurement instead. Layers with only low-rank choices are
    measured with their residual, because their compressor encodes the sum. If a step is not accepted, its sample is
    discarded, and the following step is sampled instead.
    """

    ELEMENT_BYTES = 4
    TITLE = "samples of gradients"

    def __init__(self, share: Share, every: int, samples: int) -> None:
        self._every, self._steps = every, np.array(sample_steps(every, samples))
        padded = [-(-size // LINE) * LINE for size in share.sizes]
        self._begins = np.concatenate(([0], np.cumsum(padded))).astype(np.int64)
        self._arena = share.environment.device.zeros(int(self._begins[-1]))
        super().__init__(share, 4 * int(self._begins[-1]))
        self._heard = np.zeros(len(share.sizes), dtype=np.bool_)  # layers whose sample is in the arena
        self._committed = False
        self._due = self._last = 0  # samples of the period that are due, and that have been taken
        # The work that reads the arena.
        self._work: Future[Floats] = at_once(lambda: np.zeros(0, dtype=np.float32))

    def range_over(self, candidates: CandidateLevels, width: int) -> None:
        """Replaces the candidates, and clears the table, whose errors belong to the previous choices."""
        self.columns = width
        self._layers, self._items = candidates.layers, candidates.items
        self._with_residual = np.zeros(len(self.share.sizes), dtype=np.bool_)
        self._with_residual[candidates.layers] = [
            all(isinstance(choice.bare(), LowRank) for choice in choices) for choices in candidates.choices
        ]
        self._current = self._nothing()
        self._closed: Future[Floats] | None = None

    def _nothing(self) -> Future[Floats]:
        assert self.columns is not None, "candidates come before steps"
        rows = np.zeros((len(self._layers), _COUNT + self.columns), dtype=np.float32)
        return at_once(lambda: rows)

    @property
    def overdue(self) -> bool:
        """Returns true if the arena is needed and its contents are not measured yet."""
        return self.adding and self.share.environment.deterministic and not self._work.done()

    def open(self, step: int) -> None:
        """Opens a step, and takes a sample if one is due and the arena is free."""
        self._measure_committed()
        self._heard[:] = False
        self._due = int(np.searchsorted(self._steps, step, side="right"))
        # Steps from ``every`` on, while work is late, do not count.
        due = self._last < self._due and step < self._every
        self.adding = due and (self.share.environment.deterministic or self._work.done())

    def _add_own(self, table: Table, layers: Numbers, scales: Floats) -> None:
        """Copies the gradients, with residuals for layers whose choices are all of low rank."""
        given = table["gradient"] != 0
        if not given.any():
            return
        table, layers, scales = table[given], layers[given], scales[given]
        table["residual"][~self._with_residual[layers]] = 0
        places = 4 * (self._begins[layers] + table["start"].astype(np.int64))
        table["next_residual"] = np.uint64(self._arena.address) + places.astype(np.uint64)
        self.share.environment.device.kernels.contribute(
            table, np.zeros(len(table), dtype=np.uint8), scales, decay=1.0
        )
        self._heard[layers] = True

    def commit(self, present: Mask) -> None:
        """Accepts the sample of this step, for the layers that some rank had."""
        if self.adding:
            self._heard &= present
            self._committed = bool(self._heard.any())

    def _measure_committed(self) -> None:
        if not self._committed:
            return
        self._committed, self._last = False, self._due
        sample: dict[int, Vector] = {}
        for i in np.flatnonzero(self._heard).tolist():
            begin = int(self._begins[i])
            sample[i] = self._arena.part(begin, begin + self.share.sizes[i])
        before, measure, left = self._current, self.share.measure, self.left
        heard = np.flatnonzero(self._heard[self._layers])
        self._current = self._work = self.share.environment.background(
            lambda: folded(before.result(), measure(sample, left), heard)
        )

    def close(self) -> None:
        """Closes the period; the next period begins with an empty table."""
        self._measure_committed()
        self._closed, self._current, self._last = self._current, self._nothing(), 0

    def measuring(self) -> Callable[[], Doubles]:
        """Returns work that waits for the last sample and returns the table."""
        closed = self._closed or self._nothing()  # a rank without layers has no closed table after a resume
        return lambda: closed.result()[:, _COUNT:].astype(np.float64)

    def drop(self) -> None:
        self._closed = None

    def state(self) -> dict[str, dict[str, Floats]]:
        """Returns, by layer, the number of samples taken and its rows; waits for the sample that is being measured."""
        self._measure_committed()
        kinds = {"sampled": self._current, **({} if self._closed is None else {"measured": self._closed})}
        own, last = self.share.own.items(), np.float32(self._last)
        return {
            kind: {name: np.append(last, rows.result()[self._items[layer]]) for name, layer in own}
            for kind, rows in kinds.items()
        }

    def resume(self, held: Held) -> bool:
        self._committed, self._last, self._closed = False, 0, None
        self._current, self._closed = self._nothing(), self._nothing()
        found = 0
        for name, layer in self.share.own.items():
            items, width = self._items[layer], self._current.result().shape[1]
            size = 1 + len(items) * width
            if (value := fitting(held, "sampled", name, size)) is not None:
                self._last, self._current.result()[items] = int(value[0]), value[1:].reshape(-1, width)
            if (value := fitting(held, "measured", name, size)) is not None:
                self._closed.result()[items] = value[1:].reshape(-1, width)
                found += 1
        if not found:
            self._closed = None
        return found == len(self.share.own)
