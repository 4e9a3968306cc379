"""gradcomp: compressed gradient exchange for data-parallel training."""

from gradcomp.compress import (
    NUQSGD,
    Cast,
    Codebook,
    Compression,
    Compressor,
    DensitySchedule,
    ErrorFeedback,
    Identity,
    LocalClip,
    MomentumCorrection,
    OneBit,
    Policy,
    Quantize,
    ScaledSign,
    Signum,
    TernGrad,
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
    "NUQSGD",
    "Assignment",
    "Cast",
    "Codebook",
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
    "OneBit",
    "Plan",
    "PlanMismatchError",
    "Policy",
    "Quantize",
    "ScaledSign",
    "Signum",
    "StateError",
    "TernGrad",
    "TopK",
    "TransportError",
    "Warmup",
    "WireFormatError",
    "__version__",
]
