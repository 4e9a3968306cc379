"""The process's life with gradcomp: init, shutdown, who am I."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradcomp import kernels
from gradcomp.core.config import Config
from gradcomp.core.errors import ConfigError, StateError, TransportError
from gradcomp.engine import Engine, Exchanger
from gradcomp.torch import channel
from gradcomp.torch.launch import Launch, discover
from gradcomp.torch.rendezvous import connect
from gradcomp.transport.torch import TorchControl, TorchTransport
from gradcomp.version import __version__

logger = logging.getLogger("gradcomp")

#: How long an orderly shutdown waits for the other ranks.
FAREWELL_SECONDS = 10.0


@dataclass(eq=False)
class Runtime:
    """What :func:`init` set up. ``user_group`` serves the user's own collectives, in program order."""

    launch: Launch
    config: Config
    ranks: list[int]
    owns_default_group: bool
    engine: Engine = field(default_factory=Engine)
    user_group: Any = None
    exchangers: list[Exchanger] = field(default_factory=list)
    names: Any = field(default_factory=count)
    process: int = field(default_factory=os.getpid)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def make_transport(self) -> TorchTransport:
        """A communicator of its own for an exchanger; collective."""
        whole = len(self.ranks) == dist.get_world_size()
        return TorchTransport(None if whole else self.ranks, self.config.timeout_seconds)

    def make_control(self) -> TorchControl:
        """A connection to the job's key-value store. It may take long where names are resolved slowly: make few."""
        # torchrun's store outlives a failed attempt, and with it that attempt's abort.
        attempt = self.launch.served_attempt
        return TorchControl(
            f"gradcomp/{attempt or 0}/{_generation}/{self.ranks[0]}-{len(self.ranks)}",
            self.config.timeout_seconds,
            "rank 0" if attempt is None else "torchrun",
        )

    @cached_property
    def engine_control(self) -> TorchControl:
        """The connection that all exchangers share: the engine's thread uses it."""
        return self.make_control()


_runtime: Runtime | None = None
_generation = 0  # init after shutdown must not read what the last job published


def init(process_group: Any = None, **settings: Any) -> None:
    """Join the job. Collective; a second call is allowed and changes nothing.

    Under torchrun, mpirun, horovodrun or Slurm the ranks find each other by the launcher's environment; a plain
    ``python`` is a world of one. With torch.distributed already initialised, its default group's ranks, or those of
    ``process_group``, are used; gradcomp never runs its own collectives on that group.

    ``settings``: the fields of :class:`gradcomp.Config`; see the configuration page. Raises ConfigError for a bad
    setting or a half-set launch environment, TransportError if the ranks do not meet in time.
    """
    global _runtime, _generation
    if _runtime is not None:
        if settings or process_group is not None:
            raise StateError(
                "gradcomp is already initialised; call shutdown() before init() with other settings"
            )
        return
    config = Config.resolve(**settings)
    _start_logging(config)
    _choose_kernels(config)
    owns = not dist.is_initialized()
    launch = discover() if owns else _launch_of_existing_group()
    if process_group is not None and owns:
        raise ConfigError("process_group was given, but torch.distributed is not initialised")
    if owns and launch.size > 1:
        launch = connect(launch, config.timeout_seconds)
    ranks = [0]
    if dist.is_initialized():
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    _generation += 1
    runtime = Runtime(launch, config, ranks, owns and dist.is_initialized())
    if runtime.size > 1:
        runtime.user_group = runtime.make_transport()
    _runtime = runtime
    atexit.register(shutdown)
    _banner(runtime)


def shutdown() -> None:
    """Leave the job: drain, say goodbye to the other ranks, release everything. Idempotent; registered at exit.

    After an uncaught exception the other ranks are told to stop instead.
    """
    global _runtime
    runtime, _runtime = _runtime, None
    if runtime is None:
        return
    atexit.unregister(shutdown)
    if os.getpid() != runtime.process:
        return  # a forked child has nothing of its own to leave
    failed = getattr(sys, "last_value", None)
    reason = None
    if failed is not None:
        reason = f"rank {rank_of(runtime)} ended with {type(failed).__name__}: {failed}"
        for exchanger in runtime.exchangers:
            exchanger.abort(reason)
    orderly = channel.close(reason) and failed is None
    orderly = orderly and all(exchanger.error is None for exchanger in runtime.exchangers)
    if orderly and runtime.user_group is not None:
        _farewell(runtime)
    runtime.engine.stop()
    for exchanger in runtime.exchangers:
        exchanger.close()
    if runtime.user_group is not None:
        if orderly:
            runtime.user_group.close()
        else:
            runtime.user_group.abandon()
    if runtime.owns_default_group and dist.is_initialized():
        dist.destroy_process_group()


def _farewell(runtime: Runtime) -> None:
    """A bounded barrier: the rank that hosts the job's store must not leave first."""
    try:
        handle = runtime.user_group.allreduce(np.zeros(1, dtype=np.float32))
        deadline = monotonic() + FAREWELL_SECONDS
        while not handle.poll():
            if monotonic() > deadline:
                logger.warning("shutdown: the other ranks did not arrive within %.0f s", FAREWELL_SECONDS)
                runtime.user_group.abandon()
                return
            sleep(1e-3)
    except TransportError as error:
        logger.debug("shutdown: %s", error)


def is_initialized() -> bool:
    """Whether :func:`init` was called and :func:`shutdown` was not."""
    return _runtime is not None


def current() -> Runtime:
    """The runtime; StateError before :func:`init`."""
    if _runtime is None:
        raise StateError("gradcomp is not initialised; call gradcomp.torch.init() first")
    return _runtime


def rank_of(runtime: Runtime) -> int:
    """This process's number among the runtime's ranks."""
    return runtime.ranks.index(dist.get_rank()) if runtime.size > 1 else 0


def rank() -> int:
    """This process's number, 0 .. size - 1."""
    return rank_of(current())


def size() -> int:
    """Number of processes in the job."""
    return current().size


def local_rank() -> int:
    """This process's number on its host."""
    return current().launch.local_rank


def local_size() -> int:
    """Number of the job's processes on this host."""
    return current().launch.local_size


def user_group() -> Any:
    """The process group of the user's own collectives; None in a world of one."""
    group = current().user_group
    return None if group is None else group.group


def _launch_of_existing_group() -> Launch:
    """Local rank and size come from the launcher where it says so; the rest from torch.distributed."""
    try:
        found = discover()
    except ConfigError:
        found = None
    if found is not None and found.size == dist.get_world_size():
        return found
    return Launch.existing(dist.get_rank(), dist.get_world_size())


def _choose_kernels(config: Config) -> None:
    try:
        kernels.use("reference" if config.kernels == "reference" else "native")
        if config.isa != "auto":
            from gradcomp import _native

            _native.set_isa(config.isa)
    except ValueError as error:
        raise ConfigError(f"kernels={config.kernels}, isa={config.isa}: {error}") from error


def _start_logging(config: Config) -> None:
    """Be heard: a program that has configured logging keeps its configuration."""
    if logger.level == logging.NOTSET:
        logger.setLevel(config.log_level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("gradcomp: %(message)s"))
        logger.addHandler(handler)


def _banner(runtime: Runtime) -> None:
    if rank_of(runtime) == 0:
        logger.info(
            "%s: %d ranks by %s, transport torch.distributed (gloo), torch %s, kernels %s",
            __version__,
            runtime.size,
            runtime.launch.launcher,
            torch.__version__,
            kernels.body(),
        )
        if runtime.size == 1:
            logger.info("a world of one rank: nothing is exchanged, compression is bypassed")
