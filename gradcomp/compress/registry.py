"""String forms: ``"quantize:bits=4,bucket_size=512"`` <-> ``Quantize(bits=4, bucket_size=512)``.

Other packages may add compressors under the entry point group ``gradcomp.compressors``.
"""

from __future__ import annotations

import dataclasses
from functools import cache, lru_cache
from importlib.metadata import entry_points

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
from gradcomp.compress.powersgd import PowerSGD
from gradcomp.compress.quantize import Quantize
from gradcomp.compress.random_block import RandomBlock
from gradcomp.compress.random_k import RandomK
from gradcomp.compress.redsync import RedSync
from gradcomp.compress.scaled_sign import ScaledSign
from gradcomp.compress.schedule import DensitySchedule, Warmup
from gradcomp.compress.sidco import SIDCo
from gradcomp.compress.signum import Signum
from gradcomp.compress.spectral_atomo import SpectralAtomo
from gradcomp.compress.terngrad import TernGrad
from gradcomp.compress.threshold import Threshold
from gradcomp.compress.topk import TopK
from gradcomp.compress.unbiased_rank import UnbiasedRank
from gradcomp.compress.wrapper import Wrapper
from gradcomp.core.errors import ConfigError
from gradcomp.core.forms import arguments_of, split, value_of
from gradcomp.core.plan import Level

BUILT_IN: tuple[type[Compressor], ...] = (
    Identity,
    Cast,
    Quantize,
    AdaComp,
    BestRank,
    CLTk,
    Codebook,
    DGC,
    GlobalTopK,
    NUQSGD,
    OneBit,
    PowerSGD,
    RandomBlock,
    RandomK,
    RedSync,
    ScaledSign,
    SIDCo,
    Signum,
    SpectralAtomo,
    TernGrad,
    Threshold,
    TopK,
    UnbiasedRank,
    ErrorFeedback,
    MomentumCorrection,
    LocalClip,
    Warmup,
    DensitySchedule,
    Graded,
)

_SHORT = {"fp16": Cast("float16"), "bf16": Cast("bfloat16")}


@cache
def registered() -> dict[str, type[Compressor]]:
    """Every compressor by its name."""
    found = {c.name: c for c in BUILT_IN}
    for point in entry_points(group="gradcomp.compressors"):
        loaded = point.load()
        if not (isinstance(loaded, type) and issubclass(loaded, Compressor)):
            raise ConfigError(f"entry point {point.name} is not a Compressor")
        if loaded.name in found:
            raise ConfigError(f"two compressors are named {loaded.name!r}")
        found[loaded.name] = loaded
    return found


def from_string(text: str) -> Compressor:
    """Parse a string form. ConfigError says what is wrong and what exists."""
    return _parse(text, None)


def _parse(text: str, level: Level) -> Compressor:
    """With a level, unless that is None, in place of the one that the text names or leaves out."""
    name, inner, rest = split(text.strip())
    if name in _SHORT:
        if rest or inner is not None:
            raise ConfigError(
                f"{name} takes no fields and wraps nothing; write {_SHORT[name].to_string()!r} and change that"
            )
        return _SHORT[name].with_level(level)
    kind = registered().get(name)
    if kind is None:
        raise ConfigError(
            f"unknown compression {name!r}; known: {', '.join(sorted([*registered(), *_SHORT]))}"
        )
    fields = {f.name for f in dataclasses.fields(kind)} - {"inner"}
    if issubclass(kind, Wrapper) != (inner is not None):
        raise ConfigError(
            f"{text!r}: {name} wraps another compressor: {name}[topk:density=0.01]"
            if inner is None
            else f"{text!r}: {name} wraps nothing"
        )
    wrapped = {} if inner is None else {"inner": _parse(inner, level)}
    arguments = arguments_of(text, rest, fields, lambda _, value: value_of(value, from_string))
    if level is not None and inner is None:
        if kind.level_field is None:
            raise ConfigError(f"{name} has no level, got {level!r}")
        arguments[kind.level_field] = level
    try:
        return kind(**wrapped, **arguments)
    except TypeError as error:
        raise ConfigError(f"{text!r}: {error}") from error


# Plans name a few compressors many times. Of 4 and 4.0 one may be impossible: hence typed.
@lru_cache(maxsize=4096, typed=True)
def at_level(family: str, level: Level) -> Compressor:
    """The compressor that a plan's assignment means."""
    # Not with_level: the level that a compressor has by default may be one that it refuses beside the other fields.
    return _parse(family, level)
