"""Defines ``CheckpointManager``, which reads and replaces an optimizer's compression state and checks its model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gradcomp.core.config import Config
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Plan
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.fingerprint import Digests
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.exchange.snapshot import Snapshot, check, inherit, restore, snapshot
from gradcomp.transport.inprocess import World

logger = logging.getLogger("gradcomp")


@dataclass(frozen=True)
class Expected:
    """Holds digests of the parameters when a state was saved, with its step and its path."""

    digests: Digests
    step: int
    where: str

    def check(self, held: Digests | None) -> None:
        """Raise StateError naming the first parameter that differs, if there are digests to compare.

        Warn if they were computed by another algorithm.
        """
        if held is None:
            return
        if held.algorithm != self.digests.algorithm:
            logger.warning(
                "%s has digests of parameters by %s, this version of gradcomp computes them by %s: it is not checked "
                "that the model is the one of step %d",
                self.where,
                self.digests.algorithm,
                held.algorithm,
                self.step,
            )
            return
        if names := self.digests.differing(held):
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise StateError(
                f"parameter {names[0]!r}{more} is not what it was at step {self.step}, when {self.where} was saved: "
                "the residuals in it belong to no other model. Load the model that was saved at that step"
            )


def refuse_to_save(config: Config) -> None:
    """Raise StateError in a run with fake compression, unless the settings allow it to save."""
    if not config.what_if_save:
        raise StateError(
            "this run has exchanged gradients by fake compression, so its model is worthless, and it saves no "
            "checkpoint; if it is to save one all the same, set what_if_save=True (GRADCOMP_WHAT_IF_SAVE=1)"
        )


class CheckpointManager:
    """Reads and replaces the compression state of an exchanger.

    Without an exchanger, in a world of one, it keeps what a checkpoint holds for a later job, and applies nothing.
    ``unit``: see :class:`gradcomp.exchange.snapshot.Shared`. ``ranks``: the ranks that exchange. ``digests``:
    returns digests of the parameters.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        plan: Plan,
        config: Config,
        exchanger: Exchanger | None,
        unit: float = 1.0,
        *,
        ranks: tuple[int, ...],
        digests: Callable[[], Digests | None] = lambda: None,
    ) -> None:
        #: Called before the state is read or replaced; raises StateError in the middle of a step.
        self.finish_step: Callable[[], None] = lambda: None
        self.digests = digests
        self.ranks = ranks
        self._layers = layers
        self._plan = plan
        self._config = config
        self._exchanger = exchanger
        self._unit = unit
        #: Why no step may be taken: in an elastic job the optimizer exchanges once its ranks train; empty if it may.
        self.before_training = ""
        self.awaited = False
        self._restored = False
        self._begins_anew = True  # no state was restored, and no warning of that was given
        self._expected: Expected | None = None

    @cached_property
    def pipeline(self) -> Pipeline:
        """Return the exchanger's pipeline; in a world of one, a pipeline that never steps, made when first needed."""
        if self._exchanger is not None:
            return self._exchanger.pipeline
        (transport,) = World(1).transports()
        return Pipeline(self._layers, self._plan, transport, self._config, lambda layer: 0)

    @property
    def step(self) -> int:
        """Return the number of steps so far: 0 where nothing is exchanged and nothing was restored."""
        return self.pipeline.step if self._exchanger is not None or "pipeline" in self.__dict__ else 0

    def snapshot(self) -> Snapshot:
        """Return this rank's state. It is local, unless pending means are not finite: see :meth:`StepDriver.rest`.

        StateError for a run with fake compression, unless the settings allow it to save.
        """
        if self._exchanger is not None and self.pipeline.has_faked:
            refuse_to_save(self._config)
        self.finish_step()
        return snapshot(self.pipeline, self._unit)

    def check(self, state: Snapshot) -> None:
        """Raise StateError if the state does not fit. Local."""
        check(self.pipeline, state)

    def restore(self, state: Snapshot, expected: Expected | None = None) -> None:
        """Continue from ``state``. Local. When the next step begins, the parameters must match ``expected``.

        A what-if run takes no compression state over, since the plan in it would replace the fake compression.
        """
        self.finish_step()
        if self._exchanger is not None and self._config.what_if:
            logger.info("a what-if run takes no compression state over from a checkpoint")
        else:
            restore(self.pipeline, state, self._unit)
        self.awaited, self._restored, self._begins_anew = False, True, False
        self._expected = expected

    def inherit(self, old: CheckpointManager) -> None:
        """Continue from the state of a checkpoint manager with fewer layers. Local."""
        self._expected = old._expected
        self.awaited, self._restored, self._begins_anew = old.awaited, old._restored, old._begins_anew
        if self._exchanger is not None or "pipeline" in old.__dict__:
            inherit(self.pipeline, old.pipeline)

    def state_is_due(self) -> None:
        """Record that the optimizer's state was loaded: without the compression state, the next step warns."""
        self.awaited = not self._restored

    def before_step(self) -> None:
        """Raise StateError if a state was loaded without its model; warn if only the optimizer's own was loaded."""
        if self.before_training:
            raise StateError(self.before_training)
        if self._expected is not None:
            self._expected.check(self.digests())
            self._expected = None
        awaited, self.awaited, self._restored = self.awaited, False, False
        if awaited:
            self._warn("the optimizer's state was loaded, its compression state was not: %s")

    def state_was_due(self) -> None:
        """Warn, once, that no state was loaded although an optimizer is added now that had stepped before."""
        if self._begins_anew:
            self._warn(
                "an optimizer of these parameters had stepped before the first exchange, and no compression state was "
                "loaded: if this run goes on from a checkpoint, %s"
            )

    def _warn(self, text: str) -> None:
        self._begins_anew = False
        if self._exchanger is not None and self.pipeline.residuals.nbytes + self.pipeline.fields.nbytes:
            logger.warning(text, "residuals start again from zero, what had not been sent is lost (gc.load)")


def checkpoint_manager_of(opt: Any) -> CheckpointManager:
    """Return the checkpoint manager of a distributed optimizer or of a hook's state; ConfigError for anything else."""
    checkpoint_manager = checkpoint_manager_or_none(opt)
    if checkpoint_manager is None:
        raise ConfigError(
            f"expected what DistributedOptimizer or ddp_comm_hook returned, got {type(opt).__name__}"
        )
    return checkpoint_manager


def checkpoint_manager_or_none(opt: Any) -> CheckpointManager | None:
    checkpoint_manager = getattr(getattr(opt, "_gradcomp", opt), "checkpoint_manager", None)
    return checkpoint_manager if isinstance(checkpoint_manager, CheckpointManager) else None


@contextmanager
def not_from_checkpoint(optimizer: Any) -> Iterator[None]:
    """Allow the optimizer's ``load_state_dict``, in this context, to load a state without a compression state."""
    checkpoint_manager = getattr(getattr(optimizer, "_gradcomp", None), "checkpoint_manager", None)
    awaited = isinstance(checkpoint_manager, CheckpointManager) and checkpoint_manager.awaited
    yield
    if isinstance(checkpoint_manager, CheckpointManager):
        checkpoint_manager.awaited = awaited
