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
    ``sent_bytes``: by bucket, of one rank.
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
    sent_bytes: npt.NDArray[np.float64]


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
