"""gradcomp: compressed gradient exchange for data-parallel training."""

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
from gradcomp.version import __version__

__all__ = [
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
    "WireFormatError",
    "__version__",
]

__all__ += compress.__all__
