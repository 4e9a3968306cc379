"""``Progress``: logs the bytes that compression saves during training."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import Any

import keras

from gradcomp.core.errors import ConfigError
from gradcomp.core.statistics import Statistics
from gradcomp.job import runtime
from gradcomp.tf.callbacks.common import optimizers_of, ranks_of, require_distributed
from gradcomp.tf.core import core_of

logger = logging.getLogger("gradcomp")


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
