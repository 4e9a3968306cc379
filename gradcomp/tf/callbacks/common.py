"""Short callbacks, BroadcastGlobalVariables, MetricAverage and Progress, and how callbacks look at a model."""

from __future__ import annotations

import logging
from numbers import Real
from time import perf_counter
from typing import Any

import keras
import numpy as np

from gradcomp.core.errors import ConfigError
from gradcomp.core.trace import Statistics
from gradcomp.exchange.request_group import Call
from gradcomp.job import runtime
from gradcomp.job.channel import channel_of
from gradcomp.job.launch import Ranks
from gradcomp.job.process_sets import ProcessSet
from gradcomp.tf.local import Local
from gradcomp.tf.objects import broadcast_variables
from gradcomp.tf.optimizer import core_of

logger = logging.getLogger("gradcomp")


def optimizers_of(model: Any) -> dict[str, Any]:
    """Return the optimizers that train the model, by the attribute that holds them.

    These are the distributed ones, or else ``optimizer``. A model with its own ``train_step`` may have
    several, also in lists and dicts, while Keras gave its ``optimizer`` a default that trains nothing.
    """
    found = _all_optimizers(model)
    return {name: one for name, one in found.items() if core_of(one) is not None} or {
        name: one for name, one in found.items() if name == "optimizer"
    }


def _all_optimizers(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in {
        "optimizer": None,
        **vars(model),
    }.items():  # "optimizer" comes first, and wins over other names
        if name.startswith("_self_"):  # TensorFlow's own record of all other attributes
            continue
        if isinstance(value, dict):
            parts = {f"{name}-{key}": part for key, part in value.items()}
        elif isinstance(value, list | tuple):
            parts = {f"{name}-{place}": part for place, part in enumerate(value)}
        else:
            parts = {name: value}
        for path, part in parts.items():
            if isinstance(part, keras.optimizers.Optimizer) and all(
                part is not one for one in found.values()
            ):
                found[path] = part
    return found


def ranks_of(model: Any) -> Ranks:
    """Return the ranks that the model's optimizers exchange with; all if none is distributed."""
    cores = {name: core_of(one) for name, one in optimizers_of(model).items()}
    ranks = {name: core.ranks for name, core in cores.items() if core is not None}
    if len(set(ranks.values())) > 1:
        raise ConfigError(
            f"the model's optimizers exchange with different ranks: {ranks}; give all of them the same process_set"
        )
    return next(iter(ranks.values()), runtime.current().everyone)


def require_distributed(model: Any, callback: Any) -> None:
    """Raise ConfigError if there are other ranks, and the model exchanges nothing with them.

    A plain optimizer beside a distributed one causes a warning only: it may be Keras' default, or train
    nothing.
    """
    if runtime.size() == 1:
        return
    found = _all_optimizers(model)
    if all(core_of(one) is None for one in found.values()):
        raise ConfigError(
            f"{type(callback).__name__}: the model has no DistributedOptimizer, so its ranks would drift apart "
            "without an error; wrap its optimizer"
        )
    for name, one in found.items():
        if core_of(one) is None and name != "optimizer":
            runtime.logger.warning(
                "the model's optimizer %r (%s) is not a DistributedOptimizer: variables that it trains differ between "
                "ranks",
                name,
                type(one).__name__,
            )


def build_optimizers(model: Any) -> bool:
    """Make the optimizers' slots, so that all variables exist; return False if the model itself is not built.

    With several optimizers only the model knows which variables each trains. They are left as they are, and
    their slots, made in the first step, start equal.
    """
    # Keras never builds a model that only holds other models, without a call() of its own.
    only_holds = type(model).call is keras.Model.call
    if not model.built and not (
        only_holds and all(one.built for one in model._flatten_layers(include_self=False))
    ):
        return False
    if list(optimizers_of(model)) == ["optimizer"] and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return True


def variables_of(model: Any) -> list[Any]:
    """Return the weights and all variables of the optimizers.

    States of random layers are left out, because they differ between ranks.
    """
    return [*model.weights, *(each for one in optimizers_of(model).values() for each in one.variables)]


class BroadcastGlobalVariables(keras.callbacks.Callback):
    """Give all ranks the weights and the optimizer's variables of ``root_rank`` when training begins.

    If the model is not built yet, it has nothing to send before the end of its first batch, and broadcasts then. States
    of random layers stay each rank's own, as do ``local_variables``, a variable or a list. Wire: all other variables
    once. If a model has several optimizers, in any of its attributes, all distributed ones are broadcast. Collective.
    Raises ConfigError if the model has no distributed optimizer, and for a model that is not built with
    ``steps_per_execution`` of more than 1: its ranks would take several steps from different weights.
    """

    def __init__(self, root_rank: int = 0, local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = Local()
        single = hasattr(local_variables, "assign")
        for variable in [local_variables] if single else list(local_variables or []):
            if not hasattr(variable, "assign"):
                raise ConfigError(f"local_variables must be variables, got {type(variable).__name__}")
            self._local.add(variable)
        self._due = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast now, or after the first batch if the model is not built."""
        require_distributed(self.model, self)
        self._due = not build_optimizers(self.model)
        if not self._due:
            self._broadcast()
        elif self.model.steps_per_execution > 1 and runtime.size() > 1:
            raise ConfigError(
                "BroadcastGlobalVariables: the model is not built, and takes several steps before a callback is "
                "called; build it before fit(), or set steps_per_execution=1"
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast if the model was not built before its first batch."""
        if self._due:
            self._due = False
            self._broadcast()

    def _broadcast(self) -> None:
        shared = [variable for variable in variables_of(self.model) if variable not in self._local]
        broadcast_variables(shared, self.root_rank, process_set=ProcessSet(ranks_of(self.model)))


class MetricAverage(keras.callbacks.Callback):
    """Replace the numbers in every epoch's logs by their means over ranks, for the callbacks after this one.

    Put it before those that act on metrics, such as ReduceLROnPlateau, EarlyStopping and ModelCheckpoint, so
    that all ranks decide alike. Every rank has the same weight, however many samples it has seen. Wire: 8
    bytes per metric and epoch, in one sum. Collective. Raises PlanMismatchError on every rank if they log
    different names.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the numbers in ``logs`` by their means."""
        channel = channel_of(ranks_of(self.model))
        if channel is None:
            return
        logs = {} if logs is None else logs
        names = sorted(name for name, value in logs.items() if isinstance(value, Real | np.number))
        values = np.array([float(logs[name]) for name in names], dtype=np.float64)

        def work(_: list[int]) -> None:
            if names:
                channel.allreduce(values)

        channel.submit(Call("MetricAverage", names), work).result()
        logs.update(zip(names, (values / channel.size).tolist(), strict=True))


class Progress(keras.callbacks.Callback):
    """Log a line on the first rank after each epoch, and after every ``every_steps`` batches.

    It has steps per second, MB sent per step and rank, MB that would be sent uncompressed, and the ratio,
    since the line before. The bytes of several optimizers are added up. Local. Raises ConfigError if the
    model has no distributed optimizer.
    """

    def __init__(self, every_steps: int | None = None) -> None:
        super().__init__()
        if every_steps is not None and every_steps < 1:
            raise ConfigError(f"every_steps must be at least 1, got {every_steps}")
        self.every_steps = every_steps
        self._epoch = 0
        self._batches = 0  # batches of this epoch so far
        self._counted = 0  # batches of this epoch before the last line
        self._time = 0.0
        self._before = (0, 0, 0)

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that the model has a distributed optimizer."""
        require_distributed(self.model, self)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batches, self._counted = epoch, 0, 0
        self._begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Log a line after every ``every_steps`` batches."""
        self._batches = batch + 1
        if self.every_steps and self._batches - self._counted >= self.every_steps:
            self._say(f"epoch {self._epoch + 1}, step {self._batches}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log a line, unless the last batch has logged one."""
        if self._batches > self._counted:
            self._say(f"epoch {epoch + 1}")

    def _begin(self) -> None:
        self._counted, self._time, self._before = self._batches, perf_counter(), self._bytes()

    def _bytes(self) -> tuple[int, int, int]:
        found = _statistics(self.model)
        return (
            max((one.steps for one in found), default=0),
            sum(one.wire_bytes for one in found),
            sum(one.dense_bytes for one in found),
        )

    def _say(self, head: str) -> None:
        rate = (self._batches - self._counted) / max(perf_counter() - self._time, 1e-9)
        steps, sent, dense = (now - before for now, before in zip(self._bytes(), self._before, strict=True))
        if runtime.rank() == ranks_of(self.model)[0]:
            line = f"{head}: {rate:.1f} steps/s"
            if steps and sent:
                line += (
                    f", per step and rank {sent / steps / 1e6:.3f} MB sent, {dense / steps / 1e6:.3f} MB uncompressed, "
                    f"ratio {dense / sent:.2f}"
                )
            logger.info(line)
        self._begin()


def _statistics(model: Any) -> list[Statistics]:
    exchanges = [core and core.exchange for core in map(core_of, optimizers_of(model).values())]
    return [one.exchanger.pipeline.statistics for one in exchanges if one and one.exchanger]
