"""Compressors: how a group of layers becomes its mean over ranks."""

from gradcomp.compress.base import Compressor
from gradcomp.compress.cast import Cast
from gradcomp.compress.identity import Identity
from gradcomp.compress.policy import Compression, Policy, as_policy
from gradcomp.compress.quantize import Quantize
from gradcomp.compress.registry import at_level, from_string

__all__ = [
    "Cast",
    "Compression",
    "Compressor",
    "Identity",
    "Policy",
    "Quantize",
    "as_policy",
    "at_level",
    "from_string",
]
