"""What NVRTC makes of the modules: no GPU is needed. It is kept in `build/nvrtc`, by what it is made of."""

from __future__ import annotations

import os
from pathlib import Path

from gradcomp.kernels.cuda.modules import Module
from gradcomp.kernels.cuda.nvrtc import installed

FOLDER = Path(__file__).resolve().parents[2] / "build" / "nvrtc"


def ptx(module: Module, architecture: int) -> str:
    """The PTX of a module; AssertionError, with the compiler's words, for a warning; RuntimeError for an error."""
    return _kept(module, f"compute_{architecture}", "PTX").rstrip(b"\0").decode()


def cubin(module: Module, architecture: int) -> bytes:
    """Its code for devices of one kind."""
    return _kept(module, f"sm_{architecture}", "CUBIN")


def _kept(module: Module, architecture: str, form: str) -> bytes:
    compiler = installed()
    kept = FOLDER / f"{module.digest(architecture, compiler.version)}.{form.lower()}"
    if not kept.exists():
        code, log = compiler.compile(module.source, module.text(), module.settings(architecture), form)
        assert not log, log
        FOLDER.mkdir(parents=True, exist_ok=True)
        part = FOLDER / f"{kept.name}.{os.getpid()}"
        part.write_bytes(code)
        part.rename(kept)
    return kept.read_bytes()
