"""Horovod's ``join`` for PyTorch."""

from __future__ import annotations

from gradcomp.job import joining


def join(device: int = -1) -> int:  # noqa: ARG001 - Horovod's
    """Say that this rank is out of data, and wait until all ranks have; the rank that has made most steps by then.

    Until then the others' steps and allreduces go on: this rank adds no gradient and zeros, and means are still divided
    by N. Its parameters and gradients stay what they are, so broadcast from the rank that is returned. Any other
    collective of the others is a ConfigError there. ``device`` is Horovod's, and of no use here. ConfigError beside
    ``ddp_comm_hook``, sharded training and dedicated servers, StateError before ``init``, TransportError if a rank
    fails. Wire: as the others' exchanges, and for each optimizer a small value in the job's store.
    """
    return joining.join()
