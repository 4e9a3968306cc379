"""``ddp_comm_hook``: compressed gradients under torch.nn.parallel.DistributedDataParallel."""

# No "from __future__ import annotations": DistributedDataParallel compares the annotations of a hook with classes.

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

#: All ranks adopt rank 0's order of layers after this step: DDP has its final buckets from its second step on.
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
    """Return a state and a hook for ``ddp.register_comm_hook(state, hook)`` that compress DDP's gradients.

        g_mean = (1/N) sum over ranks of g_i, each layer compressed as ``compression`` says

    Layers are known by name, so DDP may rebuild its buckets. The future of a DDP bucket completes on gradcomp's thread,
    as soon as all its layers have their means. The exchange of a step is accepted at the first DDP bucket of the next
    step, unless it held a value that was not finite. A layer whose gradient is zero everywhere on every rank counts as
    absent, because DDP fills in zeros for unused parameters: it keeps its residual, and its gradient stays zero.

    The means are those of :func:`DistributedOptimizer`, bit for bit, with one exception. Chunk owners' residuals change
    hands once, when all ranks adopt rank 0's order of layers: there after the first step, here after the second, in
    which DDP has its final buckets.

    Args:
        model: the module, or the DistributedDataParallel around it.
        compression: a compressor, its string form, or a :class:`gradcomp.Policy` of them by layer.
        grad_scaler: the GradScaler in use, as for :func:`DistributedOptimizer`.
        controller: changes the levels of layers while training runs, such as
            ``gradcomp.LGreCo(every_steps=500)``, or its string form.
        on_skip: what happens when a rank skips a step that others take: ``"raise"``, a StateError on all ranks in the
            next exchange. ``"agree"`` is refused, because a hook has no part in ``step()``; use
            ``DistributedOptimizer(on_skip="agree")``.

    Collective over the ranks of DDP, which may be some of gradcomp's. Wire: see the compressor; uncompressed,
    2 d (N-1)/N bytes per rank; DDP sends no gradient itself. State: residuals where the compressor keeps them, 8 bytes
    an element.
    Raises ConfigError for bad arguments, ``follow_rate`` (a hook knows no learning rate) and sparse gradients, and for
    a second communication hook when it is registered; PlanMismatchError on every rank if the ranks differ; StateError
    before ``init()``. ``backward()`` raises later failures with their own type: TransportError, or StateError, as for
    frozen layers that now require gradients. In the first step under ``static_graph=True`` it raises a RuntimeError
    with the same text, because there DDP itself waits for the futures.
    """
    state = runtime.current()
    loss_scale = LossScale(grad_scaler)
    ranks = members(model.process_group if isinstance(model, DistributedDataParallel) else None)

    def validate() -> tuple[Named, Named, Proposal, Device]:
        policy = as_policy(compression)
        if on_skip != "raise":
            raise ConfigError(
                f"on_skip={on_skip!r} needs a part in step(), which a hook has not: use DistributedOptimizer, or keep "
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
    """Submit a DDP bucket; the future's value is the bucket's buffer, in which means have replaced the gradients."""
    return state.hand_in(bucket)


class HookState(Readers):
    """The state of a communication hook: the exchange of one DistributedDataParallel and what users ask about it."""

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
        #: Gives the compression state to :func:`gradcomp.torch.save` and takes it from ``load``.
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
        """Return this rank's residuals by layer name, its step, plan and bucket order, as copies.

        All values are tensors, numbers and strings. Local. Raises StateError during a backward pass.
        """
        return state_of(self.checkpoint_manager)

    def load_compression_state(self, state: dict[str, Any]) -> None:
        """Resume from the result of :meth:`compression_state` on this rank, of a job with as many ranks.

        All ranks must load states that were taken after the same step. Local. Raises StateError and changes
        nothing if anything does not fit; the error lists all of it.
        """
        load_state(self.checkpoint_manager, state)

    def set_compression(self, compression: Policy | Compressor | str) -> None:
        """Change the compression between two steps, as :meth:`DistributedOptimizer.set_compression` does.

        It first accepts the last exchange, unless that held a value that was not finite. Raises ConfigError
        also for ``follow_rate``.
        """
        policy = as_policy(compression)
        _refuse_following(policy)
        set_compression(self.checkpoint_manager, self.exchanger, self._layers, policy)
        self._steps.policy = policy

    def _exchanger_or_none(self) -> Exchanger | None:
        return self.exchanger

    def settle(self) -> None:
        """Accept the last exchange now, before the state is saved, unless it held a value that was not finite.

        Local, and free if there is none. Raises StateError during a backward pass, and the error of the
        exchange if it failed.
        """
        self._driver.rest()

    def hand_in(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Exchange a DDP bucket in place; the last one of a step ends the step."""
        if not hasattr(bucket, "buffer"):
            raise ConfigError(
                'torch._dynamo.config.optimize_ddp="python_reducer" has no buckets that a hook could exchange: do not '
                "set it, nor compiled autograd, or use DistributedOptimizer without DistributedDataParallel"
            )
        if self._driver.attached:
            return self._steps.hand_in(bucket)
        self._driver.before_step()
        future = future_of(bucket.buffer())
        future.set_result(bucket.buffer())
        return future


def _named(model: torch.nn.Module) -> tuple[Named, Named]:
    """Return trainable and frozen parameters, without those that DDP ignores.

    Their names are those within the bare module.
    """
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
