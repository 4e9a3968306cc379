"""NVIDIA's run-time compiler, which turns a text into the code for an architecture. It needs no GPU.

CuPy offers it too, but cuts the last byte off every ELF file, and appends ``-ftz=true`` to the options, where it
overrides ours: numbers near zero would become zero, and the bytes would differ from a CPU's.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

_NAMES: Final = ("libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12")
_NO_ERROR, _COMPILATION = 0, 6  # of nvrtcResult


class Nvrtc:
    """A loaded NVRTC: CUDA's ``version``, (13, 0); ``architectures``, ascending compute capabilities, 90 for 9.0."""

    def __init__(self, path: str) -> None:
        # The library opens its builtins by name, and the loader does not search a wheel's folder.
        for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(path)
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        self.architectures = tuple(sorted(numbers))

    def compile(self, name: str, text: str, options: Sequence[str], form: str) -> tuple[bytes, str]:
        """Returns code in ``form``, "CUBIN" or "PTX", and the compiler's log; RuntimeError with the log on failure."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
        try:
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), given)
            log = self._read("ProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
            if status != _NO_ERROR:
                what = "does not compile" if status == _COMPILATION else f"NVRTC fails with {status}"
                raise RuntimeError(f"{name}: {what}\n{log}")
            return self._read(form, program), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        room = (ctypes.c_char * size.value)()
        self._call(f"nvrtcGet{what}", program, room)
        return room.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != _NO_ERROR:
            raise RuntimeError(f"{function} fails with {status}")


@cache
def installed() -> Nvrtc:
    """Returns the compiler of this environment; ImportError, which says what to install, if there is none."""
    for path in (*_of_wheels(), *_of_cupy(), *_NAMES):
        with suppress(OSError):
            return Nvrtc(path)
    raise ImportError("NVRTC, CUDA's run-time compiler, is not installed: run pip install nvidia-cuda-nvrtc")


def _of_wheels() -> list[str]:
    """Returns the libraries of NVIDIA's wheels, the newest first."""
    found = importlib.util.find_spec("nvidia")
    roots = () if found is None else found.submodule_search_locations or ()
    paths = [path for root in roots for path in Path(root).glob("*/lib/libnvrtc.so.*")]
    return [str(path) for path in sorted(paths, key=lambda path: int(path.suffix[1:]), reverse=True)]


def _of_cupy() -> Iterator[str]:
    """Yields the library that CuPy finds by its own search, which leaves it open in this process."""
    try:
        # In CuPy 14 nvrtc is an attribute and no module.
        importlib.import_module("cupy").cuda.nvrtc.getVersion()
    except (AttributeError, ImportError, RuntimeError):
        return
    maps = Path("/proc/self/maps")
    if maps.exists():
        yield from dict.fromkeys(re.findall(r"(/\S*/libnvrtc\.so\.\d[.\d]*)$", maps.read_text(), re.M))
