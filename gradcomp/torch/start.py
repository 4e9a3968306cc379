"""Common parts of DistributedOptimizer and ddp_comm_hook: proposals of plans, takeovers, and parameter digests."""

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

#: Advice that ends the error about ranks of which only some stepped.
SKIP_TOGETHER = (
    ', or let a rank that gives up skip the step everywhere by DistributedOptimizer(on_skip="agree")'
)


class Exchange(Protocol):
    """Exchanges the gradients of some parameters as autograd computes them."""

    @property
    def named(self) -> Named:
        """The exchanged parameters, with their names."""
        ...

    def retire(self, why: str) -> None:
        """Exchange nothing from now on; further use raises a StateError with the text ``why``."""
        ...


#: Live exchanges in the order in which they were made, which is the same on all ranks. References are weak.
_exchanges: WeakValueDictionary[int, Exchange] = WeakValueDictionary()
_numbers = count()


def take_over(exchange: Exchange, title: str, before: Exchange | None = None) -> None:
    """Retire earlier exchanges that share parameters with this one, except ``before``, which the caller ends.

    Both would read a gradient and write its mean to the same memory at the same time. An earlier exchange is
    not an error in itself: a notebook cell that runs again wraps a new optimizer while the old one still has
    its name, and training in phases keeps optimizers that it no longer uses. It is an error to use the
    earlier one again. That use raises the error, on all ranks alike, because they make exchanges in the same
    order.
    """
    ours = {id(parameter) for _, parameter in exchange.named}
    for earlier in list(_exchanges.values()):
        shared = [name for name, parameter in earlier.named if id(parameter) in ours]
        if not shared or earlier is before:
            continue
        more = f", ... ({len(shared)} layers)" if len(shared) > 3 else ""
        what = f"layers {', '.join(map(repr, shared[:3]))}{more}"
        logger.info("%s are exchanged by this %s from now on, and no longer by an earlier one", what, title)
        earlier.retire(
            f"{what} are exchanged by a {title} that was made after this one, which exchanges nothing any more: a "
            "gradient can be averaged once only. Give every optimizer parameters of its own, or wrap an optimizer when "
            "earlier ones are no longer used"
        )
    _exchanges[next(_numbers)] = exchange


def propose(
    policy: Policy, named: Named, step: int = 0, controller: Controller | str | None = None
) -> Proposal:
    """Return the plan for these parameters at a step; raise ConfigError for layers that cannot be exchanged."""
    return start.propose(policy, [spec(name, parameter) for name, parameter in named], step, controller)


def digests_of(named: Named) -> Digests:
    """Compute a checksum of each parameter's bytes."""
    return Digests(CRC32C, {name: _digest(parameter) for name, parameter in named})


def digests_behind(named: Named) -> Callable[[], Digests]:
    """Return a function for any thread that computes the digests as of this point of the current stream.

    The parameters must not change before it returns.
    """
    streams = streams_of(named[0][1].device)
    begun = streams.mark()

    def work() -> Digests:
        with streams.on(streams.another()):  # the thread's current stream is not ordered behind the script's
            streams.follow(begun)
            return digests_of(named)

    return work


def _digest(parameter: torch.Tensor) -> int:
    data = parameter.detach()
    if not data.is_contiguous():
        data = data.contiguous()
    return kernels.crc32c(data.view(-1).view(torch.uint8).cpu().numpy())
