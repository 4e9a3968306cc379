"""Translates the DDP buckets of a backward pass into a step of the exchange."""

# No "from __future__ import annotations": DistributedDataParallel compares the annotations of a hook with classes.

import concurrent.futures
import weakref

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradcomp.compress import Policy
from gradcomp.core.errors import StateError
from gradcomp.core.layers import LayerSpec
from gradcomp.engine.background import in_background
from gradcomp.job.adapter import Words
from gradcomp.job.momentum import warn_of_averages
from gradcomp.job.step_driver import StepDriver
from gradcomp.job.step_phases import Phase
from gradcomp.kernels.codec import Sizes
from gradcomp.kernels.devices import Device
from gradcomp.pipeline import Pipeline, Submission
from gradcomp.pipeline.digests import NO_SAY, Digests
from gradcomp.pipeline.fingerprint import NOTHING, SoonFingerprint
from gradcomp.reduce.header import DISCARDED
from gradcomp.torch.ddp_futures import BucketFutures
from gradcomp.torch.fingerprint import ParameterSamples
from gradcomp.torch.layers import Named
from gradcomp.torch.live import live
from gradcomp.torch.loss_scale import LossScale
from gradcomp.torch.modules import opaque
from gradcomp.torch.momentum import Momenta, averages
from gradcomp.torch.staging import staging_for
from gradcomp.torch.start import SKIP_TOGETHER, digests_behind, digests_of, take_over
from gradcomp.torch.step_watch import StepWatch, UnexchangedSteps
from gradcomp.torch.tensors import dtype_name


class BucketSteps:
    """Makes one step of each backward pass of a DistributedDataParallel.

    Implements :class:`gradcomp.job.adapter.Adapter`. A hook does not learn of ``step()`` or
    ``zero_grad()``, so the last step is accepted when the next one begins, or when the state is asked for.
    :meth:`attach` must be called first.
    """

    words = Words(
        "a backward pass has not handed in all buckets of DistributedDataParallel",
        unequal_steps=SKIP_TOGETHER,
    )

    def __init__(
        self,
        named: Named,
        frozen: Named,
        layers: list[LayerSpec],
        policy: Policy,
        loss_scale: LossScale,
        device: Device,
    ) -> None:
        self.policy = policy
        self.named = named
        self._frozen = frozen
        self._layers = layers
        self._loss_scale = loss_scale
        self._numbers = {id(parameter): layer for layer, (_, parameter) in enumerate(named)}
        self._where = named[0][1].device
        self._staging = staging_for(device, self._where)
        self._futures = BucketFutures(len(layers), self._staging)
        #: The engine tells this object when exchange buckets have their means.
        self.listener = self._futures
        self._samples = ParameterSamples(named, device)
        self._optimizers = StepWatch((parameter for _, parameter in named), self)
        self._momenta = Momenta(named, lambda: self._optimizers.optimizers)
        self._any_optimizer = False
        #: Instances of DistributedDataParallel with these parameters; searched for only after a step without exchange.
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        #: True if DistributedDataParallel.join() made the last exchange, because this rank had run out of data.
        self._joining = False

    def attach(self, driver: StepDriver) -> None:
        """Take the driver, and take these parameters over from earlier exchanges unless the world is one rank."""
        self._driver = driver
        self._at_end = opaque(self._await)
        if driver.attached:
            self._unexchanged = UnexchangedSteps(driver, self._local_on_purpose)
            take_over(self, "ddp_comm_hook")

    def retire(self, why: str) -> None:
        """Refuse further buckets, with ``why``, because another exchange took over some of the parameters.

        The exchanger stays until the job ends, because ranks may differ in whether they still hold this
        object.
        """
        self._driver.retire(why)

    # -- one step, on autograd's thread ---------------------------------------------------------------------------

    def hand_in(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Exchange a bucket in place; the last one of a step ends the step."""
        with self._driver.telling():
            return self._hand_in(self._driver, bucket)

    def _hand_in(self, driver: StepDriver, bucket: GradBucket) -> Future[torch.Tensor]:
        if bucket.index() == 0:
            self._begin(driver)
        layers, addresses, buffer = self._contents(bucket)
        handed = self._staging.hand_in(buffer)
        future = self._futures.add(bucket.index(), layers, buffer, handed)
        shift = handed.address - buffer.data_ptr()
        for layer, address in zip(layers.tolist(), addresses, strict=True):
            place = address + shift
            driver.submit(Submission(layer, place, place, handed, handed.event, zero_is_absent=True))
        if bucket.is_last():
            driver.flush()
            self._unexchanged.signs += 1
            # DDP queues its own wait behind this one. Ours comes first and raises errors with their own types.
            if torch._C._current_graph_task_id() != -1:
                Variable._execution_engine.queue_callback(self._at_end)
        return future

    def _begin(self, driver: StepDriver) -> None:
        # These checks come first, so that a problem that all ranks share is raised by all of them.
        self._check_frozen()
        self._momenta_of_step(driver.exchanger.pipeline)
        driver.rest()
        driver.exchanger.pipeline.lay_out()
        stepped = self._optimizers.stepped()
        if self._joining:
            driver.amend(0)
        elif stepped is False:
            driver.amend(DISCARDED)
        # Outside of a backward pass it is DistributedDataParallel.join() that calls, on a rank that has run out of
        # data. That rank does not step, and takes the others' parameters in the end.
        self._joining = torch._C._current_graph_task_id() == -1
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

    def _check_frozen(self) -> None:
        """Raise StateError for unfrozen parameters: DDP does not exchange them, so ranks would diverge."""
        thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if thawed:
            raise StateError(
                "parameters that were frozen when ddp_comm_hook was called now require gradients and are not "
                f"exchanged: {', '.join(thawed[:5])}; after unfreezing, wrap the model in DistributedDataParallel and "
                "call ddp_comm_hook anew"
            )

    def _momenta_of_step(self, pipeline: Pipeline) -> npt.NDArray[np.float64] | None:
        if not self._any_optimizer and pipeline.momenta.any():
            for optimizer in live(torch.optim.Optimizer):
                self._optimizers.holds(optimizer)
        return self._momenta.of_step(pipeline)

    # -- gradcomp.torch.step_watch.Listener -----------------------------------------------------------------------

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
        if driver.exchanger.pipeline.transport.rank == 0 and averages(optimizer):
            warn_of_averages(self.policy, type(optimizer).__name__)
        if driver.phase is Phase.DONE:  # its momentum was not known when the exchange began
            with driver.telling():
                self._momenta.of_step(driver.exchanger.pipeline)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step on gradients that were not exchanged, and withhold momentum that the exchange has applied."""
        if self._driver.attached:
            self._unexchanged.check(optimizer, self._optimizers.held_by(optimizer))
        self._momenta.withhold(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer its momentum back."""
        self._momenta.give_back()

    def _await(self) -> None:
        if self._driver.phase is Phase.FLUSHED:
            self._driver.wait()

    # -- gradcomp.job.adapter.Adapter -----------------------------------------------------------------------------

    def allocate(self, layer: int) -> int:
        """Raise StateError: other ranks exchanged this layer, and this rank's DDP left it out."""
        raise StateError(
            f"layer {self.named[layer][0]!r} is exchanged by other ranks' DistributedDataParallel only"
        )

    def digests(self) -> Digests:
        return digests_of(self.named)

    def begin_digests(self) -> concurrent.futures.Future[Digests]:
        """Compute digests on a thread; a rank in ``join()`` does not step, so its parameters are not compared."""
        joining = self._joining
        return in_background((lambda: NO_SAY) if joining else digests_behind(self.named))

    def fingerprint(self, turn: int) -> SoonFingerprint:
        """Sample the parameters and the optimizers' settings; a rank in ``join()`` contributes nothing."""
        if self._joining:
            return NOTHING
        return self._samples.take(turn, self._optimizers.scalars())

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
