"""``ddp_comm_hook``: compressed gradients under torch.nn.parallel.DistributedDataParallel."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradcomp.compress import Compression, Compressor, Policy
from gradcomp.control import Controller
from gradcomp.core.errors import ConfigError, GradcompError, StateError
from gradcomp.exchange.driver import Phase, StepDriver, Words
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.layout import Bucket, Layout
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.job import runtime
from gradcomp.job.process_sets import members
from gradcomp.job.settings import Arguments
from gradcomp.job.start import Proposal, propose, set_compression, start, validate_together
from gradcomp.kernels.codec import Sizes
from gradcomp.kernels.devices import HOST, Device
from gradcomp.reduce.header import DISCARDED
from gradcomp.torch.devices import Handed, Staging, device_of, staging_for
from gradcomp.torch.layers import (
    SKIP_TOGETHER,
    Exchange,
    Named,
    ParameterSamples,
    refuse_thawed,
    specs,
    take_over,
)
from gradcomp.torch.loss_scale import LossScale, Scaler
from gradcomp.torch.modules import allow_one_hook, bare, live, opaque
from gradcomp.torch.optimizers import Listener, Momenta, StepWatch, UnexchangedSteps, warn_if_it_averages
from gradcomp.torch.tensors import CompressionState, dtype_name

logger = logging.getLogger("gradcomp")
#: All ranks adopt rank 0's order of layers after this step: DDP has its final buckets from its second step on.
_ORDER_STEP = 1
Hook = Callable[["HookState", GradBucket], Future[torch.Tensor]]


@dataclass(eq=False)
class _Pending:
    """A DDP bucket whose exchange has not ended."""

    buffer: torch.Tensor
    handed: Handed
    future: Future[torch.Tensor]
    layers: int  # number of layers that have no mean yet


class BucketFutures:
    """The futures of DDP buckets: autograd's thread adds them, the engine's thread completes them."""

    def __init__(self, layers: int, staging: Staging) -> None:
        self._staging = staging
        self._slices: Sizes = np.zeros(layers, dtype=np.int64)  # by layer: number of slices without a mean
        self._bucket_of: Sizes = np.zeros(layers, dtype=np.int64)
        self._pending: dict[int, _Pending] = {}
        self._error: GradcompError | None = None
        self._lock = threading.Lock()

    def open(self, layout: Layout) -> None:
        """Begin a step whose layers lie in exchange buckets as ``layout`` says."""
        self._slices[:] = [len(buckets) for buckets in layout.buckets_of]
        self._bucket_of[:] = -1

    def add(self, bucket: int, layers: Sizes, buffer: torch.Tensor, handed: Handed) -> Future[torch.Tensor]:
        """Return the future of a DDP bucket whose layers are about to be submitted."""
        future = future_of(buffer)
        self._bucket_of[layers] = bucket
        with self._lock:
            if self._error is not None:
                raise self._error
            self._pending[bucket] = _Pending(buffer, handed, future, len(layers))
        # DDP waits in C++, which takes an exception set from Python for a value. One raised in a callback is an error.
        return future.then(lambda ended: ended.value())

    def bucket_complete(self, bucket: Bucket) -> None:
        """Complete the DDP buckets whose last layer gets its mean with this exchange bucket."""
        self._slices[bucket.layers] -= 1
        ended = bucket.layers[self._slices[bucket.layers] == 0]
        numbers, counts = np.unique(self._bucket_of[ended], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            pending = self._pending.get(number)
            if pending is None:
                continue  # other ranks have these layers, and this rank's DDP left them out
            pending.layers -= count
            if not pending.layers:
                with self._lock:
                    del self._pending[number]
                # A future of a device makes who waits for it wait for the stream that is current now.
                with self._staging.aside():
                    self._staging.give_back([pending.handed])
                    pending.future.set_result(pending.buffer)

    def failed(self, error: GradcompError) -> None:
        """Fail the pending DDP buckets, and those that are added later."""
        with self._lock:
            self._error = error
            pending, self._pending = self._pending, {}
        for one in pending.values():
            one.future.set_exception(error)  # type: ignore[arg-type]


def future_of(buffer: torch.Tensor) -> Future[torch.Tensor]:
    """Return a future that may hold the buffer: it must name the GPU of its value."""
    return Future(devices=[buffer.device] if buffer.is_cuda else None)


def ddp_comm_hook(
    model: torch.nn.Module,
    compression: Policy | Compressor | str = Compression.none,
    *,
    grad_scaler: Scaler = None,
    controller: Controller | str | None = None,
    on_skip: str = "raise",
    layers: bool = True,
) -> tuple[HookState, Hook]:
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
        layers: False compresses each exchange bucket as one vector, see :func:`DistributedOptimizer`.

    Collective over the ranks of DDP, which may be some of gradcomp's. Wire: see the compressor; uncompressed,
    2 d (N-1)/N bytes per rank; DDP sends no gradient itself. State: residuals where the compressor keeps them, 8 bytes
    an element.
    Raises ConfigError for bad arguments, ``follow_rate`` (a hook knows no learning rate) and sparse gradients, and for
    a second communication hook when it is registered; PlanMismatchError on every rank if the ranks differ; StateError
    before ``init()``. ``backward()`` raises later failures with their own type: TransportError, or StateError, as for
    frozen layers that now require gradients. In the first step under ``static_graph=True`` it raises a RuntimeError
    with the same text, because there DDP itself waits for the futures.
    """
    arguments = Arguments(compression, controller=controller, on_skip=on_skip, layers=layers)  # type: ignore[arg-type]
    return make_hook(model, arguments, LossScale(grad_scaler))


def make_hook(model: torch.nn.Module, arguments: Arguments, loss_scale: LossScale) -> tuple[HookState, Hook]:
    """Return what :func:`ddp_comm_hook` returns, for arguments that are checked on all ranks together."""
    state = HookState(model, arguments, loss_scale)
    allow_one_hook(model)
    return state, opaque(exchange_bucket)


def _refuse_following(policy: Policy) -> None:
    if following := [c.to_string() for c in policy.compressors if c.traits.follows_rate]:
        raise ConfigError(
            f"{following[0]} follows the learning rate, which a hook does not know: use DistributedOptimizer"
        )


def exchange_bucket(state: HookState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Submit a DDP bucket; the future's value is the bucket's buffer, in which means have replaced the gradients."""
    return state.hand_in(bucket)


# DistributedDataParallel compares a hook's annotations with classes, and they are text in this file.
exchange_bucket.__annotations__.update({"bucket": GradBucket, "return": Future[torch.Tensor]})


class HookState(CompressionState, Listener, Exchange):
    """The state of a communication hook: it makes one step of each backward pass of a DistributedDataParallel.

    Implements :class:`gradcomp.exchange.driver.Adapter`. A hook does not learn of ``step()`` or
    ``zero_grad()``, so the last step is accepted when the next one begins, or when the state is asked for.
    Construction is collective.
    """

    words = Words(
        "a backward pass has not handed in all buckets of DistributedDataParallel",
        unequal_steps=SKIP_TOGETHER,
    )

    def __init__(self, model: torch.nn.Module, arguments: Arguments, loss_scale: LossScale) -> None:
        state = runtime.current()
        ranks = members(model.process_group if isinstance(model, DistributedDataParallel) else None)

        def validate() -> tuple[Named, Named, Proposal, Device]:
            policy = arguments.check()
            if arguments.on_skip != "raise":
                raise ConfigError(
                    f"on_skip={arguments.on_skip!r} needs a part in step(), which a hook has not: use "
                    'DistributedOptimizer, or keep "raise"'
                )
            _refuse_following(policy)
            named, frozen = trainable(model)
            proposal = propose(
                policy, specs(named), controller=arguments.controller, what_if=state.what_if(ranks)
            )
            loss_scale.check()
            return named, frozen, proposal, device_of(named) if len(ranks) > 1 else HOST

        (named, frozen, proposal, device), transport = validate_together(state, ranks, validate)
        if transport is None:
            logger.info(
                "a world of one rank: the hook leaves DistributedDataParallel's gradients as they are"
            )
        #: The parameters that are exchanged, with their names: the layers, in order.
        self.named_parameters = self.named = named
        self._frozen = frozen
        self._policy, self._arguments = proposal.policy, arguments
        self._layers = proposal.layers
        self._loss_scale = loss_scale
        self._numbers = {id(parameter): layer for layer, (_, parameter) in enumerate(named)}
        self._where = named[0][1].device
        self._staging = staging_for(device, self._where)
        self._futures = BucketFutures(len(named), self._staging)
        #: The engine tells this object when exchange buckets have their means.
        self.listener = self._futures
        self._samples = ParameterSamples(named, device)
        self._any_optimizer = False
        #: Instances of DistributedDataParallel with these parameters; searched for only after a step without exchange.
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._at_end = opaque(self._await)
        self._driver = start(
            state,
            ranks,
            transport,
            proposal,
            self,
            [tuple(parameter.shape) for _, parameter in named],
            arguments,
            order_step=_ORDER_STEP,
            device=device,
        )
        # Last, since it registers hooks that outlive an error above.
        self._watch = StepWatch((parameter for _, parameter in named), self)
        self._scalars = self._watch.scalars
        self._momenta = Momenta(named, lambda: list(self._watch.ours))
        #: Gives the compression state to :func:`gradcomp.torch.save` and takes it from ``load``.
        self.checkpoint_manager = self._driver.checkpoint_manager
        if self._driver.attached:
            self._unexchanged = UnexchangedSteps(self._driver, self._local_on_purpose)
            take_over(self, "ddp_comm_hook")

    # -- what a user may ask --------------------------------------------------------------------------------------

    @property
    def exchanger(self) -> Exchanger | None:
        """The exchanger, with the pipeline and the compression state; None in a world of one."""
        return self._driver.exchanger if self._driver.attached else None

    def set_compression(self, compression: Policy | Compressor | str) -> None:
        """Change the compression between two steps, as :meth:`DistributedOptimizer.set_compression` does.

        It first accepts the last exchange, unless that held a value that was not finite. Raises ConfigError
        also for ``follow_rate``.
        """
        policy = self._arguments.policy_of(compression)
        _refuse_following(policy)
        set_compression(self.checkpoint_manager, self.exchanger, self._layers, policy)
        self._policy = policy

    def _exchanger_or_none(self) -> Exchanger | None:
        return self.exchanger

    def __deepcopy__(self, memo: object) -> HookState:
        """Return this object, because a copy of a DistributedDataParallel lists its hooks and has none registered."""
        return self

    def know(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch an optimizer before its first step, which comes late on a rank that has no batches."""
        self._watch.holds(optimizer)

    def settle(self) -> None:
        """Accept the last exchange now, before the state is saved, unless it held a value that was not finite.

        Local, and free if there is none. Raises StateError during a backward pass, and the error of the
        exchange if it failed.
        """
        self._driver.rest()

    def retire(self, why: str) -> None:
        """Refuse further buckets, with ``why``, because another exchange took over some of the parameters.

        The exchanger stays until the job ends, because ranks may differ in whether they still hold this
        object.
        """
        self._driver.retire(why)

    # -- one step, on autograd's thread ---------------------------------------------------------------------------

    def hand_in(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Exchange a DDP bucket in place; the last one of a step ends the step."""
        if not hasattr(bucket, "buffer"):
            raise ConfigError(
                'torch._dynamo.config.optimize_ddp="python_reducer" has no buckets that a hook could exchange: do not '
                "set it, nor compiled autograd, or use DistributedOptimizer without DistributedDataParallel"
            )
        driver = self._driver
        if not driver.attached:
            driver.checkpoint_manager.before_step()
            future = future_of(bucket.buffer())
            future.set_result(bucket.buffer())
            return future
        with driver.telling():
            if bucket.index() == 0:
                self._begin(driver)
            layers, addresses, buffer = self._contents(bucket)
            handed = self._staging.hand_in(buffer)
            future = self._futures.add(bucket.index(), layers, buffer, handed)
            shift = handed.tensor.data_ptr() - buffer.data_ptr()
            places = np.array([address + shift for address in addresses], dtype=np.uint64)
            driver.submit_all(layers.tolist(), places, handed, handed.event, zero_is_absent=True)
            if bucket.is_last():
                driver.flush()
                self._unexchanged.signs += 1
                # DDP queues its own wait after this one, so this one raises errors first, with their own types.
                if torch._C._current_graph_task_id() != -1:
                    Variable._execution_engine.queue_callback(self._at_end)
            return future

    def _begin(self, driver: StepDriver) -> None:
        # These checks come first, so that a problem that all ranks share is raised by all of them.
        # DDP does not exchange unfrozen parameters, so ranks would diverge.
        refuse_thawed(
            self._frozen,
            "ddp_comm_hook was called",
            "after unfreezing, wrap the model in DistributedDataParallel and call ddp_comm_hook anew",
        )
        self._momenta_of_step(driver.exchanger.pipeline)
        driver.rest()
        driver.exchanger.pipeline.lay_out()
        stepped = self._watch.stepped()
        if self.in_join:
            driver.amend(0)
        elif stepped is False:
            driver.amend(DISCARDED)
        # Outside of a backward pass it is DistributedDataParallel.join() that calls, on a rank that has run out of
        # data. That rank does not step, and takes the others' parameters in the end.
        self.in_join = torch._C._current_graph_task_id() == -1
        if driver.exchanger.pipeline.trains is not None:
            driver.exchanger.pipeline.trains = not self.in_join
        momenta = self._momenta_of_step(driver.exchanger.pipeline)
        self._staging.open()
        scale = self._loss_scale.of(driver.exchanger.pipeline)
        self._loss_scale.agree(driver.exchanger)
        driver.open(scale, momenta=momenta)
        self._futures.open(driver.exchanger.pipeline.layout)

    def _local_on_purpose(self) -> bool:
        """Return True if a DistributedDataParallel of ours is under ``no_sync()``, or was not known before.

        It is asked after a step without an exchange. From then on forward passes of the
        DistributedDataParallel count as signs too, because one without an exchange runs under ``no_sync()``.
        """
        news = False
        for ddp in live(DistributedDataParallel):
            if ddp not in self._wrappers and any(id(p) in self._numbers for p in ddp.parameters()):
                self._wrappers.add(ddp)
                ddp.register_forward_pre_hook(self._ran)
                news = True
        return news or any(not ddp.require_backward_grad_sync for ddp in self._wrappers)

    def _ran(self, *_: object) -> None:
        self._unexchanged.signs += 1

    def _momenta_of_step(self, pipeline: Pipeline) -> npt.NDArray[np.float64] | None:
        if not self._any_optimizer and pipeline.momenta.any():
            for optimizer in live(torch.optim.Optimizer):
                self._watch.holds(optimizer)
        return self._momenta.of_step(pipeline)

    # -- gradcomp.torch.optimizers.Listener -----------------------------------------------------------------------

    def appears(self, optimizer: torch.optim.Optimizer, *, had_stepped: bool) -> None:
        """Warn or raise if the optimizer does not fit the compression.

        The first optimizer also tells whether this run resumes from a checkpoint.
        """
        driver, first = self._driver, not self._any_optimizer
        self._any_optimizer = True
        if not driver.attached:
            return
        if first and had_stepped:
            driver.checkpoint_manager.state_was_due()
        if driver.exchanger.pipeline.transport.rank == 0:
            warn_if_it_averages(optimizer, self._policy)
        if driver.phase is Phase.DONE:  # its momentum was not known when the exchange began
            with driver.telling():
                self._momenta.of_step(driver.exchanger.pipeline)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step on gradients that were not exchanged, and withhold momentum that the exchange has applied."""
        if self._driver.attached:
            self._unexchanged.check(optimizer, self._watch.held_by(optimizer))
        self._momenta.withhold(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer its momentum back."""
        self._momenta.give_back()

    def _await(self) -> None:
        if self._driver.phase is Phase.FLUSHED:
            self._driver.wait()

    # -- gradcomp.exchange.driver.Adapter -----------------------------------------------------------------------------

    def allocate(self, layer: int) -> int:
        """Raise StateError: other ranks exchanged this layer, and this rank's DDP left it out."""
        raise StateError(
            f"layer {self.named[layer][0]!r} is exchanged by other ranks' DistributedDataParallel only"
        )

    def means_complete(self) -> None:
        """Do nothing: the engine's thread has completed the futures."""

    def finalise(self) -> bool:
        """Wait for a step whose buckets were all submitted, and accept it."""
        self._await()
        if self._driver.phase is Phase.DONE:
            self._driver.commit()
        return True

    def _contents(self, bucket: GradBucket) -> tuple[Sizes, list[int], torch.Tensor]:
        """Return a bucket's layers, the addresses of their gradients, and the buffer that holds these."""
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        numbers = [self._numbers.get(id(parameter), -1) for parameter in parameters]
        if -1 in numbers:
            shape = tuple(parameters[numbers.index(-1)].shape)
            raise StateError(
                f"DistributedDataParallel has a parameter of shape {shape} that the model did not have, or not "
                "as a trainable one, when ddp_comm_hook was called: call ddp_comm_hook on the final model"
            )
        if buffer.layout != torch.strided or buffer.device != self._where:
            raise StateError(
                f"layer {self.named[numbers[0]][0]!r} was dense and on {self._where} when ddp_comm_hook was called; "
                f"its gradient is {buffer.layout} and on {buffer.device} now"
            )
        gradients = bucket.gradients()
        dtype = dtype_name(buffer.dtype)
        for number, gradient in zip(numbers, gradients, strict=True):
            if (gradient.numel(), dtype) != (self._layers[number].size, self._layers[number].dtype):
                raise StateError(
                    f"layer {self.named[number][0]!r} had another dtype or size when ddp_comm_hook was called; "
                    f"its gradient has {gradient.numel()} elements of {dtype} now"
                )
        return np.array(numbers, dtype=np.int64), [gradient.data_ptr() for gradient in gradients], buffer


def trainable(model: torch.nn.Module) -> tuple[Named, Named]:
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
