"""Learning rates that follow epochs: a schedule, and the warm-up for large batches (Goyal et al., 2017)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras

from gradcomp.core.errors import ConfigError
from gradcomp.tf.callbacks.common import ranks_of

logger = logging.getLogger("gradcomp")


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
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda epoch: multiplier
        )
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that the learning rate can be set, and find the number of steps in an epoch."""
        _settable(self.model.optimizer, self)
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
            initial_lr,
            self._rising,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the rate, and the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch == self.warmup_epochs - 1:
            logger.info(
                "epoch %d: the warm-up of the learning rate has ended at %g",
                epoch + 1,
                float(self.model.optimizer.learning_rate),
            )

    def _rising(self, epoch: float) -> float:
        size = len(ranks_of(self.model))
        assert self.steps_per_epoch is not None, "on_train_begin comes first"
        done = epoch + 1 / self.steps_per_epoch  # e after this batch, so that epochs end with whole numbers
        return (done * (size - 1) / self.warmup_epochs + 1) / size


def _settable(optimizer: Any, callback: Any) -> None:
    """Raise ConfigError if the rate is not a plain number."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = inner._learning_rate
    if not isinstance(rate, keras.Variable):
        raise ConfigError(
            f"{type(callback).__name__}: the optimizer's learning rate is a {type(rate).__name__}, which cannot be "
            "set; give it a number"
        )
