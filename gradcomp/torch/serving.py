"""Ranks that only serve: what they do instead of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradcomp.core.errors import StateError

if TYPE_CHECKING:
    from gradcomp.torch.core import Core


class Serving:
    """The methods of a distributed optimizer where ``reduction="parameter_server:...,dedicated=true"``."""

    _gradcomp: Core

    @property
    def serves(self) -> bool:
        """Whether this rank only serves, and calls :meth:`serve` instead of training."""
        return not self._gradcomp.checkpoint_manager.role.trains

    def serve(self, update: Callable[[], Any] | None = None) -> int:
        """Exchange with those who train, step by step, until they are :meth:`done`; the number of exchanges.

        Before each the gradients are set to None, after it they are the means, as on the trainers when backward has
        returned. ``update`` then does what the trainers do from there to the next batch, and must call ``step()``: clip
        gradients, step, advance a schedule of learning rates. Without it that is ``step()`` alone. So parameters stay
        those of the trainers.

        StateError on a rank that trains; TransportError if a rank dies, as everywhere. Between two exchanges the
        trainers may take ``timeout_seconds``.
        """
        if not self.serves:
            raise StateError("this rank trains; only ranks whose opt.serves is true serve")
        optimizer: Any = self
        exchanges = 0
        while True:
            optimizer.zero_grad(set_to_none=True)
            if not self._gradcomp.exchange.serve():
                return exchanges
            (update or optimizer.step)()
            exchanges += 1

    def done(self) -> None:
        """On every trainer: let the servers' :meth:`serve` return, as ``gc.shutdown()`` and the end of the program do.

        Whoever goes on training needs servers that serve again. Nothing where no rank only serves.
        """
        core = self._gradcomp
        if core.driver.attached:
            core.exchange.drain()
            core.driver.dismiss()
