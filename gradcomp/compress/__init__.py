"""Compressors: how a group of layers becomes its mean over ranks."""

from gradcomp.compress.adacomp import AdaComp
from gradcomp.compress.base import Compressor
from gradcomp.compress.best_rank import BestRank
from gradcomp.compress.cast import Cast
from gradcomp.compress.clt_k import CLTk
from gradcomp.compress.codebook import Codebook
from gradcomp.compress.dgc import DGC
from gradcomp.compress.error_feedback import ErrorFeedback
from gradcomp.compress.global_topk import GlobalTopK
from gradcomp.compress.graded import Graded
from gradcomp.compress.identity import Identity
from gradcomp.compress.local_clip import LocalClip
from gradcomp.compress.momentum_correction import MomentumCorrection
from gradcomp.compress.nuqsgd import NUQSGD
from gradcomp.compress.one_bit import OneBit
from gradcomp.compress.policy import Compression, Policy, as_policy
from gradcomp.compress.powersgd import PowerSGD
from gradcomp.compress.quantize import Quantize
from gradcomp.compress.random_block import RandomBlock
from gradcomp.compress.random_k import RandomK
from gradcomp.compress.redsync import RedSync
from gradcomp.compress.registry import at_level, from_string
from gradcomp.compress.scaled_sign import ScaledSign
from gradcomp.compress.schedule import DensitySchedule, Warmup
from gradcomp.compress.sidco import SIDCo
from gradcomp.compress.signum import Signum
from gradcomp.compress.spectral_atomo import SpectralAtomo
from gradcomp.compress.terngrad import TernGrad
from gradcomp.compress.threshold import Threshold
from gradcomp.compress.topk import TopK
from gradcomp.compress.unbiased_rank import UnbiasedRank

__all__ = [
    "DGC",
    "NUQSGD",
    "AdaComp",
    "BestRank",
    "CLTk",
    "Cast",
    "Codebook",
    "Compression",
    "Compressor",
    "DensitySchedule",
    "ErrorFeedback",
    "GlobalTopK",
    "Graded",
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
    "UnbiasedRank",
    "Warmup",
    "as_policy",
    "at_level",
    "from_string",
]
