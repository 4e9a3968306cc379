"""What the optimizer's wrapper and the DDP hook have in common: which layers, and whether parameters stay equal."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradcomp import kernels
from gradcomp.compress import Policy
from gradcomp.control import Controller
from gradcomp.job import start
from gradcomp.job.start import Proposal
from gradcomp.pipeline.digests import CRC32C, Digests
from gradcomp.torch.layers import Named, spec
from gradcomp.torch.streams import streams_of

#: What follows where some ranks stepped and others did not.
SKIP_TOGETHER = (
    ', or let a rank that gives up skip the step everywhere by DistributedOptimizer(on_skip="agree")'
)


def propose(
    policy: Policy, named: Named, step: int = 0, controller: Controller | str | None = None
) -> Proposal:
    """The plan for these parameters at a step; ConfigError for what cannot be exchanged."""
    return start.propose(policy, [spec(name, parameter) for name, parameter in named], step, controller)


def digests_of(named: Named) -> Digests:
    """What the parameters hold."""
    return Digests(CRC32C, {name: _digest(parameter) for name, parameter in named})


def digests_behind(named: Named) -> Callable[[], Digests]:
    """What makes, on any thread, the digests of what the parameters hold when the current stream comes to this point.

    They must not change before it has returned.
    """
    streams = streams_of(named[0][1].device)
    begun = streams.mark()

    def work() -> Digests:
        with streams.on(streams.another()):  # the thread's own would not wait for the script's
            streams.follow(begun)
            return digests_of(named)

    return work


def _digest(parameter: torch.Tensor) -> int:
    data = parameter.detach()
    if not data.is_contiguous():
        data = data.contiguous()
    return kernels.crc32c(data.view(-1).view(torch.uint8).cpu().numpy())
