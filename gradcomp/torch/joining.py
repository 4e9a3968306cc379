"""Horovod's ``join`` for PyTorch."""

from __future__ import annotations

from gradcomp.job import joining


def join(device: int = -1) -> int:  # noqa: ARG001 - Horovod's
    """Say that this rank is out of data, and wait until all ranks have; the rank that joined last.

    Until then the others' steps and allreduces go on: this rank adds no gradient and zeros, and means are still divided
    by N. Its parameters and gradients stay what they are, so broadcast from the rank that is returned: the one with
    most steps, of several the one that called collectives last, else the highest. Any other collective of the others is
    a ConfigError there, after which they may go on, and join. ``device`` is Horovod's, and of no use here. ConfigError
    beside ``ddp_comm_hook`` and sharded training, StateError before ``init``, TransportError if a
    rank fails. Wire: as the others' exchanges, and for each optimizer a small value in the job's store.
    """
    return joining.join()
