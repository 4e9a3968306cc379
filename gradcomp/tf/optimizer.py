"""``DistributedOptimizer``: a Keras 3 optimizer steps on gradients averaged over ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import keras
import tensorflow as tf

from gradcomp.compress import Compression, Compressor, Policy, as_policy
from gradcomp.control import Controller
from gradcomp.core.config import refuse_removed
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.exchange.checkpoint_manager import CheckpointManager
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.job import runtime, settings
from gradcomp.job.checkpoint import from_plain, to_plain
from gradcomp.job.launch import Ranks
from gradcomp.job.momentum import LOOKS_AHEAD, NO_SUM, Group, takes_momentum, warn_of_averages
from gradcomp.job.process_sets import Members, members
from gradcomp.job.reduce_op import Average, ReduceOp
from gradcomp.job.report import Readers
from gradcomp.tf.bridge import name_of
from gradcomp.tf.exchange import Exchange
from gradcomp.tf.keras_model import core_of, refuse_strategy, watch
from gradcomp.tf.local import Local, change_values, check_ignored
from gradcomp.tf.sensitivity import Sensitivity, check_sensitivity


@dataclass(frozen=True)
class Arguments(settings.Arguments):
    """The arguments of :func:`DistributedOptimizer`; ``names`` are the layers' names, if not the variables' own."""

    on_skip: settings.OnSkip = field(default="raise", init=False)  # Keras' optimizers have no such argument
    names: Sequence[str] | None = None
    average_aggregated_gradients: bool = False
    local: Local = field(default_factory=Local)

    def check(self) -> Policy:
        check_sensitivity(self.sensitivity)
        if self.sensitivity is not None and self.sensitivity.optimizer is not None:
            raise ConfigError(
                "sensitivity: optimizer= is for a tape; this optimizer applies the means itself"
            )
        return super().check()


#: Methods of Keras' optimizers that :class:`Distributed` replaces or calls.
_HOOKS = (
    "_clip_gradients", "_backend_apply_gradients", "_backend_update_step", "_check_variables_are_known", "_var_key",
)  # fmt: skip
#: Numeric settings of Keras' optimizers. The learning rate is not one: it may be a schedule, whose value is passed.
_SCALARS = (
    "momentum", "nesterov", "rho", "beta_1", "beta_2", "epsilon", "weight_decay", "clipnorm", "clipvalue",
    "global_clipnorm", "amsgrad", "centered", "initial_accumulator_value", "learning_rate_power",
)  # fmt: skip


class Core:
    """The state that wrapping adds to an optimizer.

    ``owner`` is the optimizer that exchanges. Others that share the core, which are inside a
    ``LossScaleOptimizer``, only answer questions.
    """

    def __init__(self, arguments: Arguments, ranks: Ranks, owner: Any) -> None:
        self.arguments = arguments
        #: The ranks that exchange; of an elastic job this one alone, until :meth:`reattach`.
        self.ranks = ranks
        self.owner = owner
        self.exchange: Exchange | None = None
        #: The variables whose gradients Keras is applying, before it clips them.
        self.applying: list[Any] | None = None
        #: Why nothing can be exchanged yet; empty if something can.
        self.before_training = ""
        #: The keys of all variables, and the number of each exchanged one in the exchange, by its key.
        self.known: set[Any] = set()
        self._rows: dict[Any, int] = {}

    @property
    def exchanger(self) -> Exchanger | None:
        """The exchanger; None before the optimizer is built, and in a world of one."""
        return None if self.exchange is None else self.exchange.exchanger

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
                given,
                ranks=self.ranks,
                names=given.names if named else None,
                scalars=self._scalars,
                momentum=self._momentum,
                optimizer=self._inner,
            )
        self.exchange.checkpoint_manager.before_training = self.before_training
        if self.exchanger is not None and self.exchanger.pipeline.transport.rank == 0:
            inner = self._inner
            if getattr(inner, "beta_1", 0.0):
                warn_of_averages(as_policy(given.compression), type(inner).__name__)
        self.known = set(map(self.owner._var_key, variables))
        self._rows = {self.owner._var_key(variable): row for row, variable in enumerate(exchanged)}

    def reattach(self) -> None:
        """Exchange among all ranks of the generation from now on, without the old compression state. Collective.

        Functions that were traced before still have the old exchange, and must be traced anew.
        """
        self.ranks, self.before_training = runtime.current().everyone, ""
        self.start(self.owner._trainable_variables)

    def measure_losses(self) -> None:
        """Let a controller that decides by losses measure some, between two steps."""
        if self.exchange is not None:
            self.exchange.measure_losses()

    @property
    def _inner(self) -> Any:
        return getattr(self.owner, "inner_optimizer", self.owner)

    def _scalars(self) -> dict[str, float]:
        """Return the optimizer's numeric settings, without its learning rate."""
        inner = self._inner
        found = {name: getattr(inner, name, None) for name in _SCALARS}
        return {name: value for name, value in found.items() if isinstance(value, float | int)}

    def _momentum(self) -> Group:
        """Return the inner optimizer's momentum as it is now."""
        inner = self._inner
        kind, momentum, problem = type(inner).__name__, getattr(inner, "momentum", 0.0), ""
        if not isinstance(inner, keras.optimizers.SGD):
            problem = NO_SUM % (kind, "keras.optimizers.SGD")
        elif inner.nesterov:
            problem = LOOKS_AHEAD
        elif len(self._rows) < len(self.known):
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
        inner = self._inner
        momentum = getattr(inner, "momentum", None)  # the exchange refuses an optimizer without one
        taken = self.exchanger is not None and self.takes_momentum(self.arguments.compression)
        if momentum is None or not taken:
            yield
            return
        inner.momentum = 0.0
        try:
            yield
        finally:
            inner.momentum = momentum

    def takes_momentum(self, compression: Policy | Compressor | str) -> bool:
        """Return whether the exchange applies the optimizer's momentum; a what-if run replaces the compression."""
        assert self.exchanger is not None, "something is exchanged"
        return not self.exchanger.pipeline.config.what_if and takes_momentum(as_policy(compression))

    def move_to(self, outer: Any) -> None:
        """Let ``outer``, a ``LossScaleOptimizer`` around the owner, exchange in its place."""
        self.owner = outer
        adopt(outer, self)

    def means(
        self, gradients: Sequence[Any], variables: Sequence[Any], scale: Any = 1.0, learning_rate: Any = 0.0
    ) -> list[Any]:
        """Return the means of the gradients of these variables, and the own gradients of local ones.

        A gradient of None gives None. Variables that are left out have no gradient.
        """
        assert self.exchange is not None, "an optimizer is built before it applies"
        given = self.arguments
        results = list(gradients)
        if not given.average_aggregated_gradients and given.backward_passes_per_step != 1:
            # Keras accumulates the mean over passes, and ours is the sum.
            results = [change_values(each, lambda v: v * given.backward_passes_per_step) for each in results]
        rows = [self._rows.get(self.owner._var_key(variable)) for variable in variables]
        own: list[Any] = [None] * len(self._rows)
        for row, gradient in zip(rows, results, strict=True):
            if row is not None:
                own[row] = gradient
        means = self.exchange.exchange(own, scale, learning_rate)
        return [
            given.local.gradient(gradient, len(self.ranks)) if row is None else means[row]
            for row, gradient in zip(rows, results, strict=True)
        ]


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
    for hook in _HOOKS:
        if not callable(getattr(optimizer, hook, None)):
            raise ConfigError(
                f"Keras {keras.__version__} has no Optimizer.{hook}: this gradcomp does not support this Keras"
            )
    refuse_strategy(getattr(optimizer, "_distribution_strategy", None))


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


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    use_locking: bool = False,  # noqa: ARG001
    device_dense: str = "",
    device_sparse: str = "",
    compression: Policy | Compressor | str = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Members = None,
    scale_local_gradients: bool = True,
    *,
    local_layers: Any = None,
    reduction: str | None = None,
    controller: Controller | str | None = None,
    layers: bool = True,
    residuals: str | None = None,
    sensitivity: Sensitivity | None = None,
) -> DistributedKerasOptimizer:
    """Make a Keras ``optimizer`` step on gradients averaged over ranks; returns the same object, still of its class.

        g_mean = (1/N) sum over ranks of g_i, each layer compressed as ``compression`` says

    The exchange comes after Keras has divided by ``loss_scale_factor`` and accumulated over
    ``gradient_accumulation_steps``, and before clipping, weight decay, the update and its moving average, which act on
    means. ``get_config()``, ``model.save`` and copies give the plain optimizer, which loads without gradcomp.

    Args:
        optimizer: any ``keras.optimizers.Optimizer``, built or not; changed in place. For dynamic loss scaling use
            ``DistributedOptimizer(LossScaleOptimizer(inner))``. If ``compile`` adds a ``LossScaleOptimizer`` around a
            distributed optimizer, the outer one exchanges, before it looks for overflows.
        name: Horovod's argument without effect, as are ``use_locking`` and the devices: only exchange buckets have
            names here.
        use_locking: see ``name``.
        device_dense: see ``name``.
        device_sparse: see ``name``.
        compression: a compressor, its string form, or a :class:`gradcomp.Policy` of them by layer. ``"auto"`` chooses
            the least compression that hides the communication on this network, see
            :class:`gradcomp.control.auto.Auto`.
        backward_passes_per_step: gradients are summed over this many passes before they are exchanged. It sets the
            optimizer's ``gradient_accumulation_steps``, whose mean over the passes is multiplied by their number. A
            ``LossScaleOptimizer`` looks at every pass, so every pass is exchanged.
        average_aggregated_gradients: exchange the mean over the passes instead of their sum.
        op: ``Average`` or ``Sum`` over ranks.
        gradient_predivide_factor: gradients are divided by it before the exchange, and the mean is multiplied by it
            after.
        sparse_as_dense: exchange ``IndexedSlices`` as dense gradients; else their rows are gathered, uncompressed.
        num_groups: Horovod's older spelling of ``groups``.
        groups: Horovod's argument without effect: exchange buckets form by themselves, and no value depends on them.
        process_set: the ranks to average over, if not all: a :class:`ProcessSet`. Only these ranks call this.
        local_layers: layers whose gradients stay each rank's own; ``register_local_var`` adds variables.
        scale_local_gradients: divide gradients of local variables by the number of ranks.
        reduction: the algorithm that adds codes over ranks, if not that of ``init()`` or GRADCOMP_REDUCTION.
        controller: a controller that changes the levels of layers while training runs, such as
            ``gradcomp.LGreCo(every_steps=500)``, or its string form.
        layers: False compresses each exchange bucket as one vector, as a library beneath the framework has to, which
            knows no layers: biases and norms too, at one level, without feedback. See :class:`gradcomp.Flat`; it takes
            a quantiser, and no policy or controller.
        residuals: removed; anything but None raises a ConfigError that says what to do instead.
        sensitivity: the training loss on a batch, for ``controller=LGreCo(metric="loss")``, which needs it.

    Collective when the optimizer is built, by ``fit`` or by the first ``apply``, or here if it is. Wire: see the
    compressor; uncompressed, 2 d (N-1)/N bytes per rank. State: residuals where the compressor keeps them, 8 bytes an
    element; :func:`gradcomp.tf.save` saves them.
    Raises ConfigError for bad arguments and other backends of Keras, PlanMismatchError on every rank if the ranks
    differ, StateError before ``init()`` and for an optimizer that is distributed already.
    """
    refuse_removed("residuals", residuals)
    check_ignored(num_groups, groups, name=name, device_dense=device_dense, device_sparse=device_sparse)
    arguments = Arguments(
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        sparse_as_dense,
        process_set,
        reduction,
        controller,
        layers=layers,
        sensitivity=sensitivity,
        average_aggregated_gradients=average_aggregated_gradients,
        local=Local(local_layers, scale_local_gradients),
    )
    distribute(optimizer, arguments)
    return cast("DistributedKerasOptimizer", optimizer)


def distribute(optimizer: Any, arguments: Arguments) -> None:
    state, ranks = runtime.current(), members(arguments.process_set)
    check_optimizer(optimizer)
    arguments.check()
    accumulate(optimizer, arguments.backward_passes_per_step)
    core = Core(arguments, ranks, optimizer)
    if state.network.member is not None:
        if ranks != state.everyone:
            raise ConfigError("an elastic job has optimizers of all ranks, and no process sets")
        # elastic.run makes it exchange: here a rank that dies would end those that have not begun.
        core.ranks = (state.rank,)
        core.before_training = (
            "a step outside of the function that gradcomp.tf.elastic.run calls, which makes the optimizers of its "
            "KerasState exchange: give the model to the KerasState"
        )
    if optimizer.built:
        core.start(optimizer._trainable_variables)
    watch()
    adopt(optimizer, core)


class Distributed(Readers):
    """The methods that wrapping adds to an optimizer's class, or replaces in it."""

    _gradcomp: Core

    def _exchanger_or_none(self) -> Exchanger | None:
        return self._gradcomp.exchanger

    def build(self, variables: Sequence[Any]) -> None:
        """Make the slots, and begin to exchange. Collective the first time."""
        core = self._gradcomp
        caller = sys._getframe(1).f_locals.get("self")
        if core.owner is self and getattr(caller, "inner_optimizer", None) is self:
            raise ConfigError(
                "LossScaleOptimizer(DistributedOptimizer(...)) would wait for ever if one rank overflows and skips "
                "its step: wrap the other way round, DistributedOptimizer(LossScaleOptimizer(...))"
            )
        super().build(variables)  # type: ignore[misc]
        if core.owner is self and core.exchange is None:
            core.start(self._trainable_variables)

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of this variable on this rank; StateError once the optimizer is built."""
        if self._gradcomp.exchange is not None:
            raise StateError("the optimizer is built: register local variables before")
        self._gradcomp.arguments.local.add(var)

    def set_compression(self, compression: Policy | Compressor | str) -> None:
        """Change the compression during training, in a callback between two steps or two calls of ``fit``.

        All ranks must call it, between the same two steps; the call sends nothing. The headers of the next
        step show whether all ranks called it with the same argument, and the new compression applies from the step
        after that one. Layers whose new compressor keeps no residual send the rest of theirs with the
        gradient, exactly and once. Momentum of the old compression is dropped, and a controller ends.

        Raises ConfigError for a bad argument and for ``"auto"``, StateError while a step is open. If a rank
        did not call, or with another argument, the next step raises: a PlanMismatchError on every rank that
        called, and on the others this or the TransportError of the abort.
        """
        core = self._gradcomp
        if core.exchange is not None and core.exchanger is not None:
            if core.takes_momentum(compression) != core.takes_momentum(core.arguments.compression):
                raise ConfigError(
                    'a momentum factor of "optimizer" cannot be added or removed during training: the train step that '
                    "Keras has traced contains the optimizer's momentum, or none"
                )
            core.exchange.set_compression(compression)
        else:
            core.arguments.policy_of(compression)  # a ConfigError for a bad argument
        core.arguments = replace(core.arguments, compression=compression, controller=None, sensitivity=None)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Apply gradients; exchanges them here if they are loss-scaled, else before Keras clips them."""
        self._apply(grads, trainable_variables)
        if tf.executing_eagerly() and self._gradcomp.owner is self:
            self._gradcomp.measure_losses()

    def _apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None) -> None:
        core = self._gradcomp
        if core.owner is not self or not isinstance(self, keras.optimizers.LossScaleOptimizer):
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not self.built:
            with keras.name_scope(self.name):
                self.build(variables)
        self._check_variables_are_known(variables)
        # The exchange comes before Keras looks for overflows: one rank's is in the mean of all, so that all skip alike.
        scale, rate = tf.convert_to_tensor(self.dynamic_scale), tf.convert_to_tensor(self.learning_rate)
        means = core.means(grads, variables, scale, rate)
        with core.momentum_withheld():
            super().apply(means, variables)  # type: ignore[misc]

    def _check_variables_are_known(self, variables: Sequence[Any]) -> None:
        core = self._gradcomp
        unknown = [v for v in variables if self._var_key(v) not in core.known]  # type: ignore[attr-defined]
        if core.owner is self and unknown:
            raise StateError(
                f"variables that did not exist when the optimizer was built are not exchanged: "
                f"{', '.join(map(name_of, unknown[:5]))}; a model that was rebuilt, or has other trainable layers, "
                "needs a new optimizer"
            )
        super()._check_variables_are_known(variables)  # type: ignore[misc]

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        core = self._gradcomp
        if core.owner is not self or isinstance(self, keras.optimizers.LossScaleOptimizer):
            super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]
            return
        core.applying = list(trainable_variables)
        try:
            super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]
            # In a pass that only accumulates, Keras clips nothing.
            if core.applying is not None and not self.gradient_accumulation_steps:
                raise ConfigError(
                    f"{type(self).__name__} does not call _clip_gradients() as Keras' optimizers do, so nothing was "
                    "exchanged: use one that does"
                )
        finally:
            core.applying = None

    def _backend_update_step(self, *arguments: Any) -> None:
        with self._gradcomp.momentum_withheld():
            super()._backend_update_step(*arguments)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Exchange the gradients, then clip the means.

        Keras calls this after all that belongs before the exchange, and before all that belongs after it.
        """
        core = self._gradcomp
        variables, core.applying = core.applying, None
        if variables is not None:
            learning_rate = tf.convert_to_tensor(self.learning_rate)  # type: ignore[attr-defined]
            grads = core.means(grads, variables, 1.0, learning_rate)
        return list(super()._clip_gradients(grads))  # type: ignore[misc]

    def __reduce__(self) -> Any:
        """Pickle as a plain optimizer of the wrapped class, because an exchange cannot be copied."""
        plain: Any = super().__reduce__()
        return self.__class__._unpickle_model, plain[1]  # type: ignore[attr-defined]

    def compression_state(self) -> dict[str, Any]:
        """Return this rank's residuals by layer name, its step, plan and bucket order, as copies.

        All values are arrays, numbers and strings. Local. Raises StateError before the optimizer is built.
        """
        return to_plain(self._gradcomp.checkpoint_manager.snapshot())

    def load_compression_state(self, state: dict[str, Any]) -> None:
        """Resume from the result of :meth:`compression_state` on this rank, of a job with the same number of ranks.

        All ranks must load states that were taken after the same step. Local. Raises StateError and changes
        nothing if anything does not fit; the error lists all of it.
        """
        self._gradcomp.checkpoint_manager.restore(from_plain(state))


if TYPE_CHECKING:

    class DistributedKerasOptimizer(Distributed, keras.optimizers.Optimizer, Any):
        """Tells type checkers that a wrapped optimizer has these methods in addition to those of its class."""


def adopt(optimizer: Any, core: Core) -> None:
    """Turn the optimizer into a distributed one, in place, so that references to it stay valid.

    Its ``__class__`` stays the wrapped class, by which Keras saves and copies it as the plain optimizer. Only
    ``type()`` returns the distributed class.
    """
    kind = type(optimizer)
    optimizer.__dict__["_gradcomp"] = core
    if isinstance(optimizer, Distributed):
        return
    body = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__class__": property(lambda self: kind),
    }
    object.__setattr__(optimizer, "__class__", type(kind.__name__, (Distributed, kind), body))
