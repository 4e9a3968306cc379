"""The state that ``DistributedOptimizer`` adds to an optimizer, its arguments and its construction."""

from __future__ import annotations

import copy
import copyreg
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, ClassVar

import torch

from gradcomp.compress import Policy
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.job import joining, runtime, settings
from gradcomp.job.launch import Ranks
from gradcomp.job.reduce_op import Adasum, Average
from gradcomp.job.start import Proposal, propose, say_what_is_bypassed, start, validate_together
from gradcomp.job.state import Runtime
from gradcomp.kernels.devices import HOST, Device
from gradcomp.torch.devices import device_of
from gradcomp.torch.forward_finish import ForwardExchange, refuse
from gradcomp.torch.hooks import Finish, GradientExchange
from gradcomp.torch.layers import Named, forget, name_parameters, specs
from gradcomp.torch.loss_scale import LossScale
from gradcomp.torch.modules import opaque
from gradcomp.torch.optimizers import warn_if_it_averages
from gradcomp.torch.sensitivity import Sensitivity

_NOT_FOR_ADASUM = ("finish", "reduction", "controller", "on_skip", "layers", "sensitivity")
NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


class Adopted:
    """The mixin that precedes an optimizer's class in the MRO; ``_gradcomp`` holds the state that wrapping adds.

    ``is_opaque`` lists methods that torch.compile must not trace. torch.compile does not trace those in
    ``calls_own`` either, but may trace the method of the wrapped class that they call.
    """

    _gradcomp: Any
    is_opaque: ClassVar[tuple[str, ...]] = ()
    calls_own: ClassVar[tuple[str, ...]] = ()

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Horovod's attribute: the name of each parameter, or its position if the user gave no names."""
        names: dict[torch.Tensor, str] = self._gradcomp.parameter_names
        return names

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain optimizer of the wrapped class, because an exchange cannot be copied."""
        # The pickle names a function of copyreg, so that it loads where gradcomp is not installed.
        return copyreg._reconstructor, (type(self).__bases__[1], object, None), self.__getstate__()  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a plain optimizer with copies of the parameters."""
        base: Any = type(self).__bases__[1]
        plain = base.__new__(base)
        memo[id(self)] = plain
        plain.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return plain


def check_plain(optimizer: Any) -> None:
    """Raise ConfigError if this is not an optimizer, StateError if it is wrapped already."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if hasattr(optimizer, "_gradcomp"):
        raise StateError("this optimizer is already a DistributedOptimizer; wrap an optimizer once only")


def adopt(optimizer: torch.optim.Optimizer, mixin: type[Adopted], core: Any) -> None:
    """Change the optimizer's class to one that derives from ``mixin`` and the present class.

    The object stays the same, so schedulers and users that hold a reference to it need no change.
    """
    kind = type(optimizer)
    # A scheduler that was made before may have set a bound ``step`` on the instance, which would bypass the mixin's.
    optimizer.__dict__.pop("step", None)
    optimizer.__dict__["_gradcomp"] = core
    hidden = {name: opaque(getattr(mixin, name), calls_own=True) for name in mixin.calls_own}
    hidden |= {name: opaque(getattr(mixin, name)) for name in mixin.is_opaque}
    optimizer.__class__ = type(
        kind.__name__, (mixin, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__, **hidden}
    )


def groups_of(num_groups: Any, groups: Any) -> Any:
    """Return ``groups``, or if it is None ``num_groups``, its older spelling, with a warning as Horovod gives it."""
    if isinstance(num_groups, int) and num_groups == 0:
        return groups
    warnings.warn(
        "num_groups is the older spelling of groups; give groups=", DeprecationWarning, stacklevel=3
    )
    return num_groups if groups is None else groups


def check_groups(groups: Any) -> None:
    """Raise ConfigError unless this is None, a number from 0, or lists of tensors without repetitions.

    The argument has no effect: layers are laid out in exchange buckets of ``slice_elements`` values in the
    order in which their gradients come, and the means of all of them are applied together.
    """
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0):
        return
    if not isinstance(groups, list) or not all(isinstance(group, list | tuple) for group in groups):
        raise ConfigError(
            f"groups must be a non-negative integer or a list of lists of tensors, got {groups!r:.80}"
        )
    members = [member for group in groups for member in group]
    for member in members:
        if not isinstance(member, torch.Tensor):
            raise ConfigError(f"groups must consist of tensors, got {type(member).__name__}")
    if len({id(member) for member in members}) < len(members):
        raise ConfigError("a parameter can only appear once in groups")


@dataclass(frozen=True, eq=False)
class Arguments(settings.Arguments):
    """The arguments of :func:`DistributedOptimizer`."""

    compared = (*settings.Arguments.compared, "backward_passes_per_step", "finish", "on_skip")

    groups: Any = None
    finish: Finish = "backward"
    loss_scale: LossScale = field(default_factory=lambda: LossScale(None))

    def check(self) -> Policy:
        check_groups(self.groups)
        self.loss_scale.check()
        if self.finish not in ("backward", "step", "forward"):
            raise ConfigError(f'finish must be "backward", "step" or "forward", got {self.finish!r}')
        if self.sensitivity is not None and not isinstance(self.sensitivity, Sensitivity):
            raise ConfigError(
                f"sensitivity must be a gradcomp.torch.Sensitivity(model, loss), got {self.sensitivity!r:.80}"
            )
        # Adasum comes here in a world of one only, where the Adasum of the step is the step itself.
        return super(Arguments, replace(self, op=Average) if self.op is Adasum else self).check()

    def check_adasum(self) -> None:
        """Raise ConfigError for arguments that cannot work, or have no meaning, with ``op=Adasum``."""
        check_groups(self.groups)
        self.check_passes()
        if self.gradient_predivide_factor != 1.0:
            raise ConfigError("gradient_predivide_factor needs op=Average")
        for each in fields(self):
            if each.name in _NOT_FOR_ADASUM and getattr(self, each.name) != each.default:
                raise ConfigError(
                    f"{each.name}= has no meaning with op=Adasum: ranks exchange steps, not gradients"
                )


def build(
    state: Runtime,
    ranks: Ranks,
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None,
    arguments: Arguments,
    *,
    before: GradientExchange | None = None,
    step: int = 0,
) -> GradientExchange:
    """Validate the arguments, compare them over ranks, and start the exchange. Collective.

    ``before`` is the exchange of the same optimizer when it is wrapped already and gets more parameters, or other
    ranks. ``step`` is that of the plan.
    """

    def validate() -> tuple[Named, Named, Proposal, Device]:
        if before is None:
            check_plain(optimizer)
        policy = arguments.check()
        check_rate(optimizer, policy)
        named, frozen = name_parameters(optimizer, named_parameters)
        proposal = propose(
            policy,
            specs(named),
            step,
            arguments.controller,
            state.what_if(ranks),
            measures_losses=arguments.sensitivity is not None,
        )
        if arguments.sensitivity is not None:
            arguments.sensitivity.check(named, optimizer)
        # In a world of one nothing is exchanged, so gradients may be on any device.
        device = device_of(named) if len(ranks) > 1 else HOST
        if arguments.finish == "forward":
            refuse(arguments, optimizer, named, device)
        return named, frozen, proposal, device

    (named, frozen, proposal, device), transport = validate_together(state, ranks, validate)
    kind = ForwardExchange if arguments.finish == "forward" else GradientExchange
    exchange = kind(named, frozen, arguments, optimizer)
    if transport is None:
        say_what_is_bypassed(proposal.policy)
    elif transport.rank == 0:
        warn_if_it_averages(optimizer, proposal.policy)
        if named_parameters is None and proposal.policy.compresses:
            runtime.logger.warning(
                "named_parameters was not given, so layers are named by position (%s, ...): patterns of a policy "
                "cannot match them, and a checkpoint fits only while their order stays. Pass "
                "named_parameters=model.named_parameters()",
                named[0][0],
            )
    driver = start(
        state,
        ranks,
        transport,
        proposal,
        exchange,
        [tuple(parameter.shape) for _, parameter in named],
        arguments,
        device=device,
        uses=exchange.uses if isinstance(exchange, ForwardExchange) else None,
    )
    exchange.attach(driver, before)
    joining.register(exchange)
    return exchange


def rebuild(
    optimizer: Any, old: GradientExchange, names: Sequence[str], added: Sequence[torch.nn.Parameter]
) -> GradientExchange:
    """Make an exchange for the old and the added parameters, with the old one's residuals and step.

    Collective. After an error the old exchange is still in use.
    """
    state = runtime.current()
    old.driver.check()
    old.drain()
    named = chain(old.named, old.frozen, _name_group(names, added))
    step = old.checkpoint_manager.step
    fresh = build(state, old.checkpoint_manager.ranks, optimizer, named, old.arguments, before=old, step=step)
    old.detach()
    fresh.checkpoint_manager.inherit(old.checkpoint_manager)
    if old.driver.attached:
        state.close(old.exchanger)
    return fresh


def reattach(optimizer: Any) -> None:
    """Exchange among all ranks of the generation from now on, without the old compression state. Collective."""
    state, old = runtime.current(), optimizer._gradcomp
    old.detach()
    forget(old)
    for _, parameter in old.named:
        parameter.grad = None
    old.arguments.loss_scale.begin_again()
    named = chain(old.named, old.frozen)
    optimizer.__dict__["_gradcomp"] = build(
        state, state.everyone, optimizer, named, old.arguments, before=old
    )


def _name_group(
    names: Sequence[str], parameters: Sequence[torch.nn.Parameter]
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Pair names with parameters lazily, so that the error is raised where all ranks validate together."""
    if len(names) != len(parameters):
        raise ConfigError(f"{len(names)} names for {len(parameters)} parameters")
    yield from zip(names, parameters, strict=True)


def check_rate(optimizer: torch.optim.Optimizer, policy: Policy) -> None:
    """Raise ConfigError if a compressor follows the learning rate and the optimizer has none."""
    following = [c.to_string() for c in policy.compressors if c.traits.follows_rate]
    if following and optimizer.param_groups[0].get("lr") is None:
        raise ConfigError(
            f"{following[0]} follows the learning rate, and {type(optimizer).__name__} has none in its param_groups: "
            "leave follow_rate away"
        )
