"""The state that :func:`DistributedOptimizer` adds to a Keras optimizer, and the checks before it is wrapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from gradcomp.compress import Compression, Compressor, Policy, as_policy
from gradcomp.control import Controller
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.job.checkpoint_manager import CheckpointManager
from gradcomp.job.momentum import LOOKS_AHEAD, NO_SUM, Group, takes_momentum, warn_of_averages
from gradcomp.job.network import Ranks
from gradcomp.job.process_sets import Members
from gradcomp.job.reduce_op import Average, ReduceOp
from gradcomp.job.start import check_arguments
from gradcomp.tf import keras_model
from gradcomp.tf.exchange import Exchange
from gradcomp.tf.local import Local


@dataclass(frozen=True)
class Arguments:
    """The arguments of :func:`DistributedOptimizer`; ``names`` are the layers' names, if not the variables' own."""

    compression: Policy | Compressor | str = Compression.none
    backward_passes_per_step: int = 1
    op: ReduceOp = Average
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    process_set: Members = None
    reduction: str | None = None
    controller: Controller | str | None = None
    names: Sequence[str] | None = None
    average_aggregated_gradients: bool = False
    local: Local = field(default_factory=Local)

    def check(self) -> None:
        """Raise ConfigError for arguments that cannot work with any variables."""
        passes = self.backward_passes_per_step
        if type(passes) is not int or passes < 1:
            raise ConfigError(
                f"backward_passes_per_step must be a whole number of at least 1, got {passes!r}"
            )
        check_arguments(self.op, self.gradient_predivide_factor, self.reduction)
        as_policy(self.compression)


class Core:
    """The state that wrapping adds to an optimizer.

    ``owner`` is the optimizer that exchanges. Others that share the core, which are inside a
    ``LossScaleOptimizer``, only answer questions.
    """

    def __init__(self, arguments: Arguments, ranks: Ranks, owner: Any) -> None:
        self.arguments = arguments
        #: The ranks that exchange.
        self.ranks = ranks
        self.owner = owner
        self.exchange: Exchange | None = None
        #: The variables whose gradients Keras is applying, before it clips them.
        self.applying: list[Any] | None = None
        #: The tensors of the means of ``applying``.
        self.arrived: list[Any] = []
        #: Key of an exchanged variable -> its number in the exchange; ``_own``: keys of local variables.
        self._rows: dict[Any, int] = {}
        self._own: set[Any] = set()

    @property
    def checkpoint_manager(self) -> CheckpointManager:
        """Saves and loads the compression state; StateError before the optimizer is built."""
        if self.exchange is None:
            raise StateError(
                "the optimizer is not built: it has no variables yet, and no compression state; call "
                "optimizer.build(model.trainable_variables) first"
            )
        return self.exchange.checkpoint_manager

    def start(self, variables: Sequence[Any]) -> None:
        """Begin to exchange the gradients of these variables. Collective."""
        if any(getattr(variable, "overwrite_with_gradient", False) for variable in variables):
            raise ConfigError(
                "variables that are overwritten with their gradients, as in float8 training, are not exchanged, and "
                "would differ between ranks: train without float8"
            )
        given = self.arguments
        exchanged = [variable for variable in variables if variable not in given.local]
        named = given.names is not None and len(given.names) == len(exchanged)
        with tf.init_scope():
            self.exchange = Exchange(
                exchanged,
                given.compression,
                op=given.op,
                predivide=given.gradient_predivide_factor,
                sparse_as_dense=given.sparse_as_dense,
                process_set=given.process_set,
                reduction=given.reduction,
                controller=given.controller,
                names=given.names if named else None,
                scalars=partial(scalars_of, self.owner),
                momentum=self._momentum,
            )
        if self.exchange.exchanger is not None and self.exchange.exchanger.pipeline.transport.rank == 0:
            inner = self._inner
            if getattr(inner, "beta_1", 0.0):
                warn_of_averages(as_policy(given.compression), type(inner).__name__)
        self._rows = {self.owner._var_key(variable): row for row, variable in enumerate(exchanged)}
        self._own = {self.owner._var_key(variable) for variable in variables} - set(self._rows)

    def set_compression(self, compression: Policy | Compressor | str) -> None:
        """Change the compression; before the optimizer is built, start with this one."""
        takes = takes_momentum(as_policy(compression))
        if self.exchange is not None and self.exchange.exchanger is not None:
            if takes != takes_momentum(as_policy(self.arguments.compression)):
                raise ConfigError(
                    'a momentum factor of "optimizer" cannot be added or removed during training: the train step that '
                    "Keras has traced contains the optimizer's momentum, or none"
                )
            self.exchange.set_compression(compression)
        self.arguments = replace(self.arguments, compression=compression, controller=None)

    @property
    def _inner(self) -> Any:
        return getattr(self.owner, "inner_optimizer", self.owner)

    def _momentum(self) -> Group:
        """Return the inner optimizer's momentum as it is now."""
        inner = self._inner
        kind, momentum, problem = type(inner).__name__, getattr(inner, "momentum", 0.0), ""
        if not isinstance(inner, keras.optimizers.SGD):
            problem = NO_SUM % (kind, "keras.optimizers.SGD")
        elif inner.nesterov:
            problem = LOOKS_AHEAD
        elif self._own:
            problem = (
                "local variables, whose gradients are not exchanged, would lose their momentum; give a number"
            )
        return Group(kind, float(momentum or 0.0), problem)

    @contextmanager
    def momentum_withheld(self) -> Iterator[None]:
        """Update without momentum within a ``with`` block, if the exchange applies it.

        A trace keeps the momentum that the optimizer has while it is made, so the user's can be restored
        afterwards.
        """
        exchanges = self.exchange is not None and self.exchange.exchanger is not None
        if not exchanges or not takes_momentum(as_policy(self.arguments.compression)):
            yield
            return
        inner = self._inner
        momentum = getattr(inner, "momentum", None)
        if momentum is None:  # the exchange refuses such an optimizer
            yield
            return
        inner.momentum = 0.0
        try:
            yield
        finally:
            inner.momentum = momentum

    def unknown(self, variables: Sequence[Any]) -> list[str]:
        """Return the names of variables that did not exist when the exchange began."""
        return [
            getattr(variable, "path", variable.name)
            for variable in variables
            if self.owner._var_key(variable) not in self._rows.keys() | self._own
        ]

    def add_local(self, variable: Any) -> None:
        """Keep the gradient of this variable on this rank; StateError once the optimizer is built."""
        if self.exchange is not None:
            raise StateError("the optimizer is built: register local variables before")
        self.arguments.local.add(variable)

    def means(
        self, gradients: Sequence[Any], variables: Sequence[Any], scale: Any = None, learning_rate: Any = None
    ) -> list[Any]:
        """Return the means of the gradients of these variables, and the own gradients of local ones.

        A gradient of None gives None. Variables that are left out have no gradient.
        """
        assert self.exchange is not None, "an optimizer is built before it applies"
        given = self.arguments
        factor = 1 if given.average_aggregated_gradients else given.backward_passes_per_step
        keys = [self.owner._var_key(variable) for variable in variables]
        own: list[Any] = [None] * len(self._rows)
        results = [_times(gradient, factor) for gradient in gradients]
        for key, gradient in zip(keys, results, strict=True):
            if key in self._rows:
                own[self._rows[key]] = gradient
        means = self.exchange.exchange(own, scale, learning_rate)
        for place, key in enumerate(keys):
            if key in self._rows:
                results[place] = means[self._rows[key]]
            else:
                results[place] = given.local.gradient(results[place], len(self.ranks))
        return results


def core_of(optimizer: Any) -> Core | None:
    """Return the core of a distributed optimizer, or None for a plain one."""
    core = getattr(optimizer, "_gradcomp", None)
    return core if isinstance(core, Core) else None


#: Numeric settings of Keras' optimizers. The learning rate is not one: it may be a schedule, whose value is passed.
_SCALARS = (
    *("momentum", "nesterov", "rho", "beta_1", "beta_2", "epsilon", "weight_decay", "clipnorm", "clipvalue"),
    *("global_clipnorm", "amsgrad", "centered", "initial_accumulator_value", "learning_rate_power"),
)


def scalars_of(optimizer: Any) -> dict[str, float]:
    """Return the optimizer's numeric settings, without its learning rate."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    found = {name: getattr(inner, name, None) for name in _SCALARS}
    return {name: value for name, value in found.items() if isinstance(value, float | int)}


def check_optimizer(optimizer: Any) -> None:
    """Raise ConfigError for an optimizer that cannot be wrapped, StateError for one that is wrapped already."""
    backend = keras.backend.backend()
    if backend == "torch":
        raise ConfigError(
            "Keras runs on torch, and its parameters are torch's: wrap a torch.optim.Optimizer over "
            "model.parameters() with gradcomp.torch.DistributedOptimizer, in a training loop of your own"
        )
    if backend != "tensorflow":
        raise ConfigError(
            f"Keras runs on {backend}: gradcomp.tf needs KERAS_BACKEND=tensorflow, which must be set before Keras is "
            "imported"
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(f"expected a keras.optimizers.Optimizer of Keras 3, got {type(optimizer).__name__}")
    if core_of(optimizer) is not None or core_of(getattr(optimizer, "inner_optimizer", None)) is not None:
        raise StateError("this optimizer is already a DistributedOptimizer; wrap an optimizer once only")
    hooks = (
        "_clip_gradients",
        "_backend_apply_gradients",
        "_backend_update_step",
        "_check_variables_are_known",
        "_var_key",
    )
    missing = [name for name in hooks if not callable(getattr(optimizer, name, None))]
    if missing:
        raise ConfigError(
            f"Keras {keras.__version__} has no Optimizer.{missing[0]}: this gradcomp does not support this Keras"
        )
    keras_model.refuse_strategy(getattr(optimizer, "_distribution_strategy", None))


def accumulate(optimizer: Any, passes: int) -> None:
    """Let Keras accumulate over ``passes``.

    Raises ConfigError if the optimizer accumulates over another number, or was built without accumulators.
    """
    if passes == 1:
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if inner.gradient_accumulation_steps not in (None, passes):
        raise ConfigError(
            f"backward_passes_per_step={passes}, and the optimizer has gradient_accumulation_steps="
            f"{inner.gradient_accumulation_steps}: pass one of them"
        )
    if inner.built and inner.gradient_accumulation_steps is None:
        raise ConfigError(
            "the optimizer is built without accumulators: set backward_passes_per_step before it is built, or "
            "construct it with gradient_accumulation_steps"
        )
    inner.gradient_accumulation_steps = passes


def _times(gradient: Any, factor: int) -> Any:
    """Multiply a gradient, because Keras accumulates the mean over passes, and ours is the sum."""
    if gradient is None or factor == 1:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
