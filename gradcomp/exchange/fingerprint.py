"""Digests and fingerprints: a few bytes tell that ranks, or a model and a checkpoint, hold different values."""

from __future__ import annotations

import re
import zlib
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import StateError
from gradcomp.exchange.waiting import Waiting, gather_rows
from gradcomp.transport.base import Transport

CRC32C = "crc32c"

Words = npt.NDArray[np.uint32]
#: Bytes of its scalars that a rank sends once ranks are known to differ.
_SHOWN_BYTES = 4096


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


def exchange_digests(
    transport: Transport, count: int, future: Future[Digests]
) -> Generator[Waiting, None, npt.NDArray[np.uint32]]:
    """Gather every rank's digests of its parameters; the row of a rank without any holds zeros."""
    while not future.done():
        yield Waiting.BACKGROUND
    row = np.zeros(count, dtype="<u4")
    numbers = future.result().numbers
    row[: len(numbers)] = numbers
    table = yield from gather_rows(row.view(np.uint8), transport)
    return table.view("<u4")


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Holds one rank's fingerprint of parameters, optimizer and results, taken before an exchange.

    ``layers`` has a check value of a sample of each layer's parameter, and is empty on a rank that has nothing to
    compare. ``scalars`` are the optimizer's as JSON: a mapping of names to values for each group of parameters.
    ``results`` is a check value of the means that the last exchange decoded.
    """

    layers: Words
    scalars: str = ""
    results: int = 0

    @property
    def value(self) -> int:
        """Return the bits that travel, which are 0 only on a rank that has nothing to compare."""
        if not len(self.layers):
            return 0
        return zlib.crc32(self.scalars.encode(), zlib.crc32(self.layers.tobytes(), self.results)) or 1

    @staticmethod
    def done() -> bool:
        """Return True, so that a fingerprint can stand for a :class:`DeferredFingerprint`."""
        return True

    def result(self) -> Fingerprint:
        return self


class DeferredFingerprint(Protocol):
    """Stands for a fingerprint that a device may still be computing."""

    def done(self) -> bool:
        """Return whether it is computed, without waiting; may raise a :class:`gradcomp.GradcompError`."""
        ...

    def result(self) -> Fingerprint:
        """Return the fingerprint, once it is done."""
        ...


#: The fingerprint of a rank that has nothing to compare.
NOTHING = Fingerprint(np.zeros(0, dtype=np.uint32))


@dataclass(frozen=True)
class Fingerprints:
    """Holds the fingerprints of all ranks, a row a rank; ``has_say`` marks ranks with something to compare."""

    has_say: npt.NDArray[np.bool_]
    layers: Words
    results: Words
    scalars: tuple[str, ...]


def exchange_fingerprints(
    transport: Transport, count: int, own: Fingerprint
) -> Generator[Waiting, None, Fingerprints]:
    """Gather all ranks' fingerprints of ``count`` layers, once some are known to differ.

    Wire: 4 bytes a layer and 4,104 more, from each rank.
    """
    mine = np.zeros(8 + 4 * count + _SHOWN_BYTES, dtype=np.uint8)
    if len(own.layers):
        mine[:8].view("<u4")[:] = 1, own.results
        mine[8 : 8 + 4 * count].view("<u4")[:] = own.layers
        shown = own.scalars.encode("ascii", "replace")[:_SHOWN_BYTES]
        mine[8 + 4 * count :][: len(shown)] = np.frombuffer(shown, dtype=np.uint8)
    table = yield from gather_rows(mine, transport)
    head = table[:, :8].copy().view("<u4")
    texts = [bytes(shown[8 + 4 * count :]).rstrip(b"\0") for shown in table]
    return Fingerprints(
        head[:, 0] == 1,
        table[:, 8 : 8 + 4 * count].copy().view("<u4"),
        head[:, 1],
        tuple(text.decode("ascii", "replace") for text in texts),
    )
