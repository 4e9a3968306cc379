"""Elastic training with PyTorch: ``run`` and the states that it keeps."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from gradcomp.core.errors import ConfigError
from gradcomp.exchange.checkpoint_manager import checkpoint_manager_or_none
from gradcomp.job.elastic import State, run
from gradcomp.job.elastic_sampler import ElasticSampler
from gradcomp.job.elastic_state import OptimizerState, ValuesState
from gradcomp.torch.broadcast_state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from gradcomp.torch.distributed_state import reattach
from gradcomp.torch.local_steps import LocalSteps
from gradcomp.torch.optimizer import Distributed
from gradcomp.torch.saving import load, save
from gradcomp.torch.tensors import arrays, tensors

__all__ = ["ElasticSampler", "ObjectState", "TorchState", "run"]

logger = logging.getLogger("gradcomp")


class ObjectState(ValuesState):
    """Keeps values through deaths and arrivals of ranks: ``ObjectState(epoch=0, batch=0)``.

    Every value is an attribute, which may be assigned. Values with ``state_dict`` and ``load_state_dict``, such as
    schedulers, gradient scalers and :class:`ElasticSampler`, are kept by these; all others are copied. What is sent to
    newcomers must be what :func:`gradcomp.torch.broadcast_object` takes.

    ConfigError for a name that a state has for something else.
    """

    @staticmethod
    def _broadcast_object(value: Any, root_rank: int) -> Any:
        return broadcast_object(value, root_rank)

    def _broadcast(self, value: Any, root_rank: int) -> bool:
        if isinstance(value, torch.nn.Module):
            broadcast_parameters(value, root_rank)
        elif isinstance(value, torch.optim.Optimizer) and not isinstance(value, LocalSteps):
            broadcast_optimizer_state(value, root_rank)
        else:
            return False
        return True

    def _read(self, value: Any) -> Any:
        return value.progress() if isinstance(value, LocalSteps) else super()._read(value)

    def _write(self, name: str, saved: Any) -> None:
        value = getattr(self, name)
        if isinstance(value, LocalSteps):
            value.load_progress(saved)
        else:
            super()._write(name, saved)


class TorchState(ObjectState, OptimizerState):
    """Keeps a model, optimizers and values: ``TorchState(model=model, optimizer=opt, epoch=0)``.

    Optimizers may be wrapped by :func:`gradcomp.torch.DistributedOptimizer`, or be
    :class:`gradcomp.torch.LocalSteps`. Of these it also keeps the compression state. Survivors go on with the residuals
    that they had at the commit, newcomers begin with none, and those of the dead are lost, which is logged.

    Args:
        model: a module; further ones may be given by other names.
        optimizer: likewise.
        directory: every ``directory_every``-th commit is also written there, as :func:`gradcomp.torch.save` does, and
            a job that no rank survived begins with the last one. It is for launchers that restart all processes.
        directory_every: see there.
        values: see :class:`ObjectState`.

    Raises ConfigError if ``directory`` is given without a wrapped ``optimizer``.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        directory: str | Path | None = None,
        directory_every: int = 1,
        **values: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer}
        super().__init__(**{name: value for name, value in given.items() if value is not None}, **values)
        if directory is not None and checkpoint_manager_or_none(optimizer) is None:
            raise ConfigError("directory= needs optimizer=, which DistributedOptimizer returned")
        if type(directory_every) is not int or directory_every < 1:
            raise ConfigError(
                f"directory_every must be a whole number of at least 1, got {directory_every!r}"
            )
        self._directory = directory
        self._every = directory_every

    def commit(self) -> None:
        self.save()
        if self._directory is not None and self._number % self._every == 0:
            model, optimizer = getattr(self, "model", None), getattr(self, "optimizer", None)
            save(self._directory, optimizer, model=model, extra=self._extra())
        self._check(saved=True)

    commit.__doc__ = State.commit.__doc__

    def _extra(self) -> dict[str, Any]:
        """Return what a checkpoint keeps besides model and optimizer."""
        names = [name for name in self._names if name not in ("model", "optimizer")]
        return {name: self._read(getattr(self, name)) for name in names}

    def _begin(self) -> None:
        if self._directory is None:
            return
        model, optimizer = getattr(self, "model", None), getattr(self, "optimizer", None)
        found = load(self._directory, optimizer, model=model, missing_ok=True)
        if found is not None:
            for name, saved in found.items():
                self._write(name, saved)
            logger.info("elastic: the state is that of the last commit in %s", self._directory)

    @property
    def _wrapped(self) -> list[tuple[str, Any]]:
        given = [(name, getattr(self, name)) for name in self._names]
        outer = [
            (f"{name}/{number}", fragment.optimizer)
            for name, value in given
            if isinstance(value, LocalSteps)
            for number, fragment in enumerate(value.fragments)
        ]
        return [(name, value) for name, value in given if isinstance(value, Distributed)] + outer

    def _reattach(self, optimizer: Any) -> None:
        reattach(optimizer)

    @staticmethod
    def _broadcast_arrays(value: Any, root_rank: int) -> Any:
        return arrays(broadcast_object(tensors(value), root_rank))

    @staticmethod
    def _allgather_arrays(value: Any) -> list[Any]:
        return [arrays(one) for one in allgather_object(tensors(value))]
