"""``MetricAverage``: callbacks after it see means over ranks."""

from __future__ import annotations

from numbers import Real
from typing import Any

import keras
import numpy as np

from gradcomp.job.channel import channel_of
from gradcomp.pipeline.calls import Call
from gradcomp.tf.callbacks.common import ranks_of


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
