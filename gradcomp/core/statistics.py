"""Counts the bytes, steps and seconds of one exchanger."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass
class Statistics:
    """Counters of one rank since the start: bytes that it sent, and seconds of wall time.

    ``dense_bytes`` is what an uncompressed exchange of the same gradients in their own dtype would have sent by the
    same reduction, 2 d (N-1) / N. ``exposed_seconds`` is the time the training thread waited for the exchange,
    ``vote_seconds`` the time ranks took to agree on steps (``on_skip="agree"``).
    """

    steps: int = 0
    skipped_steps: int = 0
    wire_bytes: int = 0
    dense_bytes: int = 0
    codec_seconds: float = 0.0
    wire_seconds: float = 0.0
    exposed_seconds: float = 0.0
    vote_seconds: float = 0.0

    FIELDS = ("steps", "skipped_steps", "wire_bytes", "dense_bytes", "codec_seconds", "wire_seconds",
              "exposed_seconds", "vote_seconds")  # fmt: skip

    def vector(self) -> npt.NDArray[np.float64]:
        """Returns the fields in order, for reduction."""
        return np.array([getattr(self, name) for name in self.FIELDS], dtype=np.float64)

    @classmethod
    def mean(cls, vector: npt.NDArray[np.float64], ranks: int) -> Statistics:
        """Returns the mean over ranks, from the sum of their vectors; counts are rounded down."""
        values = dict(zip(cls.FIELDS, (vector / ranks).tolist(), strict=True))
        counts = {name: int(values[name]) for name in cls.FIELDS if not name.endswith("_seconds")}
        return cls(**{**values, **counts})

    @property
    def ratio(self) -> float:
        """Returns dense bytes over sent bytes; 1.0 before the first step."""
        return self.dense_bytes / self.wire_bytes if self.wire_bytes else 1.0

    def metrics(self) -> dict[str, float]:
        """Returns a flat dictionary for TensorBoard and other loggers: ``gradcomp/steps``, ``gradcomp/ratio``, ...

        Bytes and seconds are means over the steps since the start: ``gradcomp/wire_bytes_per_step``.
        """
        steps = max(self.steps, 1)
        values: dict[str, float] = {"ratio": self.ratio}
        for name in self.FIELDS:
            total = getattr(self, name)
            if name.endswith("steps"):
                values[name] = total
            else:
                values[f"{name}_per_step"] = total / steps
        return {f"gradcomp/{name}": value for name, value in values.items()}
