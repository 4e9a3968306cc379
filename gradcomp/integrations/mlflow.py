"""Logs compression metrics to MLflow."""

from __future__ import annotations

from gradcomp.core.errors import need
from gradcomp.integrations.loggers import HasMetrics, MetricsLogger

need(__name__, "mlflow", "mlflow")

# isort: split
import mlflow


class CompressionLogger(MetricsLogger):
    """Logs ``compression_metrics()`` to a run: ``log = CompressionLogger(opt)``, then ``log(step)`` after each step.

    MLflow sends the numbers from a thread of its own, so that no step waits for its store, and the last of them when
    the run ends. That takes milliseconds of processor time, so ``every`` is larger than that of other loggers.

    Args:
        opt: what gradcomp returned: the wrapped optimizer, the state of a hook or the handle of ``compress_fsdp``.
        run_id: the run; by default the active one, or a new one, as ``mlflow.log_metrics`` has it.
        every: the number of steps of which the means are logged.
        all_ranks: every rank logs, to a run of its own, and not rank 0 alone.

    Raises ConfigError if ``every`` is not positive. Local: no rank waits for another.
    """

    def __init__(
        self, opt: HasMetrics, run_id: str | None = None, *, every: int = 200, all_ranks: bool = False
    ) -> None:
        super().__init__(opt, every, all_ranks)
        self._run_id = run_id

    def write(self, metrics: dict[str, float], step: int) -> None:
        """Log the metrics together."""
        mlflow.log_metrics(metrics, step=step, run_id=self._run_id, synchronous=False)
