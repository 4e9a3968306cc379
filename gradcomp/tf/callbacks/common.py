"""Questions of the callbacks about their model: its optimizers, ranks and variables."""

from __future__ import annotations

from typing import Any

import keras

from gradcomp.core.errors import ConfigError
from gradcomp.job import runtime
from gradcomp.job.network import Ranks
from gradcomp.tf.core import core_of


def optimizers_of(model: Any) -> dict[str, Any]:
    """Return the optimizers that train the model, by the attribute that holds them.

    These are the distributed ones, or else ``optimizer``. A model with its own ``train_step`` may have
    several, also in lists and dicts, while Keras gave its ``optimizer`` a default that trains nothing.
    """
    found = _all_optimizers(model)
    return {name: one for name, one in found.items() if core_of(one) is not None} or {
        name: one for name, one in found.items() if name == "optimizer"
    }


def _all_optimizers(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in {
        "optimizer": None,
        **vars(model),
    }.items():  # "optimizer" comes first, and wins over other names
        if name.startswith("_self_"):  # TensorFlow's own record of all other attributes
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
    """Return the ranks that the model's optimizers exchange with; all if none is distributed."""
    cores = {name: core_of(one) for name, one in optimizers_of(model).items()}
    ranks = {name: core.ranks for name, core in cores.items() if core is not None}
    if len(set(ranks.values())) > 1:
        raise ConfigError(
            f"the model's optimizers exchange with different ranks: {ranks}; give all of them the same process_set"
        )
    return next(iter(ranks.values()), runtime.current().everyone)


def require_distributed(model: Any, callback: Any) -> None:
    """Raise ConfigError if there are other ranks, and the model exchanges nothing with them.

    A plain optimizer beside a distributed one causes a warning only: it may be Keras' default, or train
    nothing.
    """
    if runtime.size() == 1:
        return
    found = _all_optimizers(model)
    if all(core_of(one) is None for one in found.values()):
        raise ConfigError(
            f"{type(callback).__name__}: the model has no DistributedOptimizer, so its ranks would drift apart "
            "without an error; wrap its optimizer"
        )
    for name, one in found.items():
        if core_of(one) is None and name != "optimizer":
            runtime.logger.warning(
                "the model's optimizer %r (%s) is not a DistributedOptimizer: variables that it trains differ between "
                "ranks",
                name,
                type(one).__name__,
            )


def build_optimizers(model: Any) -> bool:
    """Make the optimizers' slots, so that all variables exist; return False if the model itself is not built.

    With several optimizers only the model knows which variables each trains. They are left as they are, and
    their slots, made in the first step, start equal.
    """
    # Keras never builds a model that only holds other models, without a call() of its own.
    only_holds = type(model).call is keras.Model.call
    if not model.built and not (
        only_holds and all(one.built for one in model._flatten_layers(include_self=False))
    ):
        return False
    if list(optimizers_of(model)) == ["optimizer"] and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return True


def variables_of(model: Any) -> list[Any]:
    """Return the weights and all variables of the optimizers.

    States of random layers are left out, because they differ between ranks.
    """
    return [*model.weights, *(each for one in optimizers_of(model).values() for each in one.variables)]
