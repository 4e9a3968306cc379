"""``gloo_built``, the question about engines that needs a framework; :mod:`gradcomp.job.engines` has the others."""

from __future__ import annotations

from gradcomp.tf.runtime import is_there


def gloo_built() -> bool:
    """Return True if PyTorch is installed with Gloo, through which ranks may meet.

    It imports PyTorch. Needs no ``init``.
    """
    if not is_there("torch"):
        return False
    from torch import distributed

    return distributed.is_available() and distributed.is_gloo_available()
