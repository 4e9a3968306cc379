"""``init`` for TensorFlow: ranks meet through MPI alone, or through torch.distributed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import tensorflow as tf

from gradcomp.core.config import Config
from gradcomp.core.errors import ConfigError, StateError, is_there
from gradcomp.core.scheme import AUTO
from gradcomp.job import runtime
from gradcomp.job.cores import available_cores
from gradcomp.job.launch import Launch, Ranks, discover, ranks_of
from gradcomp.job.network import Alone, Network

MPI, TORCH = "mpi", "torch"
#: Transport between hosts -> the engine that it needs; other transports work with either engine.
_NEEDS = {"mpi": MPI, "torch": TORCH, "horovod": TORCH}


def gloo_built() -> bool:
    """Return True if PyTorch is installed with Gloo, through which ranks may meet.

    It imports PyTorch. Needs no ``init``.
    """
    if not is_there("torch"):
        return False
    from torch import distributed

    return distributed.is_available() and distributed.is_gloo_available()


def preempted() -> bool:
    """Return whether some rank has got a signal that ``handle_preemption`` handles, as all ranks know.

    Read it after a step, outside of tf.function, as in ``on_train_batch_end`` of a callback: there it is the same on
    all ranks, so that all can save and leave together. See :func:`gradcomp.torch.preempted`.

    Raises StateError before ``init``, and while a tf.function is traced, in which it would be a constant.
    """
    if not tf.executing_eagerly():
        raise StateError("preempted() would be a constant in a tf.function: call it outside, after the step")
    return runtime.preempted()


def init(comm: Any = None, process_sets: Iterable[Any] | str | None = None, **settings: Any) -> None:
    """Join the job. Collective; a second call is allowed and changes nothing.

    Under mpirun, mpiexec or srun the ranks meet through MPI, for which mpi4py and a wheel of MPI from PyPI
    suffice; under torchrun and horovodrun through torch.distributed, which needs torch. ``transport="mpi"``
    and ``"torch"`` override that. A plain ``python`` is a world of one.

    Args:
        comm: all ranks that the launcher started, as a list, a communicator of mpi4py or None.
        process_sets: sets that will have optimizers of their own, see :func:`gradcomp.torch.init`.
        settings: the fields of :class:`gradcomp.Config`.

    Raises ConfigError for a bad setting, a ``comm`` of some ranks only, an incomplete launch environment and
    a missing engine, TransportError if the ranks do not meet in time.
    """
    chosen = ranks_of(comm)
    # "dynamic" is Horovod's value for sets that are added later, which need not be announced here.
    sets = () if process_sets in (None, "dynamic") else process_sets
    runtime.begin(
        partial(_join, chosen=chosen, sets=sets),
        sets,
        settings,
        # 0, the default, is a thread for each core.
        training_threads=tf.config.threading.get_intra_op_parallelism_threads() or available_cores(),
    )


def _join(config: Config, chosen: Ranks | None, sets: Any) -> tuple[Launch, Network]:
    if config.store:
        if chosen is not None or sets:
            raise ConfigError(
                f"store={config.store}: an elastic job has all of its ranks, and no process sets"
            )
        if not is_there("torch"):
            raise ConfigError(
                f"store={config.store}: the ranks of an elastic job meet through PyTorch: pip install torch"
            )
        from gradcomp.job import over_torch

        return over_torch.join_elastic(config)
    launch = discover()
    if chosen not in (None, tuple(range(launch.size))):
        raise ConfigError(
            f"comm={list(chosen)}: a job has all {launch.size} ranks that the launcher started; pass "
            f"process_set=ProcessSet({list(chosen)}) to the calls that only these ranks make"
        )
    if launch.size == 1:
        return launch, Alone()
    installed = {engine for engine, module in ((MPI, "mpi4py"), (TORCH, "torch")) if is_there(module)}
    if choose(launch.launcher, config.transport, installed) == MPI:
        from gradcomp.job import network

        return network.join(config.timeout_seconds)
    from gradcomp.job import over_torch

    return over_torch.join(config.timeout_seconds)


def choose(launcher: str, transport: str, installed: set[str]) -> str:
    """Return the engine through which the ranks meet; ConfigError with what to install if it is missing."""
    engine = _NEEDS.get(transport.rpartition("+")[2])
    if engine is None:
        preferred = (MPI, TORCH) if launcher in ("mpirun", "slurm") else (TORCH,)
        engine = next((one for one in preferred if one in installed), preferred[0])
    if engine in installed:
        return engine
    if engine == MPI:
        raise ConfigError(f"{launcher} with transport={transport} needs MPI: pip install gradcomp[mpi]")
    instead = "; or start the ranks with mpiexec, which needs no torch" if transport == AUTO else ""
    raise ConfigError(
        f"{launcher} with transport={transport} needs torch.distributed: pip install torch{instead}"
    )
