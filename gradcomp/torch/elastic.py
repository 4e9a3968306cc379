"""Elastic training with PyTorch: ``run``, the states that it keeps, and a sampler that goes on in mid-epoch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradcomp.core.errors import ConfigError
from gradcomp.exchange.checkpoint_manager import checkpoint_manager_or_none
from gradcomp.job import runtime
from gradcomp.job.elastic import State, run
from gradcomp.job.elastic_state import OptimizerState, ValuesState
from gradcomp.torch.broadcast_state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from gradcomp.torch.distributed_state import reattach
from gradcomp.torch.optimizer import Distributed
from gradcomp.torch.saving import load, save
from gradcomp.torch.tensors import arrays, tensors

__all__ = ["ElasticSampler", "ObjectState", "TorchState", "run"]

logger = logging.getLogger("gradcomp")


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Gives each rank its part of an epoch's samples, and after a change of ranks its part of those that are left.

    All ranks shuffle alike. Rank i of N takes elements i, i + N, ... of the samples that no rank has processed; at the
    end some are given twice, so that all ranks have equally many. Give it to a TorchState too, and call
    :meth:`record_batch` after each step.

    Args:
        dataset: what has a length.
        shuffle: whether samples come in a random order, another one in each epoch.
        seed: the seed of that order, equal on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        #: How many samples of the epoch all ranks have processed.
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing is processed."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch of ``batch_size`` samples."""
        self.processed_num += batch_size * self.num_replicas

    def reset(self) -> None:
        """Share out the rest of the epoch over the ranks of now."""
        initialized = runtime.is_initialized()
        self.rank, self.num_replicas = (runtime.rank(), runtime.size()) if initialized else (0, 1)
        order = np.arange(len(self.dataset))
        if self.shuffle:
            np.random.default_rng([self.seed, self.epoch]).shuffle(order)
        self.remaining_indices: list[int] = order[self.processed_num :].tolist()
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of its samples that are processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from the result of :meth:`state_dict`, with the ranks of now."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        left, size = self.remaining_indices, len(self.remaining_indices)
        places = range(self.rank, self.num_samples * self.num_replicas, self.num_replicas)
        return iter([left[place % size] for place in places])

    def __len__(self) -> int:
        return self.num_samples


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
        elif isinstance(value, torch.optim.Optimizer):
            broadcast_optimizer_state(value, root_rank)
        else:
            return False
        return True

    def _attach(self) -> None:
        super()._attach()
        for value in self.__dict__.values():
            if isinstance(value, ElasticSampler):
                value.reset()


class TorchState(ObjectState, OptimizerState):
    """Keeps a model, optimizers and values: ``TorchState(model=model, optimizer=opt, epoch=0)``.

    Optimizers may be wrapped by :func:`gradcomp.torch.DistributedOptimizer`. Of these it also keeps the compression
    state. Survivors go on with the residuals that they had at the commit, newcomers begin with none, and those of the
    dead are lost, which is logged.

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
        given = ((name, getattr(self, name)) for name in self._names)
        return [(name, value) for name, value in given if isinstance(value, Distributed)]

    def _reattach(self, optimizer: Any) -> None:
        reattach(optimizer)

    @staticmethod
    def _broadcast_arrays(value: Any, root_rank: int) -> Any:
        return arrays(broadcast_object(tensors(value), root_rank))

    @staticmethod
    def _allgather_arrays(value: Any) -> list[Any]:
        return [arrays(one) for one in allgather_object(tensors(value))]
