"""Compressors define how a group of layers becomes its mean over ranks.

Every module of a family is imported here, so that a new file is enough: its compressor is then known by its name and is
public. The imports below repeat the names for type checkers. This module also exports what a compressor of your own
needs in addition to the names of ``gradcomp``: ``docs/tutorials/own-compressor.md``.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from gradcomp.compress import lowrank, quantise, sparse, wrappers
from gradcomp.compress.arrays import GroupArray
from gradcomp.compress.base import Compressor
from gradcomp.compress.base import Traits as Traits
from gradcomp.compress.bounds import Distortion as Distortion
from gradcomp.compress.fake import Fake
from gradcomp.compress.identity import Identity
from gradcomp.compress.lowrank.powersgd import PowerSGD, UnbiasedRank
from gradcomp.compress.lowrank.spectral import BestRank, SpectralAtomo
from gradcomp.compress.messages import Broadcast as Broadcast
from gradcomp.compress.messages import Gather as Gather
from gradcomp.compress.messages import Reduce as Reduce
from gradcomp.compress.messages import Sum as Sum
from gradcomp.compress.policy import Compression, Policy
from gradcomp.compress.policy import as_policy as as_policy
from gradcomp.compress.quantise.bucketed import NUQSGD, BlockFloat, Codebook, TernGrad
from gradcomp.compress.quantise.cast import Cast
from gradcomp.compress.quantise.quantize import Quantize
from gradcomp.compress.quantise.signs import OneBit, ScaledSign, Signum
from gradcomp.compress.registry import REGISTERED
from gradcomp.compress.registry import at_level as at_level
from gradcomp.compress.registry import from_string as from_string
from gradcomp.compress.registry import register as register
from gradcomp.compress.sparse.chunks import ChunkedTopK
from gradcomp.compress.sparse.clt_k import CLTk
from gradcomp.compress.sparse.dgc import DGC
from gradcomp.compress.sparse.drawn import RandomBlock, RandomK
from gradcomp.compress.sparse.threshold import AdaComp, RedSync, SIDCo, Threshold
from gradcomp.compress.sparse.topk import GlobalTopK, TopK
from gradcomp.compress.sparse.two_level_selection import TwoLevelSelection
from gradcomp.compress.wrappers.ef21 import EF21
from gradcomp.compress.wrappers.flat import Flat
from gradcomp.compress.wrappers.momentum import ErrorFeedback, LocalClip, MomentumCorrection
from gradcomp.compress.wrappers.schedule import DensitySchedule, Warmup
from gradcomp.core.registry import contributed

if TYPE_CHECKING:
    from gradcomp.contrib.lgc.lgc import LGC as LGC
else:

    def __getattr__(name: str) -> type[Compressor]:
        if name != "LGC":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return contributed(name)


for _family in (quantise, sparse, lowrank, wrappers):
    for _module in iter_modules(_family.__path__, f"{_family.__name__}."):
        import_module(_module.name)

__all__ = [
    "DGC",
    "EF21",
    "NUQSGD",
    "AdaComp",
    "BestRank",
    "BlockFloat",
    "CLTk",
    "Cast",
    "ChunkedTopK",
    "Codebook",
    "Compression",
    "Compressor",
    "DensitySchedule",
    "ErrorFeedback",
    "Fake",
    "Flat",
    "GlobalTopK",
    "GroupArray",
    "Identity",
    "LocalClip",
    "MomentumCorrection",
    "OneBit",
    "Policy",
    "PowerSGD",
    "Quantize",
    "RandomBlock",
    "RandomK",
    "RedSync",
    "SIDCo",
    "ScaledSign",
    "Signum",
    "SpectralAtomo",
    "TernGrad",
    "Threshold",
    "TopK",
    "TwoLevelSelection",
    "UnbiasedRank",
    "Warmup",
]

_public = {kind.__name__: kind for kind in REGISTERED.values()}
globals().update(_public)
__all__ += [name for name in _public if name not in __all__]
