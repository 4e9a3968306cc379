"""All kernels of a device under the names that they have in the other backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gradcomp.kernels.cuda.bisect import BisectKernels
from gradcomp.kernels.cuda.codec import CodecKernels
from gradcomp.kernels.cuda.driver import Driver
from gradcomp.kernels.cuda.indices import IndexKernels
from gradcomp.kernels.cuda.lowrank import LowRankKernels
from gradcomp.kernels.cuda.measures import MeasureKernels
from gradcomp.kernels.cuda.prepared import Plans
from gradcomp.kernels.cuda.scatter import ScatterKernels
from gradcomp.kernels.cuda.selection import SelectionKernels
from gradcomp.kernels.cuda.subspace import SubspaceKernels

PARTS: Final = (
    CodecKernels,
    BisectKernels,
    IndexKernels,
    LowRankKernels,
    MeasureKernels,
    ScatterKernels,
    SelectionKernels,
    SubspaceKernels,
)
"""The classes that contain the kernels."""


class CudaKernels:
    """The kernels that work on tables, as attributes, for one device."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        plans = Plans(driver)
        self.together, self.finalise, self.start_again = plans.together, plans.finalise, plans.start_again
        self.rehearsing = plans.rehearsing
        self._parts = [part(plans) for part in PARTS]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        for part in self._parts:
            if hasattr(part, name):
                kernel: Callable[..., Any] = getattr(part, name)
                setattr(self, name, kernel)  # the next look-up does not come here
                return kernel
        raise AttributeError(f"no kernel of the device is named {name!r}")
