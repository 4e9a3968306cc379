"""Changes of the training loss when one layer at a time is compressed: the error tables of ``metric="loss"``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gradcomp.compress import BestRank, Compressor, PowerSGD
from gradcomp.compress.lowrank.base import clamped_rank, matrix_shape
from gradcomp.control.base import Doubles, Probe
from gradcomp.control.candidates import CandidateLevels
from gradcomp.control.distortion.round_trip import round_trip
from gradcomp.control.distortion.spectra import POWER_STEPS
from gradcomp.core.layers import LayerSpec
from gradcomp.core.vectors import Floats, Vector
from gradcomp.kernels.random_factors import initial_q

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

    @property
    def complete(self) -> bool:
        return not any((changes == _MISSING).any() for changes in self._changes.values())

    def clear(self) -> None:
        """Forgets all changes; the next ones are those of other gradients."""
        for changes in self._changes.values():
            changes[:] = _MISSING

    def measure(self, gradients: Mapping[int, Vector], probe: Probe, count: int) -> None:
        """Measures the next ``count`` cells, and those on the way that lose nothing."""
        cells: list[tuple[int, int]] = []
        errors: list[tuple[int, Floats]] = []
        for layer, k in self._missing():
            if len(cells) == count:
                break
            row = self._rows[layer]
            choice, spec = self._candidates.choices[row][k].bare(), self._candidates.specs[row]
            error = lost(choice, spec, gradients[layer].read(), self._seed)
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


def lost(choice: Compressor, spec: LayerSpec, values: Floats, seed: int) -> Floats | None:
    """Returns values - decompress(compress(values)); None if the choice cannot send them.

    Low rank by power steps, as the errors of :mod:`gradcomp.control.distortion` are; a single step without a warm start
    has a larger error.
    """
    if choice.traits.exact or not values.size:
        return np.zeros_like(values)
    if type(choice) not in (PowerSGD, BestRank):
        given = round_trip(choice, spec, values, seed)
        return None if given is None else np.subtract(values, given, out=given)
    assert isinstance(choice, PowerSGD | BestRank), "only these have a rank"
    rank = clamped_rank(spec.shape, choice.rank)
    if not rank:
        return np.zeros_like(values)
    matrix = values.reshape(matrix_shape(spec.shape))
    q, p = initial_q(matrix.shape[1], rank, seed=seed, layer=spec.hash).T, matrix
    for _ in range(POWER_STEPS):
        p = np.linalg.qr(matrix @ q)[0]
        q = matrix.T @ p
    error: Floats = (matrix - p @ q.T).reshape(-1)
    return error
