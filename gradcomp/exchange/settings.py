"""The settings of one exchanger, which a frontend makes and every part of the exchange is given whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from gradcomp.compress import Compressor
from gradcomp.compress.policy import Schedule
from gradcomp.control import Controller, ControllerRun
from gradcomp.core.errors import GradcompError
from gradcomp.core.topology import Topology
from gradcomp.exchange.fingerprint import DeferredFingerprint, Digests
from gradcomp.exchange.layout import Bucket
from gradcomp.exchange.members import Roster
from gradcomp.exchange.preemption import Preemption
from gradcomp.kernels.devices import HOST, Device
from gradcomp.reduce.model import Network

#: The name of the job's first exchanger among all ranks.
FIRST = "all-0"


class Listener(Protocol):
    """A callback for means before the step ends. It is called on the engine thread and must not block."""

    def bucket_complete(self, bucket: Bucket) -> None:
        """Take note that the means of the bucket's layers and slices are in their outputs."""
        ...

    def failed(self, error: GradcompError) -> None:
        """Take note that no further mean will come, in this step or later."""
        ...


@dataclass(frozen=True)
class Settings:
    """Holds the settings of one exchanger; for the process's own settings see :class:`gradcomp.Config`.

    Equal on all ranks, which compare them: ``name``; ``average``, False for the sum over ranks in place of the mean;
    ``order_step``, in which rank 0's order of arrival becomes the order of the buckets; ``schedule(step, version)``,
    which returns the plan that begins then, or None; ``topology``, by default one host; the frontend's ``arguments``;
    ``controlled_by``, the controller that the ranks begin; from step ``adjustable_from`` on it may change the
    compressor of layer i, ``adjustable[i]``, and leaves layers alone whose entry is None; ``compression``, for logs;
    ``network``, the measured constants that ``reduction="auto"`` needs with several hosts; ``slices_chosen``, True if
    the ranks have chosen the size of exchange buckets, since no setting gives it; ``times_every``, the steps between
    two gathers of the ranks' times for rank 0's run log, or 0; ``uses()``, each rank's own, which returns layers in the
    order in which the forward pass used them: all ranks have it, or none, see :class:`Priorities`.

    Each rank's own: ``device``, which holds gradients and means, and so the state; ``listener``; ``digests()`` and
    ``fingerprint(step)``, which begin to compute those of the parameters and of a step; ``roster``; ``shared_core``,
    True if the framework computes on all cores that the rank may use; ``preemption``, the process's own if all ranks of
    the job exchange, else one that nobody signals. ``advice`` ends the error for ranks of which some applied the means
    of a step and others did not. ``problem`` says why this rank cannot take part: it raises this, and the others a
    PlanMismatchError that quotes it.
    """

    name: str = FIRST
    average: bool = True
    order_step: int = 0
    schedule: Schedule | None = None
    topology: Topology | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    controlled_by: Controller | None = None
    adjustable: Sequence[Compressor | None] = ()
    adjustable_from: int = 0
    controller: ControllerRun | None = None
    compression: str = ""
    network: Network | None = None
    slices_chosen: bool = False
    times_every: int = 0
    device: Device = HOST
    listener: Listener | None = None
    uses: Callable[[], Sequence[int]] | None = None
    digests: Callable[[], Future[Digests]] | None = None
    fingerprint: Callable[[int], DeferredFingerprint] | None = None
    roster: Roster | None = None
    shared_core: bool = False
    preemption: Preemption = field(default_factory=Preemption)
    advice: str = ""
    problem: GradcompError | None = None

    @property
    def controller_text(self) -> str:
        """Return the controller's name and arguments, for logs."""
        return "none" if self.controlled_by is None else self.controlled_by.to_string()
