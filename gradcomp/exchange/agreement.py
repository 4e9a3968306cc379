"""Before the first exchange all ranks compare layers, plan, settings and arguments."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradcomp.control import Controller, ControllerRun, Environment
from gradcomp.core.config import Config
from gradcomp.core.errors import ConfigError, GradcompError, PlanMismatchError, WireFormatError
from gradcomp.core.journal import Journal
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Plan
from gradcomp.core.scheme import AUTO, parse
from gradcomp.core.strings import printable
from gradcomp.core.topology import Topology
from gradcomp.exchange.settings import FIRST, Settings
from gradcomp.exchange.slices import agree_on_slices
from gradcomp.exchange.thread import in_background
from gradcomp.transport.base import Handle, Transport, wait
from gradcomp.version import __version__

logger = logging.getLogger("gradcomp")


def describe(layers: Sequence[LayerSpec], plan: Plan, config: Config, **extra: Any) -> dict[str, Any]:
    """Return the values that must be equal on all ranks: version, settings, layers, plan."""
    return {
        "version": __version__,
        "settings": {**config.shared(), **extra},
        "layers": {layer.name: [list(layer.shape), layer.dtype] for layer in layers},
        "order": [layer.name for layer in layers],
        "compression": {a.layer: [a.compressor, a.level] for a in plan.assignments},
    }


def agree(
    transport: Transport,
    description: Mapping[str, Any] | None,
    error: Exception | None = None,
    *,
    wait_for: Callable[[Handle], None] = wait,
    note: bytes = b"",
) -> list[bytes]:
    """Raise PlanMismatchError on every rank unless all descriptions are equal. Collective.

    A rank that cannot continue passes its ``error``: it raises this error, and the others raise one that quotes it.
    ``wait_for`` waits for a handle. It returns the ``note`` of each rank, which may differ. Wire: two rounds of a
    digest and the note; the descriptions themselves travel only if the digests differ.
    """
    mine = {"error": f"{type(error).__name__}: {error}"} if error else dict(description or {})
    text = json.dumps(mine, sort_keys=True)
    digest = hashlib.sha256(text.encode()).digest()
    parts = transport.allgather_bytes(digest + note, wait_for)
    if error is None and all(part[: len(digest)] == digest for part in parts):
        return [part[len(digest) :] for part in parts]
    texts = transport.allgather_bytes(text.encode(), wait_for)
    everyone = [_parse(rank, part) for rank, part in enumerate(texts)]
    raise error or PlanMismatchError(printable(_difference(everyone)))


def _parse(rank: int, part: bytes) -> dict[str, Any]:
    try:
        data = json.loads(part)
    except ValueError as error:
        raise WireFormatError(f"rank {rank} sent a description that is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise WireFormatError(f"rank {rank} sent a description that is not an object")
    return data


def _difference(everyone: Sequence[Mapping[str, Any]]) -> str:
    """Describe the first thing in which a rank differs from rank 0, or the first rank that failed."""
    for rank, other in enumerate(everyone):
        if "error" in other:
            return f"rank {rank} failed: {other['error']}"
    for rank, other in enumerate(everyone):
        for key in everyone[0]:
            mine, theirs = everyone[0][key], other.get(key)
            if mine == theirs:
                continue
            if isinstance(mine, dict) and isinstance(theirs, dict):
                names = sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
                name = names[0]
                what = f"{key} of {name!r}" if key != "layers" else f"layer {name!r}"
                return (
                    f"{what}: rank 0 has {mine.get(name, 'none')}, rank {rank} has {theirs.get(name, 'none')}"
                    f" ({len(names)} differ)"
                )
            return f"{key}: rank 0 has {mine}, rank {rank} has {theirs}"
    return "the ranks differ"


def agree_on_settings(
    layers: Sequence[LayerSpec],
    plan: Plan,
    transport: Transport,
    config: Config,
    settings: Settings,
    wait_for: Callable[[Handle], None],
) -> tuple[Config, Settings, Journal | None]:
    """Raise PlanMismatchError on every rank if layers, plan, settings or arguments differ. Collective.

    It returns what all have agreed on: the settings have a topology, and the run of the controller if there is one.
    Rank 0's run log comes with them.
    """
    topology = settings.topology or Topology.one_host(transport.size)
    shared = {
        "average": settings.average,
        "order_step": settings.order_step,
        "hosts": list(topology.hosts),
        **settings.arguments,
    }
    if settings.controlled_by is not None:
        shared["controller"] = settings.controller_text
    journal = _open_journal(transport, config, settings.name)
    try:
        description, logs = describe(layers, plan, config, **shared), bytes([journal is not None])
        notes = agree(transport, description, settings.problem, wait_for=wait_for, note=logs)
        on_device, slices_chosen = settings.device.driver is not None, not config.slice_elements
        config = agree_on_slices(transport, config, on_device, topology, layers, plan, wait_for=wait_for)
        if config.deterministic:
            _refuse_times(settings.controlled_by, config, topology)
        controller = _begin_controller(settings, layers, transport, topology, config)
    except GradcompError:
        if journal is not None:
            journal.close()
        raise
    times_every = config.run_log_every_steps if notes[0] == b"\1" else 0
    found = replace(
        settings,
        topology=topology,
        controller=controller,
        slices_chosen=slices_chosen,
        times_every=times_every,
    )
    return config, found, journal


def _refuse_times(controller: Controller | None, config: Config, topology: Topology) -> None:
    """Raise ConfigError for what decides by measured times, since no two runs have these in common."""
    what = ""
    if config.reduction == AUTO and len(topology.leaders) > 1:
        what = "between hosts reduction=auto chooses by measured times: name a reduction"
    if controller is not None and controller.by_times:
        what = f"{controller.to_string()} decides by measured times: choose another controller or objective"
    if what:
        raise ConfigError(f"deterministic=True: {what}, or leave deterministic off")


def _begin_controller(
    settings: Settings, layers: Sequence[LayerSpec], transport: Transport, topology: Topology, config: Config
) -> ControllerRun | None:
    """Begin the controller, which refuses what it cannot do; return None if no layer is left to it."""
    controller, device = settings.controlled_by, settings.device
    if controller is None:
        return None
    environment = Environment(
        layers,
        settings.adjustable,
        transport.rank,
        topology,
        parse(config.reduction),
        config.seed,
        settings.adjustable_from,
        lambda work: in_background(device.bound(work)),
        config.slice_elements,
        device,
        config.deterministic,
        settings.shared_core and device.driver is None,
        transport.byte_seconds,
    )
    running = controller.begin(environment)
    if environment.controlled:
        return running
    if transport.rank == 0:
        logger.warning(
            "the controller %s has nothing to adjust, and does not run: no layer travels compressed (they are small, "
            "excluded or float64, or the compression is none)",
            controller.name,
        )
    return None


def _open_journal(transport: Transport, config: Config, name: str) -> Journal | None:
    """Open rank 0's run log, if there is to be one; all ranks raise if it cannot be opened."""
    if transport.rank != 0 or not config.run_log:
        return None
    path = Path(config.run_log)
    if name != FIRST:  # exchangers after the job's first one put their names into their paths
        path = path.with_name(f"{path.stem}.{name}{path.suffix}")
    try:
        return Journal(path)
    except ConfigError as error:
        agree(transport, None, error)
        raise
