"""What callbacks ask of the model they are given."""

from __future__ import annotations

from typing import Any

import keras

from gradcomp.core.errors import ConfigError
from gradcomp.job import runtime
from gradcomp.job.network import Ranks
from gradcomp.tf.core import core_of


def optimizers_of(model: Any) -> dict[str, Any]:
    """The optimizers that train the model, by the attribute that holds them: the distributed ones, if there is one.

    A model with its own ``train_step`` may have several, also in lists and dicts, while Keras gave its ``optimizer`` a
    default that trains nothing.
    """
    found = _all_optimizers(model)
    return {name: one for name, one in found.items() if core_of(one) is not None} or {
        name: one for name, one in found.items() if name == "optimizer"
    }


def _all_optimizers(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in {"optimizer": None, **vars(model)}.items():  # one that has two names has this one
        if name.startswith("_self_"):  # where TensorFlow notes what all the others hold
            continue
        if isinstance(value, dict):
            parts = {f"{name}-{key}": part for key, part in value.items()}
        elif isinstance(value, list | tuple):
            parts = {f"{name}-{place}": part for place, part in enumerate(value)}
        else:
            parts = {name: value}
        for path, part in parts.items():
            if isinstance(part, keras.optimizers.Optimizer) and all(
                part is not one for one in found.values()
            ):
                found[path] = part
    return found


def ranks_of(model: Any) -> Ranks:
    """The ranks that the model's optimizers exchange with; all if they are plain ones."""
    cores = {name: core_of(one) for name, one in optimizers_of(model).items()}
    ranks = {name: core.ranks for name, core in cores.items() if core is not None}
    if len(set(ranks.values())) > 1:
        raise ConfigError(f"the model's optimizers exchange with different ranks: {ranks}")
    return next(iter(ranks.values()), runtime.current().everyone)


def require_distributed(model: Any, callback: Any) -> None:
    """ConfigError if there are other ranks, and the model exchanges nothing with them.

    Beside a distributed optimizer a plain one is only named in the log: it may be Keras' default, or train nothing.
    """
    if runtime.size() == 1:
        return
    found = _all_optimizers(model)
    if all(core_of(one) is None for one in found.values()):
        raise ConfigError(
            f"{type(callback).__name__}: the model has no DistributedOptimizer, so that its ranks would drift apart "
            "without a word"
        )
    for name, one in found.items():
        if core_of(one) is None and name != "optimizer":
            runtime.logger.warning(
                "the model's optimizer %r (%s) is not a DistributedOptimizer: ranks differ in what it trains",
                name,
                type(one).__name__,
            )


def build_optimizers(model: Any) -> bool:
    """Make the optimizers' slots, so that all variables are there; False if the model itself is not built.

    Of several, only the model knows what each trains: they are left as they are, and their slots, made in the first
    step, begin alike.
    """
    # Keras never builds a model that is only a place for others, without a call of its own.
    only_holds = type(model).call is keras.Model.call
    if not model.built and not (
        only_holds and all(one.built for one in model._flatten_layers(include_self=False))
    ):
        return False
    if list(optimizers_of(model)) == ["optimizer"] and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return True


def variables_of(model: Any) -> list[Any]:
    """Weights, and all that the optimizers keep. Not the states of random layers: each rank draws its own."""
    return [*model.weights, *(each for one in optimizers_of(model).values() for each in one.variables)]
