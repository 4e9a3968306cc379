"""Code that the loggers share: which rank logs, and after which steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from gradcomp.core.errors import ConfigError
from gradcomp.job import runtime


class HasMetrics(Protocol):
    """Describes a wrapped optimizer, the state of a hook or the handle of ``compress_fsdp``."""

    def compression_metrics(self) -> dict[str, float]: ...


class MetricsLogger(ABC):
    """Writes the metrics of ``opt`` after every ``every`` steps, on rank 0 or on all ranks; the base of the loggers."""

    def __init__(self, opt: HasMetrics, every: int, all_ranks: bool) -> None:
        if every < 1:
            raise ConfigError(f"every must be at least 1 step, got {every}")
        self._opt, self.every, self._all_ranks = opt, every, all_ranks

    def __call__(self, step: int) -> None:
        """Write the means since the last time if ``step`` is a multiple of ``every``; call it after every step."""
        if step % self.every == 0 and (self._all_ranks or runtime.rank() == 0):
            self.write(self._opt.compression_metrics(), step)

    @abstractmethod
    def write(self, metrics: dict[str, float], step: int) -> None:
        """Write the metrics of a step."""
