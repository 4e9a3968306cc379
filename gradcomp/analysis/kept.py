"""Keeps a bounded number of recorded steps, spread over the whole run."""

from __future__ import annotations

from gradcomp.analysis.recording import Floats


class Kept:
    """Steps that are multiples of ``every``, with the values of all ranks: at most ``most`` of them.

    Before there would be one more, ``every`` doubles and steps that are not multiples of it are dropped. The kept steps
    depend on step numbers only, so all ranks keep the same ones, with values or without.
    """

    def __init__(
        self, every: int, most: int, steps: list[int] | None = None, rows: list[Floats] | None = None
    ) -> None:
        self.every = every
        self.steps: list[int] = []
        self.rows: list[Floats] = []
        self.most = most
        for place, step in enumerate(steps or []):
            self.add(step, rows[place] if rows else None)

    def due(self, step: int) -> bool:
        """Returns true if the step is to be recorded."""
        return step % self.every == 0

    def add(self, step: int, row: Floats | None) -> None:
        """Appends a due step; ``row`` is None on ranks that keep no values."""
        while len(self.steps) >= self.most:
            self._thin()
        if not self.due(step):
            return
        self.steps.append(step)
        if row is not None:
            self.rows.append(row)

    def _thin(self) -> None:
        self.every *= 2
        stay = [place for place, step in enumerate(self.steps) if self.due(step)]
        self.steps = [self.steps[place] for place in stay]
        self.rows = [self.rows[place] for place in stay if place < len(self.rows)]
