"""The driver's stand-in: memory with guards on both sides, kernels as fibers; see cuda_on_cpu.hpp."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gradcomp.kernels.cuda import source

HERE = Path(__file__).parent
GUARD = 256
_PATTERN = 0xA7


class Block:
    """Memory between two guards, full of garbage."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._room = np.full(nbytes + 2 * GUARD + 256, _PATTERN, dtype=np.uint8)
        self._begin = GUARD + -(self._room.ctypes.data + GUARD) % 256
        self.address = self._room.ctypes.data + self._begin

    def check(self) -> None:
        end = self._begin + self.nbytes
        assert (self._room[self._begin - GUARD : self._begin] == _PATTERN).all(), "written before a block"
        assert (self._room[end : end + GUARD] == _PATTERN).all(), "written behind a block"

    def __del__(self) -> None:
        self.check()


class CpuDriver:
    """`order` is that of the threads: 0 ascending, 1 descending, else shuffled."""

    def __init__(self, folder: Path, order: int = 0) -> None:
        self.order = order
        self.launched: list[tuple[str, int]] = []
        self.synchronized = 0
        self.late = 0
        self._asked: dict[Any, int] = {}
        self.events: list[tuple[str, Any]] = []
        self._folder = folder
        self._reached: dict[int, int] = {}  # memory of the device: where it begins and ends

    def allocate(self, nbytes: int) -> Block:
        block = Block(nbytes)
        self._reached[block.address] = block.address + nbytes
        weakref.finalize(block, self._reached.pop, block.address)
        return block

    def managed(self, nbytes: int) -> np.ndarray:
        room = np.zeros(nbytes + 256, dtype=np.uint8)
        key = room.ctypes.data
        self._reached[key] = key + room.nbytes
        weakref.finalize(room, self._reached.pop, key)
        return room[-key % 256 :][:nbytes]

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.full(nbytes, _PATTERN, dtype=np.uint8)

    def upload(self, address: int, source: np.ndarray) -> None:
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def download(self, target: np.ndarray, address: int) -> None:
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    def zero(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0, nbytes)

    def function(self, name: str, kernel: str, defines: Mapping[str, object]) -> Any:
        library = compiled(self._folder, name, defines)
        return library, getattr(library, kernel), kernel

    def launch(self, function: Any, blocks: int, threads: int, argument: int) -> None:
        library, kernel, name = function
        self.launched.append((name, blocks))
        if library.cuda_on_cpu_launch(
            kernel, ctypes.c_int64(blocks), threads, ctypes.c_void_p(argument), self.order
        ):
            raise RuntimeError(f"{name}: threads wait for each other for ever")

    def synchronize(self) -> None:
        self.synchronized += 1

    def reaches(self, address: int) -> bool:
        return any(begin <= address < end for begin, end in self._reached.copy().items())

    def mark(self, stream: int) -> Any:
        self.events.append(("mark", stream))
        return len(self.events)

    def reached(self, event: Any) -> bool:
        """After as many questions as ``late`` says."""
        self._asked[event] = self._asked.get(event, 0) + 1
        return self._asked[event] > self.late

    def follow(self, event: Any) -> None:
        self.events.append(("follow", event))


_libraries: dict[str, ctypes.CDLL] = {}


def compiled(folder: Path, name: str, defines: Mapping[str, object]) -> ctypes.CDLL:
    """The shared object of a source; kept in `folder` for the next run."""
    shim = HERE / "cuda_on_cpu.hpp"
    text = f'#include "{shim}"\n#line 1 "{name}"\n{source.flat(name)}'
    flags = [option for option in source.options(defines) if option.startswith("-D")]
    command = [
        os.environ.get("CXX", "c++"),
        "-std=c++20",
        "-O1",
        "-ffp-contract=off",
        "-U_FORTIFY_SOURCE",
        "-w",
    ]
    command += ["-fPIC", "-shared", *flags]
    key = hashlib.sha256("\0".join([shim.read_text(), text, *command]).encode()).hexdigest()[:32]
    if key not in _libraries:
        target = folder / f"{key}.so"
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f"{key}.{os.getpid()}"
            run = subprocess.run(
                [*command, "-x", "c++", "-", "-o", str(part)],
                input=text,
                capture_output=True,
                text=True,
                check=False,
            )
            assert run.returncode == 0, f"{name} does not compile for the CPU:\n{run.stderr[:4000]}"
            part.rename(target)
        _libraries[key] = ctypes.CDLL(str(target))
    return _libraries[key]
