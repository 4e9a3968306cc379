"""Selects the backend that runs a kernel: NumPy, which defines it, the compiled module, or a GPU's.

A call whose table refers to memory on a GPU goes to that device's backend, which :data:`device_backends` lists. The
modules `reference` and `reference_*` define names, arguments and types of the kernels; :func:`kernel` turns each
definition into the function that callers see, and every other backend has the same names and arguments
(`tests/kernels/test_signatures.py`).

A script that starts in a clone's root imports the source tree, which has no compiled module. That of the installed
package serves it if both come from the same C++ sources: the module knows a digest of those that it was built from.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.machinery import PathFinder
from itertools import chain
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final, Literal, ParamSpec, TypeAlias, TypeVar

import numpy as np

from gradcomp.kernels import (
    philox,
    reference,
    reference_bits,
    reference_checksum,
    reference_indices,
    reference_lowrank,
    reference_program,
    reference_selection,
)
from gradcomp.kernels.cuda.mirrors import is_mirror
from gradcomp.kernels.segments import SEGMENT, Draw, Factor, Shapes, check_array, is_table

NAME: Final = "gradcomp._native"
_ROOT: Final = Path(__file__).resolve().parents[2]

P = ParamSpec("P")
R = TypeVar("R")
BackendName: TypeAlias = Literal["reference", "native"]
DEFINITIONS: Final = (
    reference,
    reference_checksum,
    reference_bits,
    philox,
    reference_indices,
    reference_lowrank,
    reference_program,
    reference_selection,
)
"""The modules that define the kernels."""
# Columns that hold addresses come first, eight bytes each.
_ADDRESSES = (SEGMENT.names or ()).index("payload")
_RECORDS = {"Shapes", "Factor"}  # names of the annotations of arguments that are passed member by member
Reaches: TypeAlias = Callable[[int], bool]
"""Tells whether a device's kernels can use memory at this address."""


def load(root: Path = _ROOT) -> tuple[ModuleType | None, str]:
    """Returns the compiled module and "", or None and the reason, with what to do, if this package has no module.

    ``root`` is the folder of this package, which in a source tree has ``native/`` too. A module that is there but
    broken raises ImportError.
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


class Backend:
    """The kernels of one backend, as attributes; all backends have the same ones with the same signatures."""

    def __init__(self, *modules: ModuleType) -> None:
        self._modules = modules

    def __getattr__(self, name: str) -> Callable[..., Any]:
        for module in self._modules:
            if hasattr(module, name):
                kernel = self._prepare(getattr(module, name))
                setattr(self, name, kernel)  # the next look-up does not come here
                return kernel
        raise AttributeError(f"no kernel is named {name!r}")

    def _prepare(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        return kernel


class _Compiled(Backend):
    """The compiled module's kernels. It checks arguments itself, and takes neither structured arrays nor records."""

    def _prepare(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        # None for a function that is no kernel.
        definition = getattr(_backends["reference"], kernel.__name__, None)
        takes = {} if definition is None else definition.__annotations__
        has_records = not _RECORDS.isdisjoint(takes.values())

        # Every step makes such calls, so this loop looks for tables itself, without a function call for each argument.
        def call(*arguments: Any, **settings: Any) -> Any:
            given = arguments
            if has_records:
                each = (one if isinstance(one, Shapes | Factor) else (one,) for one in arguments)
                given = tuple(chain.from_iterable(each))
            for i, argument in enumerate(given):
                if isinstance(argument, np.ndarray) and argument.dtype == SEGMENT:
                    check_array("table", argument, SEGMENT)
                    rows = argument.view(np.uint8).reshape(len(argument), SEGMENT.itemsize)
                    given = (*given[:i], rows, *given[i + 1 :])
            return kernel(*given, **settings)

        def draw(*arguments: Any, draw: Draw | None, **settings: Any) -> Any:
            words = vars(draw or Draw(0, 0, 0))
            return call(*arguments, stochastic=draw is not None, **words, **settings)

        return draw if "draw" in takes else call


_native, _why_not = load()
_backends = {"reference": Backend(*DEFINITIONS)}
if _native is not None:
    _backends["native"] = _Compiled(_native)
_active: BackendName = "native" if "native" in _backends else "reference"

device_backends: dict[str, tuple[Any, Reaches]] = {}
"""Backends by the device's name. Each runs the kernels whose tables refer to memory that it reaches."""


def named(name: str) -> Backend:
    """Returns the backend of that name; ValueError if it is not installed."""
    if name not in _backends:
        reason = f"; {_why_not}" if _why_not and name == "native" else ""
        raise ValueError(
            f"kernel backend {name!r} is not installed; available: {', '.join(_backends)}{reason}"
        )
    return _backends[name]


def host() -> Backend:
    """Returns the host's backend in use."""
    return _backends[_active]


def backend() -> BackendName:
    """Returns the name of the host's backend in use."""
    return _active


def kernel(
    definition: Callable[P, R], on_host: Callable[[Sequence[Any]], Backend] | None = None
) -> Callable[P, R]:
    """Returns the function that callers see for a definition: the same signature, run where its arguments lie.

    ``on_host`` chooses the host's backend by the arguments.
    """
    name = definition.__name__

    @wraps(definition)
    def call(*arguments: P.args, **settings: P.kwargs) -> R:
        backend = device_of(arguments) if device_backends else None
        if backend is None:
            backend = _backends[_active] if on_host is None else on_host(arguments)
        found: R = getattr(backend, name)(*arguments, **settings)
        return found

    return call


def on_device(address: int) -> Any:
    """Returns the backend of the device that reaches an address; None on the host."""
    for backend, reaches in device_backends.values():
        if reaches(address):
            return backend
    return None


def of(table: Any) -> Any:
    """Returns the backend of the device whose memory a table refers to; None on the host."""
    # Addresses of a call are all on the host or all on a device. Mostly the first row has one; looking through all
    # columns in NumPy is slow.
    if not device_backends or not len(table):
        return None
    first: list[int] = np.frombuffer(table, np.uint64, _ADDRESSES).tolist()
    address = next(filter(None, reversed(first)), 0)
    if not address:
        rows = table.view(np.uint64).reshape(-1, SEGMENT.itemsize // 8)
        address = int(rows[:, :_ADDRESSES].max(initial=0))
    return on_device(address) if address else None


def device_of(arguments: Sequence[Any]) -> Any:
    """Returns the backend of the first device that a message lies on or a table refers to; None on the host."""
    if not device_backends:
        return None
    # A table may have no address: a chunk's owner without residuals only adds up messages.
    for argument in arguments:
        for each in argument if isinstance(argument, list | tuple) else (argument,):
            if is_mirror(each):
                return on_device(each.address)
    return next((found for each in arguments if is_table(each) and (found := of(each)) is not None), None)


class use:  # noqa: N801  (reads as the statement it is: `use("reference")`, `with use("reference"):`)
    """Selects the backend of all kernels, until further notice or for a `with` block.

    Raises:
        ValueError: the backend is not installed.
    """

    def __init__(self, name: BackendName) -> None:
        global _active
        named(name)
        self._previous = _active
        _active = name

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        _active = self._previous
