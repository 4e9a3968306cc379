"""Layers travel in an order, and some stay behind, as follows from what all ranks have seen of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]


class Ordering:
    """Keeps the layers' order, by number.

    ``order`` has all layers. The layers in ``cold``, which no rank used for some steps, travel last. Those in
    ``sparse`` have sparse gradients and go another way. ``streak`` counts, by layer, steps present (> 0) or absent
    (< 0) in a row.
    """

    def __init__(self, layers: int, cold_after_steps: int) -> None:
        self._limit = cold_after_steps
        self.order: list[int] = list(range(layers))
        self.cold: frozenset[int] = frozenset()
        self.sparse: frozenset[int] = frozenset()
        self.streak = np.zeros(layers, dtype=np.int64)

    @property
    def travelling(self) -> tuple[int, ...]:
        """Return the layers that travel, in order."""
        return tuple(layer for layer in self.order if layer not in self.sparse)

    def restore(
        self, order: Sequence[int], cold: frozenset[int], sparse: frozenset[int], streak: Sequence[int] | None
    ) -> None:
        """Go on from a saved state; without saved streaks they begin anew."""
        self.order, self.cold, self.sparse = list(order), cold, sparse
        self.streak[:] = 0 if streak is None else streak

    def take(self, order: list[int]) -> bool:
        """Set the order; return whether it is another one."""
        changed = order != self.order
        self.order = order
        return changed

    def seen(self, present: Mask, sparse: Mask) -> bool:
        """Record which layers were present in a step, or sparse; return whether that changes the layout.

        A layer that was absent everywhere for some steps moves behind the others, so that it holds nobody up; it
        moves back after as many steps in which it was present.
        """
        streak, limit, before = self.streak, self._limit, (self.cold, self.sparse)
        streak[:] = np.where(present, np.maximum(streak, 0) + 1, np.minimum(streak, 0) - 1)
        self.cold = frozenset(
            {i for i in self.cold if streak[i] < limit} | set(np.flatnonzero(streak <= -limit).tolist())
        )
        self.sparse |= frozenset(np.flatnonzero(sparse).tolist())
        return (self.cold, self.sparse) != before
