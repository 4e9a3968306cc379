"""``init`` for PyTorch: the ranks meet through torch.distributed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradcomp.core.errors import StateError
from gradcomp.job import runtime
from gradcomp.job.over_torch import join
from gradcomp.torch import profiler


def init(process_group: Any = None, *, process_sets: Iterable[Any] = (), **settings: Any) -> None:
    """Join the job. Collective; a second call is allowed and changes nothing.

    Under torchrun, mpirun, horovodrun or Slurm the ranks find each other by the launcher's environment; a plain
    ``python`` is a world of one. With torch.distributed already initialised, its default group's ranks, or those of
    ``process_group``, are used; gradcomp never runs its own collectives on that group.

    ``process_sets``: those that will have optimizers of their own, as lists of ranks or :class:`ProcessSet`; only the
    horovod transport needs to be told, for Horovod's sets are made by all ranks together. ``settings``: the fields of
    :class:`gradcomp.Config`; see the configuration page. Raises ConfigError for a bad
    setting or a half-set launch environment, TransportError if the ranks do not meet in time.
    """
    if runtime.is_initialized() and process_group is not None:
        raise StateError(
            "gradcomp is already initialised; call shutdown() before init() with a process_group"
        )
    profiler.show_ranges()
    runtime.begin(lambda config: join(config.timeout_seconds, process_group), process_sets, settings)
