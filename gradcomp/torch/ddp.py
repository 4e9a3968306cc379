"""``ddp_comm_hook``: compressed gradients under torch.nn.parallel.DistributedDataParallel."""

# Annotations are evaluated here: DistributedDataParallel compares those of a hook with classes.

import concurrent.futures
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradcomp.compress import Compression, Compressor, Policy, as_policy
from gradcomp.control import Controller
from gradcomp.core.errors import ConfigError, GradcompError, StateError
from gradcomp.engine import Exchanger
from gradcomp.engine.background import in_background
from gradcomp.job import runtime
from gradcomp.job.keeper import Keeper
from gradcomp.job.network import Ranks
from gradcomp.job.process_sets import members
from gradcomp.job.report import Readers
from gradcomp.job.serving import refuse_servers
from gradcomp.job.start import Proposal, start, validate_together
from gradcomp.job.switching import set_compression
from gradcomp.kernels.codec import Sizes
from gradcomp.kernels.devices import HOST, Device
from gradcomp.pipeline import Bucket, Layout
from gradcomp.pipeline.digests import NO_SAY, Digests
from gradcomp.reduce.header import DISCARDED
from gradcomp.torch.devices import device_of
from gradcomp.torch.layers import Named, dtype_name
from gradcomp.torch.loss_scale import LossScale, Scaler
from gradcomp.torch.modules import bare
from gradcomp.torch.plain import load_state, state_of
from gradcomp.torch.staging import Handed, Staging, staging_for
from gradcomp.torch.start import digests_behind, digests_of, propose
from gradcomp.torch.step_watch import StepWatch
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
    Raises ConfigError for bad arguments, ``follow_rate`` (a hook knows no learning rate) and sparse gradients,
    PlanMismatchError on every rank if the ranks differ, StateError before ``init()``. What fails later (TransportError,
    StateError) ``backward()`` raises, as that type; in the first step under ``static_graph=True`` as a RuntimeError
    with its text, for DDP then waits for the futures.
    """
    state = runtime.current()
    loss_scale = LossScale(grad_scaler)
    ranks = members(model.process_group if isinstance(model, DistributedDataParallel) else None)

    def validate() -> tuple[Named, Proposal, Device]:
        policy = as_policy(compression)
        if on_skip != "raise":
            raise ConfigError(
                f"on_skip={on_skip!r} needs a part in step(), which a hook has not: use DistributedOptimizer, or leave "
                '"raise"'
            )
        refuse_servers(
            state.config.reduction, len(ranks), "DistributedDataParallel, in which all ranks train,"
        )
        _refuse_following(policy)
        named = _named(model)
        proposal = propose(policy, named, controller=controller)
        loss_scale.check()
        return named, proposal, device_of(named) if len(ranks) > 1 else HOST

    (named, proposal, device), transport = validate_together(state, ranks, validate)
    if transport is None:
        logger.info("a world of one rank: the hook leaves DistributedDataParallel's gradients as they are")
    return HookState(state, ranks, named, proposal, transport, loss_scale, device), exchange_bucket


def _refuse_following(policy: Policy) -> None:
    if following := [c.to_string() for c in policy.compressors if c.follows_rate]:
        raise ConfigError(
            f"{following[0]} follows the learning rate, which a hook does not know: use DistributedOptimizer"
        )


def exchange_bucket(state: "HookState", bucket: GradBucket) -> Future[torch.Tensor]:
    """The hook: hand a bucket in; the future's value is its buffer, then with means in place of gradients."""
    return state.hand_in(bucket)


class HookState(Readers):
    """What a DistributedDataParallel has beside itself: an exchanger, and which of its exchanges are accepted."""

    def __init__(
        self,
        state: runtime.Runtime,
        ranks: Ranks,
        named: Named,
        proposal: Proposal,
        transport: Transport | None,
        loss_scale: LossScale,
        device: Device = HOST,
    ) -> None:
        layers = proposal.layers
        self._runtime = state
        self._named = named
        self._loss_scale = loss_scale
        self._numbers = {id(parameter): layer for layer, (_, parameter) in enumerate(named)}
        self._layers = layers
        self._where = named[0][1].device
        self._complete = False  # all buckets of the step that is open or not yet accepted were handed in
        self._staging = staging_for(device, self._where)
        self._futures = BucketFutures(len(layers), self._staging)
        self._exchanger: Exchanger | None = None
        self._optimizers = StepWatch(parameter for _, parameter in named)
        self._shadows = False  # in the last exchange this rank only kept the others company
        if transport is not None:
            self._exchanger = start(
                state,
                ranks,
                transport,
                proposal,
                self._allocate,
                listener=self._futures,
                order_step=_ORDER_STEP,
                device=device,
                digests=self._digests,
            )
        #: Where :func:`gradcomp.torch.save` finds the compression state.
        self.keeper = Keeper(
            layers,
            proposal.plan,
            state.config,
            self._exchanger,
            self.settle,
            ranks=ranks,
            digests=partial(digests_of, named),
        )

    # -- what a user may ask --------------------------------------------------------------------------------------

    @property
    def exchanger(self) -> Exchanger | None:
        """The exchanger, with the pipeline and the compression state; None in a world of one."""
        return self._exchanger

    @property
    def named_parameters(self) -> Named:
        """The parameters that are exchanged, with their names: the layers, in order."""
        return list(self._named)

    def compression_state(self) -> dict[str, Any]:
        """This rank's residuals by layer name, step, plan, bucket order: copies, as tensors, numbers and strings.

        Local; StateError in the midst of a backward pass.
        """
        return state_of(self.keeper)

    def load_compression_state(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`compression_state` gave on this rank of as many; all ranks must, from one moment.

        Local. StateError, with nothing changed, if anything does not fit: the error lists it all.
        """
        load_state(self.keeper, state)

    def set_compression(self, compression: Policy | Compressor | str) -> None:
        """Go over to another compression in mid-run, as :meth:`DistributedOptimizer.set_compression` says.

        Accepts the last exchange first, if no value in it was not finite. Raises ConfigError for ``follow_rate`` too.
        """
        policy = as_policy(compression)
        _refuse_following(policy)
        set_compression(self.keeper, self._exchanger, self._layers, policy)

    def _exchanger_or_none(self) -> Exchanger | None:
        return self._exchanger

    def settle(self) -> None:
        """Accept the last exchange now, unless a value in it was not finite; before the state is saved.

        Local, and free if there is none. Raises StateError in the midst of a backward pass, and the error of the
        exchange if it has failed.
        """
        exchanger = self._exchanger
        if exchanger is None:
            return
        if exchanger.error is not None:
            raise exchanger.error
        if exchanger.is_open:
            if not self._complete:
                raise StateError("a backward pass has not handed in all buckets of DistributedDataParallel")
            exchanger.wait()
        if self._complete:
            self._complete = False
            exchanger.commit()

    # -- one step, on autograd's thread ---------------------------------------------------------------------------

    def hand_in(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Exchange a bucket in place; the last one of a step ends the step."""
        exchanger = self._exchanger
        if exchanger is None:
            self.keeper.before_step()
            future = _future_of(bucket.buffer())
            future.set_result(bucket.buffer())
            return future
        try:
            return self._hand_in(exchanger, bucket)
        except Exception as error:
            if exchanger.error is None:  # the others wait for this bucket
                exchanger.abort(f"rank {self._runtime.rank}: {type(error).__name__}: {error}")
            raise

    def _hand_in(self, exchanger: Exchanger, bucket: GradBucket) -> Future[torch.Tensor]:
        if bucket.index() == 0:
            self._begin(exchanger)
        layers, addresses, buffer = self._contents(bucket)
        handed = self._staging.hand_in(buffer)
        future = self._futures.add(bucket.index(), layers, buffer, handed)
        shift = handed.address - buffer.data_ptr()
        for layer, address in zip(layers.tolist(), addresses, strict=True):
            place = address + shift
            exchanger.submit(layer, place, place, handed, handed.event, zero_is_absent=True)
        if bucket.is_last():
            self._complete = True
            exchanger.flush()
            # DDP queues its own wait behind this one, which raises errors as what they are.
            if torch._C._current_graph_task_id() != -1:
                Variable._execution_engine.queue_callback(self._await)
        return future

    def _begin(self, exchanger: Exchanger) -> None:
        self.settle()
        self.keeper.before_step()
        stepped = self._optimizers.stepped()
        if self._shadows:
            exchanger.pipeline.outcome = 0
        elif stepped is False and exchanger.pipeline.outcome:
            exchanger.pipeline.outcome = DISCARDED
        # Outside of backward passes, DistributedDataParallel.join() calls for a rank that has run out of data: it does
        # not step, and takes the others' parameters in the end.
        self._shadows = torch._C._current_graph_task_id() == -1
        self._staging.open()
        scale = self._loss_scale.of(exchanger.pipeline)
        self._loss_scale.agree(exchanger)
        exchanger.open(scale)
        self._futures.open(exchanger.pipeline.layout)

    def _digests(self) -> concurrent.futures.Future[Digests]:
        shadows = self._shadows
        return in_background((lambda: NO_SAY) if shadows else digests_behind(self._named))

    def _await(self) -> None:
        if self._exchanger is not None and self._exchanger.is_open:
            self._exchanger.wait()

    def _contents(self, bucket: GradBucket) -> tuple[Sizes, list[int], torch.Tensor]:
        """A bucket's layers, where their gradients are, and the buffer in which these lie."""
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        numbers = [self._numbers.get(id(parameter), -1) for parameter in parameters]
        if -1 in numbers:
            shape = tuple(parameters[numbers.index(-1)].shape)
            raise StateError(
                f"DistributedDataParallel has a parameter of shape {shape} that the model did not have, or not "
                "as a trainable one, when ddp_comm_hook was called"
            )
        if buffer.layout != torch.strided or buffer.device != self._where:
            raise StateError(
                f"layer {self._named[numbers[0]][0]!r} was dense and on {self._where} when ddp_comm_hook was called; "
                f"its gradient is {buffer.layout} and on {buffer.device} now"
            )
        gradients = bucket.gradients()
        dtype = dtype_name(buffer.dtype)
        for number, gradient in zip(numbers, gradients, strict=True):
            if (gradient.numel(), dtype) != (self._layers[number].size, self._layers[number].dtype):
                raise StateError(
                    f"layer {self._named[number][0]!r} had another dtype or size when ddp_comm_hook was called; "
                    f"its gradient has {gradient.numel()} elements of {dtype} now"
                )
        return np.array(numbers, dtype=np.int64), [gradient.data_ptr() for gradient in gradients], buffer

    def _allocate(self, layer: int) -> int:
        """Called for a layer that other ranks had and this rank's DDP left out."""
        raise StateError(
            f"layer {self._named[layer][0]!r} is exchanged by other ranks' DistributedDataParallel only"
        )


@dataclass(eq=False)
class _Pending:
    """A DDP bucket under way."""

    buffer: torch.Tensor
    handed: Handed
    future: Future[torch.Tensor]
    layers: int  # without their mean


class BucketFutures:
    """The futures of DDP's buckets: entered on autograd's thread, completed on the engine's."""

    def __init__(self, layers: int, staging: Staging) -> None:
        self._staging = staging
        self._slices: Sizes = np.zeros(layers, dtype=np.int64)  # of each layer, that have not landed
        self._bucket_of: Sizes = np.zeros(layers, dtype=np.int64)
        self._pending: dict[int, _Pending] = {}
        self._error: GradcompError | None = None
        self._lock = threading.Lock()

    def open(self, layout: Layout) -> None:
        """A step begins; its layers travel as ``layout`` says."""
        self._slices[:] = [len(buckets) for buckets in layout.buckets_of]
        self._bucket_of[:] = -1

    def add(self, bucket: int, layers: Sizes, buffer: torch.Tensor, handed: Handed) -> Future[torch.Tensor]:
        """The future of a bucket whose layers are about to be submitted."""
        future = _future_of(buffer)
        self._bucket_of[layers] = bucket
        with self._lock:
            if self._error is not None:
                raise self._error
            self._pending[bucket] = _Pending(buffer, handed, future, len(layers))
        # DDP waits in C++, where an exception set from Python is a value; one raised in a callback is an error.
        return future.then(_value)

    def landed(self, bucket: Bucket) -> None:
        """Complete the buckets whose last layer has its mean now."""
        self._slices[bucket.layers] -= 1
        ended = bucket.layers[self._slices[bucket.layers] == 0]
        numbers, counts = np.unique(self._bucket_of[ended], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            pending = self._pending.get(number)
            if pending is None:
                continue  # layers that DDP left out
            pending.layers -= count
            if not pending.layers:
                with self._lock:
                    del self._pending[number]
                # Whoever waits for a future of a device waits, there, for the stream that is current now.
                with self._staging.aside():
                    self._staging.give_back([pending.handed])
                    pending.future.set_result(pending.buffer)

    def failed(self, error: GradcompError) -> None:
        """Fail the buckets under way, and those to come."""
        with self._lock:
            self._error = error
            pending, self._pending = self._pending, {}
        for one in pending.values():
            one.future.set_exception(error)  # type: ignore[arg-type]


def _future_of(buffer: torch.Tensor) -> Future[torch.Tensor]:
    """One that may hold the buffer: futures name the GPUs of what they hold."""
    return Future(devices=[buffer.device] if buffer.is_cuda else None)


def _value(future: Future[torch.Tensor]) -> torch.Tensor:
    return future.value()


def _named(model: torch.nn.Module) -> Named:
    """The trainable parameters by the names that the bare module gives them, without those that DDP ignores."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"expected a torch.nn.Module, got {type(model).__name__}")
    model = bare(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"module {name!r} has sparse gradients; use sparse=False or DistributedOptimizer"
            )
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad and n not in ignored]
