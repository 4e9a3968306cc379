"""Gathers the facts of this process, alone or as a rank of a job."""

from __future__ import annotations

import os
import socket

from gradcomp.core.config import Config, secret, unknown_variables
from gradcomp.core.errors import ConfigError, is_there
from gradcomp.doctor import gpus, machine
from gradcomp.doctor.addresses import network
from gradcomp.doctor.facts import Facts, Place, Settings
from gradcomp.job.launch import Launch, discover
from gradcomp.reduce.header import PROTOCOL
from gradcomp.version import __version__


def examine() -> tuple[Launch, Facts]:
    """Return where this process is in its job, and its facts. What is wrong is among the facts; nothing is raised."""
    launch, place = _place()
    config, settings = _settings()
    libraries = machine.libraries()
    threads, cuda = None, ("", 0)
    if is_there("torch"):
        from gradcomp.doctor import over_torch

        libraries["torch"] = over_torch.version()
        threads, cuda = over_torch.training_threads(), over_torch.gpus()
    found = gpus.gpus(*cuda)
    if found.cupy:
        libraries["cupy"] = found.cupy
    return launch, Facts(
        gradcomp=__version__,
        wire=PROTOCOL,
        libraries=libraries,
        place=place,
        settings=settings,
        kernels=machine.kernels(config),
        cores=machine.cores(config, launch.local_size, threads),
        limits=machine.limits(),
        disks=machine.disks(config, launch.rank),
        network=network(launch),
        gpus=found,
        lacks=gpus.lacks(launch, found),
    )


def _place() -> tuple[Launch, Place]:
    problem = ""
    try:
        launch = discover()
    except ConfigError as error:
        problem = str(error)
        launch = Launch(0, 1, 0, 1, 0, 1, "single", socket.gethostname())
    return launch, Place(
        launcher=launch.launcher,
        rank=launch.rank,
        size=launch.size,
        local_rank=launch.local_rank,
        local_size=launch.local_size,
        host=launch.host,
        problem=problem,
    )


def _settings() -> tuple[Config, Settings]:
    problem, has_secret = "", False
    try:
        has_secret = bool(secret(os.environ))
        config = Config.resolve()
    except ConfigError as error:
        problem, config = str(error), Config()
    return config, Settings(
        transport=config.transport,
        shared={name: str(value) for name, value in config.shared().items()},
        changed={name: str(value) for name, value in config.changed().items()},
        unknown=tuple(unknown_variables(os.environ)),
        problem=problem,
        has_secret=has_secret,
    )
