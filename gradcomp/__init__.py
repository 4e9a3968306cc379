"""gradcomp: compressed gradient exchange for data-parallel training."""

from gradcomp.compress import Cast, Compression, Compressor, Identity, Policy, Quantize
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
    "Filter",
    "GradcompError",
    "Identity",
    "LayerSpec",
    "Plan",
    "PlanMismatchError",
    "Policy",
    "Quantize",
    "StateError",
    "TransportError",
    "WireFormatError",
    "__version__",
]
