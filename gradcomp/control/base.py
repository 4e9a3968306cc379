"""What every controller is: a frozen configuration, and what runs it on every rank of an exchanger."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gradcomp.compress import Compressor
from gradcomp.control.saving import from_plain, to_plain
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Assignment, Plan
from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.core.vectors import Zeros, host_zeros
from gradcomp.kernels.codec import Table
from gradcomp.kernels.step import Observations
from gradcomp.reduce.model import Network

Doubles = npt.NDArray[np.float64]

#: Runs work that takes long, on another thread; what it returns may be asked for its result.
Background = Callable[[Callable[[], Any]], "Future[Any]"]


def at_once(work: Callable[[], Any]) -> Future[Any]:
    """The background that is none: the work is done when this returns."""
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001  (whoever asks for the result gets it)
        future.set_exception(error)
    return future


@dataclass(frozen=True)
class Environment:
    """Where a controller runs; the same on all ranks but for ``rank`` and ``background``.

    ``compressors[i]``: what layer i travels under once warm-ups are over, None if it is not up for choice: excluded,
    exact or float64. ``first_step``: the step from which the controller decides. ``seed``: of all random draws.
    ``slice_elements``: of one bucket, as configured. ``zeros``: where gradients can be added up. ``deterministic``:
    decisions apply in steps that do not depend on how long the background takes.
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
    zeros: Zeros = host_zeros
    deterministic: bool = False

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.topology.world

    @property
    def controlled(self) -> list[int]:
        """Numbers of the layers that are up for choice."""
        return [i for i, compressor in enumerate(self.compressors) if compressor is not None]


@dataclass(frozen=True)
class Step:
    """What the pipeline tells of a finished exchange; the same on all ranks, but for seconds and the rate.

    ``agreed``: every rank had voted ready. ``sums``: the contributions of this step, added over ranks. ``seconds``:
    from the opening of the step before to the opening of this one, 0 in the first. ``wire``: by layer, seconds that its
    buckets spent on the wire. ``sent``: by layer, bytes that this rank sends for its buckets, by formula. ``ready``: by
    bucket, seconds from the step's opening to its completeness. ``position``: by layer, the last bucket that it travels
    in, from 0. ``rate``: the learning rate, 0 if it is not known.
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


class ControllerRun:
    """A controller at work on one rank. All ranks' runs go through the same states in the same steps.

    Whatever differs between ranks (times, the progress of background work) enters by :attr:`ready`, which the header
    counts, or by :meth:`contribution`, which is added over ranks; :meth:`finish` then sees the same on all ranks. Calls
    come from one thread at a time, in the order begin, accumulate per bucket, contribution, finish, commit.
    """

    def __init__(self, name: str, environment: Environment) -> None:
        self.name = name
        self.environment = environment
        #: What was chosen, by layer number; layers that are missing travel as the plan says.
        self.choices: dict[int, Compressor] = {}
        #: Why, in one line; for the log. Only rank 0 may know.
        self.reason = ""

    @property
    def ready(self) -> bool:
        """This rank's vote."""
        return False

    @property
    def overdue(self) -> bool:
        """Whether the step has to wait for background work of this rank: with ``deterministic`` only."""
        return False

    @property
    def notable(self) -> bool:
        """Whether the last change of plan is worth a line in the log."""
        return True

    @property
    def wants_network(self) -> bool:
        """Whether the link is to be measured before the next step; the same on all ranks."""
        return False

    def hear(self, network: Network) -> None:
        """The link was measured; the same figures on all ranks."""

    def begin(self, step: int) -> None:
        """A step opens; what was committed before it is final."""

    @property
    def accumulates(self) -> bool:
        """Whether :meth:`accumulate` wants this step's gradients."""
        return False

    def accumulate(self, table: Table, layers: npt.NDArray[np.int64], scale: float) -> None:
        """Gradients and residuals of a group at the addresses in ``table``, the callee's to change; 0: none."""

    def observe(self, observations: Observations) -> None:
        """What compressors noted while they encoded this step."""

    def contribution(self, step: int) -> Doubles | None:
        """This rank's summand, None for none: of the same length on all ranks. Asked once all buckets are encoded."""
        return None

    def finish(self, step: Step) -> bool:
        """A step is done. Returns whether :attr:`choices` changed; they apply from the next step on."""
        return False

    def commit(self, present: npt.NDArray[np.bool_]) -> None:
        """The step that finished was accepted, for the layers that some rank had."""

    def plan(self, before: Plan) -> Plan:
        """The next plan: ``before`` with the choices in it."""
        rows = list(before.assignments)
        for layer, compressor in self.choices.items():
            rows[layer] = Assignment(rows[layer].layer, compressor.family_string(), compressor.level)
        return Plan(before.version + 1, tuple(rows))

    # -- state: what a checkpoint holds ------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """A dataclass, the same on all ranks, keyed by layer name where by layer; saved as it is."""
        raise NotImplementedError

    def adopt(self, saved: Any, own: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on from a state, of as many ranks or of others; StateError, with nothing changed, if it is none.

        ``own`` may hold the arrays of all ranks: each takes what is its own.
        """
        raise NotImplementedError

    def own_state(self) -> dict[str, dict[str, npt.NDArray[np.float32]]]:
        """What this rank alone holds: kind -> layer name -> flat float32 array."""
        return {}

    def shared_state(self) -> dict[str, Any]:
        """:attr:`state` as numbers, strings, lists and dicts."""
        plain: dict[str, Any] = to_plain(self.state)
        return plain

    def restore(self, shared: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on from what :meth:`shared_state` and :meth:`own_state` gave; StateError for anything else."""
        self.adopt(from_plain(type(self.state), shared, self.name), own)


@dataclass(frozen=True)
class Controller(ABC):
    """Base of the controllers: configuration only. ``name`` is the word in logs and checkpoints."""

    name: ClassVar[str]

    @property
    def by_times(self) -> bool:
        """Whether decisions depend on measured times, which no two runs have in common."""
        return False

    @abstractmethod
    def begin(self, environment: Environment) -> ControllerRun:
        """The running of one rank. ConfigError, on all ranks alike, for what cannot work here."""

    def to_string(self) -> str:
        """``name(field=value, ...)``: equal on ranks that agree, and shown in logs."""
        fields = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return f"{self.name}({', '.join(f'{name}={_text(value)}' for name, value in fields)})"


def _text(value: Any) -> str:
    if isinstance(value, Compressor):
        return value.to_string()
    if isinstance(value, Controller):
        return value.to_string()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return str(value)
