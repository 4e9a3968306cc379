"""What an exchanger is made from beside layers and a plan, and what the ranks agree on before they make one."""

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

#: Name of the job's first exchanger among all ranks.
FIRST = "all-0"


class Listener(Protocol):
    """Who wants to hear of means before the step ends. Called on the engine's thread; must not block."""

    def bucket_complete(self, bucket: Bucket) -> None:
        """The means of the bucket's layers and slices are in their outputs."""
        ...

    def failed(self, error: GradcompError) -> None:
        """No further mean will come, in this step or later."""
        ...


class Recorder(Protocol):
    """Who looks at gradients before they are encoded. Called on the threads that drive the exchange, one at a time."""

    def begin(self, step: int) -> None:
        """An exchange begins."""
        ...

    def take(self, submission: Submission) -> None:
        """A gradient is ready, and is about to be handed to the engine."""
        ...

    def end(self) -> None:
        """The exchange is done, on all ranks; may use collectives."""
        ...

    def close(self) -> None:
        """No further exchange will come. Raises nothing."""
        ...


@dataclass(frozen=True)
class Controlled:
    """A controller with what it may change: ``compressors[i]`` of layer i, or None, from step ``first_step`` on."""

    controller: Controller
    compressors: Sequence[Compressor | None]
    first_step: int = 0


@dataclass(frozen=True)
class Terms:
    """What may differ between exchangers.

    ``arguments``: the frontend's, which the ranks compare. ``digests``: begins those of the parameters;
    ``fingerprint``: begins that of a turn. ``advice``: ends the error where some ranks applied the means of a step and
    others did not. ``problem``: why this rank cannot take part; it raises this, and the others a PlanMismatchError that
    quotes it.
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
        """Of the controller, for logs."""
        return "none" if self.controlled is None else self.controlled.controller.to_string()


@dataclass(frozen=True)
class Agreement:
    """What all ranks have come to. ``journal``: rank 0's run log, if there is to be one."""

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
    """Collective: PlanMismatchError on every rank if layers, plan, settings or arguments differ."""
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
    """ConfigError for what decides by measured times: no two runs have these in common."""
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
    """The controller's, if there is one and a layer that it may change; it refuses what it cannot do in either case."""
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
    """Rank 0's, if there is to be one; if it cannot be opened, all ranks raise."""
    if transport.rank != 0 or not config.run_log:
        return None
    try:
        return Journal(_log_path(config.run_log, name))
    except ConfigError as error:
        agree(transport, None, error)
        raise


def _log_path(path: str, name: str) -> Path:
    """The run log of the job's first exchanger is at ``path``; others put their names into theirs."""
    whole = Path(path)
    return whole if name == FIRST else whole.with_name(f"{whole.stem}.{name}{whole.suffix}")
