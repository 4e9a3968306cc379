"""Logs compression metrics to TensorBoard."""

from __future__ import annotations

from typing import Any, Protocol

from gradcomp.integrations.loggers import HasMetrics, MetricsLogger


class Writer(Protocol):
    """Describes the ``SummaryWriter`` of ``torch.utils.tensorboard`` or of tensorboardX."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any: ...


class CompressionLogger(MetricsLogger):
    """Writes ``compression_metrics()`` to a SummaryWriter: ``log = CompressionLogger(opt, writer)``, ``log(step)``.

    Args:
        opt: what gradcomp returned: the wrapped optimizer, the state of a hook or the handle of ``compress_fsdp``.
        writer: a ``SummaryWriter`` of ``torch.utils.tensorboard`` or of tensorboardX. On ranks that do not log it may
            be None.
        every: the number of steps of which the means are written.
        all_ranks: every rank writes, to a writer of its own, and not rank 0 alone.

    Raises ConfigError if ``every`` is not positive. Local: no rank waits for another.
    """

    def __init__(
        self, opt: HasMetrics, writer: Writer | None, *, every: int = 50, all_ranks: bool = False
    ) -> None:
        super().__init__(opt, every, all_ranks)
        self._writer = writer

    def write(self, metrics: dict[str, float], step: int) -> None:
        """Write each metric as a scalar of its name."""
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
