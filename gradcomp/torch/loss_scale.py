"""The loss scale that gradients carry, which all ranks must agree on."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch

from gradcomp.core.errors import ConfigError
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.exchange.waiting import Number
from gradcomp.torch.modules import live
from gradcomp.torch.streams import number_of

logger = logging.getLogger("gradcomp")

#: A GradScaler, or an object with its ``get_scale()``; None: search for it; False: the loss is not scaled.
Scaler = torch.amp.GradScaler | Literal[False] | None


class LossScale:
    """The scale of the given GradScaler, or of the only enabled one in the program.

    The search happens when compression state begins, because only state needs the scale: residuals and
    momentum are kept in unscaled units. All ranks must have a scaler or none, or gradients in different units
    would be added, see :meth:`agree`. The reference to the scaler is weak.
    """

    def __init__(self, given: Scaler) -> None:
        self._given = given is not None
        self._wrong = "" if not given or callable(getattr(given, "get_scale", None)) else repr(given)
        self._scaler = _reference(given)
        self._several = False
        self._has_state = False
        self._agreed = False

    @property
    def scaler(self) -> Any:
        """Return the scaler that was given, or found; else None."""
        return self._scaler()

    def begin_again(self) -> None:
        """Compare over ranks once more, since these have changed."""
        self._has_state = self._agreed = False

    def check(self) -> None:
        """Raise ConfigError if the argument is not a scaler."""
        if self._wrong:
            raise ConfigError(f"grad_scaler must be a torch.amp.GradScaler, None or False, got {self._wrong}")

    def of(self, pipeline: Pipeline, factor: float = 1.0) -> Number:
        """Return ``factor`` times the scale of the gradients of the exchange that is about to begin.

        A scale on a device is copied in stream order, after the gradients that carry it; nothing waits for
        the copy.
        """
        pipeline.lay_out()  # afterwards keeps_state is that of the next step's plan
        if pipeline.keeps_state and not self._has_state:
            self._has_state, self._agreed = True, False
            if not self._given:
                self._find(pipeline)
        scaler = self._scaler()
        held = getattr(scaler, "_scale", scaler)
        if held is None:
            return factor  # a scaler has no scale before the first loss that it scales
        if isinstance(held, torch.Tensor) and type(scaler).get_scale is torch.amp.GradScaler.get_scale:
            return number_of(held, factor)  # get_scale() would wait for the device
        return factor * float(scaler.get_scale())

    def _find(self, pipeline: Pipeline) -> None:
        enabled = [scaler for scaler in live(torch.amp.GradScaler) if scaler.is_enabled()]
        self._several = len(enabled) > 1
        self._scaler = _reference(enabled[0] if len(enabled) == 1 else None)
        if len(enabled) == 1 and pipeline.transport.rank == 0:
            logger.info(
                "the program's only GradScaler is taken for that of these gradients; pass it as grad_scaler=, or "
                "pass grad_scaler=False if their loss is not scaled"
            )

    def agree(self, exchanger: Exchanger) -> None:
        """Raise ConfigError on every rank if only some ranks have a scaler, or one has several.

        It compares in the first exchange, and again when state begins. Collective, between steps. Wire: one
        byte a rank.
        """
        if self._agreed:
            return
        mine = 2 if self._several else int(self._scaler() is not None)
        said = exchanger.allgather_bytes(bytes([mine]))
        none, one, several = (
            [str(rank) for rank, each in enumerate(said) if each[0] == count] for count in range(3)
        )
        if not several and not (none and one):
            self._agreed = True
            return
        self._has_state = False  # a script that catches the error gets it again in its next exchange
        if several:
            raise ConfigError(
                f"several enabled GradScalers exist (on rank {', '.join(several)}), and compression state is kept in "
                "unscaled units: pass the one that scales these gradients as grad_scaler=scaler, or grad_scaler=False "
                "if their loss is not scaled"
            )
        raise ConfigError(
            f"rank {one[0]} has a GradScaler for these gradients and rank {none[0]} has none, so they "
            "are in different units: give every rank the same grad_scaler=, or grad_scaler=False if the loss is not "
            "scaled"
        )


def means_before_unscaling() -> None:
    """Patch GradScaler, once, to finish a wrapped optimizer's exchange before it looks at the gradients.

    On a rank whose loss reaches no parameter there are no gradients before, which GradScaler refuses. An optimizer may
    return another object, whose gradients are looked at and unscaled in place of its own.
    """
    look: Any = torch.amp.GradScaler._unscale_grads_
    if hasattr(look, "of_gradcomp"):
        return

    @functools.wraps(look)
    def after_the_exchange(scaler: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
        if (finish := getattr(optimizer, "_finish_exchange", None)) is not None:
            optimizer = finish() or optimizer
        return look(scaler, optimizer, *arguments, **named)

    after_the_exchange.of_gradcomp = True  # type: ignore[attr-defined]
    torch.amp.GradScaler._unscale_grads_ = after_the_exchange  # type: ignore[assignment,method-assign]


def _reference(scaler: Any) -> Callable[[], Any]:
    if isinstance(scaler, torch.amp.GradScaler):
        return weakref.ref(scaler)
    return lambda: scaler or None
