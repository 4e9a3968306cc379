"""Four bytes for each parameter tell that ranks, or a model and a checkpoint, differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import StateError

CRC32C = "crc32c"


@dataclass(frozen=True)
class Digests:
    """Holds a check value of each parameter's bytes, by layer name.

    ``algorithm`` names how they were computed, such as :data:`CRC32C`.
    """

    algorithm: str
    values: Mapping[str, int]

    @property
    def numbers(self) -> npt.NDArray[np.uint32]:
        """Return the check values in the order of the layers."""
        return np.array(list(self.values.values()), dtype="<u4")

    def to_plain(self) -> dict[str, Any]:
        """Return numbers and strings that JSON can hold."""
        return {"algorithm": self.algorithm, "values": dict(self.values)}

    @staticmethod
    def from_plain(data: Any) -> Digests:
        """Invert :meth:`to_plain`; raise StateError for anything else."""
        if not isinstance(data, dict) or data.keys() != {"algorithm", "values"}:
            raise StateError("the digests of parameters are malformed")
        algorithm, values = data["algorithm"], data["values"]
        if type(algorithm) is not str or not re.fullmatch("[a-z0-9-]{1,32}", algorithm):
            raise StateError("the digests of parameters name no algorithm")
        if not isinstance(values, dict) or not all(
            type(name) is str and type(value) is int and 0 <= value < 1 << 32
            for name, value in values.items()
        ):
            raise StateError("a digest of a parameter is not a number of 32 bits")
        return Digests(algorithm, dict(values))

    def differing(self, other: Digests) -> list[str]:
        """Return the layers whose parameter is another in ``other``, in order; both must be by one algorithm."""
        return [name for name, value in self.values.items() if other.values.get(name) != value]


#: The digests of a rank whose parameters are not compared.
NO_SAY = Digests(CRC32C, {})
