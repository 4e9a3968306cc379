"""All kernels of a device behind the names of the other bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

# Those whose calls are written down once, and those that write them down at every run.
_PREPARED = (
    CodecKernels,
    BisectKernels,
    IndexKernels,
    LowRankKernels,
    ScatterKernels,
    SelectionKernels,
    SubspaceKernels,
)
_OTHERS = (MeasureKernels,)


class CudaKernels:
    """The kernels that work on tables, as attributes, for one device."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        plans = Plans(driver)
        self.together, self.finalise, self.run_again = plans.together, plans.finalise, plans.run_again
        self._parts = (*(part(driver, plans) for part in _PREPARED), *(part(driver) for part in _OTHERS))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        for part in self._parts:
            if hasattr(part, name):
                kernel: Callable[..., Any] = getattr(part, name)
                setattr(self, name, kernel)  # found once
                return kernel
        raise AttributeError(f"no kernel of the device is named {name!r}")
