"""Selects the backend that runs the host's kernels: NumPy, which defines them, or the compiled module.

The modules `reference` and `reference_*` define names, arguments and types of the kernels. :class:`Kernels` lists them;
every other backend has the same names and arguments (`tests/kernels/test_signatures.py`). Callers take the kernels of
the device where their arrays lie: ``device.kernels.encode(...)``.

A script that starts in a clone's root imports the source tree, which has no compiled module. That of the installed
package serves it if both come from the same C++ sources: the module knows a digest of those that it was built from.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import PathFinder
from itertools import chain
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from gradcomp.kernels import (
    philox,
    reference,
    reference_bits,
    reference_checksum,
    reference_headers,
    reference_indices,
    reference_lowrank,
    reference_program,
    reference_selection,
    subspace,
)
from gradcomp.kernels.replayed_calls import DONE, Pending, Routine
from gradcomp.kernels.segments import SEGMENT, Doubles, Draw, Factor, Floats, Shapes, check_array

NAME: Final = "gradcomp._native"
_ROOT: Final = Path(__file__).resolve().parents[2]

BackendName: TypeAlias = Literal["reference", "native"]

BASELINE_RANKS = 4
"""Above this rank NumPy multiplies faster than the compiled kernels do without AVX."""


def load(root: Path = _ROOT) -> tuple[ModuleType | None, str]:
    """Returns the compiled module and "", or None and the reason, with what to do, if this package has no module.

    ``root`` is the folder of this package, which in a source tree has ``native/`` too. A module that exists but
    is broken raises ImportError.
    """
    # Absent is a choice of the build; present but broken must not pass for absent.
    if importlib.util.find_spec(NAME) is not None:
        return importlib.import_module(NAME), ""
    if NAME in sys.modules or not (root / "native").is_dir():
        return None, ""
    spec = PathFinder.find_spec(NAME, [str(Path(each) / "gradcomp") for each in sys.path])
    if spec is None or spec.loader is None:
        return None, (
            f"Python imports the source tree {root}, which has no compiled module, and no gradcomp is installed: "
            f"run pip install {root}"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[NAME]  # else the next import would return the broken module
        raise
    if getattr(module, "sources_digest", str)() == digest(root):
        return module, ""
    del sys.modules[NAME]
    installed = Path(str(spec.origin)).parent
    return None, (
        f"Python imports the source tree {root} instead of the installed {installed}, "
        f"which was built from other C++ sources: run pip install {root}, or start the script from another directory"
    )


def digest(root: Path) -> str:
    """Returns SHA-256 over names and contents of CMakeLists.txt and the C++ sources, as CMakeLists.txt computes it."""
    native = root / "native"
    sources = [each for each in native.rglob("*") if each.suffix in (".cpp", ".hpp")]
    names = sorted(each.relative_to(root).as_posix() for each in [root / "CMakeLists.txt", *sources])
    lines = (f"{hashlib.sha256((root / name).read_bytes()).hexdigest()} {name}\n" for name in names)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


#: The block of :meth:`Kernels.together` on the host.
_AT_ONCE: Final = nullcontext(DONE)


class Kernels:
    """The kernels of one backend: methods that serve a whole table of segments in a call.

    An instance runs the definitions, in NumPy; a faster backend replaces them by attributes of the same names.
    """

    encode = staticmethod(reference.encode)
    decode = staticmethod(reference.decode)
    decode_add = staticmethod(reference.decode_add)
    reduce = staticmethod(reference.reduce)
    nonzero = staticmethod(reference.nonzero)
    crc32c = staticmethod(reference_checksum.crc32c)
    sample = staticmethod(reference_checksum.sample)
    write_headers = staticmethod(reference_headers.write_headers)
    read_headers = staticmethod(reference_headers.read_headers)
    compact = staticmethod(reference_bits.compact)
    restore = staticmethod(reference_bits.restore)
    draw_indices = staticmethod(philox.draw_indices)
    encode_indices = staticmethod(reference_indices.encode_indices)
    decode_indices = staticmethod(reference_indices.decode_indices)
    scatter_mean = staticmethod(reference_indices.scatter_mean)
    contribute = staticmethod(reference_selection.contribute)
    squares = staticmethod(reference_selection.squares)
    select_top = staticmethod(reference_selection.select_top)
    select_above = staticmethod(reference_selection.select_above)
    select_adacomp = staticmethod(reference_selection.select_adacomp)
    sample_thresholds = staticmethod(reference_selection.sample_thresholds)
    tail = staticmethod(reference_selection.tail)
    take = staticmethod(reference_selection.take)
    put = staticmethod(reference_selection.put)
    project = staticmethod(reference_lowrank.project)
    back_project = staticmethod(reference_lowrank.back_project)
    orthogonalise = staticmethod(reference_lowrank.orthogonalise)
    expand = staticmethod(reference_lowrank.expand)
    subtract = staticmethod(reference_lowrank.subtract)
    keep = staticmethod(reference_lowrank.keep)
    cheapest = staticmethod(reference_program.cheapest)
    subspace_project = subspace.project
    subspace_iterate = subspace.iterate
    subspace_finish = subspace.finish
    # Only a GPU has these.
    bisect: Callable[..., Floats]
    losses: Callable[..., Doubles]
    moments: Callable[..., Doubles]
    rehearsing: Callable[[], AbstractContextManager[None]]
    start_again: Callable[[Routine], Pending]
    finalise: Callable[[Routine, Sequence[Any]], None]

    def together(self, routine: Routine | None = None) -> AbstractContextManager[Pending]:
        """Collects the kernels that the block calls into one call on the device, started when the block ends.

        The block is given that call; results are in their arrays once it is finished. On the host each kernel runs at
        once.

        Args:
            routine: the block's own, if it is entered in every step; the device then checks the tables only once.
        """
        return _AT_ONCE


def _compiled(kernel: Callable[..., Any], definition: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a compiled kernel as a function of its definition's arguments.

    The compiled module checks arguments itself, and takes neither structured arrays nor records.
    """
    takes = definition.__annotations__
    has_records = not {"Shapes", "Factor"}.isdisjoint(takes.values())  # these are passed member by member
    has_draw = "draw" in takes
    table_at = list(takes.values()).index("SegmentTable") if "SegmentTable" in takes.values() else None
    if not (has_records or has_draw or table_at is not None):
        return kernel

    def call(*arguments: Any, **settings: Any) -> Any:
        given = list(arguments)
        if has_draw:
            draw = settings.pop("draw")
            settings["stochastic"] = draw is not None
            settings |= vars(draw or Draw(0, 0, 0))
        if table_at is not None:
            table = arguments[table_at]
            check_array("table", table, SEGMENT)
            given[table_at] = np.ndarray((len(table), SEGMENT.itemsize), np.uint8, table)
        if has_records:
            each = (one if isinstance(one, Shapes | Factor) else (one,) for one in given)
            given = list(chain.from_iterable(each))
        return kernel(*given, **settings)

    return call


_native, _why_not = load()
_backends = {"reference": Kernels()}
if _native is not None:
    _backends["native"] = Kernels()
    for _name, _definition in vars(Kernels).items():
        if isinstance(_definition, staticmethod) and hasattr(_native, _name):
            setattr(_backends["native"], _name, _compiled(getattr(_native, _name), _definition.__func__))
_active: BackendName = "reference"

HOST_KERNELS = Kernels()
"""The host's kernels: those of the backend in use, except that NumPy computes some products, see `numpy_multiplies`."""


def named(name: str) -> Kernels:
    """Returns the backend of that name; ValueError if it is not installed."""
    if name not in _backends:
        reason = f"; {_why_not}" if _why_not and name == "native" else ""
        raise ValueError(
            f"kernel backend {name!r} is not installed; available: {', '.join(_backends)}{reason}"
        )
    return _backends[name]


def backend() -> BackendName:
    """Returns the name of the host's backend in use."""
    return _active


def threads() -> int:
    """Returns the most threads that share the work of a codec's kernel on the host, the caller's included.

    The compiled kernels `encode`, `decode`, `decode_add` and `reduce` share theirs; NumPy's run on the caller's thread.
    """
    return int(_native.threads()) if _native is not None and _active == "native" else 1


def set_threads(number: int) -> None:
    """Lets so many threads share the work of the compiled codecs; results do not depend on it.

    Raises:
        ValueError: the number is not positive.
    """
    if _native is not None:
        _native.set_threads(number)


def numpy_multiplies(rank: int) -> bool:
    """Returns whether NumPy computes, on the host, the products whose order of sums is free.

    It does without the compiled module, and above BASELINE_RANKS columns where that has only 128-bit vectors. The
    order of sums, and so the last bits of results, then depend on the alignment of the matrices; and `project` takes
    5 bytes of memory for an element of the longest layer.
    """
    return _active == "reference" or (
        rank > BASELINE_RANKS and _native is not None and _native.isa() == "baseline"
    )


def _product(name: str) -> Callable[..., Any]:
    """Returns a kernel of matrix products that runs on the backend which :func:`numpy_multiplies` tells."""

    def call(*arguments: Any, **settings: Any) -> Any:
        (shapes,) = (each for each in arguments if isinstance(each, Shapes))
        by_numpy = numpy_multiplies(int(np.max(shapes.ranks, initial=0)))
        return getattr(_backends["reference" if by_numpy else "native"], name)(*arguments, **settings)

    return call


def _activate(name: BackendName) -> None:
    global _active
    chosen = vars(named(name)) | {each: _product(each) for each in ("project", "back_project")}
    _active = name
    HOST_KERNELS.__dict__ = chosen  # one assignment, since other threads may call kernels meanwhile


class use:  # noqa: N801  (reads as the statement it is: `use("reference")`, `with use("reference"):`)
    """Selects the backend of all kernels of the host, until further notice or for a `with` block.

    Raises:
        ValueError: the backend is not installed.
    """

    def __init__(self, name: BackendName) -> None:
        self._previous = _active
        _activate(name)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _activate(self._previous)


_activate("native" if "native" in _backends else "reference")
