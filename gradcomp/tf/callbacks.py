"""Callbacks for ``keras.Model.fit``; the warm-up for large batches is that of Goyal et al., 2017."""

from __future__ import annotations

import logging
from collections.abc import Callable
from numbers import Real
from time import perf_counter
from typing import Any

import keras
import numpy as np

from gradcomp.core.errors import ConfigError
from gradcomp.core.metrics import PREFIX
from gradcomp.exchange.request_group import Call
from gradcomp.job import runtime
from gradcomp.job.channel import channel_of
from gradcomp.job.joining import Divide
from gradcomp.job.process_sets import ProcessSet
from gradcomp.tf import keras_model
from gradcomp.tf.backup import BackupAndRestore
from gradcomp.tf.joining import JoinContext
from gradcomp.tf.local import Local
from gradcomp.tf.local_steps import LocalSteps
from gradcomp.tf.objects import broadcast_variables

__all__ = [
    "BackupAndRestore",
    "BroadcastGlobalVariables",
    "CompressionMetrics",
    "Join",
    "LearningRateSchedule",
    "LearningRateWarmup",
    "MetricAverage",
    "Progress",
]

logger = logging.getLogger("gradcomp")


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
        keras_model.require_distributed(self.model, self)
        self._due = not keras_model.build_optimizers(self.model)
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
        shared = [
            variable for variable in keras_model.variables_of(self.model) if variable not in self._local
        ]
        broadcast_variables(shared, self.root_rank, process_set=ProcessSet(keras_model.ranks_of(self.model)))


class Join(keras.callbacks.Callback):
    """Let ranks have unequal numbers of batches in ``fit``: all epochs end together, with the same variables.

    A rank that has trained on its last batch of an epoch takes part in the others' steps, see
    :func:`gradcomp.tf.join`. Then all ranks take over the weights and the optimizers' variables of a rank that trained
    last, before the epoch is validated. ``divide`` is ``"all"`` or ``"active"``. ``local_steps`` is the model's
    :class:`gradcomp.tf.LocalSteps`, if it has one. Put it before the callbacks that call collectives at the end of an
    epoch, such as :class:`MetricAverage`. Metrics of an epoch are those of a rank's own
    batches. Wire: at the end of an epoch, those variables once. Collective. Raises ConfigError if the model has no
    distributed optimizer, or is not built: a rank without batches would never build it.
    """

    def __init__(self, divide: Divide = "all", local_steps: LocalSteps | None = None) -> None:
        super().__init__()
        self.divide: Divide = divide
        self._local = [] if local_steps is None else [local_steps]
        self._context: JoinContext | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that the model has a distributed optimizer, or local steps."""
        if self._context is not None:  # the last fit() ended by an error, of which callbacks learn nothing
            context, self._context = self._context, None
            context.__exit__(GeneratorExit, GeneratorExit(), None)
        if not self._local:
            keras_model.require_distributed(self.model, self)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Compare the ranks' arguments."""
        self._context = JoinContext([self.model, *self._local], self.divide).__enter__()

    def on_test_begin(self, logs: Any = None) -> None:
        """Wait for the other ranks before the epoch is validated."""
        self._leave()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Wait for the other ranks, unless that was done before a validation."""
        self._leave()

    def _leave(self) -> None:
        if self._context is not None:
            context, self._context = self._context, None
            context.__exit__(None, None, None)


class MetricAverage(keras.callbacks.Callback):
    """Replace the numbers in every epoch's logs by their means over ranks, for the callbacks after this one.

    Put it before those that act on metrics, such as ReduceLROnPlateau, EarlyStopping and ModelCheckpoint, so
    that all ranks make the same decisions. Every rank has the same weight, however many samples it has seen. Wire: 8
    bytes per metric and epoch, in one sum. Collective. Raises PlanMismatchError on every rank if they log
    different names.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the numbers in ``logs`` by their means."""
        channel = channel_of(keras_model.ranks_of(self.model))
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


class CompressionMetrics(keras.callbacks.Callback):
    """Add ``compression_metrics()`` of the model's optimizer to the logs, for the callbacks after this one.

    At the end of an epoch they are means over its steps, and History, CSVLogger, TensorBoard and WandbMetricsLogger
    write them. With ``every_steps`` the logs of batches have them too, for callbacks that write some batches:
    TensorBoard by ``update_freq=``, WandbMetricsLogger by ``log_freq=``. They are read after batches 0,
    ``every_steps``, 2 ``every_steps`` and so on, and the logs of the batches in between have the last ones. Each
    reading has the means since the one before, that at the end of an epoch too. All ranks add them, so that
    :class:`MetricAverage` after this callback makes them means over ranks. Where a model has several distributed
    optimizers, ``gradcomp/`` is followed by the optimizer's attribute. Local. Raises ConfigError if ``every_steps`` is
    not positive, and if the model has no distributed optimizer.
    """

    def __init__(self, every_steps: int | None = None) -> None:
        super().__init__()
        if every_steps is not None and every_steps < 1:
            raise ConfigError(f"every_steps must be at least 1, got {every_steps}")
        self.every_steps = every_steps
        self._last: dict[str, float] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that the model has a distributed optimizer."""
        keras_model.require_distributed(self.model, self)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the metrics to the logs of the batch."""
        if self.every_steps is None:
            return
        if batch % self.every_steps == 0:
            self._last = self._metrics()
        if logs is not None:
            logs.update(self._last)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the metrics to the logs of the epoch."""
        if logs is not None:
            logs.update(self._metrics())

    def _metrics(self) -> dict[str, float]:
        found = {
            name: one.compression_metrics()
            for name, one in keras_model.optimizers_of(self.model).items()
            if keras_model.core_of(one) is not None
        }
        if len(found) == 1:
            return next(iter(found.values()))
        return {
            f"{PREFIX}{name}/{metric.removeprefix(PREFIX)}": value
            for name, metrics in found.items()
            for metric, value in metrics.items()
        }


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
        keras_model.require_distributed(self.model, self)

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
        found = [
            one.statistics()
            for one in keras_model.optimizers_of(self.model).values()
            if keras_model.core_of(one)
        ]
        return (
            max((one.steps for one in found), default=0),
            sum(one.wire_bytes for one in found),
            sum(one.dense_bytes for one in found),
        )

    def _say(self, head: str) -> None:
        rate = (self._batches - self._counted) / max(perf_counter() - self._time, 1e-9)
        steps, sent, dense = (now - before for now, before in zip(self._bytes(), self._before, strict=True))
        if runtime.rank() == keras_model.ranks_of(self.model)[0]:
            line = f"{head}: {rate:.1f} steps/s"
            if steps and sent:
                line += (
                    f", per step and rank {sent / steps / 1e6:.3f} MB sent, {dense / steps / 1e6:.3f} MB uncompressed, "
                    f"ratio {dense / sent:.2f}"
                )
            logger.info(line)
        self._begin()


class LearningRateSchedule(keras.callbacks.Callback):
    """Set the learning rate to ``initial_lr * multiplier(epoch)``, from ``start_epoch`` to before ``end_epoch``.

    Args:
        initial_lr: the learning rate where the multiplier is 1.
        multiplier: a function of the epoch, or a number, with which ``staircase`` is always true.
        start_epoch: the first epoch in which this callback acts.
        end_epoch: the first epoch in which it acts no more; None if it always does.
        staircase: set the rate at the beginning of epochs; else before every batch, for an epoch with a fraction.
        momentum_correction: when the rate changes, scale SGD's velocity, which contains the old rate, by new / old.
        steps_per_epoch: number of batches in an epoch, if Keras cannot know it.

    Arguments mean what they mean in Horovod. Differs in what is scaled: Horovod changes ``momentum`` for one batch,
    which a traced function would not notice; scaling the velocity makes the same step. Local, and the same on all
    ranks. Raises ConfigError if the learning rate is a ``LearningRateSchedule`` of Keras, or the number of steps is not
    known.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if not initial_lr > 0:
            raise ConfigError(f"initial_lr must be positive, got {initial_lr!r}")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda _: multiplier
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that the learning rate can be set, and find the number of steps in an epoch."""
        optimizer = self.model.optimizer
        rate = getattr(optimizer, "inner_optimizer", optimizer)._learning_rate
        if not isinstance(rate, keras.Variable):
            raise ConfigError(
                f"{type(self).__name__}: the optimizer's learning rate is a {type(rate).__name__}, which cannot be "
                "set; give it a number"
            )
        if not self.staircase and self.steps_per_epoch is None:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ConfigError(
                    f"{type(self).__name__}: the number of steps in an epoch is not known: pass steps_per_epoch"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the epoch for the multiplier."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate, at every batch or at the first of an epoch."""
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None, "on_train_begin comes first"
            self._set(self._epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the rate under the name ``learning_rate``."""
        if logs is not None:
            logs["learning_rate"] = float(self.model.optimizer.learning_rate)

    def _set(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old = float(optimizer.learning_rate)
        optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)
        new = float(optimizer.learning_rate)
        if self.momentum_correction and old > 0 and new != old:
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            if isinstance(inner, keras.optimizers.SGD) and inner.built:
                for velocity in inner.momentums:
                    velocity.assign(velocity * (new / old))


class LearningRateWarmup(LearningRateSchedule):
    """Raise the learning rate from ``initial_lr`` / N to ``initial_lr`` within ``warmup_epochs``, batch by batch.

        lr = initial_lr / N * (e (N - 1) / warmup_epochs + 1),  N ranks, e epochs since the start, after each batch

    Args:
        initial_lr: the rate at the end of the warm-up, usually N times that of one rank.
        warmup_epochs: the length of the warm-up.
        momentum_correction: see :class:`LearningRateSchedule`.
        steps_per_epoch: number of batches in an epoch, if Keras cannot know it.
        verbose: 1 to log a line at the end of the warm-up.

    Arguments mean what they mean in Horovod. Local, and the same on all ranks. Raises as
    :class:`LearningRateSchedule` does.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr, self._rising, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the rate, and the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch == self.warmup_epochs - 1:
            rate = float(self.model.optimizer.learning_rate)
            logger.info("epoch %d: the warm-up of the learning rate has ended at %g", epoch + 1, rate)

    def _rising(self, epoch: float) -> float:
        size = len(keras_model.ranks_of(self.model))
        assert self.steps_per_epoch is not None, "on_train_begin comes first"
        done = epoch + 1 / self.steps_per_epoch  # e after this batch, so that epochs end with whole numbers
        return (done * (size - 1) / self.warmup_epochs + 1) / size
