"""``ddp_comm_hook``: compressed gradients under torch.nn.parallel.DistributedDataParallel."""

# Annotations are evaluated here: DistributedDataParallel compares those of a hook with classes.

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradcomp.compress import Compression, Compressor, Policy, as_policy
from gradcomp.control import Controller
from gradcomp.core.errors import ConfigError
from gradcomp.engine import Exchanger
from gradcomp.job import runtime
from gradcomp.job.network import Ranks
from gradcomp.job.process_sets import members
from gradcomp.job.report import Readers
from gradcomp.job.start import Proposal, Setup, start, validate_together
from gradcomp.job.state import Runtime
from gradcomp.job.switching import set_compression
from gradcomp.kernels.devices import HOST, Device
from gradcomp.torch.ddp_check import allow_one_hook
from gradcomp.torch.ddp_futures import future_of
from gradcomp.torch.ddp_steps import BucketSteps
from gradcomp.torch.devices import device_of
from gradcomp.torch.layers import Named
from gradcomp.torch.loss_scale import LossScale, Scaler
from gradcomp.torch.modules import bare, opaque
from gradcomp.torch.plain import load_state, state_of
from gradcomp.torch.start import propose
from gradcomp.transport.base import Transport

logger = logging.getLogger("gradcomp")

#: DistributedDataParallel has its final buckets from its second step on.
_ORDER_STEP = 1

Hook = Callable[["HookState", GradBucket], Future[torch.Tensor]]


def ddp_comm_hook(
    model: torch.nn.Module,
    compression: Policy | Compressor | str = Compression.none,
    *,
    grad_scaler: Scaler = None,
    controller: Controller | str | None = None,
    on_skip: str = "raise",
) -> tuple["HookState", Hook]:
    """A state and a hook for ``ddp.register_comm_hook(state, hook)``: DDP's gradients, averaged in compressed form.

    g_mean = (1/N) sum over ranks of g_i, each layer compressed as ``compression`` says. Layers are known by name: DDP
    may form its buckets anew. A bucket's future completes on gradcomp's thread, as soon as its layers have their means.
    The exchange of a step is accepted at the next step's first bucket, unless a value in it was not finite. A layer
    whose gradient is zero everywhere on every rank counts as absent, as DDP fills in zeros for unused parameters: it
    keeps its residual, and stays zero. Means are those of :func:`DistributedOptimizer`, bit for bit, except that chunk
    owners' residuals change hands once, when rank 0's order of buckets is adopted: there after the first step, here
    after the second, in which DDP has its final buckets.

    Args:
        model: the module, or the DistributedDataParallel around it.
        compression: a compressor, its string form, or a :class:`gradcomp.Policy` of them by layer.
        grad_scaler: the GradScaler in use, as for :func:`DistributedOptimizer`.
        controller: changes the levels of layers while training runs, such as
            ``gradcomp.LGreCo(every_steps=500)``, or its string form.
        on_skip: what follows when a rank does not step on means that others step on: "raise", a StateError on all ranks
            in the next exchange. To agree first, as ``DistributedOptimizer(on_skip="agree")`` does, a hook has no part
            in ``step()``.

    Collective over the ranks of DDP, which may be some of gradcomp's. Wire: see the compressor; uncompressed,
    2 d (N-1)/N bytes per rank; DDP sends no gradient itself. State: residuals where the compressor keeps them, 8 bytes
    an element.
    Raises ConfigError for bad arguments, ``follow_rate`` (a hook knows no learning rate) and sparse gradients, and for
    a second communication hook when it is registered; PlanMismatchError on every rank if the ranks differ, StateError
    before ``init()``. What fails later (TransportError, StateError, which layers that were frozen and require gradients
    now are too) ``backward()`` raises, as that type; in the first step under ``static_graph=True`` as a RuntimeError
    with its text, for DDP then waits for the futures.
    """
    state = runtime.current()
    loss_scale = LossScale(grad_scaler)
    ranks = members(model.process_group if isinstance(model, DistributedDataParallel) else None)

    def validate() -> tuple[Named, Named, Proposal, Device]:
        policy = as_policy(compression)
        if on_skip != "raise":
            raise ConfigError(
                f"on_skip={on_skip!r} needs a part in step(), which a hook has not: use DistributedOptimizer, or leave "
                '"raise"'
            )
        _refuse_following(policy)
        named, frozen = _named(model)
        proposal = propose(policy, named, controller=controller)
        loss_scale.check()
        return named, frozen, proposal, device_of(named) if len(ranks) > 1 else HOST

    (named, frozen, proposal, device), transport = validate_together(state, ranks, validate)
    if transport is None:
        logger.info("a world of one rank: the hook leaves DistributedDataParallel's gradients as they are")
    allow_one_hook(model)
    hook = opaque(exchange_bucket)
    return HookState(state, ranks, named, frozen, proposal, transport, loss_scale, device), hook


def _refuse_following(policy: Policy) -> None:
    if following := [c.to_string() for c in policy.compressors if c.traits.follows_rate]:
        raise ConfigError(
            f"{following[0]} follows the learning rate, which a hook does not know: use DistributedOptimizer"
        )


def exchange_bucket(state: "HookState", bucket: GradBucket) -> Future[torch.Tensor]:
    """The hook: hand a bucket in; the future's value is its buffer, then with means in place of gradients."""
    return state.hand_in(bucket)


class HookState(Readers):
    """What a DistributedDataParallel has beside itself: an exchanger, and what a user may ask of it."""

    def __init__(
        self,
        state: Runtime,
        ranks: Ranks,
        named: Named,
        frozen: Named,
        proposal: Proposal,
        transport: Transport | None,
        loss_scale: LossScale,
        device: Device = HOST,
    ) -> None:
        self._named = named
        self._layers = proposal.layers
        self._steps = BucketSteps(named, frozen, proposal.layers, proposal.policy, loss_scale, device)
        shapes = [tuple(parameter.shape) for _, parameter in named]
        self._driver = start(
            state,
            ranks,
            transport,
            proposal,
            self._steps,
            shapes,
            Setup(
                order_step=_ORDER_STEP,
                device=device,
            ),
        )
        self._steps.attach(self._driver)
        #: Where :func:`gradcomp.torch.save` finds the compression state.
        self.checkpoint_manager = self._driver.checkpoint_manager

    # -- what a user may ask --------------------------------------------------------------------------------------

    @property
    def exchanger(self) -> Exchanger | None:
        """The exchanger, with the pipeline and the compression state; None in a world of one."""
        return self._driver.exchanger if self._driver.attached else None

    @property
    def named_parameters(self) -> Named:
        """The parameters that are exchanged, with their names: the layers, in order."""
        return list(self._named)

    def compression_state(self) -> dict[str, Any]:
        """This rank's residuals by layer name, step, plan, bucket order: copies, as tensors, numbers and strings.

        Local; StateError in the midst of a backward pass.
        """
        return state_of(self.checkpoint_manager)

    def load_compression_state(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`compression_state` gave on this rank of as many; all ranks must, from one moment.

        Local. StateError, with nothing changed, if anything does not fit: the error lists it all.
        """
        load_state(self.checkpoint_manager, state)

    def set_compression(self, compression: Policy | Compressor | str) -> None:
        """Go over to another compression in mid-run, as :meth:`DistributedOptimizer.set_compression` says.

        Accepts the last exchange first, if no value in it was not finite. Raises ConfigError for ``follow_rate`` too.
        """
        policy = as_policy(compression)
        _refuse_following(policy)
        set_compression(self.checkpoint_manager, self.exchanger, self._layers, policy)
        self._steps.policy = policy

    def _exchanger_or_none(self) -> Exchanger | None:
        return self.exchanger

    def settle(self) -> None:
        """Accept the last exchange now, unless a value in it was not finite; before the state is saved.

        Local, and free if there is none. Raises StateError in the midst of a backward pass, and the error of the
        exchange if it has failed.
        """
        self._driver.rest()

    def hand_in(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Exchange a bucket in place; the last one of a step ends the step."""
        if not hasattr(bucket, "buffer"):
            raise ConfigError(
                'torch._dynamo.config.optimize_ddp="python_reducer" has no buckets that a hook could exchange: leave '
                "it, and compiled autograd, away, or use DistributedOptimizer without DistributedDataParallel"
            )
        if self._driver.attached:
            return self._steps.hand_in(bucket)
        self._driver.before_step()
        future = future_of(bucket.buffer())
        future.set_result(bucket.buffer())
        return future


def _named(model: torch.nn.Module) -> tuple[Named, Named]:
    """Trainable and frozen parameters by the names that the bare module gives them, without those that DDP ignores."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"expected a torch.nn.Module, got {type(model).__name__}")
    model = bare(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"module {name!r} has sparse gradients; use sparse=False or DistributedOptimizer"
            )
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    known = [(n, p) for n, p in model.named_parameters() if n not in ignored]
    return [(n, p) for n, p in known if p.requires_grad], [(n, p) for n, p in known if not p.requires_grad]
