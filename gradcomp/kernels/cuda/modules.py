"""The modules, one for each family of kernels and each codec: their source, their options, and files of their code.

NVRTC is given one text that needs no other files, so that a cache by text notices a change in any header. The headers
of `native/` are in the folder of the sources in a built package, and in `native/` in the repository. Code comes with
the package, where ``make cubins`` builds it without a GPU, or is built on this machine once. A file's name is a digest
of source, options and the compiler's version; if any of them changes, the code is built on this machine again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from gradcomp.kernels.cuda.codes import CODED, classes_of, encoders_of, has_buckets, rounding
from gradcomp.kernels.cuda.factors import RANKS
from gradcomp.kernels.cuda.nvrtc import installed
from gradcomp.kernels.segments import LEVELS, STOCHASTIC, UNIT_BYTES

_HERE: Final = Path(__file__).parent
_NATIVE: Final = (_HERE / "native", _HERE.parents[2] / "native")
_INCLUDE: Final = re.compile(r'^#include "([^"]+)"$')
_LIBRARY: Final = re.compile(r"^#include <[^>]+>$")

#: No contraction, no flush to zero, division and roots rounded by IEEE 754: the same bytes as on a CPU.
OPTIONS: Final = (
    "--std=c++20",
    "-default-device",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "-DGRADCOMP_CUDA",
    "-DGRADCOMP_BODY=cuda",
)

PRELUDE: Final = "prelude.cuh"

logger = logging.getLogger("gradcomp")
FAMILY: Final = "GRADCOMP_FAMILY"
"""The macro that selects the part of a source to compile; without it all of the source is compiled."""
Defines = tuple[tuple[str, str], ...]
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


@cache
def flat(name: str) -> str:
    """Returns the source with its headers in place of ``#include``, once each, without the standard library's."""
    lines: list[str] = []
    _append(_HERE / name, set(), lines)
    return "\n".join(lines) + "\n"


def options(defines: Mapping[str, object]) -> tuple[str, ...]:
    """Returns OPTIONS and the macro definitions of one module."""
    return (*OPTIONS, *(f"-D{name}={value}" for name, value in defines.items()))


def _append(path: Path, seen: set[Path], lines: list[str]) -> None:
    path = path.resolve()
    if path in seen:
        return
    seen.add(path)
    for line in path.read_text(encoding="utf-8").splitlines():
        if found := _INCLUDE.match(line):
            _append(_find(path, found[1]), seen, lines)
        elif line != "#pragma once" and not _LIBRARY.match(line):
            lines.append(line)


def _find(includer: Path, name: str) -> Path:
    if name.startswith("native/"):
        return next(root / name.removeprefix("native/") for root in _NATIVE if root.is_dir())
    return includer.parent / name


PACKAGED: Final = Path(__file__).parent / "cubins"
"""The folder to which ``make cubins`` writes; it has a folder for each compiler, such as ``13.0``."""


def built(module: Module, capability: int, cuda: int) -> Path:
    """Returns the file for devices of a compute capability, 90 for 9.0; RuntimeError if the source does not compile.

    ``cuda`` is the version that the device's driver supports, 13000 for 13.0: it loads no code of newer compilers.
    """
    return _packaged(module, capability, cuda) or _built_here(module, capability)


def _packaged(module: Module, capability: int, cuda: int) -> Path | None:
    """Returns the package's file, if any. Code for 8.0 also runs on 8.6 and all newer devices of its major number."""
    for folder, compiler in compilers(PACKAGED):
        if 1000 * compiler[0] + 10 * compiler[1] > cuda:
            continue
        for architecture in range(capability, capability // 10 * 10 - 1, -1):
            found = folder / f"{module.digest(f'sm_{architecture}', compiler)}.cubin"
            if found.exists():
                if whole(found.read_bytes()):
                    return found
                logger.warning("%s is damaged, and is not used: run make cubins to replace it", found)
    return None


def compilers(folder: Path) -> list[tuple[Path, tuple[int, int]]]:
    """Returns the subfolders that are named by a compiler's version, the newest first."""
    found = []
    for each in folder.glob("*.*"):
        major, _, minor = each.name.partition(".")
        if major.isdecimal() and minor.isdecimal():
            found.append((each, (int(major), int(minor))))
    return sorted(found, key=lambda pair: pair[1], reverse=True)


def _built_here(module: Module, capability: int) -> Path:
    """Returns a file in CuPy's folder, compiled if it is missing or damaged; one in memory if that is not writable."""
    compiler = installed()
    known = [each for each in compiler.architectures if each <= capability]
    if not known:
        raise RuntimeError(f"NVRTC {compiler.version} compiles for no device of capability {capability}")
    # For a device newer than the compiler we build PTX, which the device's driver compiles.
    kind, form = ("sm", "cubin") if max(known) == capability else ("compute", "ptx")
    architecture = f"{kind}_{max(known)}"
    folder = _folder()
    if folder is None:
        return _in_memory(compiled(module, architecture))
    target = folder / f"gradcomp-{module.digest(architecture, compiler.version)}.{form}"
    if not (target.exists() and whole(target.read_bytes())):
        write(target, compiled(module, architecture))
    return target


def compiled(module: Module, architecture: str) -> bytes:
    """Returns the code for an architecture: ELF for ``sm_90``, PTX for ``compute_90``; RuntimeError unless whole."""
    form = "CUBIN" if architecture.startswith("sm_") else "PTX"
    code, _ = installed().compile(module.source, module.text(), module.settings(architecture), form)
    code = code if form == "CUBIN" else code.rstrip(b"\0")
    if not whole(code):
        raise RuntimeError(
            f"{module}: NVRTC gave {len(code)} bytes for {architecture}, which are incomplete code"
        )
    return code


def whole(code: bytes) -> bool:
    """Returns whether code is complete: an ELF file by the tables that its header lists, PTX by its last character."""
    if not code.startswith(b"\x7fELF"):
        return b".version" in code and code.rstrip().endswith(b"}")
    if len(code) < 64:
        return False
    programs, sections = struct.unpack_from("<QQ", code, 32)
    program_bytes, program_count, section_bytes, section_count = struct.unpack_from("<4H", code, 54)
    ends = (programs + program_bytes * program_count, sections + section_bytes * section_count)
    return bool(len(code) >= max(ends))


def write(target: Path, code: bytes) -> None:
    """Writes all of the file or nothing, as processes that start together may all build it."""
    handle, part = tempfile.mkstemp(dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        Path(part).chmod(0o644)
        Path(part).rename(target)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


@cache
def _folder() -> Path | None:
    """Returns CuPy's folder for such files; None if it is not writable."""
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return None


def _in_memory(code: bytes) -> Path:
    """Returns the path of a file without a name, which exists until this process ends."""
    descriptor = os.memfd_create("gradcomp-kernels")
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(code)
    return Path(f"/proc/self/fd/{descriptor}")


@dataclass(frozen=True)
class Module:
    """The ``kernels`` of a source that are compiled together, with the macros ``defines`` and the family's."""

    source: str
    kernels: tuple[str, ...]
    defines: Defines = ()
    family: str = ""

    def settings(self, architecture: str) -> tuple[str, ...]:
        """Returns the compiler's options for an architecture, such as ``sm_90``, or ``compute_90`` for PTX."""
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
