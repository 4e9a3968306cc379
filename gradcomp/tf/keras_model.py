"""Adapts ``keras.Model`` to distributed optimizers.

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
from gradcomp.tf.bridge import typed_errors

_MARK = "_gradcomp_watches"


def watch() -> None:
    """Wrap the methods of ``keras.Model``, once."""
    for name, around in (("compile", _compile), ("fit", _train), ("train_on_batch", _train)):
        for kind in keras.Model.__mro__:
            if name in kind.__dict__:
                method = kind.__dict__[name]
                if not hasattr(method, _MARK):
                    wrapped = around(method)
                    setattr(wrapped, _MARK, True)
                    # Set on the class that defines it, because Keras compares ``Model.compile`` with that attribute to
                    # detect custom ones.
                    setattr(kind, name, wrapped)
                break


def refuse_strategy(strategy: Any) -> None:
    """Raise ConfigError for strategies of ``tf.distribute``, which would exchange gradients too."""
    if tf.distribute.has_strategy() or (
        strategy is not None and not isinstance(strategy, type(_default_strategy()))
    ):
        raise ConfigError(
            "tf.distribute strategies exchange gradients by themselves: start one process per device, without a "
            "strategy"
        )


def _default_strategy() -> Any:
    with tf.init_scope():
        return tf.distribute.get_strategy()


def _compile(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``compile``: refuse XLA, whose clusters cannot call Python, and put loss scaling outside the exchange."""
    from gradcomp.tf.optimizer import core_of, turn_inside_out

    signature = inspect.signature(method)

    @functools.wraps(method)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A001 - the method's name
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        optimizer = given.arguments["optimizer"]
        if core_of(optimizer) is None:
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
            turn_inside_out(self.optimizer)
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
