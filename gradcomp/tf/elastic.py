"""Elastic training with Keras: ``run``, the states that it keeps, and callbacks that commit them in ``fit``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import keras

from gradcomp.core.errors import ConfigError
from gradcomp.job.elastic import State, run
from gradcomp.job.elastic_sampler import ElasticSampler
from gradcomp.job.elastic_state import OptimizerState, ValuesState
from gradcomp.tf import keras_model
from gradcomp.tf.bridge import typed_errors
from gradcomp.tf.keras_model import core_of
from gradcomp.tf.local_steps import LocalSteps
from gradcomp.tf.objects import allgather_object, broadcast_object, broadcast_variables

__all__ = [
    "CommitStateCallback",
    "ElasticSampler",
    "KerasState",
    "ObjectState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class ObjectState(ValuesState):
    """Keeps values through deaths and arrivals of ranks: ``ObjectState(epoch=0, batch=0)``.

    Every value is an attribute, which may be assigned. Values with ``state_dict`` and ``load_state_dict``, as
    :class:`ElasticSampler` has, are kept by these; all others are copied. What is sent to newcomers must be what
    :func:`gradcomp.tf.broadcast_object` takes.

    ConfigError for a name that a state has for something else.
    """

    @staticmethod
    def _broadcast_object(value: Any, root_rank: int) -> Any:
        return broadcast_object(value, root_rank)

    def _restoring_errors(self) -> AbstractContextManager[None]:
        return typed_errors()


class KerasState(ObjectState, OptimizerState):
    """Keeps a model, its optimizers and values: ``KerasState(model, epoch=0, batch=0)``.

    All weights and all variables of the optimizers are kept, without the states of random layers. Of optimizers that
    :func:`gradcomp.tf.DistributedOptimizer` wrapped the compression state is kept too. Survivors go on with the
    residuals that they had at the commit, newcomers begin with none, and those of the dead are lost, which is logged.

    A :class:`gradcomp.tf.LocalSteps` of the model is kept too, under any name: ``KerasState(model, steps=steps)``.
    Commit after a round.

    A ``tf.function`` that a program made itself contains the exchange of the ranks with which it was traced: make it
    inside of the function that :func:`run` calls. That of ``fit`` is made anew.

    Args:
        model: a built ``keras.Model``, compiled with its optimizer unless that is given.
        optimizer: of a training loop without ``fit``.
        values: see :class:`ObjectState`.

    Raises ConfigError if the model is not built, or has several optimizers of which one is not.
    """

    def __init__(
        self, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None, **values: Any
    ) -> None:
        if not isinstance(model, keras.Model) or not keras_model.build_optimizers(model):
            raise ConfigError(
                "KerasState needs a keras.Model that is built: ranks that come later have no batch yet"
            )
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        if unbuilt := [name for name, one in keras_model.optimizers_of(model).items() if not one.built]:
            raise ConfigError(f"KerasState: call build(variables) of the model's {', '.join(unbuilt)} first")
        for steps in (each for each in values.values() if isinstance(each, LocalSteps)):
            steps.build(model)
        given = {"model": model, "optimizer": optimizer}
        super().__init__(**{name: value for name, value in given.items() if value is not None}, **values)

    @property
    def _wrapped(self) -> list[tuple[str, Any]]:
        found = dict(keras_model.optimizers_of(self.model))
        if "optimizer" in self._names:
            found["the optimizer that is given"] = self.optimizer
        for name in self._names:
            if isinstance(steps := getattr(self, name), LocalSteps):
                found |= {f"{name}, fragment {i}": each.optimizer for i, each in enumerate(steps.fragments)}
        by_core = {id(core): (name, one) for name, one in found.items() if (core := core_of(one)) is not None}
        return list(by_core.values())

    def _reattach(self, optimizer: Any) -> None:
        core_of(optimizer).reattach()

    def _attach(self) -> None:
        super()._attach()
        self.model.train_function = None  # the traced one exchanges with the ranks of the last generation

    @staticmethod
    def _broadcast_arrays(value: Any, root_rank: int) -> Any:
        return broadcast_object(value, root_rank)

    @staticmethod
    def _allgather_arrays(value: Any) -> list[Any]:
        return list(allgather_object(value))

    def _broadcast(self, value: Any, root_rank: int) -> bool:
        variables = _variables_of(value)
        if variables is None:
            return False
        broadcast_variables(variables, root_rank)
        if isinstance(value, LocalSteps):
            value.progress = broadcast_object(value.progress, root_rank)
        return True

    def _read(self, value: Any) -> Any:
        variables = _variables_of(value)
        if variables is None:
            return super()._read(value)
        if not isinstance(value, LocalSteps):
            return [each.numpy() for each in variables]
        value.settle()
        return [value.progress, *(each.numpy() for each in variables)]

    def _write(self, name: str, saved: Any) -> None:
        value = getattr(self, name)
        variables = _variables_of(value)
        if variables is None:
            super()._write(name, saved)
            return
        if isinstance(value, LocalSteps):
            value.progress, *saved = saved
            for fragment in value.fragments:
                fragment.drop()
        for variable, array in zip(variables, saved, strict=True):
            variable.assign(array)


def _variables_of(value: Any) -> list[Any] | None:
    """Return the variables of a model, an optimizer or local steps; None for other values."""
    if isinstance(value, keras.Model):
        return keras_model.variables_of(value)
    if isinstance(value, LocalSteps):
        return value.variables
    return list(value.variables) if isinstance(value, keras.optimizers.Optimizer) else None


class CommitStateCallback(keras.callbacks.Callback):
    """Commit ``state`` after every ``batches_per_commit`` batches of ``fit``, and after every epoch.

    Put it last: callbacks behind it are not called if ranks have come. Collective, see :meth:`KerasState.commit`.
    Raises ConfigError if ``batches_per_commit`` is not positive.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ConfigError(f"batches_per_commit must be at least 1, got {batches_per_commit}")
        self._state = state
        self._every = batches_per_commit
        self._next = batches_per_commit

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._next = self._every

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit if it is due; after the last batch, if its number is known, the end of the epoch does."""
        if batch + 1 >= self._next and batch + 1 != self.params.get("steps"):
            self._next = batch + 1 + self._every
            self._state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit, so that no finished epoch is made again."""
        self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keep in ``state.batch`` how many batches of the epoch are done; 0 at its end. Local.

    An epoch that begins with ``state.batch`` above 0 goes on from there: skip as many batches of the data.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state
        self._before = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before = self._state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Add the batches that were done before this call of ``fit``."""
        self._state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begin again at 0."""
        self._state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Count finished epochs in ``state.epoch``. Local.

    It goes with ``fit(initial_epoch=state.epoch, epochs=n)`` and with Horovod's ``fit(epochs=n - state.epoch)``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Let a later call of ``run`` begin with the next epoch."""
        self._state.epoch += 1
