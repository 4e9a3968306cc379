"""The interface of controllers: a frozen configuration, a run of it on every rank, and the saved state of a run."""

from __future__ import annotations

import enum
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from gradcomp.compress import Compressor
from gradcomp.compress.policy import assign
from gradcomp.core.errors import StateError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Plan
from gradcomp.core.run_lines import Account
from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.core.vectors import Floats
from gradcomp.kernels.codec import Table
from gradcomp.kernels.devices import HOST, Device
from gradcomp.kernels.step import Observations
from gradcomp.reduce.model import Network

S = TypeVar("S")

Doubles = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
#: Runs long work on another thread and returns a future of its result.
Background = Callable[[Callable[[], Any]], "Future[Any]"]
#: Returns by how much the training loss changes if an error, in units of the gradient, is missing from the steps of a
#: layer; for each of these layers, by number, and errors alone.
Probe = Callable[[Sequence[tuple[int, Floats]]], Sequence[float]]


def to_plain(value: Any) -> Any:
    """Converts a value to what JSON can hold: a dataclass by field names, an enum by name, an array as lists.

    A field that is None and has a default is left out.
    """
    if is_dataclass(value):
        named = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: to_plain(v) for f, v in named if v is not None or f.default is MISSING}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: to_plain(one) for key, one in value.items()}
    return [to_plain(one) for one in value] if isinstance(value, list | tuple) else value


def from_plain(kind: type[S], data: Any, name: str) -> S:
    """Inverse of :func:`to_plain`; raises StateError, with the controller's ``name``, for anything else.

    Fields that have a default may be absent.
    """
    try:
        found: S = _read(kind, data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"not a state of {name}: {error!r}") from error
    return found


def _read(kind: Any, data: Any) -> Any:
    """Converts plain data to a value of the type hint ``kind``."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in arguments:
            return None
        if isinstance(data, list) and any(typing.get_origin(one) is tuple for one in arguments):
            return tuple(data)
        kinds = [one for one in arguments if one is not type(None)]
        return _read(kinds[0], data) if len(kinds) == 1 else data
    if origin is np.ndarray:
        return np.array(data, dtype=np.float64)
    if origin is list:
        return [_read(arguments[0], one) for one in data]
    if origin is tuple:
        return tuple(_read(one, item) for one, item in zip(arguments, data, strict=True))
    if origin is dict:
        return {str(key): _read(arguments[1], one) for key, one in data.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        given = [f.name for f in fields(kind) if f.name in data or f.default is MISSING]
        return kind(**{name: _read(hints[name], data[name]) for name in given})
    if isinstance(kind, enum.EnumMeta):
        return kind[data]
    if isinstance(data, str) != (kind is str):
        raise TypeError(f"expected {kind.__name__}, got {data!r}")
    return kind(data)


def at_once(work: Callable[[], Any]) -> Future[Any]:
    """Does the work on the calling thread and returns a completed future."""
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001  (the future raises it)
        future.set_exception(error)
    return future


@dataclass(frozen=True)
class Environment:
    """The job in which a controller runs; the same on all ranks except for ``rank`` and ``background``.

    ``compressors[i]``: the compressor of layer i once warm-ups are over, or None if the layer is not controlled because
    it is excluded, exact or float64. ``first_step``: the step from which the controller decides. ``seed``: seeds all
    random draws. ``slice_elements``: elements of one exchange bucket, as configured. ``device``: has the
    memory in which gradients are summed. ``deterministic``: decisions apply in steps that do not depend on how long
    the background takes. ``shared_core``: this rank's gradients are computed on all cores that it may use, so that
    the exchange takes turns with the computing. ``byte_seconds``: the processor's seconds for a byte on the wire.
    """

    layers: Sequence[LayerSpec]
    compressors: Sequence[Compressor | None]
    rank: int
    topology: Topology
    scheme: Scheme
    seed: int = 0
    first_step: int = 0
    background: Background = at_once
    slice_elements: int = 1 << 20
    device: Device = HOST
    deterministic: bool = False
    shared_core: bool = False
    byte_seconds: float = 0.0

    @property
    def world(self) -> int:
        return self.topology.world

    @property
    def controlled(self) -> list[int]:
        """Returns the numbers of the layers whose compressor the controller may change."""
        return [i for i, compressor in enumerate(self.compressors) if compressor is not None]


@dataclass(frozen=True)
class Step:
    """A report on a finished exchange; the same on all ranks except for seconds and the rate.

    ``agreed`` is true if every rank had voted ready. ``sums`` has the contributions of this step, summed over ranks.
    ``seconds`` is the time from the opening of the previous step to the opening of this one, 0 in the first. Three
    fields are by layer: ``wire`` has the seconds that its exchange buckets spent on the wire, ``sent`` the bytes that
    this rank sends for these buckets, by formula, and ``position`` the number of the last of them, from 0. ``ready``
    has, by exchange bucket, the seconds from the step's opening until the bucket is complete. ``rate`` is the learning
    rate, 0 if it is not known. ``predicted`` are the bytes that this rank sends in the step, by formula, without
    headers.
    """

    number: int
    agreed: bool
    sums: Doubles | None
    seconds: float
    wire: Doubles
    sent: Doubles
    ready: Doubles
    position: npt.NDArray[np.int64]
    rate: float = 0.0
    predicted: float = 0.0


class ControllerRun:
    """The run of a controller on one rank. The runs of all ranks go through the same states in the same steps.

    Values that differ between ranks (times, the progress of background work) enter only by :attr:`ready`, which the
    header counts, or by :meth:`contribution`, which is summed over ranks; :meth:`finish` then sees the same on all
    ranks. Calls come from one thread at a time, in the order begin, accumulate per exchange bucket, contribution,
    finish, commit.
    """

    def __init__(self, name: str, environment: Environment) -> None:
        self.name = name
        self.environment = environment
        #: Chosen compressors by layer number; missing layers keep the compressor of the plan.
        self.choices: dict[int, Compressor] = {}
        #: Why they were chosen, in one line for the log. May be known on rank 0 only.
        self.reason = ""

    @property
    def ready(self) -> bool:
        """Returns this rank's vote on ending the current phase."""
        return False

    @property
    def overdue(self) -> bool:
        """Returns true if the step has to wait for background work of this rank; with ``deterministic`` only."""
        return False

    @property
    def notable(self) -> bool:
        """Returns true if the last change of plan deserves a line in the log."""
        return True

    @property
    def wants_network(self) -> bool:
        """Returns true if the link must be measured before the next step; the same on all ranks."""
        return False

    def hear(self, network: Network) -> None:
        """Receives the measurement of the link, the same on all ranks."""

    def begin(self, step: int) -> None:
        """Opens a step; commits before it are final."""

    @property
    def accumulates(self) -> bool:
        """Returns true if :meth:`accumulate` wants this step's gradients."""
        return False

    def accumulate(self, table: Table, layers: npt.NDArray[np.int64], scale: float) -> None:
        """Receives a group's gradients and residuals at the addresses in ``table``, 0 for none.

        It may change the table.
        """

    @property
    def awaits_losses(self) -> bool:
        """Returns true if :meth:`probe` has losses left to measure on this rank."""
        return False

    def probe(self, losses: Probe) -> None:
        """Measures changes of the training loss if the controller decides by them.

        Called on the training thread, between two steps, after the optimizer has stepped.
        """

    def observe(self, observations: Observations) -> None:
        """Receives the observations that compressors made while they encoded this step."""

    def contribution(self, step: int) -> Doubles | None:
        """Returns this rank's summand, of the same length on all ranks, or None.

        It is called once all exchange buckets are encoded.
        """
        return None

    def finish(self, step: Step) -> bool:
        """Ends a step. Returns true if :attr:`choices` changed; they apply from the next step on."""
        return False

    def commit(self, present: npt.NDArray[np.bool_]) -> None:
        """Accepts the finished step for the layers that some rank had."""

    def close(self) -> None:
        """Ends the run, since no further step comes; it may log, and sends nothing."""

    def account(self) -> Account:
        """Returns what it has measured since the last call, for rank 0's run log; called between two steps."""
        return ()

    def plan(self, before: Plan) -> Plan:
        """Returns the next plan: ``before`` with the choices in it."""
        rows = list(before.assignments)
        for layer, compressor in self.choices.items():
            rows[layer] = assign(rows[layer].layer, compressor)
        return Plan(before.version + 1, tuple(rows))

    # -- state in a checkpoint ---------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """Returns the state as a dataclass, the same on all ranks; per-layer values are keyed by layer name."""
        raise NotImplementedError

    def adopt(self, saved: Any, own: Mapping[str, Mapping[str, Any]]) -> None:
        """Continues from a saved state, which may be of another number of ranks.

        ``own`` may hold the arrays of all ranks: each rank takes its own. Raises StateError, with nothing changed, if
        the state is not one of this controller.
        """
        raise NotImplementedError

    def own_state(self) -> dict[str, dict[str, npt.NDArray[np.float32]]]:
        """Returns the arrays that only this rank holds: kind -> layer name -> flat float32 array."""
        return {}

    def shared_state(self) -> dict[str, Any]:
        """Returns :attr:`state` as numbers, strings, lists and dicts."""
        plain: dict[str, Any] = to_plain(self.state)
        return plain

    def restore(self, shared: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> None:
        """Continues from what :meth:`shared_state` and :meth:`own_state` returned; StateError for anything else."""
        self.adopt(from_plain(type(self.state), shared, self.name), own)


@dataclass(frozen=True)
class Controller(ABC):
    """Base class of controllers, which hold configuration only. ``name`` is the word in logs and checkpoints."""

    name: ClassVar[str]

    @property
    def by_times(self) -> bool:
        """Returns true if decisions depend on measured times, which differ from run to run."""
        return False

    @property
    def needs_losses(self) -> bool:
        """Returns true if decisions need changes of the training loss, which :meth:`ControllerRun.probe` measures."""
        return False

    @abstractmethod
    def begin(self, environment: Environment) -> ControllerRun:
        """Returns a run for one rank. Raises ConfigError, on all ranks, if the controller cannot work in this job."""

    def to_string(self) -> str:
        """Returns ``name(field=value, ...)``: equal on ranks that agree, and shown in logs."""
        given = ", ".join(f"{f.name}={_text(getattr(self, f.name))}" for f in fields(self))
        return f"{self.name}({given})"


def _text(value: Any) -> str:
    if isinstance(value, Compressor | Controller):
        return value.to_string()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return str(value)
