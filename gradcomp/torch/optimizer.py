"""``DistributedOptimizer``: the wrapped optimizer steps on gradients averaged over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from gradcomp.compress import Compression, Compressor, Policy
from gradcomp.control import Controller
from gradcomp.core.config import refuse_removed
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.core.registry import contributed
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.job import runtime
from gradcomp.job.process_sets import Members, ProcessSet, ranks_of
from gradcomp.job.reduce_op import Adasum, Average, ReduceOp, Sum
from gradcomp.job.settings import OnSkip
from gradcomp.job.start import set_compression
from gradcomp.torch.distributed_state import (
    Adopted,
    Arguments,
    NamedParameters,
    adopt,
    build,
    check_plain,
    check_rate,
    groups_of,
    rebuild,
)
from gradcomp.torch.forward_finish import ForwardExchange
from gradcomp.torch.forward_steps import ForwardSteps
from gradcomp.torch.hooks import Finish, GradientExchange
from gradcomp.torch.layers import name_parameters, refuse_thawed, specs
from gradcomp.torch.loss_scale import LossScale, Scaler
from gradcomp.torch.modules import refuse_inside_backward
from gradcomp.torch.optimizers import warn_if_it_averages
from gradcomp.torch.sensitivity import Sensitivity
from gradcomp.torch.tensors import CompressionState

_SYNCHRONIZED = (
    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(). gradcomp uses the "
    "synchronized gradients; Horovod would exchange them again, and undo what was done to them in between"
)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    compression: Policy | Compressor | str = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Members = None,
    *,
    finish: Finish = "backward",
    grad_scaler: Scaler = None,
    reduction: str | None = None,
    controller: Controller | str | None = None,
    on_skip: OnSkip = "raise",
    layers: bool = True,
    residuals: str | None = None,
    sensitivity: Sensitivity | None = None,
) -> DistributedTorchOptimizer:
    """Make ``optimizer`` step on gradients averaged over ranks; returns the same object, still of its class.

        g_mean = (1/N) sum over ranks of g_i, each layer compressed as ``compression`` says

    Gradients are exchanged while backward runs. When it returns from the last of ``backward_passes_per_step`` passes,
    ``.grad`` is the mean, so clipping and unscaling work as usual. ``step()`` accepts the exchange; ``zero_grad()``
    without ``step()`` discards it.

    Args:
        optimizer: any ``torch.optim.Optimizer``; changed in place.
        named_parameters: the pairs of ``model.named_parameters()``. Without them layers are named by position, which
            patterns of a policy cannot match.
        compression: a compressor, its string form, or a :class:`gradcomp.Policy` of them by layer. ``"auto"`` chooses
            the least compression that hides the communication on this network, see
            :class:`gradcomp.control.auto.Auto`.
        backward_passes_per_step: gradients are summed over this many passes before they are exchanged.
        op: ``Average`` or ``Sum`` over ranks of the gradients, or ``Adasum`` of the steps, see
            :mod:`gradcomp.contrib.adasum_steps`: gradients stay a rank's own, and ``step()`` combines the steps of all
            ranks. Adasum needs a power of two of ranks, and ``compression`` none, fp16 or bf16; it refuses
            ``finish``, ``reduction``, ``controller``, ``on_skip``, ``layers`` and ``sensitivity``, and ignores
            ``grad_scaler``.
        gradient_predivide_factor: gradients are divided by it before the exchange, and the mean is multiplied by it
            after.
        num_groups: Horovod's older spelling of ``groups``.
        groups: how many groups of gradients, or which lists of parameters, travel together under Horovod. It is
            checked and has no effect: exchange buckets form by themselves, and the means of all gradients are applied
            together.
        sparse_as_dense: exchange sparse gradients as dense ones, which ``compression`` compresses; else their rows are
            gathered, uncompressed. Either way their mean is sparse again.
        finish: ``"backward"``, or ``"step"`` for several backward passes over disjoint parameters. ``"forward"``
            updates a parameter when its mean is there, at the latest where the next forward pass uses it; parameters
            are those of ``"backward"``, bit for bit. It needs gradients on the CPU and an optimizer of torch that
            updates every parameter by itself, and refuses closures, loss scalers, and changes of gradients behind
            ``backward()``, such as ``clip_grad_norm_``, without a ``synchronize()``. See the page of recipes.
        grad_scaler: the GradScaler in use, because residuals are kept in unscaled units. Without it, the only enabled
            one that exists when state begins is taken, and several are an error. False: the loss is not scaled.
        process_set: the ranks to average over, if not all: a :class:`ProcessSet`, a group of torch.distributed, or a
            dimension of a DeviceMesh. On other ranks, which need not call this, the optimizer exchanges nothing.
        reduction: the algorithm that adds codes over ranks, if not that of ``init()`` or GRADCOMP_REDUCTION: ``"sra"``,
            ``"ring"``, ``"tree"``, ``"all_to_all"``, ``"gather"``, ``"parameter_server"``, ``"hierarchical"`` or
            ``"auto"``.
        controller: a controller that changes the levels of layers while training runs, such as
            ``gradcomp.LGreCo(every_steps=500)``, or its string form.
        on_skip: what happens when a rank skips a step that others take, as by
            ``except OutOfMemoryError: opt.zero_grad(); continue``. ``"raise"``: a StateError on all ranks in the next
            exchange. ``"agree"``: all ranks vote before each step, and all skip it if one of them skips it.
        layers: False compresses each exchange bucket as one vector, as a library beneath the framework has to, which
            knows no layers: biases and norms too, at one level, without feedback. See :class:`gradcomp.Flat`; it takes
            a quantiser, and no policy or controller.
        residuals: removed; anything but None raises a ConfigError that says what to do instead.
        sensitivity: the training loss on a batch, for ``controller=LGreCo(metric="loss")``, which needs it.

    Collective. Wire: see the compressor; uncompressed, 2 d (N-1)/N bytes per rank; with ``on_skip="agree"`` also one
    number in a round trip of its own before each step (``statistics().vote_seconds``). State: residuals where the
    compressor keeps them, 8 bytes an element; :func:`gradcomp.torch.save` saves them.
    Raises ConfigError for bad arguments, PlanMismatchError on every rank if the ranks differ, StateError before
    ``init()``. Arguments mean what they mean in Horovod, except that ``finish="backward"`` is the default here.
    """
    refuse_removed("residuals", residuals)
    arguments = Arguments(
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        sparse_as_dense,
        process_set,
        reduction,
        controller,
        on_skip,
        layers,
        groups=groups_of(num_groups, groups),
        finish=finish,
        loss_scale=LossScale(grad_scaler),
        sensitivity=sensitivity,
    )
    # Before init() wrong arguments raise their own errors, and not the StateError about init().
    if not runtime.is_initialized():
        check_plain(optimizer)
        arguments.check()
        name_parameters(optimizer, named_parameters)
    state, ranks = runtime.current(), ranks_of(process_set)
    if state.rank not in ranks:
        others = ProcessSet(ranks)
        runtime.logger.info("this optimizer exchanges nothing: rank %d is not one of %s", state.rank, others)
        ranks = (state.rank,)
    elastic = state.network.member is not None
    if elastic and (ranks != state.everyone or op is Adasum or finish == "forward"):
        raise ConfigError(
            "an elastic job has optimizers of all ranks, with op=Average or Sum and finish='backward' or 'step'"
        )
    if elastic:  # elastic.run makes it exchange: here a rank that dies would end those that have not begun
        ranks = (state.rank,)
    if op is Adasum and len(ranks) > 1:
        if state.config.what_if:
            raise ConfigError("a what-if run fakes exchanges of gradients, and op=Adasum exchanges steps")
        contributed("begin_adasum_steps")(optimizer, named_parameters, process_set, arguments)
    else:
        exchange = build(state, ranks, optimizer, named_parameters, arguments)
        adopt(optimizer, ForwardDistributed if finish == "forward" else Distributed, exchange)
        if elastic:
            exchange.checkpoint_manager.before_training = (
                "a step outside of the function that gradcomp.torch.elastic.run calls, which makes the optimizers of "
                "its TorchState exchange: give this optimizer to the TorchState"
            )
    return cast("DistributedTorchOptimizer", optimizer)


#: Frames from the warning to the caller of ``step()``; an opaque function adds one.
_CALLER = 6


class Distributed(CompressionState, Adopted):
    """The methods that wrapping adds to an optimizer's class, or replaces in it."""

    _gradcomp: GradientExchange
    calls_own = ("step", "zero_grad")
    is_opaque: ClassVar[tuple[str, ...]] = (
        "_accepts",
        "_evaluation",
        "_take_means",
        "_drain",
        "_finish_exchange",
        "_measure_losses",
        "synchronize",
        "set_compression",
        "compression_state",
    )

    def _exchanger_or_none(self) -> Exchanger | None:
        driver = self._gradcomp.driver
        return driver.exchanger if driver.attached else None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on the means.

        It first exchanges gradients that were not exchanged yet: those of a short last window, or all with
        ``finish="step"``.
        """
        if closure is not None and self._gradcomp.driver.attached:
            closure = self._evaluation(closure)
        elif not self._accepts():
            return None
        try:
            result = super().step() if closure is None else super().step(closure)  # type: ignore[misc]
        finally:
            self._gradcomp.momenta.give_back()
        if self._gradcomp.arguments.sensitivity is not None:
            self._measure_losses()
        return result

    def _measure_losses(self) -> None:
        """Let the controller measure losses that it decides by, now that the parameters have their new values."""
        exchange = self._gradcomp
        sensitivity, driver = exchange.arguments.sensitivity, exchange.driver
        controller = driver.exchanger.pipeline.controller if driver.attached else None
        if sensitivity is not None and controller is not None:
            with driver.telling():
                ranks = controller.environment.world
                summands = ranks if exchange.arguments.op is Sum else 1
                controller.probe(partial(sensitivity.changes, exchange.named, self, summands))

    def _accepts(self) -> bool:
        """Accept the means and return True; return False if the ranks agreed to skip the step."""
        exchange = self._gradcomp
        if not exchange.driver.attached:
            exchange.driver.checkpoint_manager.before_step()
            self._opt_called = True
            return True
        self._check_step()
        return self._take_means()

    def _check_step(self) -> None:
        exchange = self._gradcomp
        refuse_thawed(
            exchange.frozen,
            "the optimizer was wrapped",
            "make a new optimizer after unfreezing and wrap that one",
        )
        exchange.check_step(self)  # type: ignore[arg-type]
        if exchange.synchronized and not exchange.skip_synchronize:
            warnings.warn(_SYNCHRONIZED, stacklevel=_CALLER)
        exchange.synchronized = False

    def _evaluation(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure whose every evaluation is an exchange of its own."""
        exchange = self._gradcomp
        self._check_step()
        if exchange.driver.agrees:
            raise StateError(
                'a step with a closure cannot be skipped once it has begun: on_skip="agree" needs step() alone'
            )

        def evaluate() -> Any:
            loss = closure()
            self._take_means()
            return loss

        return evaluate

    def _take_means(self) -> bool:
        exchange = self._gradcomp
        exchange.finish(late=True)
        self._opt_called = True  # schedulers advance, also where all ranks skip the step
        if not exchange.commit():
            return False
        exchange.momenta.withhold(self)  # type: ignore[arg-type]
        return True

    # A scheduler that was made before wrapping looks for this attribute and warns without it.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients; ends and discards an exchange that ``step()`` did not accept."""
        self._drain()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def _drain(self) -> None:
        self._gradcomp.drain()
        self._gradcomp.synchronized = False

    def _finish_exchange(self) -> None:
        """Finish the exchange before a GradScaler looks at the gradients, see :func:`means_before_unscaling`."""
        if self._gradcomp.driver.attached:
            refuse_inside_backward()
            self._gradcomp.finish()

    def synchronize(self) -> None:
        """Make gradients the means now; free if they are already."""
        if self._gradcomp.driver.attached:
            self._finish_exchange()
            self._gradcomp.synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Horovod's context manager, which tells ``step()`` that ``synchronize()`` was called before it."""
        exchange = self._gradcomp
        exchange.skip_synchronize = True
        try:
            yield
        finally:
            exchange.skip_synchronize = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum gradients over this many passes from the next exchange on.

        All ranks must call it, between two steps.
        """
        exchange = self._gradcomp
        arguments = replace(exchange.arguments, backward_passes_per_step=passes)
        arguments.check_passes()
        exchange.driver.rest()
        exchange.arguments = arguments

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without exchanging them; the next backward pass outside exchanges the sum."""
        with self._gradcomp.suspended():
            yield

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the same parameters on all ranks; residuals of the others are kept. Collective.

        ``param_group["names"]`` names them; without it, their position does.
        """
        names = param_group.pop("names", None)
        super().add_param_group(param_group)  # type: ignore[misc]
        exchange: GradientExchange | None = self.__dict__.get("_gradcomp")
        if exchange is None:
            return  # called by the wrapped class's constructor
        group = len(self.param_groups) - 1  # type: ignore[attr-defined]
        added = self.param_groups[group]["params"]  # type: ignore[attr-defined]
        if names is None:
            names = [f"group{group}.param{i}" for i in range(len(added))]
        try:
            self.__dict__["_gradcomp"] = rebuild(self, exchange, names, added)
        except Exception:
            self.param_groups.pop()  # type: ignore[attr-defined]
            raise

    def set_compression(self, compression: Policy | Compressor | str) -> None:
        """Change the compression during training: ``opt.set_compression("none")`` for exact gradients.

        All ranks must call it, between the same two steps; the call sends nothing. The headers of the next
        step show whether all ranks called it with the same argument, and the new compression applies from the step
        after that one. Layers whose new compressor keeps no residual send the rest of theirs with the
        gradient, exactly and once, so that the sums of true and of applied means agree. Momentum of the old
        compression is dropped, and a controller ends. Steps of a schedule in ``compression`` count from the
        start of the run.

        In a world of one the argument is only checked. Raises ConfigError for a bad argument and for ``"auto"``,
        StateError while a step is open. If a rank did not call, or with
        another argument, the next step raises: a PlanMismatchError on every rank that called, and on the
        others this or the TransportError of the abort.
        """
        exchange = self._gradcomp
        policy, exchanger = exchange.arguments.policy_of(compression), self._exchanger_or_none()
        check_rate(self, policy)  # type: ignore[arg-type]
        set_compression(exchange.checkpoint_manager, exchanger, specs(exchange.named), policy)
        exchange.arguments = replace(
            exchange.arguments, compression=compression, controller=None, sensitivity=None
        )
        if exchanger is not None and exchanger.pipeline.transport.rank == 0:
            warn_if_it_averages(self, policy)  # type: ignore[arg-type]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state; the next step warns unless compression state is loaded as well."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._gradcomp.checkpoint_manager.state_is_due()


class ForwardDistributed(ForwardSteps, Distributed):
    """The methods of an optimizer with ``finish="forward"``."""

    _gradcomp: ForwardExchange
    is_opaque = (*ForwardSteps.is_opaque, *Distributed.is_opaque)


if TYPE_CHECKING:

    class DistributedTorchOptimizer(Distributed, torch.optim.Optimizer, Any):  # type: ignore[misc]
        """Tells type checkers that a wrapped optimizer has these methods in addition to those of its class.

        ``Any`` allows the methods of the wrapped class, and assignment to a variable of that class.
        """
