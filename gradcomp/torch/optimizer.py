"""``DistributedOptimizer``: the wrapped optimizer, on means over ranks."""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch

from gradcomp.compress import Compression, Compressor, Policy, as_policy
from gradcomp.control import Controller
from gradcomp.core.errors import ConfigError, GradcompError, StateError
from gradcomp.engine import Exchanger
from gradcomp.engine.background import in_background
from gradcomp.job import runtime
from gradcomp.job.keeper import Keeper
from gradcomp.job.network import Ranks
from gradcomp.job.process_sets import Members, members
from gradcomp.job.reduce_op import Average, ReduceOp
from gradcomp.job.report import Readers
from gradcomp.job.serving import refuse_servers, serving
from gradcomp.job.start import Proposal, check_arguments, say_what_is_bypassed, start, validate_together
from gradcomp.job.switching import set_compression
from gradcomp.kernels.devices import HOST, Device
from gradcomp.torch.devices import device_of
from gradcomp.torch.exchange import Finish, GradientExchange, OnSkip, Timing
from gradcomp.torch.layers import Named, name_parameters, spec
from gradcomp.torch.loss_scale import LossScale, Scaler
from gradcomp.torch.plain import load_state, state_of
from gradcomp.torch.serving import Serving
from gradcomp.torch.soon import number_of
from gradcomp.torch.start import digests_behind, digests_of, propose

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: NamedParameters | None = None,
    compression: Policy | Compressor | str = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    *,
    finish: Finish = "backward",
    grad_scaler: Scaler = None,
    process_set: Members = None,
    reduction: str | None = None,
    controller: Controller | str | None = None,
    on_skip: OnSkip = "raise",
) -> Optimizer:
    """Make ``optimizer`` step on gradients averaged over ranks; returns the same object, still of its class.

    g_mean = (1/N) sum over ranks of g_i, each layer compressed as ``compression`` says. Gradients are exchanged while
    backward runs; when it returns from the last of ``backward_passes_per_step`` passes, ``.grad`` is the mean, so
    clipping and unscaling work as usual. ``step()`` accepts the exchange, ``zero_grad()`` without it forgets it.

    Args:
        optimizer: any ``torch.optim.Optimizer``; changed in place.
        named_parameters: as ``model.named_parameters()``; without it, names are positions and patterns cannot match.
        compression: a compressor, its string form, or a :class:`gradcomp.Policy` of them by layer; ``"auto"`` takes the
            least that hides the communication on this network, see :class:`gradcomp.control.auto.Auto`.
        backward_passes_per_step: gradients are summed over so many passes before they are exchanged.
        op: ``Average`` or ``Sum`` over ranks.
        gradient_predivide_factor: gradients are divided by it before the exchange, the mean multiplied after.
        sparse_as_dense: exchange sparse gradients as dense ones; else their rows are gathered, uncompressed.
        finish: ``"backward"``, or ``"step"`` for several backward passes over disjoint parameters.
        grad_scaler: the GradScaler in use, so that residuals are kept in unscaled units. Without it, the only enabled
            one that exists when state begins is taken, and several are an error; False: the loss is not scaled.
        process_set: the ranks to average over, if not all: a :class:`ProcessSet`, a group of torch.distributed, or a
            dimension of a DeviceMesh. Only they call this.
        reduction: how codes are added over ranks, if not as ``init()`` or GRADCOMP_REDUCTION said: ``"sra"``,
            ``"ring"``, ``"tree"``, ``"all_to_all"``, ``"gather"``, ``"parameter_server"``, ``"hierarchical"`` or
            ``"auto"``. With ``"parameter_server:dedicated=true"`` rank 0 only serves: it calls ``serve()``.
        controller: changes the levels of layers while training runs, such as
            ``gradcomp.LGreCo(every_steps=500)``, or its string form.
        on_skip: what follows when a rank does not step on means that others step on, as after
            ``except OutOfMemoryError: opt.zero_grad(); continue``. ``"raise"``: a StateError on all ranks in the next
            exchange. ``"agree"``: all ranks vote before each step, and skip it if one of them gives up.

    Collective. Wire: see the compressor; uncompressed, 2 d (N-1)/N bytes per rank; with ``on_skip="agree"`` one number
    more, in a round trip of its own before each step (``statistics().vote_seconds``). State: residuals where the
    compressor keeps them, 8 bytes an element; :func:`gradcomp.torch.save` saves them.
    Raises ConfigError for bad arguments, PlanMismatchError on every rank if the ranks differ, StateError before
    ``init()``. Horovod's meaning of the arguments; differs in ``finish="backward"``.
    """
    state = runtime.current()
    arguments = Arguments(
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        sparse_as_dense,
        finish,
        grad_scaler,
        reduction,
        controller,
        on_skip,
    )
    core = _build(state, members(process_set), optimizer, named_parameters, arguments)
    _adopt(optimizer, core)
    return optimizer


class Arguments:
    """The arguments of :func:`DistributedOptimizer`, validated."""

    def __init__(
        self,
        compression: Policy | Compressor | str,
        passes: int,
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        finish: Finish,
        grad_scaler: Scaler,
        reduction: str | None,
        controller: Controller | str | None,
        on_skip: OnSkip,
    ) -> None:
        self._on_skip = on_skip
        self._compression = compression
        self._passes = passes
        self._finish = finish
        self.op = op
        self.predivide = predivide
        self.sparse_as_dense = sparse_as_dense
        self.loss_scale = LossScale(grad_scaler)
        self.reduction = reduction
        self.controller = controller

    def take(self, policy: Policy) -> None:
        """From now on the compression is this one, and no controller changes it."""
        self._compression, self.controller = policy, None

    def check(self) -> tuple[Policy, Timing]:
        """Raise ConfigError for what cannot work."""
        check_arguments(self.op, self.predivide, self.reduction)
        self.loss_scale.check()
        return as_policy(self._compression), Timing(self._passes, self._finish, self._on_skip)


class Core:
    """What a distributed optimizer has beside the wrapped one."""

    def __init__(
        self,
        ranks: Ranks,
        arguments: Arguments,
        named: Named,
        frozen: Named,
        exchange: GradientExchange,
        keeper: Keeper,
    ) -> None:
        self.ranks = ranks
        self.arguments = arguments
        self.named = named
        self.frozen = frozen
        self.exchange = exchange
        self.keeper = keeper
        self.skip_synchronize = False


def _build(
    state: runtime.Runtime,
    ranks: Ranks,
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None,
    arguments: Arguments,
    *,
    before: Core | None = None,
) -> Core:
    """Validate on every rank, compare, and start; ``before``: of an optimizer that is a distributed one."""

    def validate() -> tuple[Timing, Named, Named, Proposal, Device]:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, Distributed) and before is None:
            raise StateError("this optimizer is already a DistributedOptimizer")
        policy, timing = arguments.check()
        if serving(reduction, len(ranks)) and timing.on_skip == "agree":
            refuse_servers(reduction, len(ranks), 'on_skip="agree", in which all ranks vote,')
        named, frozen = name_parameters(optimizer, named_parameters)
        proposal = propose(policy, named, 0 if before is None else before.keeper.step, arguments.controller)
        if proposal.controller is not None:
            refuse_servers(
                reduction, len(ranks), "a controller, which judges by gradients that servers do not have,"
            )
        # Alone, a rank exchanges nothing, wherever its gradients are.
        device = device_of(named) if len(ranks) > 1 else HOST
        return timing, named, frozen, proposal, device

    reduction = arguments.reduction or state.config.reduction
    (timing, named, frozen, proposal, device), transport = validate_together(state, ranks, validate)
    exchange = GradientExchange(
        [p for _, p in named],
        [n for n, _ in named],
        timing,
        sparse_as_dense=arguments.sparse_as_dense,
        divisor=float(len(ranks) - serving(reduction, len(ranks))) if arguments.op is Average else 1.0,
        predivide=arguments.predivide,
        loss_scale=arguments.loss_scale,
        rate=lambda: number_of(optimizer.param_groups[0].get("lr", 0.0)),
    )
    exchanger: Exchanger | None = None
    if transport is not None:
        if transport.rank == 0:
            _check_momentum(optimizer, proposal.policy)
        average = arguments.op is Average
        exchanger = start(
            state,
            ranks,
            transport,
            proposal,
            exchange.allocate,
            average=average,
            reduction=arguments.reduction,
            device=device,
            arguments={
                "backward_passes_per_step": timing.passes,
                "finish": timing.finish,
                "sparse_as_dense": arguments.sparse_as_dense,
                "gradient_predivide_factor": arguments.predivide,
                "on_skip": timing.on_skip,
            },
            digests=lambda: in_background(digests_behind(named)),
        )
        exchange.attach(exchanger)
    else:
        say_what_is_bypassed(proposal.policy)
    keeper = Keeper(
        proposal.layers,
        proposal.plan,
        state.config,
        exchanger,
        settle=lambda: _settle(exchange),
        ranks=ranks,
        unit=arguments.predivide,
        digests=partial(digests_of, named),
    )
    return Core(ranks, arguments, named, frozen, exchange, keeper)


def _settle(exchange: GradientExchange) -> None:
    """End a step that cannot be accepted any more; StateError for one that can."""
    if not exchange.attached:
        return
    if exchange.exchanger.error is not None:
        raise exchange.exchanger.error
    if exchange.has_result() and not exchange.finish().finite:
        exchange.refuse()
    if exchange._touched or exchange._result is not None or exchange.exchanger.is_open:
        raise StateError(
            "a step is open: there are gradients that neither step() nor zero_grad() has dealt with"
        )


class Distributed(Serving, Readers):
    """The methods that a distributed optimizer has beside, or instead of, those of its class."""

    _gradcomp: Core

    def _exchanger_or_none(self) -> Exchanger | None:
        exchange = self._gradcomp.exchange
        return exchange.exchanger if exchange.attached else None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on the means. Exchanges first what was not exchanged yet (a short last window, ``finish="step"``)."""
        core = self._gradcomp
        if not core.exchange.attached:
            core.keeper.before_step()
            self._opt_called = True
            return super().step(closure)  # type: ignore[misc]
        _check_frozen(core)
        core.keeper.before_step()
        if closure is not None:
            return self._step_with(closure)
        if not (core.skip_synchronize and core.exchange.has_result()):
            core.exchange.finish()
        self._opt_called = True  # for schedulers, which a step that all ranks skip does not hold up
        if not core.exchange.commit():
            return None
        return super().step()  # type: ignore[misc]

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        """Every evaluation of the closure is an exchange of its own, used by the wrapped optimizer."""
        core = self._gradcomp

        def evaluate() -> Any:
            loss = closure()
            core.exchange.finish()
            core.exchange.commit()
            return loss

        if core.exchange.timing.on_skip == "agree":
            raise StateError(
                'a step with a closure cannot be skipped once it has begun: on_skip="agree" needs step() alone'
            )
        self._opt_called = True
        return super().step(evaluate)  # type: ignore[misc]

    # A scheduler made before wrapping looks for this mark, and warns without it.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients; an exchange that ``step()`` did not accept is ended and forgotten."""
        self._gradcomp.exchange.drain()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def synchronize(self) -> None:
        """Make gradients the means now; free if they are."""
        if self._gradcomp.exchange.attached:
            self._gradcomp.exchange.finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Horovod's way to say that ``synchronize()`` was called before this ``step()``."""
        core = self._gradcomp
        core.skip_synchronize = True
        try:
            yield
        finally:
            core.skip_synchronize = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without exchanging them; the next backward outside exchanges the sum."""
        with self._gradcomp.exchange.suspended():
            yield

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, collectively: all ranks add the same. Residuals of the others are kept.

        ``param_group["names"]`` may name them; else their position does. ConfigError where some ranks only serve.
        """
        wrapped: Core | None = self.__dict__.get("_gradcomp")
        if wrapped is not None:
            wrapped.keeper.refuse_servers("add_param_group()")
        names = param_group.pop("names", None)
        super().add_param_group(param_group)  # type: ignore[misc]
        core: Core | None = self.__dict__.get("_gradcomp")
        if core is None:
            return  # called by the wrapped class's constructor
        group = len(self.param_groups) - 1  # type: ignore[attr-defined]
        added = self.param_groups[group]["params"]  # type: ignore[attr-defined]
        if names is None:
            names = [f"group{group}.param{i}" for i in range(len(added))]
        try:
            _rebuild(self, core, chain(core.named, core.frozen, _name_group(names, added)))
        except GradcompError:
            self.param_groups.pop()  # type: ignore[attr-defined]
            raise

    def set_compression(self, compression: Policy | Compressor | str) -> None:
        """Go over to another compression in mid-run: ``opt.set_compression("none")`` for exact gradients.

        The next step's headers tell whether all ranks called, with the same argument; the new compression applies from
        the step after it. What residuals of layers hold whose new compressor keeps none is then sent with the gradient,
        exactly and once: the sums of true and of applied means meet. Momentum of the old compression is dropped. A
        controller ends. Steps of a schedule in ``compression`` count from the start of the run.

        All ranks, between the same two steps; nothing is sent in the call. In a world of one the argument is only
        looked at. Raises ConfigError for a bad argument, for ``"auto"`` and where some ranks only serve, StateError
        while a step is open. If a rank did not call, or with another argument, the next step raises: a
        PlanMismatchError on every rank that did, on the others this or the TransportError of the abort.
        """
        core = self._gradcomp
        policy, exchanger = as_policy(compression), self._exchanger_or_none()
        set_compression(core.keeper, exchanger, [spec(name, p) for name, p in core.named], policy)
        core.arguments.take(policy)
        if exchanger is not None and exchanger.pipeline.transport.rank == 0:
            _check_momentum(self, policy)  # type: ignore[arg-type]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The wrapped optimizer's; unless compression state is loaded as well, the next step warns."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._gradcomp.keeper.state_is_due()

    def compression_state(self) -> dict[str, Any]:
        """This rank's residuals by layer name, step, plan, bucket order: copies, as tensors, numbers and strings.

        ``torch.load(weights_only=True)`` reads what ``torch.save`` makes of it. Local; StateError while a step is open.
        """
        return state_of(self._gradcomp.keeper)

    def load_compression_state(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`compression_state` gave on this rank of as many; all ranks must, from one moment.

        Local. StateError, with nothing changed, if anything does not fit (the error lists it all) or a step is open.
        """
        load_state(self._gradcomp.keeper, state)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are plain optimizers of the wrapped class: an exchange cannot be copied."""
        # copyreg's function, so that a pickle loads where gradcomp is not installed.
        return copyreg._reconstructor, (_base(type(self)), object, None), self.__getstate__()  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A plain optimizer with parameters of its own."""
        base: Any = _base(type(self))
        plain = base.__new__(base)
        memo[id(self)] = plain
        plain.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return plain


def _base(kind: type) -> type:
    """The class that was wrapped."""
    wrapped: type = kind.__bases__[1]
    return wrapped


def _adopt(optimizer: torch.optim.Optimizer, core: Core) -> None:
    """Turn the optimizer into a distributed one, in place: schedulers and users that hold it go on holding it."""
    kind = type(optimizer)
    # A scheduler made before may have put a bound ``step`` on the instance, which would bypass ours.
    optimizer.__dict__.pop("step", None)
    optimizer.__dict__["_gradcomp"] = core
    optimizer.__class__ = type(
        kind.__name__, (Distributed, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__}
    )


def _name_group(
    names: Sequence[str], parameters: Sequence[torch.nn.Parameter]
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Lazy, so that its error is met where ranks validate together."""
    if len(names) != len(parameters):
        raise ConfigError(f"{len(names)} names for {len(parameters)} parameters")
    yield from zip(names, parameters, strict=True)


def _rebuild(optimizer: Any, core: Core, named: NamedParameters) -> None:
    """New layers: a new exchanger, with the old one's state. After an error the old one is still there."""
    state = runtime.current()
    old = core.exchange
    old.drain()
    fresh = _build(state, core.ranks, optimizer, named, core.arguments, before=core)
    old.detach()
    fresh.keeper.inherit(core.keeper)
    if old.attached:
        state.exchangers.remove(old.exchanger)
        old.exchanger.close()
    optimizer.__dict__["_gradcomp"] = fresh


def _check_frozen(core: Core) -> None:
    thawed = [name for name, parameter in core.frozen if parameter.requires_grad]
    if thawed:
        raise StateError(
            f"parameters that were frozen when the optimizer was wrapped now require gradients and are not exchanged: "
            f"{', '.join(thawed[:5])}; wrap after unfreezing, or add them with add_param_group"
        )


def _check_momentum(optimizer: torch.optim.Optimizer, policy: Policy) -> None:
    """Warn if momentum would be applied twice."""
    twice = [c for c in policy.compressors if c.momentum]
    own = any(group.get("momentum") or group.get("betas") for group in optimizer.param_groups)
    if twice and own:
        runtime.logger.warning(
            "%s applies momentum before compression, and %s has momentum of its own, which acts once more on the "
            "mean: give it none",
            twice[0].to_string(),
            type(optimizer).__name__,
        )
