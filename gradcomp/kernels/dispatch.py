"""Selects the backend that runs a kernel: NumPy, which defines it, the compiled module, or a GPU's.

A call whose table refers to memory on a GPU goes to that device's backend once :func:`bring` has registered one. The
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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    reference_adacomp,
    reference_bits,
    reference_checksum,
    reference_indices,
    reference_lowrank,
    reference_program,
    reference_selection,
)
from gradcomp.kernels.arguments import Draw, Factor, Shapes
from gradcomp.kernels.cuda.mirrors import DeviceMirror, is_mirror
from gradcomp.kernels.segments import SEGMENT, Bytes, SegmentTable, check_array, is_table

NAME: Final = "gradcomp._native"
_ROOT: Final = Path(__file__).resolve().parents[2]

P = ParamSpec("P")
R = TypeVar("R")
BackendName: TypeAlias = Literal["reference", "native"]
DEFINITIONS: Final = (
    reference,
    reference_adacomp,
    reference_checksum,
    reference_bits,
    philox,
    reference_indices,
    reference_lowrank,
    reference_program,
    reference_selection,
)
"""The modules that define the kernels."""
_COLUMNS = SEGMENT.names or ()
_ADDRESSES = _COLUMNS.index("payload")  # columns that hold addresses come first, eight bytes each
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


class _Routed(Backend):
    """Runs each call on the device that holds the memory of its table, or one of its messages, and else on the host."""

    def __init__(self) -> None:
        self.devices: dict[str, tuple[Any, Reaches]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            return getattr(self._backend_of(arguments), name)(*arguments, **settings)

        setattr(self, name, call)
        return call

    def _backend_of(self, arguments: tuple[Any, ...]) -> Any:
        device = device_of(arguments)
        return _backends[_active] if device is None else device


def _messages(argument: Any) -> Iterator[DeviceMirror]:
    """Yields the argument, or those of its members, that lie on a device."""
    if type(argument) is np.ndarray:
        return iter(())
    members = argument if isinstance(argument, list | tuple) else (argument,)
    return filter(is_mirror, members)


def _an_address(table: Any) -> int:
    """Returns an address that the table refers to, or 0. Those of a call are all on the host or all on a device."""
    # Mostly the first row has an address; looking through all columns in NumPy is slow.
    if not len(table):
        return 0
    first: list[int] = np.frombuffer(table, np.uint64, _ADDRESSES).tolist()
    for address in first[::-1]:
        if address:
            return address
    addresses = table.view(np.uint64).reshape(-1, SEGMENT.itemsize // 8)[:, :_ADDRESSES]
    return int(addresses.max(initial=0))


class _Compiled(Backend):
    """The compiled module's kernels. It checks arguments itself, and takes neither structured arrays nor records."""

    def _prepare(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        # None for a function that is no kernel.
        definition = getattr(_backends["reference"], kernel.__name__, None)
        takes = {} if definition is None else definition.__annotations__
        members = _members if not _RECORDS.isdisjoint(takes.values()) else None

        # Every step makes such calls, so this loop looks for tables itself, without a function call for each argument.
        def call(*arguments: Any, **settings: Any) -> Any:
            given = arguments if members is None else members(arguments)
            for i, argument in enumerate(given):
                if isinstance(argument, np.ndarray) and argument.dtype == SEGMENT:
                    given = (*given[:i], _rows(argument), *given[i + 1 :])
            return kernel(*given, **settings)

        def draw(*arguments: Any, draw: Draw | None, **settings: Any) -> Any:
            return call(*arguments, **_drawn(draw), **settings)

        return draw if "draw" in takes else call


def _rows(table: SegmentTable) -> Bytes:
    """Views a table as one row of bytes for each segment."""
    check_array("table", table, SEGMENT)
    return table.view(np.uint8).reshape(len(table), SEGMENT.itemsize)


def _members(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replaces each record by its members."""
    each = (argument if isinstance(argument, Shapes | Factor) else (argument,) for argument in arguments)
    return tuple(chain.from_iterable(each))


def _drawn(draw: Draw | None) -> dict[str, int]:
    if draw is None:
        return {"stochastic": False, "seed": 0, "step": 0, "rank": 0}
    return {"stochastic": True, "seed": draw.seed, "step": draw.step, "rank": draw.rank}


def _installed() -> dict[str, Backend]:
    found = {"reference": Backend(*DEFINITIONS)}
    if _native is not None:
        found["native"] = _Compiled(_native)
    return found


_native, _why_not = load()
_backends = _installed()
_routed = _Routed()
_active: BackendName = "native" if "native" in _backends else "reference"


def named(name: str) -> Backend:
    """Returns the backend of that name; ValueError if it is not installed."""
    if name not in _backends:
        reason = f"; {_why_not}" if _why_not and name == "native" else ""
        raise ValueError(
            f"kernel backend {name!r} is not installed; available: {', '.join(_backends)}{reason}"
        )
    return _backends[name]


def active() -> Backend:
    """Returns the backend in use, which sends calls to devices once there are any."""
    return _routed if _routed.devices else _backends[_active]


def kernel(
    definition: Callable[P, R], on_host: Callable[[Sequence[Any]], Backend] | None = None
) -> Callable[P, R]:
    """Returns the function that callers see for a definition: the same signature, run by the backend in use.

    ``on_host`` chooses the host's backend by the arguments.
    """
    name = definition.__name__

    if on_host is None:

        @wraps(definition)
        def call(*arguments: P.args, **settings: P.kwargs) -> R:
            backend = _routed if _routed.devices else _backends[_active]
            found: R = getattr(backend, name)(*arguments, **settings)
            return found

    else:

        @wraps(definition)
        def call(*arguments: P.args, **settings: P.kwargs) -> R:
            found: R = getattr(device_of(arguments) or on_host(arguments), name)(*arguments, **settings)
            return found

    return call


def bring(name: str, backend: Any, reaches: Reaches) -> None:
    """Registers a device's backend for kernels whose tables refer to memory that it reaches."""
    _routed.devices[name] = backend, reaches


def on_device(address: int) -> Any:
    """Returns the backend of the device that reaches an address; None on the host."""
    for backend, reaches in _routed.devices.values():
        if reaches(address):
            return backend
    return None


def of(table: Any) -> Any:
    """Returns the backend of the device whose memory a table refers to; None on the host."""
    address = _an_address(table) if _routed.devices else 0
    return on_device(address) if address else None


def device_of(arguments: Iterable[Any]) -> Any:
    """Returns the backend of the first device that a table refers to or a message lies on; None on the host."""
    if not _routed.devices:
        return None
    # A table may have no address: a chunk's owner without residuals only adds up messages.
    given = list(arguments)
    for argument in given:
        for each in _messages(argument):
            return on_device(each.address)
    return next((found for each in given if is_table(each) and (found := of(each)) is not None), None)


def take_away(name: str) -> None:
    """Removes a device's backend that :func:`bring` registered."""
    del _routed.devices[name]


def body() -> BackendName:
    """Returns the name of the host's backend in use."""
    return _active


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
