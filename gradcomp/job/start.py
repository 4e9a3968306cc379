"""Validates the arguments of wrappers on all ranks together, starts the exchange, and changes its compression."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gradcomp.compress import Fake, Policy
from gradcomp.compress.policy import Automatic
from gradcomp.control import Controller, WhatIf, controller_from_string
from gradcomp.control.auto import Auto
from gradcomp.core.config import Config
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import Filter, LayerSpec
from gradcomp.core.plan import Plan
from gradcomp.core.what_if import parse as ratios_of
from gradcomp.exchange.agreement import agree
from gradcomp.exchange.checkpoint_manager import CheckpointManager
from gradcomp.exchange.driver import Adapter, StepDriver
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.layout import compressors_of
from gradcomp.exchange.preemption import Preemption
from gradcomp.exchange.settings import Settings
from gradcomp.job import preemption
from gradcomp.job.launch import Ranks
from gradcomp.job.membership import meet
from gradcomp.job.network import make_transport
from gradcomp.job.reduce_op import Average
from gradcomp.job.report import Reporter, announce_compression
from gradcomp.job.settings import Arguments
from gradcomp.job.state import Runtime
from gradcomp.kernels.devices import HOST, Device
from gradcomp.transport.base import Transport

logger = logging.getLogger("gradcomp")
T = TypeVar("T")


def refusal(config: Config, policy: Policy, device: Device = HOST, step: int = 0) -> ConfigError | None:
    """Return why a compressor cannot learn what it has to, or None if it can or none of them learns.

    ``device`` holds the gradients. The compressor would begin in ``step``.
    """
    learning = [c for c in policy.compressors if c.traits.learns]
    if not learning:
        return None
    why = ""
    if device.driver is not None:
        why = "it works on gradients in the host's memory, not on a GPU"
    elif step and any(c.at_step(step).traits.learns for c in learning):
        why = f"its steps are counted from step 0, and this is step {step}: wrap it in gc.Warmup(..., steps={step})"
    elif config.deterministic and any(c.traits.by_times for c in learning):
        why = (
            "deterministic=True: by default its train_share depends on measured times: set train_share to 1/m"
        )
    return ConfigError(f"{learning[0].to_string()}: {why}") if why else None


def validate_together(
    state: Runtime,
    ranks: Ranks,
    validate: Callable[[], T],
    purpose: str = "build its optimizer",
    lacking: str = "has not built its optimizer",
) -> tuple[T, Transport | None]:
    """Return what ``validate`` returns, and a new communicator, which is None in a world of one.

    Collective over ``ranks``. A rank that raises tells the others, who raise PlanMismatchError from :func:`start`.
    """
    transport = None
    if len(ranks) > 1:
        meet(state, ranks, purpose, lacking)
        transport = make_transport(state, ranks)
    try:
        return validate(), transport
    except Exception as error:
        if transport is not None:
            wait_for = state.watchdog.patient(state.config, "the other ranks to check their arguments")
            agree(transport, None, error, wait_for=wait_for)
        raise


@dataclass(frozen=True)
class Proposal:
    """Holds the layers that a rank will exchange, with policy, plan and controller."""

    policy: Policy
    layers: list[LayerSpec]
    plan: Plan
    controller: Controller | None = None

    @property
    def chooses_by_times(self) -> bool:
        """Return whether a controller chooses, by measured times, whether anything is compressed."""
        return isinstance(self.controller, Auto | WhatIf)


#: What a what-if run exchanges: all layers by fake compression, also those that a policy would exclude. Its exchange
#: buckets have the size of those for a ratio of 8, as that of 4 bits.
_FAKE = Policy(Fake(8), filter=Filter(exclude_kinds=(), min_elements=0, min_dimensions=0))


def propose(
    policy: Policy,
    layers: list[LayerSpec],
    step: int = 0,
    controller: Controller | str | None = None,
    what_if: str = "",
    *,
    measures_losses: bool = False,
) -> Proposal:
    """Return the plan for these layers at a step; ConfigError for what cannot be exchanged.

    ``what_if`` has the ratios of a what-if run, which replaces policy and controller once they were checked.
    ``measures_losses`` is true if the frontend can measure the training loss.
    """
    if what_if:
        propose(policy, layers, step, controller, measures_losses=measures_losses)
        policy, controller = _FAKE, WhatIf(ratios_of(what_if).gradients)
    if isinstance(policy, Automatic):
        if controller is not None:
            raise ConfigError(
                'compression="auto" is a controller itself: for other settings give controller=Auto(...), and in '
                "compression= the most that it may compress"
            )
        controller = Auto()
    if isinstance(controller, str):
        controller = controller_from_string(controller)
    if controller is not None and not isinstance(controller, Controller):
        raise ConfigError(
            f"controller must be a controller such as gc.LGreCo(every_steps=500), got {controller!r}"
        )
    if controller is not None and any(c.traits.learns for c in policy.compressors):
        raise ConfigError(f"{policy.title} learns what it sends: no controller can choose its levels")
    if controller is not None and controller.needs_losses and not measures_losses:
        raise ConfigError(
            f"{controller.name} measures the training loss, which it does not know: give "
            "sensitivity=Sensitivity(model, loss), of gradcomp.torch or gradcomp.tf, to the DistributedOptimizer or "
            "tape. Communication hooks cannot measure it: choose another metric there"
        )
    if measures_losses and not what_if and (controller is None or not controller.needs_losses):
        raise ConfigError('sensitivity= is for controller=LGreCo(metric="loss"): give that, or leave it away')
    if not layers:
        raise ConfigError("there is no trainable parameter")
    return Proposal(policy, layers, policy.plan(layers, step=step), controller)


def start(
    state: Runtime,
    ranks: Ranks,
    transport: Transport | None,
    proposal: Proposal,
    adapter: Adapter,
    shapes: Sequence[tuple[int, ...]],
    arguments: Arguments,
    *,
    order_step: int = 0,
    device: Device = HOST,
    uses: Callable[[], Sequence[int]] | None = None,
) -> StepDriver:
    """Make an exchanger on the runtime's engine, log what it compresses, and return the driver of its steps.

    Collective: see :class:`Exchanger`. Without a ``transport``, in a world of one, there is no exchanger. ``shapes``
    are those of the gradients in the framework. For ``uses`` see :class:`gradcomp.exchange.priorities.Priorities`.
    """
    config = state.config
    if arguments.reduction is not None:
        config = replace(config, reduction=arguments.reduction)
    policy, average = proposal.policy, arguments.op is Average
    compared: dict[str, Any] = {name: getattr(arguments, name) for name in arguments.compared}
    if changing := [c.to_string() for c in policy.compressors if c.changes]:
        compared["schedule"] = changing  # later plans differ from the first
    exchanger = None
    if transport is not None:
        exchanger = Exchanger(
            state.engine,
            proposal.layers,
            proposal.plan,
            transport,
            state.watchdog,
            config,
            adapter.allocate,
            Settings(
                name=state.name(ranks),
                average=average,
                listener=adapter.listener,
                order_step=order_step,
                uses=uses,
                schedule=policy.scheduled(proposal.layers),
                topology=state.topology.among(ranks),
                arguments=compared,
                controlled_by=proposal.controller,
                adjustable=() if proposal.controller is None else policy.adjustable(proposal.layers),
                adjustable_from=policy.last_change,
                compression=policy.title,
                device=device,
                digests=adapter.begin_digests,
                fingerprint=adapter.fingerprint,
                roster=state.roster(ranks),
                shared_core=state.shares_core,
                preemption=_preemption(state, ranks),
                advice=adapter.words.unequal_steps,
                problem=refusal(config, policy, device),
            ),
        )
        if config.what_if and state.rank == ranks[0]:
            logger.warning(
                "what_if=%s: fake compression replaces the compression and the controller of this program; training is "
                "worthless, and checkpoints are %s",
                config.what_if,
                "saved all the same" if config.what_if_save else "refused",
            )
        exchanger.before_exchange = Reporter(exchanger, config, proposal.chooses_by_times).after_steps
        state.add(exchanger)
        announce_compression(exchanger, proposal)
    elif config.what_if and state.size == 1:
        logger.warning(
            "what_if=%s has no effect in a world of one rank: nothing is exchanged", config.what_if
        )
    checkpoint_manager = CheckpointManager(
        proposal.layers,
        proposal.plan,
        state.config,
        exchanger,
        unit=arguments.gradient_predivide_factor,
        ranks=ranks,
        digests=adapter.digests,
    )
    return StepDriver(
        exchanger,
        checkpoint_manager,
        adapter,
        shapes,
        divisor=float(len(ranks)) if average else 1.0,
        agrees=arguments.on_skip == "agree",
        rank=state.rank,
    )


def start_requests(state: Runtime, ranks: Ranks, transport: Transport) -> Exchanger:
    """Return an exchanger without layers, for requests between steps. Collective: see :class:`Exchanger`."""
    settings = Settings(
        name=state.name(ranks),
        topology=state.topology.among(ranks),
        roster=state.roster(ranks),
        preemption=_preemption(state, ranks),
    )
    exchanger = Exchanger(
        state.engine, [], Plan(0, ()), transport, state.watchdog, state.config, lambda _: 0, settings
    )
    state.add(exchanger)
    return exchanger


def _preemption(state: Runtime, ranks: Ranks) -> Preemption:
    """Return the process's own if all ranks exchange, so that they all know the same, else one that nobody signals."""
    return preemption.process if ranks == state.everyone else Preemption()


def say_what_is_bypassed(policy: Policy) -> None:
    """Warn, in a world of one, if more than compression is bypassed."""
    if changing := [c for c in policy.compressors if c.traits.preconditions]:
        logger.warning(
            "a world of one rank: %s is bypassed, its momentum and clipping as well", changing[0].to_string()
        )


def set_compression(
    checkpoint_manager: CheckpointManager,
    exchanger: Exchanger | None,
    layers: Sequence[LayerSpec],
    policy: Policy,
) -> None:
    """Change to ``policy`` on all ranks: see ``set_compression`` of what was wrapped. Local.

    In a world of one nothing is exchanged, and the policy is only checked. ConfigError for one that is impossible,
    StateError in the middle of a step.
    """
    if isinstance(policy, Automatic):
        raise ConfigError(
            'set_compression("auto"): a controller begins with the optimizer, not in mid-run; name a compressor'
        )
    checkpoint_manager.finish_step()
    step = checkpoint_manager.step
    plan = policy.plan(layers, step=step)
    compressors_of(layers, plan)
    if exchanger is None:
        return
    pipeline = exchanger.pipeline
    config = pipeline.config
    if config.what_if:
        if pipeline.transport.rank == 0:
            logger.info("step %d: a what-if run does not change its compression to %s", step, policy.title)
        return
    if problem := refusal(config, policy, pipeline.device, step):
        raise problem
    changes = sorted({change for c in policy.compressors for change in c.changes if change > step})
    pipeline.set_compression(plan, {later: policy.plan(layers, step=later) for later in changes})
    if pipeline.transport.rank == 0:
        logger.info("step %d: compression changes to %s", step, policy.title)
