"""gradcomp: compressed gradient exchange for data-parallel training."""

from typing import TYPE_CHECKING, Any

from gradcomp import compress
from gradcomp.compress import *  # noqa: F403 - the compressors, and what chooses among them
from gradcomp.control import (
    Accordion,
    AdaQS,
    Auto,
    Bayes,
    Controller,
    FixedPlan,
    GraVAC,
    KMeans,
    LGreCo,
    Linear,
    Schedule,
    WhatIf,
)
from gradcomp.core.config import Config
from gradcomp.core.errors import (
    ConfigError,
    DeviceError,
    GradcompError,
    PlanMismatchError,
    StateError,
    TransportError,
    WireFormatError,
)
from gradcomp.core.layers import Filter, LayerSpec
from gradcomp.core.plan import Assignment, Plan
from gradcomp.core.registry import contributed
from gradcomp.version import __version__

if TYPE_CHECKING:
    from gradcomp.contrib.lgc.lgc import LGC
else:  # type checkers report a missing name themselves, unless they see a __getattr__

    def __getattr__(name: str) -> Any:
        if name == "LGC":
            globals()[name] = kind = contributed(name)  # so that eval(repr(...)) finds it
            return kind
        told = f"module 'gradcomp' has no attribute {name!r}"
        if not name.startswith("_"):
            told += "; what scripts call is in `import gradcomp.torch as gc` or `import gradcomp.tf as gc`"
        raise AttributeError(told)


__all__ = [
    "LGC",
    "Accordion",
    "AdaQS",
    "Assignment",
    "Auto",
    "Bayes",
    "Config",
    "ConfigError",
    "Controller",
    "DeviceError",
    "Filter",
    "FixedPlan",
    "GraVAC",
    "GradcompError",
    "KMeans",
    "LGreCo",
    "LayerSpec",
    "Linear",
    "Plan",
    "PlanMismatchError",
    "Schedule",
    "StateError",
    "TransportError",
    "WhatIf",
    "WireFormatError",
    "__version__",
]
__all__ += compress.__all__
compress.__all__.append("LGC")  # not there: the star import above would import contrib
