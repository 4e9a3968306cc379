"""Gives the compression the momentum of optimizers, and withholds it from them where the exchange has applied it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradcomp.exchange.pipeline import Pipeline
from gradcomp.job import momentum
from gradcomp.job.momentum import LOOKS_AHEAD, NO_SUM, Group
from gradcomp.torch.layers import Named


class Momenta:
    """The momentum of the layers ``named``, which the groups of ``optimizers()`` hold.

    Optimizers may gain groups, but a group must neither gain nor lose parameters.
    """

    def __init__(self, named: Named, optimizers: Callable[[], Sequence[torch.optim.Optimizer]]) -> None:
        self._layers = {id(parameter): layer for layer, (_, parameter) in enumerate(named)}
        self._optimizers = optimizers
        self._known: list[
            int
        ] = []  # optimizers and their numbers of groups, from which the next two are computed
        self._groups: list[tuple[torch.optim.Optimizer, int]] = []
        self._group_of = np.full(len(named), -1)
        self._without: list[tuple[torch.optim.Optimizer, int]] = []
        self._withheld: list[tuple[dict[str, Any], Any]] = []

    def of_step(self, pipeline: Pipeline) -> npt.NDArray[np.float64] | None:
        """Return the momentum by layer for the exchange that is laid out, or None if no compressor needs it.

        See :func:`gradcomp.job.momentum.momenta`.
        """
        self.give_back()
        self._without = []
        if not pipeline.momenta.any():
            return None
        self._assign()
        groups = [_group(optimizer, optimizer.param_groups[number]) for optimizer, number in self._groups]
        by_layer, without = momentum.momenta(pipeline, groups, self._group_of)
        self._without = [self._groups[number] for number in without]
        return by_layer

    def _assign(self) -> None:
        optimizers = self._optimizers()
        known = [number for each in optimizers for number in (id(each), len(each.param_groups))]
        if known == self._known:
            return
        self._known = known
        self._groups = [(each, number) for each in optimizers for number in range(len(each.param_groups))]
        self._group_of[:] = -1
        for place, (optimizer, number) in enumerate(self._groups):
            for parameter in optimizer.param_groups[number]["params"]:
                if (layer := self._layers.get(id(parameter))) is not None:
                    self._group_of[layer] = place

    def withhold(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the momentum of groups to 0 where the exchange has applied it, until :meth:`give_back`."""
        for one, number in self._without:
            if one is optimizer:
                group = optimizer.param_groups[number]
                self._withheld.append((group, group["momentum"]))
                group["momentum"] = 0.0

    def give_back(self) -> None:
        """Restore the user's momentum after the step, for schedulers and checkpoints to find."""
        for group, value in self._withheld:
            if group["momentum"] == 0.0:
                group["momentum"] = value
        self._withheld = []

    @contextmanager
    def withheld(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        self.withhold(optimizer)
        try:
            yield
        finally:
            self.give_back()


def averages(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer averages gradients over steps, as Adam does."""
    return any(group.get("betas") for group in optimizer.param_groups)


def _group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Group:
    kind = type(optimizer).__name__
    problem = ""
    if not isinstance(optimizer, torch.optim.SGD):
        problem = NO_SUM % (kind, "torch.optim.SGD")
    elif group["nesterov"]:
        problem = LOOKS_AHEAD
    elif group["dampening"]:
        problem = "dampening is not known before compression: give dampening=0"
    return Group(kind, float(group.get("momentum") or 0.0), problem)
