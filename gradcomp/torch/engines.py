"""``gloo_built``, the one question about engines that PyTorch answers; :mod:`gradcomp.job.engines` has the others."""

from __future__ import annotations

import torch.distributed


def gloo_built() -> bool:
    """Return True if this PyTorch was built with Gloo. Local; needs no ``init``."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()
