"""What a plan comes to on one rank, kept while plans go back and forth."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradcomp.core.plan import Fingerprint
from gradcomp.core.state import Begin, Range
from gradcomp.pipeline.bucket import BucketProgram
from gradcomp.pipeline.layout import Layout

#: Arrangements that are kept, and for how many steps after they were last in force: they hold buffers.
_MOST, _STEPS = 8, 64


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Buckets, their programs, and what follows from them; the same whenever the same plan is in force.

    ``fingerprint``: of the plan but for its version. ``order``: of the layers that travel. ``sizes``: of residuals.
    ``fields``: what compressors keep, by layer. ``ranges``: second residuals. ``travels``: pairs of layers and buckets;
    ``position``: by layer, the last bucket that it travels in. ``predicted_bytes``: that one rank sends in a step, by
    formula; ``sent``: by layer, those of its buckets.
    """

    layout: Layout
    programs: list[BucketProgram]
    fingerprint: Fingerprint
    order: bytes
    sizes: list[int]
    fields: Sequence[Mapping[str, tuple[int, Begin]]]
    ranges: list[Range]
    dense_bytes: int
    travels: tuple[npt.NDArray[np.int64], ...]
    position: npt.NDArray[np.int64]
    predicted_bytes: float
    sent: npt.NDArray[np.float64]


class Arrangements:
    """The last few arrangements, by what they are made from."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Arrangement, int]] = {}  # with the last step, the latest last

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable, step: int, make: Callable[[], Arrangement]) -> Arrangement:
        """The arrangement of this key, which comes into force with ``step``."""
        kept = self._kept.pop(key, None)
        found = make() if kept is None else kept[0]
        while len(self._kept) >= _MOST:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = found, step
        return found

    def age(self, step: int) -> None:
        """Let go of what has not been in force for long; the latest is in force."""
        if len(self._kept) > 1:
            latest, (found, _) = self._kept.popitem()
            self._kept = {key: one for key, one in self._kept.items() if one[1] >= step - _STEPS}
            self._kept[latest] = found, step


def by_layer(
    travels: Sequence[npt.NDArray[np.int64]], values: npt.NDArray[np.float64], layers: int
) -> npt.NDArray[np.float64]:
    """The sum of ``values``, one for every bucket, over the buckets of each layer."""
    of, buckets = travels
    added: npt.NDArray[np.float64] = np.bincount(of, values[buckets], layers).astype(np.float64)
    return added
