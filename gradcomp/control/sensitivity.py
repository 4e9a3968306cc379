"""Changes of the training loss when one layer at a time is compressed: the error tables of ``metric="loss"``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from gradcomp.compress import BestRank, Compressor, PowerSGD
from gradcomp.compress.lowrank.base import clamped_rank, matrix_shape
from gradcomp.control.base import Doubles, Probe
from gradcomp.control.candidates import CandidateLevels
from gradcomp.control.distortion.round_trip import round_trip
from gradcomp.control.distortion.spectra import power_steps
from gradcomp.core.layers import LayerSpec
from gradcomp.core.vectors import Floats, Vector

#: In place of a change that is not measured yet, and of one that is not finite: checkpoints hold finite numbers.
_MISSING, ENDLESS = np.float32(-1), np.float32(1e30)


class LossTable:
    """The absolute changes of loss of this rank's layers, measured cell by cell; a cell is a layer and a choice of it.

    ``own`` maps names of layers to numbers. Changes are float32, so that a checkpoint holds them exactly.
    """

    def __init__(self, candidates: CandidateLevels, own: Mapping[str, int], seed: int) -> None:
        self._candidates, self._own, self._seed = candidates, own, seed
        self._rows = {layer: candidates.items[layer].start for layer in own.values()}
        self._changes = {
            layer: np.full(len(candidates.choices[row]), _MISSING) for layer, row in self._rows.items()
        }
        self._lost: tuple[int, Lost] | None = None  # of the layer that is being measured

    @property
    def complete(self) -> bool:
        return not any((changes == _MISSING).any() for changes in self._changes.values())

    def clear(self) -> None:
        """Forgets all changes; the next ones are those of other gradients."""
        self._lost = None
        for changes in self._changes.values():
            changes[:] = _MISSING

    def measure(self, gradients: Mapping[int, Vector], probe: Probe, count: int) -> None:
        """Measures the next ``count`` cells, and those on the way that lose nothing."""
        cells: list[tuple[int, int]] = []
        errors: list[tuple[int, Floats]] = []
        for layer, k in self._missing():
            if len(cells) == count:
                break
            error = self._of(layer, gradients).by(self._candidates.choices[self._rows[layer]][k])
            if error is None or not np.isfinite(error).all():
                self._changes[layer][k] = ENDLESS
            elif error.any():
                cells.append((layer, k))
                errors.append((layer, error))
            else:
                self._changes[layer][k] = 0
        if cells:
            for (layer, k), change in zip(cells, probe(errors), strict=True):
                self._changes[layer][k] = ENDLESS if not abs(change) < ENDLESS else abs(change)
        if self.complete:
            self._lost = None

    def _of(self, layer: int, gradients: Mapping[int, Vector]) -> Lost:
        if self._lost is None or self._lost[0] != layer:
            row, values = self._rows[layer], gradients[layer].read()
            self._lost = (
                layer,
                Lost(self._candidates.choices[row], self._candidates.specs[row], values, self._seed),
            )
        return self._lost[1]

    def _missing(self) -> list[tuple[int, int]]:
        found = self._changes.items()
        return [(layer, k) for layer, one in found for k in np.flatnonzero(one == _MISSING).tolist()]

    def table(self) -> Doubles:
        """Returns the changes by row and choice; 0 for rows of other ranks and for choices that do not exist."""
        found = np.zeros(self._candidates.costs.shape)
        for layer, changes in self._changes.items():
            found[self._rows[layer], : len(changes)] = changes
        return found

    def state(self) -> dict[str, Floats]:
        return {name: self._changes[layer].copy() for name, layer in self._own.items()}

    def resume(self, held: Mapping[str, Floats]) -> None:
        """Takes the saved changes that fit; the others are measured again."""
        self.clear()
        for name, layer in self._own.items():
            saved = held.get(name)
            if saved is not None and saved.size == self._changes[layer].size:
                self._changes[layer][:] = np.reshape(saved, -1)


class Lost:
    """Computes what the choices of one layer lose of its gradient: values - decompress(compress(values))."""

    def __init__(self, choices: Sequence[Compressor], spec: LayerSpec, values: Floats, seed: int) -> None:
        self._choices = [choice.bare() for choice in choices]
        self._spec, self._values, self._seed = spec, values, seed

    def by(self, choice: Compressor) -> Floats | None:
        """Returns what one of the choices loses; None if it cannot send the values.

        All low ranks are those of one run of power steps, as the errors of :mod:`gradcomp.control.distortion` are; a
        single step without a warm start has a larger error.
        """
        choice, values = choice.bare(), self._values
        rank = self._rank(choice)
        if choice.traits.exact or rank == 0 or not values.size:
            return np.zeros_like(values)
        if rank is None:
            given = round_trip(choice, self._spec, values, self._seed)
            return None if given is None else np.subtract(values, given, out=given)
        if self._factors is None:
            return None
        left, right = self._factors
        near: Floats = (left[:, :rank] @ right[:rank]).reshape(-1)
        return np.subtract(values, near, out=near)

    def _rank(self, choice: Compressor) -> int | None:
        """Returns the rank of a low-rank choice, 0 if it sends the layer exactly; None for other choices."""
        if type(choice) not in (PowerSGD, BestRank):
            return None
        assert isinstance(choice, PowerSGD | BestRank), "only these have a rank"
        return clamped_rank(self._spec.shape, choice.rank)

    @cached_property
    def _factors(self) -> tuple[Floats, Floats] | None:
        """Returns L and R such that the first r columns of L times the first r rows of R approximate the matrix.

        From M = P Q^T at the largest rank b, about, and Q^T = U S V^T: L = P U and R = S V^T. None if the values are
        not finite.
        """
        if not np.isfinite(self._values).all():
            return None
        largest = max(filter(None, map(self._rank, self._choices)))
        matrix = self._values.reshape(matrix_shape(self._spec.shape))
        scale, p, q, _ = power_steps(matrix, largest, seed=self._seed, layer=self._spec.hash)
        u, singular, v = np.linalg.svd(q, full_matrices=False)
        right: Floats = (np.float32(scale) * singular)[:, None] * v
        return p.T @ u, right
