"""``DistributedOptimizer``: a Keras 3 optimizer, on means over ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import keras
import tensorflow as tf

from gradcomp.compress import Compression, Compressor, Policy, as_policy
from gradcomp.control import Controller
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.engine import Exchanger
from gradcomp.job.keeper import Keeper
from gradcomp.job.network import Ranks
from gradcomp.job.plain import from_plain, to_plain
from gradcomp.job.process_sets import Members, members
from gradcomp.job.reduce_op import Average, ReduceOp
from gradcomp.job.report import Readers
from gradcomp.job.start import check_arguments
from gradcomp.tf import keras_model
from gradcomp.tf.exchange import Exchange

Optimizer = TypeVar("Optimizer", bound="keras.optimizers.Optimizer")


def DistributedOptimizer(
    optimizer: Optimizer,
    compression: Policy | Compressor | str = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    *,
    process_set: Members = None,
    reduction: str | None = None,
    controller: Controller | str | None = None,
) -> Optimizer:
    """Make a Keras ``optimizer`` step on gradients averaged over ranks; returns the same object, still of its class.

    g_mean = (1/N) sum over ranks of g_i, each layer compressed as ``compression`` says. The exchange comes after Keras
    has divided by ``loss_scale_factor`` and accumulated over ``gradient_accumulation_steps``, and before clipping,
    weight decay, the update and its moving average: these act on means. ``get_config()``, ``model.save`` and copies
    give the plain optimizer, which loads without gradcomp.

    Args:
        optimizer: any ``keras.optimizers.Optimizer``, built or not; changed in place. Dynamic loss scaling:
            ``DistributedOptimizer(LossScaleOptimizer(inner))``. Where ``compile`` adds a ``LossScaleOptimizer`` around
            a distributed one, it becomes the one that exchanges, before it looks for overflows.
        compression: a compressor, its string form, or a :class:`gradcomp.Policy` of them by layer; ``"auto"`` takes the
            least that hides the communication on this network, see :class:`gradcomp.control.auto.Auto`.
        backward_passes_per_step: gradients are summed over so many passes before they are exchanged. It sets the
            optimizer's ``gradient_accumulation_steps``, whose mean over the passes is multiplied by their number. A
            ``LossScaleOptimizer`` looks at every pass, so every pass is exchanged.
        op: ``Average`` or ``Sum`` over ranks.
        gradient_predivide_factor: gradients are divided by it before the exchange, the mean multiplied after.
        sparse_as_dense: exchange ``IndexedSlices`` as dense gradients; else their rows are gathered, uncompressed.
        process_set: the ranks to average over, if not all: a :class:`ProcessSet`. Only they call this.
        reduction: how codes are added over ranks, if not as ``init()`` or GRADCOMP_REDUCTION said.
        controller: changes the levels of layers while training runs, such as
            ``gradcomp.LGreCo(every_steps=500)``, or its string form.

    Collective when the optimizer is built, by ``fit`` or by the first ``apply``, or here if it is. Wire: see the
    compressor; uncompressed, 2 d (N-1)/N bytes per rank. State: residuals where the compressor keeps them, 8 bytes an
    element; :func:`gradcomp.tf.save` saves them.
    Raises ConfigError for bad arguments and other backends of Keras, PlanMismatchError on every rank if the ranks
    differ, StateError before ``init()`` and for an optimizer that is distributed already.
    """
    arguments = Arguments(
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        sparse_as_dense,
        process_set=process_set,
        reduction=reduction,
        controller=controller,
    )
    distribute(optimizer, arguments)
    return optimizer


@dataclass(frozen=True)
class Arguments:
    """The arguments of :func:`DistributedOptimizer`, and ``names``: of the layers, if not the variables' own."""

    compression: Policy | Compressor | str = Compression.none
    backward_passes_per_step: int = 1
    op: ReduceOp = Average
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    process_set: Members = None
    reduction: str | None = None
    controller: Controller | str | None = None
    names: Sequence[str] | None = None

    def check(self) -> None:
        """Raise ConfigError for what cannot work with any variables."""
        passes = self.backward_passes_per_step
        if type(passes) is not int or passes < 1:
            raise ConfigError(
                f"backward_passes_per_step must be a whole number of at least 1, got {passes!r}"
            )
        check_arguments(self.op, self.gradient_predivide_factor, self.reduction)
        as_policy(self.compression)


def distribute(optimizer: Any, arguments: Arguments) -> None:
    """What :func:`DistributedOptimizer` does."""
    ranks = members(arguments.process_set)
    _check_optimizer(optimizer)
    arguments.check()
    _accumulate(optimizer, arguments.backward_passes_per_step)
    core = Core(arguments, ranks, optimizer)
    if optimizer.built:
        core.start(optimizer._trainable_variables)
    keras_model.watch()
    adopt(optimizer, core)


class Core:
    """What a distributed optimizer has beside the wrapped one.

    ``owner``: the optimizer that exchanges. Others that share the core, those inside of a ``LossScaleOptimizer``, only
    answer questions.
    """

    def __init__(self, arguments: Arguments, ranks: Ranks, owner: Any) -> None:
        self.arguments = arguments
        #: Those that exchange.
        self.ranks = ranks
        self.owner = owner
        self.exchange: Exchange | None = None
        #: Whose gradients Keras applies at this moment, and is about to clip.
        self.applying: list[Any] | None = None
        #: The tensors of their means.
        self.arrived: list[Any] = []
        self._count = 0
        self._rows: dict[Any, int] = {}

    @property
    def keeper(self) -> Keeper:
        """Where the compression state is; StateError before there is one."""
        if self.exchange is None:
            raise StateError(
                "the optimizer is not built: it has no variables yet, and no compression state; call "
                "optimizer.build(model.trainable_variables) first"
            )
        return self.exchange.keeper

    def start(self, variables: Sequence[Any]) -> None:
        """Begin to exchange the gradients of these variables. Collective."""
        if any(getattr(variable, "overwrite_with_gradient", False) for variable in variables):
            raise ConfigError(
                "variables that are overwritten with their gradients, as in float8 training, are not exchanged, and "
                "would differ between ranks"
            )
        given = self.arguments
        named = given.names is not None and len(given.names) == len(variables)
        with tf.init_scope():
            self.exchange = Exchange(
                list(variables),
                given.compression,
                op=given.op,
                predivide=given.gradient_predivide_factor,
                sparse_as_dense=given.sparse_as_dense,
                process_set=given.process_set,
                reduction=given.reduction,
                controller=given.controller,
                names=given.names if named else None,
            )
        self._count = len(variables)
        self._rows = {self.owner._var_key(variable): row for row, variable in enumerate(variables)}

    def set_compression(self, compression: Policy | Compressor | str) -> None:
        """Go over to another compression; before there is an exchange, begin with it."""
        as_policy(compression)
        if self.exchange is not None:
            self.exchange.set_compression(compression)
        self.arguments = replace(self.arguments, compression=compression, controller=None)

    def unknown(self, variables: Sequence[Any]) -> list[str]:
        """Those of the variables that were not there when the exchange began."""
        return [
            getattr(variable, "path", variable.name)
            for variable in variables
            if self.owner._var_key(variable) not in self._rows
        ]

    def means(
        self, gradients: Sequence[Any], variables: Sequence[Any], scale: Any = None, rate: Any = None
    ) -> list[Any]:
        """The means of the gradients of these variables; of None comes None. Variables left out have no gradient."""
        assert self.exchange is not None, "an optimizer is built before it applies"
        rows = [self._rows[self.owner._var_key(variable)] for variable in variables]
        own: list[Any] = [None] * self._count
        for row, gradient in zip(rows, gradients, strict=True):
            own[row] = _times(gradient, self.arguments.backward_passes_per_step)
        means = self.exchange.exchange(own, scale, rate)
        return [means[row] for row in rows]


class Distributed(Readers):
    """The methods that a distributed optimizer has beside, or instead of, those of its class."""

    _gradcomp: Core

    def _exchanger_or_none(self) -> Exchanger | None:
        exchange = self._gradcomp.exchange
        return None if exchange is None else exchange.exchanger

    def build(self, variables: Sequence[Any]) -> None:
        """Make the slots, and begin to exchange. Collective the first time."""
        core = self._gradcomp
        caller = sys._getframe(1).f_locals.get("self")
        if core.owner is self and getattr(caller, "inner_optimizer", None) is self:
            raise ConfigError(
                "LossScaleOptimizer(DistributedOptimizer(...)) would wait for ever where one rank overflows and skips "
                "its step: wrap the other way round, DistributedOptimizer(LossScaleOptimizer(...))"
            )
        super().build(variables)  # type: ignore[misc]
        if core.owner is self and core.exchange is None:
            core.start(self._trainable_variables)

    def set_compression(self, compression: Policy | Compressor | str) -> None:
        """Go over to another compression in mid-run, in a callback between two steps or two calls of ``fit``.

        The next step's headers tell whether all ranks called, with the same argument; the new compression applies from
        the step after it. What residuals of layers hold whose new compressor keeps none is then sent with the gradient,
        exactly and once. Momentum of the old compression is dropped; a controller ends.

        All ranks, between the same two steps; nothing is sent in the call. Raises ConfigError for a bad argument and
        for ``"auto"``, StateError while a step is open. If a rank did not call, or with another argument, the next step
        raises: a PlanMismatchError on every rank that did, on the others this or the TransportError of the abort.
        """
        self._gradcomp.set_compression(compression)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Apply gradients: exchanged here if they are still scaled, else where Keras is about to clip them."""
        core = self._gradcomp
        if core.owner is not self or not isinstance(self, keras.optimizers.LossScaleOptimizer):
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        variables = list(trainable_variables)
        if not self.built:
            with keras.name_scope(self.name):
                self.build(variables)
        self._check_variables_are_known(variables)
        # Before the look for overflows: one rank's is in the mean of all, which then skip alike.
        scale, rate = tf.convert_to_tensor(self.dynamic_scale), tf.convert_to_tensor(self.learning_rate)
        super().apply(core.means(grads, variables, scale, rate), variables)  # type: ignore[misc]

    def _check_variables_are_known(self, variables: Sequence[Any]) -> None:
        unknown = self._gradcomp.unknown(variables) if self._gradcomp.owner is self else []
        if unknown:
            raise StateError(
                f"variables that were not there when the optimizer was built are not exchanged: "
                f"{', '.join(unknown[:5])}; a model that was rebuilt, or has other trainable layers, needs a new "
                "optimizer"
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
            # Between two updates Keras accumulates, and clips nothing.
            if core.applying is not None and not self.gradient_accumulation_steps:
                raise ConfigError(
                    f"{type(self).__name__} does not clip where Keras does: nothing was exchanged"
                )
        finally:
            core.applying, core.arrived = None, []

    def _clip_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Where all that comes before the exchange is done, and nothing of what follows."""
        core = self._gradcomp
        variables, core.applying = core.applying, None
        if variables is not None:
            rate = tf.convert_to_tensor(self.learning_rate)  # type: ignore[attr-defined]
            grads = core.means(grads, variables, None, rate)
            core.arrived = [part for mean in grads for part in _tensors_of(mean)]
        return list(super()._clip_gradients(grads))  # type: ignore[misc]

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        # Does not use the means, and so need not wait for them: ranks could compare variables of which some have
        # decayed already.
        with tf.control_dependencies(self._gradcomp.arrived):
            super()._apply_weight_decay(variables)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        """Copies and pickles are plain optimizers of the wrapped class: an exchange cannot be copied."""
        plain: Any = super().__reduce__()
        return self.__class__._unpickle_model, plain[1]  # type: ignore[attr-defined]

    def compression_state(self) -> dict[str, Any]:
        """This rank's residuals by layer name, step, plan, bucket order: copies, as arrays, numbers and strings.

        Local; StateError before the optimizer is built.
        """
        return to_plain(self._gradcomp.keeper.snapshot())

    def load_compression_state(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`compression_state` gave on this rank of as many; all ranks must, from one moment.

        Local. StateError, with nothing changed, if anything does not fit (the error lists it all).
        """
        self._gradcomp.keeper.restore(from_plain(state))


def core_of(optimizer: Any) -> Core | None:
    """What :func:`DistributedOptimizer` added to an optimizer; None for a plain one."""
    core = getattr(optimizer, "_gradcomp", None)
    return core if isinstance(core, Core) else None


def adopt(optimizer: Any, core: Core) -> None:
    """Turn the optimizer into a distributed one, in place: who holds it goes on holding it.

    Its ``__class__`` stays the wrapped class, by which Keras saves and copies it: exactly the plain optimizer. Only
    ``type()`` knows better.
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


def turn_inside_out(outer: Any) -> None:
    """A ``LossScaleOptimizer`` around a distributed optimizer becomes the one that exchanges."""
    core = core_of(outer.inner_optimizer)
    assert core is not None, "there is a distributed optimizer in it"
    core.owner = outer
    adopt(outer, core)


def _check_optimizer(optimizer: Any) -> None:
    backend = keras.backend.backend()
    if backend == "torch":
        raise ConfigError(
            "Keras runs on torch, where its parameters are torch's: wrap a torch.optim.Optimizer over "
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
        raise StateError("this optimizer is already a DistributedOptimizer")
    hooks = ("_clip_gradients", "_backend_apply_gradients", "_check_variables_are_known", "_var_key")
    missing = [name for name in hooks if not callable(getattr(optimizer, name, None))]
    if missing:
        raise ConfigError(f"Keras {keras.__version__} has no {missing[0]}: this gradcomp does not know it")
    keras_model.refuse_strategy(getattr(optimizer, "_distribution_strategy", None))


def _accumulate(optimizer: Any, passes: int) -> None:
    """Let Keras accumulate; ConfigError where it accumulates otherwise, or has no room for it."""
    if passes == 1:
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if inner.gradient_accumulation_steps not in (None, passes):
        raise ConfigError(
            f"backward_passes_per_step={passes}, and the optimizer has gradient_accumulation_steps="
            f"{inner.gradient_accumulation_steps}: give one of them"
        )
    if inner.built and inner.gradient_accumulation_steps is None:
        raise ConfigError(
            "the optimizer is built and has no room to accumulate: set backward_passes_per_step before it is built, "
            "or give it gradient_accumulation_steps when it is made"
        )
    inner.gradient_accumulation_steps = passes


def _tensors_of(gradient: Any) -> list[Any]:
    """The parts of a gradient."""
    if gradient is None:
        return []
    return [gradient.values] if isinstance(gradient, tf.IndexedSlices) else [gradient]


def _times(gradient: Any, factor: int) -> Any:
    """What Keras accumulates is the mean over passes; the sum is meant."""
    if gradient is None or factor == 1:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
