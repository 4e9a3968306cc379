"""The one question about engines that PyTorch answers; the others are in :mod:`gradcomp.job.engines`."""

from __future__ import annotations

import torch.distributed


def gloo_built() -> bool:
    """Whether this PyTorch has Gloo. Local; needs no ``init``."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()
