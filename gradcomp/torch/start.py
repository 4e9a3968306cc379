"""What the optimizer's wrapper and the DDP hook have in common: which layers, and whether parameters stay equal."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import torch

from gradcomp.compress import Policy
from gradcomp.control import Controller
from gradcomp.engine import Exchanger
from gradcomp.job import start
from gradcomp.job.runtime import Runtime
from gradcomp.job.start import Proposal
from gradcomp.pipeline.digests import Digests
from gradcomp.torch.layers import Named, spec

#: What :func:`_digest` computes. Checkpoints name it.
DIGEST = "crc32"


def propose(
    policy: Policy, named: Named, step: int = 0, controller: Controller | str | None = None
) -> Proposal:
    """The plan for these parameters at a step; ConfigError for what cannot be exchanged."""
    return start.propose(policy, [spec(name, parameter) for name, parameter in named], step, controller)


def compare_parameters(state: Runtime, exchanger: Exchanger, named: Named, steps: int) -> None:
    """The fingerprint, in the steps in which it is due. Collective: StateError names the first layer that differs."""
    if start.comparison_is_due(state.config, steps):
        exchanger.fingerprint(_digests(named))


def digests_of(named: Named) -> Digests:
    """What the parameters hold."""
    values = _digests(named).tolist()
    return Digests(DIGEST, {name: value for (name, _), value in zip(named, values, strict=True)})


def _digests(named: Named) -> npt.NDArray[np.uint32]:
    return np.array([_digest(parameter) for _, parameter in named], dtype=np.uint32)


def _digest(parameter: torch.Tensor) -> int:
    data = parameter.detach()
    if not data.is_contiguous():
        data = data.contiguous()
    return zlib.crc32(data.view(-1).view(torch.uint8).cpu().numpy().data)
