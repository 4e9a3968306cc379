"""The list of modules, one for each family of kernels and each codec; only their kernels are launched."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from gradcomp.kernels.cuda.codes import CODED, classes_of, encoders_of, has_buckets, rounding
from gradcomp.kernels.cuda.factors import RANKS
from gradcomp.kernels.cuda.source import PRELUDE, flat, options
from gradcomp.kernels.segments import LEVELS, STOCHASTIC, UNIT_BYTES

FAMILY: Final = "GRADCOMP_FAMILY"
"""The macro that selects the part of a source to compile; without it all of the source is compiled."""

Defines = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Module:
    """The ``kernels`` of a source that are compiled together, with the macros ``defines`` beside the family."""

    source: str
    kernels: tuple[str, ...]
    defines: Defines = ()
    family: str = ""

    def settings(self, architecture: str) -> tuple[str, ...]:
        """Returns the compiler's options. ``architecture``: as ``sm_90``, or ``compute_90`` for PTX."""
        family = {FAMILY: self.family} if self.family else {}
        return (*options(dict(self.defines) | family), f"--gpu-architecture={architecture}")

    def text(self) -> str:
        """Returns the source with all that it includes."""
        return flat(PRELUDE) + flat(self.source)

    def digest(self, architecture: str, compiler: tuple[int, int]) -> str:
        """Returns 40 hexadecimal digits of a hash of source, options and the compiler's version."""
        made_of = "\0".join([self.text(), *self.settings(architecture), repr(compiler)])
        return hashlib.sha256(made_of.encode()).hexdigest()[:40]

    def __str__(self) -> str:
        of = " ".join([*(value for _, value in self.defines), *([self.family] if self.family else [])])
        return f"{self.source} ({of})" if of else self.source


#: Sources that are one module each, with their kernels.
_WHOLE: Final = {
    "adacomp.cu": ("maxima", "mark"),
    "bits.cu": (
        *("bits_starts", "bits_decode", "bits_decode_add", "bits_mean", "bits_choose", "bits_records"),
        *("bits_encode_ranges", "bits_encode_nearest", "bits_encode_stochastic"),
        *("bits_reduce_ranges", "bits_reduce_nearest", "bits_reduce_stochastic"),
    ),
    "bisect.cu": ("bisect_begin", "bisect_count", "bisect_decide"),
    "draws.cu": ("draw_indices",),
    "expand.cu": ("expand", "subtract"),
    "indices.cu": (
        *("encode_streams", "count_positions", "add_counts", "decode_positions"),
        *("copy_lists", "check_lists"),
    ),
    "lists.cu": ("check", "take", "clear", "claim", "decide", "put"),
    "moments.cu": ("moments",),
    "orthogonalise.cu": ("largest_magnitudes", "orthogonalise", "keep"),
    "rows.cu": ("discard", "collect", "nonzero", "encode_doubles", "reduce_doubles", "decode_doubles"),
    "sample.cu": ("sample",),
    "scatter.cu": ("check_lists", "scatter"),
    "select.cu": (
        *("contribute", "contribute_histogram", "histogram", "histogram_marking", "pick"),
        *("count", "scan", "write_selection", "threshold"),
    ),
    "sums.cu": ("squares", "tail", "join"),
}


def _listed() -> Iterator[Module]:
    for source, kernels in _WHOLE.items():
        yield Module(source, kernels)
    yield Module("project.cu", ("add_parts",), (), "ADD_PARTS")
    for ranks in RANKS:
        defines = (("GRADCOMP_RANKS", str(ranks)),)
        yield Module("project.cu", ("project",), defines, "PROJECT")
        yield Module("project.cu", ("back_project",), defines, "BACK_PROJECT")
    for codec in CODED:
        yield from _of_codec(codec)


def _of_codec(codec: int) -> Iterator[Module]:
    """Lists the modules of a codec at all its levels, with the classes that launches use."""
    bits = np.array(LEVELS.get(codec, (0,)), dtype=np.int32)
    for name, _ in classes_of(codec, bits):
        yield Module("decode.cu", ("decode", "decode_add"), (("GRADCOMP_CLASS", name),))
    for drawn in (False, True) if codec in STOCHASTIC else (False,):
        for name, _ in encoders_of(codec, bits, drawn):
            yield from _of_encoder(name, rounding(drawn), has_buckets(codec))
    if codec in UNIT_BYTES:
        for name, _ in classes_of(codec, bits):
            kernels = ("encode_largest", "reduce_largest")
            yield Module("ranges.cu", kernels, (("GRADCOMP_CLASS", name),), "LARGEST")


def _of_encoder(name: str, how: str, any_bucket: bool) -> Iterator[Module]:
    defines = (("GRADCOMP_CLASS", name),)
    for stem in ("encode", "reduce", "losses"):
        source = "losses.cu" if stem == "losses" else "encode.cu"
        yield Module(source, (f"{stem}_{how}",), defines, f"{stem}_{how}".upper())
    if any_bucket:
        codes = (f"encode_codes_{how}", f"reduce_codes_{how}")
        yield Module("encode.cu", codes, defines, f"CODES_{how}".upper())
        yield Module("ranges.cu", ("encode_ranges", "reduce_ranges"), defines, "RANGES")
        yield Module("ranges.cu", ("encode_parts", "reduce_parts", "join_parts"), defines, "PARTS")


@cache
def modules() -> tuple[Module, ...]:
    """Returns all modules, each once; several codecs share some."""
    return tuple(dict.fromkeys(_listed()))


@cache
def _by_kernel() -> dict[tuple[str, str, Defines], Module]:
    return {
        (module.source, kernel, tuple(sorted(module.defines))): module
        for module in modules()
        for kernel in module.kernels
    }


def holding(source: str, kernel: str, defines: Mapping[str, object]) -> Module:
    """Returns the module that contains a kernel; RuntimeError if none does."""
    given = tuple(sorted((name, str(value)) for name, value in defines.items()))
    found = _by_kernel().get((source, kernel, given))
    if found is None:
        raise RuntimeError(f"no module has {kernel} of {source} for {dict(given)}: list it in modules.py")
    return found
