"""``init`` and ``gloo_built`` for PyTorch: the ranks find each other through torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from gradcomp.core import trace
from gradcomp.core.config import Config
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.job import over_torch, runtime
from gradcomp.job.launch import Launch, ranks_of
from gradcomp.job.network import Network
from gradcomp.torch.sharded.failures import explain_failures


def gloo_built() -> bool:
    """Return True if this PyTorch was built with Gloo. Local; needs no ``init``."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def init(
    comm: Any = None,
    process_sets: Iterable[Any] | str | None = None,
    *,
    process_group: Any = None,
    **settings: Any,
) -> None:
    """Join the job. Collective; a second call without arguments changes nothing, one with arguments raises StateError.

    Under torchrun, mpirun, horovodrun or Slurm the ranks find each other by the launcher's environment; a
    plain ``python`` is a world of one. If torch.distributed is initialised already, its default group's
    ranks, or those of ``process_group``, are used; gradcomp never runs its own collectives on that group.

    Args:
        comm: the ranks that form the job, if not the whole world: a list, an mpi4py communicator or a process group.
            A subset is possible only if torch.distributed is initialised; the other ranks do not call ``init``.
        process_sets: sets that will have optimizers of their own, as lists of ranks or :class:`ProcessSet`. Only
            the horovod transport needs them here, because all ranks make Horovod's sets together. ``"dynamic"``
            means none: sets may always be added later.
        process_group: the group of torch.distributed whose ranks form the job, if not the default group.
        settings: the fields of :class:`gradcomp.Config`; see the configuration page.

    Raises ConfigError for a bad argument or setting or an incomplete launch environment, StateError for a second call
    with arguments, TransportError if the ranks do not meet in time.
    """
    if isinstance(comm, ProcessGroup):  # torch.distributed's communicator
        comm, process_group = None, process_group or comm
    chosen = ranks_of(comm)
    if chosen is not None and process_group is not None:
        raise ConfigError("comm and process_group both name the ranks of the job; give one")
    if runtime.is_initialized() and (chosen is not None or process_group is not None):
        raise StateError("gradcomp is already initialised; call shutdown() before init() with other ranks")
    if isinstance(process_sets, str) and process_sets.lower() == "dynamic":
        process_sets = ()
    elif isinstance(process_sets, str):
        raise ConfigError(f'process_sets must be a list, "dynamic" or None, got {process_sets!r}')
    trace.profiler.begin = _begin_range
    # Opening a range costs ten microseconds, and reading this flag costs almost nothing. torch has no public function
    # that reports the profiler for all threads. The flag exists since torch 1.11.
    trace.profiler.records = partial(getattr, torch.autograd.profiler, "_is_profiler_enabled", False)
    explain_failures()

    def meet(config: Config) -> tuple[Launch, Network]:
        if not config.store:
            return over_torch.join(config.timeout_seconds, process_group, chosen)
        if chosen is not None or process_group is not None or process_sets:
            raise ConfigError(
                f"store={config.store}: an elastic job has all of its ranks, and no process sets"
            )
        return over_torch.join_elastic(config)

    runtime.begin(meet, process_sets or (), settings, training_threads=torch.get_num_threads())


def _begin_range(name: str) -> Callable[[], object]:
    entered = torch.profiler.record_function(trace.range_name(name))
    entered.__enter__()  # type: ignore[no-untyped-call]
    return partial(entered.__exit__, None, None, None)
