"""The callbacks of ``gradcomp.tf.callbacks`` under Horovod's names, with Horovod's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradcomp.job.names import refusing
from gradcomp.tf import names
from gradcomp.tf.callbacks import (
    BroadcastGlobalVariables,
    LearningRateSchedule,
    LearningRateWarmup,
    MetricAverage,
)
from gradcomp.tf.elastic import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "CommitStateCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
]

__getattr__ = refusing(__name__, names.CALLBACKS)


class BroadcastGlobalVariablesCallback(BroadcastGlobalVariables):
    """:class:`gradcomp.tf.callbacks.BroadcastGlobalVariables` under Horovod's name; ``device`` has no effect."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__(root_rank, local_variables)


class MetricAverageCallback(MetricAverage):
    """:class:`gradcomp.tf.callbacks.MetricAverage` under Horovod's name; ``device`` has no effect."""

    def __init__(self, device: str = "") -> None:
        super().__init__()


class _LogsRate(LearningRateSchedule):
    """Logs the rate under Horovod's name too."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the rate as ``learning_rate`` and ``lr``."""
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            logs["lr"] = logs["learning_rate"]


class LearningRateScheduleCallback(_LogsRate):
    """:class:`gradcomp.tf.callbacks.LearningRateSchedule`, where a number as ``multiplier`` is a decay per epoch.

    The learning rate is then ``initial_lr * multiplier ** (epoch - start_epoch)``, and ``staircase`` applies
    as it does to a function.
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
        def decay(epoch: float) -> float:
            return float(multiplier ** (epoch - start_epoch))  # type: ignore[operator]

        super().__init__(
            initial_lr,
            multiplier if callable(multiplier) else decay,
            start_epoch,
            end_epoch,
            staircase,
            momentum_correction,
            steps_per_epoch,
        )


class LearningRateWarmupCallback(LearningRateWarmup, _LogsRate):
    """:class:`gradcomp.tf.callbacks.LearningRateWarmup` under Horovod's name."""
