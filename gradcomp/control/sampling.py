"""Measures error tables of single steps, averaged over the period."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from gradcomp.compress.lowrank.base import LowRank
from gradcomp.control.base import Doubles, at_once
from gradcomp.control.candidates import CandidateLevels
from gradcomp.control.gathering import Gathering, Held, Share, fitting
from gradcomp.control.observations import Numbers
from gradcomp.core.vectors import LINE, Floats, Vector
from gradcomp.kernels import selection
from gradcomp.kernels.codec import Table

#: A row begins with this many columns before those of the table: the number of samples that it is the mean of.
_COUNT = 1
#: The column of the table whose mean is arithmetic; all others are norms.
_MEAN = 1


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

    A sample takes 4 bytes per element. It is measured in the background; if that is late, the next sample is taken when
    it is done, or left out if it is not done before the sample after the next; with ``deterministic`` the step waits
    for it. Layers whose choices are all of low rank are measured with their residual, as their compressor reads them. A
    step that is not accepted does not count, and the following step is sampled instead.
    """

    ELEMENT_BYTES = 4
    TITLE = "samples of gradients"

    def __init__(self, share: Share, every: int, samples: int) -> None:
        super().__init__(share)
        self._every, self._steps = every, np.array(sample_steps(every, samples))
        padded = [-(-size // LINE) * LINE for size in share.sizes]
        self._begins = np.concatenate(([0], np.cumsum(padded))).astype(np.int64)
        self._arena = share.environment.zeros(int(self._begins[-1]))
        self._own = np.array([size > 0 for size in share.sizes], dtype=np.bool_)
        self._heard = np.zeros(len(share.sizes), dtype=np.bool_)  # layers whose sample is in the arena
        self._committed = False
        self._due = self._last = 0  # samples of the period that are due, and that have been taken
        # The work that reads the arena.
        self._work: Future[Floats] = at_once(lambda: np.zeros(0, dtype=np.float32))

    @property
    def nbytes(self) -> int:
        return 4 * int(self._begins[-1])

    @property
    def columns(self) -> int:
        return self._width

    def range_over(self, candidates: CandidateLevels, width: int) -> None:
        """Replaces the candidates. The table starts anew, since its errors are those of other choices."""
        self._width = width
        self._layers, self._items = candidates.layers, candidates.items
        self._with_residual = np.zeros(len(self.share.sizes), dtype=np.bool_)
        self._with_residual[candidates.layers] = [
            all(isinstance(choice.bare(), LowRank) for choice in choices) for choices in candidates.choices
        ]
        self._current = self._nothing()
        self._closed: Future[Floats] | None = None

    def _nothing(self) -> Future[Floats]:
        rows = np.zeros((len(self._layers), _COUNT + self._width), dtype=np.float32)
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
        due = self._last < self._due and step < self._every  # later steps, while work is late, do not count
        self.adding = due and (self.share.environment.deterministic or self._work.done())

    def add(self, table: Table, layers: Numbers, scale: float) -> None:
        """Copies the gradients, with residuals for layers whose choices are all of low rank."""
        own = self._own[layers] & (table["gradient"] != 0)
        if not own.any():
            return
        table, layers = table[own], layers[own]
        table["residual"][~self._with_residual[layers]] = 0
        places = 4 * (self._begins[layers] + table["start"].astype(np.int64))
        table["next_residual"] = np.uint64(self._arena.address) + places.astype(np.uint64)
        flags = np.zeros(len(table), dtype=np.uint8)
        selection.contribute(table, flags, np.full(len(table), scale, dtype=np.float32), decay=1.0)
        self._heard[layers] = True

    def commit(self, present: npt.NDArray[np.bool_]) -> None:
        """Makes the sample count."""
        if self.adding:
            self._heard &= present
            self._committed = bool(self._heard.any())

    def _measure_committed(self) -> None:
        if not self._committed:
            return
        self._committed, self._last = False, self._due
        layers = np.flatnonzero(self._heard).tolist()
        sample: dict[int, Vector] = {
            i: self._arena.part(int(self._begins[i]), int(self._begins[i]) + self.share.sizes[i])
            for i in layers
        }
        before, measure, left = self._current, self.share.measure, self.left
        heard = np.flatnonzero(self._heard[self._layers])
        self._current = self._work = self.share.environment.background(
            lambda: folded(before.result(), measure(sample, left), heard)
        )

    def close(self) -> None:
        """Closes the period; the table of the next one starts anew."""
        self._measure_committed()
        self._closed, self._current, self._last = self._current, self._nothing(), 0

    def measuring(self) -> Callable[[], Doubles]:
        """Returns work that waits for the last sample and returns the table."""
        closed = self._closed or self._nothing()  # a rank without layers has no closed table after a resume

        def table() -> Doubles:
            found: Doubles = closed.result()[:, _COUNT:].astype(np.float64)
            return found

        return table

    def drop(self) -> None:
        self._closed = None

    def state(self) -> dict[str, dict[str, Floats]]:
        """Returns, by layer, the number of samples taken and its rows; waits for the sample that is being measured."""
        self._measure_committed()
        kinds = {"sampled": self._current, **({} if self._closed is None else {"measured": self._closed})}
        return {
            kind: {
                name: np.append(np.float32(self._last), rows.result()[self._items[layer]])
                for name, layer in self.share.own.items()
            }
            for kind, rows in kinds.items()
        }

    def resume(self, held: Held) -> bool:
        self._committed, self._last, self._closed = False, 0, None
        self._current, self._closed = self._nothing(), self._nothing()
        found = 0
        for name, layer in self.share.own.items():
            items, width = self._items[layer], _COUNT + self._width
            size = 1 + len(items) * width
            if (value := fitting(held, "sampled", name, size)) is not None:
                self._last, self._current.result()[items] = int(value[0]), value[1:].reshape(-1, width)
            if (value := fitting(held, "measured", name, size)) is not None:
                self._closed.result()[items] = value[1:].reshape(-1, width)
                found += 1
        if not found:
            self._closed = None
        return found == len(self.share.own)
