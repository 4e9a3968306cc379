"""What all ranks should hold alike, in 32 bits that ride with every exchange: a sample of parameters, and scalars."""

from __future__ import annotations

import zlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gradcomp.pipeline.conclusions import collective
from gradcomp.pipeline.in_flight import Waiting
from gradcomp.transport.base import AllGather, Transport

Words = npt.NDArray[np.uint32]

#: Bytes of the scalars that a rank shows when ranks differ.
_SHOWN_BYTES = 4096


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Of one rank, before an exchange.

    ``layers``: a check value of a sample of each layer's parameter; empty of a rank that has nothing to compare.
    ``scalars``: the optimizer's, as text: JSON, a mapping of names to values for each group of parameters. ``results``:
    a check value of the means that the last exchange decoded.
    """

    layers: Words
    scalars: str = ""
    results: int = 0

    @property
    def value(self) -> int:
        """The bits that travel; 0 of a rank that has nothing to compare, and never of another."""
        if not len(self.layers):
            return 0
        return zlib.crc32(self.scalars.encode(), zlib.crc32(self.layers.tobytes(), self.results)) or 1

    @staticmethod
    def done() -> bool:
        """A fingerprint stands for one that has come."""
        return True

    def result(self) -> Fingerprint:
        """This fingerprint."""
        return self


class SoonFingerprint(Protocol):
    """One that a device may have yet to tell."""

    def done(self) -> bool:
        """Whether it has come; does not wait. May raise a :class:`gradcomp.GradcompError`."""
        ...

    def result(self) -> Fingerprint:
        """The fingerprint, once it is done."""
        ...


#: Of a rank that has nothing to compare.
NOTHING = Fingerprint(np.zeros(0, dtype=np.uint32))


@dataclass(frozen=True)
class Fingerprints:
    """Those of all ranks, as every rank knows them: a row a rank. ``has_say``: who has something to compare."""

    has_say: npt.NDArray[np.bool_]
    layers: Words
    results: Words
    scalars: tuple[str, ...]


def exchange_fingerprints(
    transport: Transport, count: int, own: Fingerprint
) -> Generator[Waiting, None, Fingerprints]:
    """All ranks' of ``count`` layers, when some are known to differ. Wire: 4 bytes a layer and 4,104 more, a rank."""
    row = 8 + 4 * count + _SHOWN_BYTES
    table = np.zeros((transport.size, row), dtype=np.uint8)
    mine = table[transport.rank]
    if len(own.layers):
        mine[:8].view("<u4")[:] = 1, own.results
        mine[8 : 8 + 4 * count].view("<u4")[:] = own.layers
        shown = own.scalars.encode("ascii", "replace")[:_SHOWN_BYTES]
        mine[8 + 4 * count :][: len(shown)] = np.frombuffer(shown, dtype=np.uint8)
    yield from collective(AllGather(table.reshape(-1), [row] * transport.size), transport)
    head = table[:, :8].copy().view("<u4")
    texts = [bytes(shown[8 + 4 * count :]).rstrip(b"\0") for shown in table]
    return Fingerprints(
        head[:, 0] == 1,
        table[:, 8 : 8 + 4 * count].copy().view("<u4"),
        head[:, 1],
        tuple(text.decode("ascii", "replace") for text in texts),
    )
