"""Logs compression metrics to Weights and Biases."""

from __future__ import annotations

from typing import Any

from gradcomp.core.errors import ConfigError, need
from gradcomp.core.metrics import PREFIX
from gradcomp.integrations.loggers import HasMetrics, MetricsLogger

need(__name__, "wandb", "wandb")

# isort: split
import wandb

_STEP = f"{PREFIX}step"


class CompressionLogger(MetricsLogger):
    """Logs ``compression_metrics()`` to a run: ``log = CompressionLogger(opt)``, then ``log(step)`` after each step.

    The metrics have an x-axis of their own, ``gradcomp/step``, so that they agree with whatever steps the script gives
    to ``run.log``.

    Args:
        opt: what gradcomp returned: the wrapped optimizer, the state of a hook or the handle of ``compress_fsdp``.
        run: the run that ``wandb.init`` returned; by default the current one.
        every: the number of steps of which the means are logged.
        all_ranks: every rank logs, to a run of its own, and not rank 0 alone.

    Raises ConfigError if ``every`` is not positive, and at the first step that is logged if there is no run. Local: no
    rank waits for another.
    """

    def __init__(self, opt: HasMetrics, run: Any = None, *, every: int = 50, all_ranks: bool = False) -> None:
        super().__init__(opt, every, all_ranks)
        self._run = run
        self._is_defined = False

    def write(self, metrics: dict[str, float], step: int) -> None:
        """Log the metrics together."""
        run = self._run = self._run or wandb.run
        if run is None:
            raise ConfigError("there is no run of Weights and Biases: call wandb.init() first, or give run=")
        if not self._is_defined:
            self._is_defined = True
            run.define_metric(_STEP)
            run.define_metric(f"{PREFIX}*", step_metric=_STEP)
        run.log({_STEP: step, **metrics})
