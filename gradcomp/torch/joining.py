"""Horovod's ``join`` for PyTorch."""

from __future__ import annotations

from gradcomp.job import joining


def join(device: int = -1) -> int:  # noqa: ARG001 - Horovod's
    """Tell the ranks that this one is out of data, wait until all are, and return the rank that joined last.

    Until then the others' steps and allreduces go on: to a step this rank adds no gradient, to an allreduce it adds
    zeros, and means are still divided by N. Its parameters and gradients do not change, so broadcast from the rank that
    is returned: the one with most steps, of several the one that called collectives last, else the highest. Any other
    collective of the others raises a ConfigError there; after it they may go on, and join. ``device`` is Horovod's
    argument and has no effect. Raises ConfigError
    beside ``ddp_comm_hook`` and sharded training, StateError before ``init``, TransportError if a
    rank fails. Wire: as the others' exchanges, and for each optimizer a small value in the job's store.
    """
    return joining.join()
