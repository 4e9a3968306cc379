"""Sources built by NVRTC, once per machine: what CuPy then loads from a file.

CuPy compiles too, but adds ``-ftz=true`` behind whatever options it is given, which is what counts: numbers near zero
would become zero, and the bytes others than on a CPU.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from cupy.cuda import nvrtc

from gradcomp.kernels.cuda.source import PRELUDE, flat, options


def built(source: str, defines: Mapping[str, object], capability: int) -> Path:
    """The file of a source for devices of this compute capability, 90 for 9.0; RuntimeError if it does not compile."""
    text = flat(PRELUDE) + flat(source)
    known = [each for each in nvrtc.getSupportedArchs() if each <= capability]
    if not known:
        raise RuntimeError(f"NVRTC {nvrtc.getVersion()} compiles for no device of capability {capability}")
    # A device that is newer than the compiler takes PTX, and its driver compiles that.
    kind, form = ("sm", "cubin") if max(known) == capability else ("compute", "ptx")
    settings = (*options(defines), f"--gpu-architecture={kind}_{max(known)}")
    made_of = "\0".join([text, *settings, repr(nvrtc.getVersion())])
    key = hashlib.sha256(made_of.encode()).hexdigest()[:40]
    target = _folder() / f"gradcomp-{key}.{form}"
    if not target.exists():
        code = _compiled(source, text, settings, form)
        # Under another name first: processes that start together may all build it.
        handle, part = tempfile.mkstemp(dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        Path(part).rename(target)
    return target


def _compiled(source: str, text: str, settings: tuple[str, ...], form: str) -> bytes:
    program = nvrtc.createProgram(text, source, (), ())
    try:
        nvrtc.compileProgram(program, settings)
        code = nvrtc.getCUBIN(program) if form == "cubin" else nvrtc.getPTX(program)
        return code if isinstance(code, bytes) else bytes(code, "utf-8")
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{source} does not compile: {error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


@cache
def _folder() -> Path:
    """CuPy's folder for such files; one that ends with the machine's temporary files if it cannot be written."""
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="gradcomp-"))
