"""The methods of an optimizer with ``finish="forward"``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from gradcomp.torch.awaited import refused
from gradcomp.torch.forward_finish import ForwardExchange

_CLOSURE = "step() takes no closure, which needs the parameters of its own step"


class ForwardSteps:
    """The methods that an optimizer with ``finish="forward"`` has in place of :class:`Distributed`'s."""

    _gradcomp: ForwardExchange
    is_opaque: ClassVar[tuple[str, ...]] = ("_begin_step", "_end_step", "_complete")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on the means that are there; a parameter whose mean is not there is updated when it is used.

        Settings of the parameter groups, such as rates, count as they are now.
        """
        if closure is not None:
            raise refused(_CLOSURE)
        groups = self._begin_step()
        if groups is None:
            found = super().step()  # type: ignore[misc]
        else:
            base: Any = type(self).__bases__[1]
            kept, self.param_groups = self.param_groups, groups  # type: ignore[has-type]
            try:
                found = base.step(self)
            finally:
                self.param_groups = kept
                self._gradcomp.momenta.give_back()
        self._end_step()
        return found

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _begin_step(self) -> list[dict[str, Any]] | None:
        exchange = self._gradcomp
        if not exchange.driver.attached:
            return None
        exchange.complete()
        self._check_step()  # type: ignore[attr-defined]
        self._opt_called = True  # for schedulers
        return exchange.defer()

    def _end_step(self) -> None:
        if self._gradcomp.driver.attached:
            self._gradcomp.deferred()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients. After ``step()`` it waits for no mean, unless ``set_to_none`` is false."""
        exchange = self._gradcomp
        if exchange.is_deferred and set_to_none:
            exchange.zeroed = True
            type(self).__bases__[1].zero_grad(self)  # type: ignore[attr-defined]
        else:
            super().zero_grad(set_to_none)  # type: ignore[misc]

    def _complete(self) -> None:
        self._gradcomp.complete()

    def synchronize(self) -> None:
        """Make gradients the means now; after ``step()``, wait for all means and apply them."""
        if self._gradcomp.is_deferred:
            self._complete()
        elif self._gradcomp.driver.attached:
            self._gradcomp.finish()
            self._gradcomp.synchronized = True

    def _finish_exchange(self) -> None:
        """Refuse a GradScaler, which calls this before it looks at the gradients."""
        raise self._gradcomp.refuse_scaler()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, once all updates are applied."""
        self._complete()
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._complete()
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        self._complete()
        state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        return state
