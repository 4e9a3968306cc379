"""NVRTC, which needs no GPU: from a CUDA source to PTX."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from gradcomp.kernels.cuda import source


@cache
def _library() -> ctypes.CDLL:
    """The one of the package nvidia-cuda-nvrtc, which the tests install; ImportError without it."""
    found = importlib.util.find_spec("nvidia")
    for root in () if found is None else found.submodule_search_locations or ():
        for library in sorted(Path(root).glob("cu*/lib/libnvrtc.so.*")):
            for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(library))
    raise ImportError("nvidia-cuda-nvrtc is not installed")


def ptx(name: str, defines: Mapping[str, object], architecture: int) -> str:
    """The PTX of a source; AssertionError, with the compiler's words, for an error or a warning."""
    nvrtc, program = _library(), ctypes.c_void_p()
    text = (source.flat(source.PRELUDE) + source.flat(name)).encode()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name.encode(), 0, None, None) == 0
    try:
        options = [*source.options(defines), f"--gpu-architecture=compute_{architecture}"]
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), array)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        assert status == 0, log
        assert "warning" not in log, log
        return _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(size_of: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    assert size_of(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(max(size.value, 1))
    assert get(program, text) == 0
    return text.value.decode()
