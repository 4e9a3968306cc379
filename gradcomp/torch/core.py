"""The state that :func:`DistributedOptimizer` adds to an optimizer, and its construction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from gradcomp.compress import Policy
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.job import joining, runtime
from gradcomp.job.momentum import warn_of_averages
from gradcomp.job.network import Ranks
from gradcomp.job.start import Proposal, Setup, say_what_is_bypassed, start, validate_together
from gradcomp.job.state import Runtime
from gradcomp.job.step_driver import StepDriver
from gradcomp.kernels.devices import HOST, Device
from gradcomp.torch.adoption import check_plain
from gradcomp.torch.arguments import Arguments
from gradcomp.torch.devices import device_of
from gradcomp.torch.exchange import GradientExchange
from gradcomp.torch.fingerprint import scalars_of
from gradcomp.torch.layers import Named, name_parameters
from gradcomp.torch.momentum import Momenta, averages
from gradcomp.torch.soon import number_of
from gradcomp.torch.start import propose
from gradcomp.torch.timing import Timing

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


class Core:
    """The state that wrapping adds to an optimizer: its exchange, driver, arguments and parameter names."""

    def __init__(
        self, ranks: Ranks, arguments: Arguments, named: Named, frozen: Named, exchange: GradientExchange
    ) -> None:
        self.ranks = ranks
        self.arguments = arguments
        self.named = named
        self.frozen = frozen
        self.exchange = exchange
        self.driver: StepDriver = exchange.driver
        #: Saves and loads the compression state.
        self.checkpoint_manager = self.driver.checkpoint_manager
        self.skip_synchronize = False
        #: True if the program has called ``synchronize()`` since the last step.
        self.synchronized = False

    @property
    def parameter_names(self) -> dict[torch.Tensor, str]:
        """The names of all parameters, including frozen ones."""
        return {parameter: name for name, parameter in (*self.named, *self.frozen)}

    def check_frozen(self) -> None:
        """Raise StateError if a parameter that was frozen at wrapping requires gradients now."""
        thawed = [name for name, parameter in self.frozen if parameter.requires_grad]
        if thawed:
            raise StateError(
                f"parameters that were frozen when the optimizer was wrapped now require gradients and are not "
                f"exchanged: {', '.join(thawed[:5])}; wrap after unfreezing, or add them with add_param_group()"
            )


def build(
    state: Runtime,
    ranks: Ranks,
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None,
    arguments: Arguments,
    *,
    before: Core | None = None,
) -> Core:
    """Validate the arguments, compare them over ranks, and start the exchange. Collective.

    ``before`` is the state of the same optimizer when it is wrapped already and gets more parameters.
    """

    def validate() -> tuple[Timing, Named, Named, Proposal, Device]:
        if before is None:
            check_plain(optimizer)
        policy, timing = arguments.check()
        check_rate(optimizer, policy)
        named, frozen = name_parameters(optimizer, named_parameters)
        proposal = propose(
            policy, named, 0 if before is None else before.checkpoint_manager.step, arguments.controller
        )
        # In a world of one nothing is exchanged, so gradients may be on any device.
        device = device_of(named) if len(ranks) > 1 else HOST
        return timing, named, frozen, proposal, device

    (timing, named, frozen, proposal, device), transport = validate_together(state, ranks, validate)
    exchange = GradientExchange(
        named,
        timing,
        sparse_as_dense=arguments.sparse_as_dense,
        predivide=arguments.predivide,
        loss_scale=arguments.loss_scale,
        # Adafactor with relative steps computes its own rate, which is not known here: it counts as 0.
        learning_rate=lambda: number_of(0.0 if (rate := _rate(optimizer)) is None else rate),
        scalars=lambda: scalars_of([optimizer]),
        momenta=Momenta(named, lambda: [optimizer]),
    )
    if transport is None:
        say_what_is_bypassed(proposal.policy)
    elif transport.rank == 0:
        check_averages(optimizer, proposal.policy)
        if named_parameters is None and proposal.policy.compresses:
            _warn_of_positions(named)
    driver = start(
        state,
        ranks,
        transport,
        proposal,
        exchange,
        [tuple(parameter.shape) for _, parameter in named],
        Setup(
            op=arguments.op,
            predivide=arguments.predivide,
            agrees=timing.on_skip == "agree",
            reduction=arguments.reduction,
            device=device,
            arguments={
                "backward_passes_per_step": timing.passes,
                "finish": timing.finish,
                "sparse_as_dense": arguments.sparse_as_dense,
                "gradient_predivide_factor": arguments.predivide,
                "on_skip": timing.on_skip,
            },
        ),
    )
    exchange.attach(driver, None if before is None else before.exchange)
    joining.register(exchange)
    return Core(ranks, arguments, named, frozen, exchange)


def rebuild(optimizer: Any, core: Core, names: Sequence[str], added: Sequence[torch.nn.Parameter]) -> Core:
    """Make an exchange for the old and the added parameters, with the old one's residuals and step.

    Collective. After an error the old exchange is still in use.
    """
    state = runtime.current()
    old = core.exchange
    core.driver.check()
    old.drain()
    named = chain(core.named, core.frozen, _name_group(names, added))
    fresh = build(state, core.ranks, optimizer, named, core.arguments, before=core)
    old.detach()
    fresh.checkpoint_manager.inherit(core.checkpoint_manager)
    if core.driver.attached:
        state.close(old.exchanger)
    return fresh


def _name_group(
    names: Sequence[str], parameters: Sequence[torch.nn.Parameter]
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Pair names with parameters lazily, so that the error is raised where all ranks validate together."""
    if len(names) != len(parameters):
        raise ConfigError(f"{len(names)} names for {len(parameters)} parameters")
    yield from zip(names, parameters, strict=True)


def _warn_of_positions(named: Named) -> None:
    runtime.logger.warning(
        "named_parameters was not given, so layers are named by position (%s, ...): patterns of a policy cannot match "
        "them, and a checkpoint fits only while their order stays. Pass named_parameters=model.named_parameters()",
        named[0][0],
    )


def _rate(optimizer: torch.optim.Optimizer) -> float | torch.Tensor | None:
    rate: float | torch.Tensor | None = optimizer.param_groups[0].get("lr")
    return rate


def check_rate(optimizer: torch.optim.Optimizer, policy: Policy) -> None:
    """Raise ConfigError if a compressor follows the learning rate and the optimizer has none."""
    following = [c.to_string() for c in policy.compressors if c.traits.follows_rate]
    if following and _rate(optimizer) is None:
        raise ConfigError(
            f"{following[0]} follows the learning rate, and {type(optimizer).__name__} has none in its param_groups: "
            "leave follow_rate away"
        )


def check_averages(optimizer: torch.optim.Optimizer, policy: Policy) -> None:
    """Warn if the compressor accumulates gradients and the optimizer averages them once more."""
    if averages(optimizer):
        warn_of_averages(policy, type(optimizer).__name__)
