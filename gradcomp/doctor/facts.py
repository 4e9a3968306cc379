"""The facts of one rank, as it tells them to the others: values of JSON, read without trust."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from gradcomp.core.errors import WireFormatError

#: Ranks whose doctors have the same number can measure together.
PROTOCOL = 1

#: The most bytes that the facts of one rank may have.
MOST_BYTES = 1 << 17


@dataclass(frozen=True)
class Place:
    """Where the launcher put this rank. ``problem``: why that cannot be read from the environment."""

    launcher: str = "single"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    #: The host as the launcher names it, which decides what ranks share a host.
    host: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Settings:
    """The settings of gradcomp on this rank. ``shared`` ones must be equal on all ranks."""

    transport: str = "auto"
    shared: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    problem: str = ""
    has_secret: bool = False


@dataclass(frozen=True)
class Kernels:
    """Holds what the compiled module offers. ``processor``: the widest instruction set that this processor has."""

    asked: str = "auto"
    asked_isa: str = "auto"
    available: tuple[str, ...] = ()
    missing: str = ""
    processor: str = ""


@dataclass(frozen=True)
class Cores:
    """Cores and threads. ``quota``: the cores' worth of time that a container may use, 0 for no limit.

    ``training_threads``: those of the framework; ``omp_threads``: those that OMP_NUM_THREADS names, 0 if it does not.
    """

    own: tuple[int, ...] = ()
    machine: int = 0
    quota: float = 0.0
    training_threads: int = 1
    omp_threads: int = 0
    kernel_threads: int = 1


@dataclass(frozen=True)
class Limits:
    """Limits of the process, and memory in bytes. ``open_files`` is -1 without a limit."""

    open_files: int = -1
    memory: int = 0
    available_memory: int = 0


@dataclass(frozen=True)
class Disk:
    """A place that this rank writes to. ``problem``: why it cannot."""

    purpose: str
    path: str
    free_bytes: int
    problem: str = ""


@dataclass(frozen=True)
class Interface:
    """A network interface with an address; ``mbit`` is -1 where the system does not know its rate."""

    name: str
    address: str
    mtu: int = 0
    mbit: int = -1
    is_hardware: bool = False


@dataclass(frozen=True)
class Network:
    """How this host is reached: ``address`` is the one that Gloo listens at, ``routed`` that of the way to rank 0.

    ``named``: the interface that the environment names, and ``variable`` where. ``boot`` is equal for containers of one
    machine.
    """

    hostname: str = ""
    boot: str = ""
    interfaces: tuple[Interface, ...] = ()
    named: str = ""
    variable: str = ""
    address: str = ""
    routed: str = ""
    #: The port at which the doctor of this rank listens, by address, and the text that opens it.
    ports: dict[str, int] = field(default_factory=dict)
    token: str = ""
    #: NCCL_SOCKET_IFNAME, which names the interfaces of NCCL.
    nccl: str = ""


@dataclass(frozen=True)
class Gpus:
    """GPUs, and what calls them. Versions are empty where a package is missing."""

    driver: str = ""
    names: tuple[str, ...] = ()
    problem: str = ""
    cupy: str = ""
    cupy_devices: int = 0
    cupy_problem: str = ""
    nccl: int = 0
    has_bindings: bool = False
    #: The CUDA that PyTorch was built for, and the GPUs that it sees.
    torch_cuda: str = ""
    torch_devices: int = 0
    visible: str | None = None


@dataclass(frozen=True)
class Facts:
    """All that a rank knows of itself."""

    protocol: int = PROTOCOL
    #: Sizes of both sides must agree before bytes are exchanged: gradcomp's own version and wire protocol.
    gradcomp: str = ""
    wire: int = 0
    #: Versions of Python and of the libraries that are installed.
    libraries: dict[str, str] = field(default_factory=dict)
    place: Place = Place()
    settings: Settings = Settings()
    kernels: Kernels = Kernels()
    cores: Cores = Cores()
    limits: Limits = Limits()
    disks: tuple[Disk, ...] = ()
    network: Network = Network()
    gpus: Gpus = Gpus()
    #: What each transport lacks on this rank; empty if it lacks nothing.
    lacks: dict[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def where(self) -> str:
        """This rank for a reader, with its host."""
        at = f", {self.network.address}" if self.network.address else ""
        return f"rank {self.rank} ({self.network.hostname or self.place.host}{at})"

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @staticmethod
    def from_json(text: bytes) -> Facts:
        """Return the facts that a rank sent.

        Unknown names are those of another version and are ignored; missing ones have their defaults. WireFormatError
        for anything else.
        """
        try:
            if len(text) > MOST_BYTES:
                raise TypeError(f"{len(text)} bytes")
            found: Facts = _read(Facts, json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise WireFormatError(f"the facts of a rank cannot be read ({error}): {text!r:.80}") from error
        return found


def _read(kind: Any, value: Any) -> Any:
    """Return a value of JSON as this type; TypeError if it is no such value."""
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        names = [item.name for item in dataclasses.fields(kind) if item.name in value]
        made: Any = kind
        return made(**{name: _read(hints[name], value[name]) for name in names})
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_read(get_args(kind)[0], each) for each in value)
    if get_origin(kind) is dict and isinstance(value, dict):
        return {str(name): _read(get_args(kind)[1], each) for name, each in value.items()}
    if NoneType in get_args(kind):
        return None if value is None else _read(get_args(kind)[0], value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is no {kind}")
    return value
