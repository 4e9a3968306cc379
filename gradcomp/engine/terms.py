"""An exchanger is made on terms beside layers and a plan, some of which the ranks agree on first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gradcomp.compress import Compressor
from gradcomp.compress.policy import Schedule
from gradcomp.control import Controller, ControllerRun, Environment
from gradcomp.core.config import Config
from gradcomp.core.errors import ConfigError, GradcompError
from gradcomp.core.journal import Journal
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Plan
from gradcomp.core.scheme import AUTO, parse
from gradcomp.core.topology import Topology
from gradcomp.engine.agreement import agree, agree_on_slices, describe
from gradcomp.engine.background import in_background
from gradcomp.engine.watch import Roster
from gradcomp.kernels.devices import HOST, Device
from gradcomp.pipeline import Bucket, Submission
from gradcomp.pipeline.digests import Digests
from gradcomp.pipeline.fingerprint import SoonFingerprint
from gradcomp.transport.base import Handle, Transport

logger = logging.getLogger("gradcomp")

#: The name of the job's first exchanger among all ranks.
FIRST = "all-0"


class Listener(Protocol):
    """Hears of means before the step ends. It is called on the engine's thread and must not block."""

    def bucket_complete(self, bucket: Bucket) -> None:
        """Take note that the means of the bucket's layers and slices are in their outputs."""
        ...

    def failed(self, error: GradcompError) -> None:
        """Take note that no further mean will come, in this step or later."""
        ...


class Recorder(Protocol):
    """Looks at gradients before they are encoded; called on the threads that drive the exchange, one at a time."""

    def begin(self, step: int) -> None:
        """Take note that an exchange begins."""
        ...

    def take(self, submission: Submission) -> None:
        """Look at a gradient that is ready and about to be handed to the engine."""
        ...

    def end(self) -> None:
        """End an exchange that is done on all ranks; may use collectives."""
        ...

    def close(self) -> None:
        """End, since no further exchange will come. Raises nothing."""
        ...


@dataclass(frozen=True)
class Controlled:
    """Joins a controller with what it may change.

    From step ``first_step`` on it may change ``compressors[i]`` of layer i, unless that is None.
    """

    controller: Controller
    compressors: Sequence[Compressor | None]
    first_step: int = 0


@dataclass(frozen=True)
class Terms:
    """Holds what may differ between exchangers.

    The ranks compare ``arguments``, which are the frontend's. ``digests()`` begins to compute those of the
    parameters; ``fingerprint(step)`` begins that of a step. ``advice`` ends the error for ranks of which some
    applied the means of a step and others did not. ``problem`` says why this rank cannot take part: it raises this,
    and the others a PlanMismatchError that quotes it.
    """

    name: str = FIRST
    average: bool = True
    listener: Listener | None = None
    order_step: int = 0
    schedule: Schedule | None = None
    topology: Topology | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    controlled: Controlled | None = None
    compression: str = ""
    device: Device = HOST
    digests: Callable[[], Future[Digests]] | None = None
    fingerprint: Callable[[int], SoonFingerprint] | None = None
    roster: Roster | None = None
    advice: str = ""
    problem: GradcompError | None = None

    @property
    def controller(self) -> str:
        """Return the controller's name and arguments, for logs."""
        return "none" if self.controlled is None else self.controlled.controller.to_string()


@dataclass(frozen=True)
class Agreement:
    """Holds what all ranks have agreed on.

    ``journal`` is rank 0's run log, or None.
    """

    config: Config
    topology: Topology
    controller: ControllerRun | None
    journal: Journal | None


def agree_on_terms(
    layers: Sequence[LayerSpec],
    plan: Plan,
    transport: Transport,
    config: Config,
    terms: Terms,
    wait_for: Callable[[Handle], None],
) -> Agreement:
    """Raise PlanMismatchError on every rank if layers, plan, settings or arguments differ. Collective."""
    topology = terms.topology or Topology.one_host(transport.size)
    shared = {
        "average": terms.average,
        "order_step": terms.order_step,
        "hosts": list(topology.hosts),
        **terms.arguments,
    }
    if terms.controlled is not None:
        shared["controller"] = terms.controller
    journal = _open_journal(transport, config, terms.name)
    try:
        agree(transport, describe(layers, plan, config, **shared), terms.problem, wait_for=wait_for)
        config = agree_on_slices(transport, config, terms.device.driver is not None, wait_for=wait_for)
        if config.deterministic:
            _refuse_times(terms.controlled, config, topology)
        controller = _begin_controller(terms, layers, transport, topology, config)
    except GradcompError:
        if journal is not None:
            journal.close()
        raise
    return Agreement(config, topology, controller, journal)


def _refuse_times(controlled: Controlled | None, config: Config, topology: Topology) -> None:
    """Raise ConfigError for what decides by measured times, since no two runs have these in common."""
    what = ""
    if config.reduction == AUTO and len(topology.leaders) > 1:
        what = "between hosts reduction=auto chooses by measured times: name a reduction"
    if controlled is not None and controlled.controller.by_times:
        what = f"{controlled.controller.to_string()} decides by measured times: choose another controller or objective"
    if what:
        raise ConfigError(f"deterministic=True: {what}, or leave deterministic off")


def _begin_controller(
    terms: Terms, layers: Sequence[LayerSpec], transport: Transport, topology: Topology, config: Config
) -> ControllerRun | None:
    """Begin the controller, which refuses what it cannot do; return None if no layer is left to it."""
    controlled, device = terms.controlled, terms.device
    if controlled is None:
        return None
    environment = Environment(
        layers,
        controlled.compressors,
        transport.rank,
        topology,
        parse(config.reduction),
        config.seed,
        controlled.first_step,
        lambda work: in_background(device.bound(work)),
        config.slice_elements,
        device.zeros,
        config.deterministic,
    )
    running = controlled.controller.begin(environment)
    if environment.controlled:
        return running
    if transport.rank == 0:
        logger.warning(
            "the controller %s has nothing to adjust, and does not run: no layer travels compressed (they are small, "
            "excluded or float64, or the compression is none)",
            controlled.controller.name,
        )
    return None


def _open_journal(transport: Transport, config: Config, name: str) -> Journal | None:
    """Open rank 0's run log, if there is to be one; all ranks raise if it cannot be opened."""
    if transport.rank != 0 or not config.run_log:
        return None
    try:
        return Journal(_log_path(config.run_log, name))
    except ConfigError as error:
        agree(transport, None, error)
        raise


def _log_path(path: str, name: str) -> Path:
    """Return ``path`` for the job's first exchanger; others put their names into theirs."""
    whole = Path(path)
    return whole if name == FIRST else whole.with_name(f"{whole.stem}.{name}{whole.suffix}")
