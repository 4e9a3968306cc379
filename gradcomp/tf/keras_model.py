"""Adapts ``keras.Model`` to distributed optimizers, and finds those that a model has.

The first :func:`gradcomp.tf.DistributedOptimizer` wraps ``compile`` and the methods that train. For models
without a distributed optimizer the wrappers change nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from gradcomp.core.errors import ConfigError
from gradcomp.job import runtime
from gradcomp.job.launch import Ranks
from gradcomp.tf.bridge import typed_errors

_MARK = "_gradcomp_watches"


def core_of(optimizer: Any) -> Any:
    """Return the :class:`gradcomp.tf.optimizer.Core` of a distributed optimizer, or None for a plain one."""
    return getattr(optimizer, "_gradcomp", None)


def watch() -> None:
    """Wrap the methods of ``keras.Model``, once."""
    wrappers = {
        "compile": _compile,
        "fit": _train,
        "train_on_batch": _train,
        "make_train_function": _make_train_function,
    }
    for name, around in wrappers.items():
        # The class that defines the method, because Keras compares ``Model.compile`` with that attribute to detect
        # custom ones.
        kind = next(kind for kind in keras.Model.__mro__ if name in kind.__dict__)
        method = kind.__dict__[name]
        if not hasattr(method, _MARK):
            wrapped = around(method)
            setattr(wrapped, _MARK, True)
            setattr(kind, name, wrapped)


def refuse_strategy(strategy: Any) -> None:
    """Raise ConfigError for strategies of ``tf.distribute``, which would exchange gradients too."""
    with tf.init_scope():
        default = type(tf.distribute.get_strategy())
    if tf.distribute.has_strategy() or not (strategy is None or isinstance(strategy, default)):
        raise ConfigError(
            "tf.distribute strategies exchange gradients by themselves: start one process per device, without a "
            "strategy"
        )


def _compile(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``compile``: refuse XLA, whose clusters cannot call Python, and put loss scaling outside the exchange."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A001 - the method's name
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        optimizer = given.arguments["optimizer"]
        core = core_of(optimizer)
        if core is None:
            return method(self, *args, **kwargs)
        refuse_strategy(getattr(self, "_distribute_strategy", None))
        if given.arguments["jit_compile"] == "auto":
            given.arguments["jit_compile"] = False
        elif given.arguments["jit_compile"]:
            raise ConfigError(
                "jit_compile=True: an XLA cluster cannot call Python to exchange gradients; set jit_compile=False"
            )
        result = method(*given.args, **given.kwargs)
        if self.optimizer is not optimizer:
            core.move_to(self.optimizer)  # Keras has put a LossScaleOptimizer around it
        return result

    return compile


def _train(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that trains, to restore the types of gradcomp's errors.

    This covers optimizers in any attribute of the model, because errors that are not gradcomp's pass
    unchanged.
    """

    @functools.wraps(method)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        with typed_errors():
            return method(self, *args, **kwargs)

    return train


def _make_train_function(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that makes the function of a step, so that losses are measured after each call of that."""

    @functools.wraps(method)
    def make(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.train_function
        result = method(self, *args, **kwargs)
        cores = [core for one in optimizers_of(self).values() if (core := core_of(one)) is not None]
        if self.train_function is not before and any(
            core.arguments.sensitivity is not None for core in cores
        ):
            self.train_function = _measuring(self.train_function, cores)
        return result

    return make


def _measuring(function: Callable[..., Any], cores: list[Any]) -> Callable[..., Any]:
    def step(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        for core in cores:
            core.measure_losses()
        return result

    return step


def optimizers_of(model: Any) -> dict[str, Any]:
    """Return the optimizers that train the model, by the attribute that holds them.

    These are the distributed ones, or else ``optimizer``. A model with its own ``train_step`` may have
    several, also in lists and dicts, while Keras gave its ``optimizer`` a default that trains nothing.
    """
    found = _all_optimizers(model)
    distributed = {name: one for name, one in found.items() if core_of(one) is not None}
    return distributed or {name: one for name, one in found.items() if name == "optimizer"}


def _all_optimizers(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    attributes = {"optimizer": None, **vars(model)}  # "optimizer" comes first, and wins over other names
    for name, value in attributes.items():
        if name.startswith("_self_"):  # TensorFlow's own record of all other attributes
            continue
        if isinstance(value, dict):
            parts = {f"{name}-{key}": part for key, part in value.items()}
        elif isinstance(value, list | tuple):
            parts = {f"{name}-{place}": part for place, part in enumerate(value)}
        else:
            parts = {name: value}
        for path, part in parts.items():
            known = any(part is one for one in found.values())
            if isinstance(part, keras.optimizers.Optimizer) and not known:
                found[path] = part
    return found


def ranks_of(model: Any) -> Ranks:
    """Return the ranks that the model's optimizers exchange with; all if none is distributed."""
    found = optimizers_of(model).items()
    ranks: dict[str, Ranks] = {name: core.ranks for name, one in found if (core := core_of(one)) is not None}
    if len(set(ranks.values())) > 1:
        raise ConfigError(
            f"the model's optimizers exchange with different ranks: {ranks}; give all of them the same process_set"
        )
    return next(iter(ranks.values()), runtime.current().everyone)


def require_distributed(model: Any, callback: Any) -> None:
    """Raise ConfigError if there are other ranks, and the model exchanges nothing with them.

    If a model has a plain optimizer in addition to a distributed one, this only warns: the plain one may be
    Keras' default, or train nothing.
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
    parts = model._flatten_layers(include_self=False)
    if not model.built and not (only_holds and all(one.built for one in parts)):
        return False
    if list(optimizers_of(model)) == ["optimizer"] and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return True


def variables_of(model: Any) -> list[Any]:
    """Return the weights and all variables of the optimizers.

    States of random layers are left out, because they differ between ranks.
    """
    return [*model.weights, *(each for one in optimizers_of(model).values() for each in one.variables)]
