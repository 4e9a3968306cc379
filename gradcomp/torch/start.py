"""What the optimizer's wrapper and the DDP hook have in common: which layers, and whether parameters stay equal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from gradcomp import kernels
from gradcomp.compress import Policy
from gradcomp.control import Controller
from gradcomp.job import start
from gradcomp.job.start import Proposal
from gradcomp.pipeline.digests import CRC32C, Digests
from gradcomp.torch.layers import Named, spec
from gradcomp.torch.streams import streams_of

logger = logging.getLogger("gradcomp")

#: What follows where some ranks stepped and others did not.
SKIP_TOGETHER = (
    ', or let a rank that gives up skip the step everywhere by DistributedOptimizer(on_skip="agree")'
)


class Exchange(Protocol):
    """What exchanges the gradients of parameters when autograd has computed them."""

    @property
    def named(self) -> Named:
        """The parameters, with their names."""
        ...

    def retire(self, why: str) -> None:
        """Exchange nothing from now on; who asks for it is told why, by a StateError."""
        ...


#: In the order in which they were made, which all ranks share. One that nobody holds, parameters included, is gone.
_exchanges: WeakValueDictionary[int, Exchange] = WeakValueDictionary()
_numbers = count()


def take_over(exchange: Exchange, title: str, before: Exchange | None = None) -> None:
    """Of exchanges over the same parameters the last one goes on; ``before`` is left to its caller.

    All would read a gradient and write its mean to the same memory at the same time. The earlier one is not always an
    error: a notebook's cell that is run again wraps a new optimizer while the old one still has its name, and training
    in phases holds optimizers that are no longer used. It is one where the earlier one is used again, and is said
    there, on all ranks alike: they make exchanges in the same order.
    """
    ours = {id(parameter) for _, parameter in exchange.named}
    for earlier in list(_exchanges.values()):
        shared = [name for name, parameter in earlier.named if id(parameter) in ours]
        if not shared or earlier is before:
            continue
        more = f", ... ({len(shared)} layers)" if len(shared) > 3 else ""
        what = f"layers {', '.join(map(repr, shared[:3]))}{more}"
        logger.info("%s are exchanged by this %s from now on, and no longer by one before", what, title)
        earlier.retire(
            f"{what} are exchanged by a {title} that was made after this one, which exchanges nothing any more: a "
            "gradient can be averaged once only. Give every optimizer parameters of its own, or wrap an optimizer when "
            "those before it are done"
        )
    _exchanges[next(_numbers)] = exchange


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
