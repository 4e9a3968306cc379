"""Finds the code of a module in a file: one that came with the package, or one that is built on this machine, once.

``make cubins`` builds those of the package without a GPU. A file's name is a digest of source, options and the
compiler's version; if any of them changes, the code is built on this machine again.
"""

from __future__ import annotations

import logging
import os
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

from gradcomp.kernels.cuda.modules import Module
from gradcomp.kernels.cuda.nvrtc import installed

logger = logging.getLogger("gradcomp")

PACKAGED: Final = Path(__file__).parent / "cubins"
"""Where ``make cubins`` writes: a folder for each compiler, as ``13.0``."""


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
    """Returns a file in CuPy's folder, built unless it is there and whole; one in memory if that is not writable."""
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
    """Tells whether code is complete: an ELF file by the tables that its header lists, PTX by its last character."""
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
