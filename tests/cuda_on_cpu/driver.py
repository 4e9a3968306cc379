"""The driver's stand-in: memory with guards on both sides, kernels as fibers; see cuda_on_cpu.hpp.

With GRADCOMP_SANITIZE_KERNELS=1 in the environment, kernels are compiled with the sanitizers of addresses and of
undefined behaviour, and the process ends at the first thing they find. One of them has to be there first::

    LD_PRELOAD=$(c++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 GRADCOMP_SANITIZE_KERNELS=1 pytest ...
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import re
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cuda_on_cpu import parameters
from gradcomp.kernels.cuda import modules
from gradcomp.kernels.cuda.call import Call
from gradcomp.kernels.cuda.layout import Layout
from gradcomp.kernels.cuda.modules import holding

HERE = Path(__file__).parent
GUARD = 256
_PATTERN = 0xA7

SANITIZED = os.environ.get("GRADCOMP_SANITIZE_KERNELS") == "1"
_SANITIZE = (
    *("-g", "-DCUDA_ON_CPU_SANITIZED", "-fsanitize=address,undefined,float-cast-overflow"),
    *("-fno-sanitize-recover=all", "--param=asan-stack=0"),  # stacks are the fibers'
)
_one_at_a_time = threading.Lock()


class Block:
    """Memory between two guards, full of garbage."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._workspace = np.full(nbytes + 2 * GUARD + 256, _PATTERN, dtype=np.uint8)
        self._begin = GUARD + -(self._workspace.ctypes.data + GUARD) % 256
        self.address = self._workspace.ctypes.data + self._begin

    def check(self) -> None:
        end = self._begin + self.nbytes
        assert (self._workspace[self._begin - GUARD : self._begin] == _PATTERN).all(), (
            "written before a block"
        )
        assert (self._workspace[end : end + GUARD] == _PATTERN).all(), "written behind a block"

    def __del__(self) -> None:
        self.check()


class CpuDriver:
    """`order` is that of the threads: 0 ascending, 1 descending, else shuffled. `parallel`: blocks run side by side.

    Kernels run at once. What is copied to the host comes there when that has been waited for. ``held``: events of the
    own stream are not reached.
    """

    stream = 1 << 20

    def __init__(self, folder: Path, order: int = 0, *, parallel: bool = False) -> None:
        self.order = order
        self._parallel = parallel
        self.launched: list[tuple[str, int]] = []
        self.residents = 3  # blocks of a kernel that go through tiles
        self.synchronized = 0
        self.late = 0
        self.current_in: set[int] = set()  # threads that work on the device
        self.held = False
        self.waited = 0  # events of the own stream
        self._downloads: list[tuple[np.ndarray, bytes]] = []
        self._downloaded = 0  # how many there were before these
        self._asked: dict[Any, int] = {}
        self.events: list[tuple[str, Any]] = []
        self._folder = folder
        self._reached: dict[int, int] = {}  # memory of the device: where it begins and ends
        # What of it was freed: a finalizer that removed it may run inside a copy of the dict, which is broken then.
        self._freed: deque[int] = deque()
        self._pinned: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
        self.gaps: list[tuple[int, int]] = []  # addresses and sizes, of what no kernel may touch

    def make_current(self) -> None:
        self.current_in.add(threading.get_ident())

    def allocate(self, nbytes: int) -> Block:
        block = Block(nbytes)
        self._note(block, block.address, nbytes)
        return block

    def _note(self, owner: object, address: int, nbytes: int) -> None:
        self._forget_freed()  # what was there before
        self._reached[address] = address + nbytes
        weakref.finalize(owner, self._freed.append, address)

    def _forget_freed(self) -> None:
        with suppress(IndexError):
            while True:
                self._reached.pop(self._freed.popleft(), None)

    def shared(self, nbytes: int) -> np.ndarray:
        """Zeros of a framework's on the device, which tests read and write as well."""
        whole = np.zeros(nbytes + 256, dtype=np.uint8)
        key = whole.ctypes.data
        self._note(whole, key, whole.nbytes)
        return whole[-key % 256 :][:nbytes]

    def pinned(self, nbytes: int) -> np.ndarray:
        found = np.full(nbytes, _PATTERN, dtype=np.uint8)
        self._pinned[found.ctypes.data] = found
        return found

    def _check_pinned(self, array: np.ndarray) -> None:
        """Other memory of the host is copied while the caller waits."""
        begin = array.ctypes.data
        assert any(
            first <= begin and begin + array.nbytes <= first + each.nbytes
            for first, each in list(self._pinned.items())
        ), "copied from memory that is not pinned, or to such"

    def upload(self, address: int, modules: np.ndarray) -> None:
        self._check_pinned(modules)
        ctypes.memmove(address, modules.ctypes.data, modules.nbytes)

    def download(self, target: np.ndarray, address: int) -> None:
        self._check_pinned(target)
        self._downloads.append((target, ctypes.string_at(address, target.nbytes)))

    def zero(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0, nbytes)

    def function(self, name: str, kernel: str, defines: Mapping[str, object]) -> Any:
        holding(name, kernel, defines)  # what is in no module is nowhere on a GPU
        parallel = {"CUDA_ON_CPU_PARALLEL": 1} if self._parallel else {}
        library = compiled(self._folder, name, {**defines, **parallel})
        return library, getattr(library, kernel), kernel

    def resident(self, function: Any, threads: int) -> int:
        return self.residents

    def launch(self, function: Any, blocks: int, threads: int, parameters: np.ndarray) -> None:
        library, kernel, name = function
        self.launched.append((name, blocks))
        with _one_at_a_time, _fenced(self.gaps):
            stuck = library.cuda_on_cpu_launch(
                kernel, ctypes.c_int64(blocks), threads, ctypes.c_void_p(parameters.ctypes.data), self.order
            )
        if stuck:
            raise RuntimeError(f"{name}: threads wait for each other for ever")

    def synchronize(self) -> None:
        self.synchronized += 1
        self._come(self._downloaded + len(self._downloads))

    def _come(self, number: int) -> None:
        """Downloads up to this one are there."""
        while self._downloaded < number:
            target, found = self._downloads.pop(0)
            target[:] = np.frombuffer(found, np.uint8)
            self._downloaded += 1

    def reaches(self, address: int) -> bool:
        self._forget_freed()
        return any(begin <= address < end for begin, end in self._reached.copy().items())

    def mark(self, stream: int) -> Any:
        if stream == self.stream:
            self.waited += 1
            return _Own(self._downloaded + len(self._downloads))
        self.events.append(("mark", stream))
        return len(self.events)

    def reached(self, event: Any) -> bool:
        """After as many questions as ``late`` says; an own event unless they are held."""
        if isinstance(event, _Own):
            if not self.held:
                self._come(event.downloads)
            return not self.held
        self._asked[event] = self._asked.get(event, 0) + 1
        return self._asked[event] > self.late

    def follow(self, event: Any) -> None:
        self.events.append(("follow", event))


@dataclass(frozen=True, eq=False)
class _Own:
    """An event of the driver's own stream, behind so many downloads."""

    downloads: int


@contextmanager
def _fenced(gaps: list[tuple[int, int]]) -> Iterator[None]:
    """Nobody touches these meanwhile."""
    for address, size in gaps:
        _asan("__asan_poison_memory_region", address, size)
    yield
    for address, size in gaps:
        _asan("__asan_unpoison_memory_region", address, size)


def _asan(name: str, address: int, size: int) -> None:
    getattr(ctypes.CDLL(None), name)(ctypes.c_void_p(address), ctypes.c_size_t(size))


_launch = Call.launch


def _launch_checked(call: Call, name: str, kernel: str, blocks: int, *given: Any, **settings: Any) -> None:
    parameters.check(name, kernel, given)
    _launch(call, name, kernel, blocks, *given, **settings)


Call.launch = _launch_checked  # type: ignore[method-assign]

if SANITIZED:
    _upload = Layout.upload

    def _upload_and_fence(layout: Layout, address: int, staged: np.ndarray) -> None:
        """Each piece of a call's memory ends where it ends, not at the next boundary."""
        pieces = sorted(layout.pieces())
        driver: Any = layout._driver
        driver.gaps = [
            (address + at + nbytes, after - at - nbytes)
            for (at, nbytes), (after, _) in itertools.pairwise(pieces)
            if after > at + nbytes
        ]
        at, nbytes = pieces[-1]
        driver.gaps.append((address + at + nbytes, GUARD))
        _upload(layout, address, staged)

    Layout.upload = _upload_and_fence  # type: ignore[method-assign]


_libraries: dict[str, ctypes.CDLL] = {}
_compiling = threading.Lock()  # ranks may be threads


def compiled(folder: Path, name: str, defines: Mapping[str, object]) -> ctypes.CDLL:
    """The shared object of a source; kept in `folder` for the next run."""
    shim = HERE / "cuda_on_cpu.hpp"
    text = f'#include "{shim}"\n#line 1 "{name}"\n{modules.flat(name)}'
    defined = [option for option in modules.options(defines) if option.startswith("-D")]
    command = [
        os.environ.get("CXX", "c++"),
        "-std=c++20",
        "-O1",
        "-ffp-contract=off",
        "-U_FORTIFY_SOURCE",
        "-w",
        *(_SANITIZE if SANITIZED else ()),
        "-fPIC",
        "-fno-gnu-unique",  # a library's shared memory is its own, whatever others have under the same name
    ]
    common = tuple(command)
    command += ["-shared", *defined]
    key = hashlib.sha256("\0".join([shim.read_text(), text, *command]).encode()).hexdigest()[:32]
    with _compiling:
        if key not in _libraries:
            target = folder / f"{key}.so"
            if not target.exists():
                folder.mkdir(parents=True, exist_ok=True)
                part = folder / f"{key}.{os.getpid()}"
                # Of the few sources that are compiled with sanitizers, none saves what the headers take.
                headers = () if SANITIZED else ("-include", str(_headers(folder, common)))
                _compile([*command, *headers, "-x", "c++", "-", "-o", str(part)], text, name)
                part.rename(target)
            _libraries[key] = ctypes.CDLL(str(target))
        return _libraries[key]


@functools.cache
def _headers(folder: Path, command: tuple[str, ...]) -> Path:
    """The shim's headers, precompiled: to read them takes the compiler as long as all the rest of a source."""
    text = "".join(re.findall(r"^#include <.*>\n", (HERE / "cuda_on_cpu.hpp").read_text(), re.M))
    name = hashlib.sha256("\0".join([text, *command]).encode()).hexdigest()[:32]
    header = folder / f"{name}.hpp"
    compiled_header = folder / f"{name}.hpp.gch"
    if not compiled_header.exists():
        part = folder / f"{name}.{os.getpid()}"
        part.write_text(text)
        part.rename(header)
        _compile([*command, "-x", "c++-header", str(header), "-o", str(part)], "", "the shim")
        part.rename(compiled_header)
    return header


def _compile(command: list[str], text: str, what: str) -> None:
    run = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{what} does not compile for the CPU:\n{run.stderr[:4000]}"
