"""What callbacks ask of the model they are given."""

from __future__ import annotations

from typing import Any

from gradcomp.core.errors import ConfigError
from gradcomp.job import runtime
from gradcomp.job.network import Ranks
from gradcomp.tf.core import core_of


def ranks_of(model: Any) -> Ranks:
    """The ranks that the model's optimizer exchanges with; all if it is a plain one."""
    core = core_of(getattr(model, "optimizer", None))
    return runtime.current().everyone if core is None else core.ranks


def require_distributed(model: Any, callback: Any) -> None:
    """ConfigError if there are other ranks, and the model exchanges nothing with them."""
    if runtime.size() > 1 and core_of(getattr(model, "optimizer", None)) is None:
        raise ConfigError(
            f"{type(callback).__name__}: the model's optimizer is not a DistributedOptimizer, so that its ranks would "
            "drift apart without a word"
        )


def build_optimizer(model: Any) -> bool:
    """Make the optimizer's slots, so that all variables are there; False if the model itself is not built."""
    if not model.built:
        return False
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return True


def variables_of(model: Any) -> list[Any]:
    """Weights, and all that the optimizer keeps. Not the states of random layers: each rank draws its own."""
    return [*model.weights, *model.optimizer.variables]
