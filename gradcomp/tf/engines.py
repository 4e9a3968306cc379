"""The question of Horovod's about engines that only a framework can answer; the others are in ``gradcomp.job``."""

from __future__ import annotations

from gradcomp.tf.runtime import is_there


def gloo_built() -> bool:
    """Whether PyTorch is installed and has Gloo, through which ranks may meet. Imports it; needs no ``init``."""
    if not is_there("torch"):
        return False
    from torch import distributed

    return distributed.is_available() and distributed.is_gloo_available()
