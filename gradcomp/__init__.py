"""gradcomp: compressed gradient exchange for data-parallel training."""

from gradcomp.compress import (
    Cast,
    Compression,
    Compressor,
    DensitySchedule,
    ErrorFeedback,
    Identity,
    LocalClip,
    MomentumCorrection,
    Policy,
    Quantize,
    TopK,
    Warmup,
)
from gradcomp.core.config import Config
from gradcomp.core.errors import (
    ConfigError,
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
    "Assignment",
    "Cast",
    "Compression",
    "Compressor",
    "Config",
    "ConfigError",
    "DensitySchedule",
    "ErrorFeedback",
    "Filter",
    "GradcompError",
    "Identity",
    "LayerSpec",
    "LocalClip",
    "MomentumCorrection",
    "Plan",
    "PlanMismatchError",
    "Policy",
    "Quantize",
    "StateError",
    "TopK",
    "TransportError",
    "Warmup",
    "WireFormatError",
    "__version__",
]
