"""What the optimizer's wrapper and the DDP hook have in common: which layers, and whether parameters stay equal."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from gradcomp import kernels
from gradcomp.compress import Policy
from gradcomp.control import Controller
from gradcomp.job import start
from gradcomp.job.start import Proposal
from gradcomp.torch.layers import Named, spec


def propose(
    policy: Policy, named: Named, step: int = 0, controller: Controller | str | None = None
) -> Proposal:
    """The plan for these parameters at a step; ConfigError for what cannot be exchanged."""
    return start.propose(policy, [spec(name, parameter) for name, parameter in named], step, controller)


def digests(named: Named) -> npt.NDArray[np.uint32]:
    """A number for every parameter, by which ranks compare them."""
    return np.array([_digest(parameter) for _, parameter in named], dtype=np.uint32)


def _digest(parameter: torch.Tensor) -> int:
    data = parameter.detach()
    if not data.is_contiguous():
        data = data.contiguous()
    return kernels.crc32c(data.view(-1).view(torch.uint8).cpu().numpy())
