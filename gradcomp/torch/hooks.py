"""Turns autograd's hooks into steps: the windows of accumulation, and the hooks themselves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from gradcomp.core.errors import StateError
from gradcomp.exchange import settings
from gradcomp.exchange.arrivals import Submission
from gradcomp.exchange.driver import Means, Phase, StepDriver, Words
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.job import runtime
from gradcomp.reduce.header import LATE
from gradcomp.torch.arrived import Arrived
from gradcomp.torch.devices import Gradients
from gradcomp.torch.layers import (
    SKIP_TOGETHER,
    Exchange,
    Named,
    ParameterSamples,
    rows_of,
    take_over,
    tensor_of,
)
from gradcomp.torch.loss_scale import means_before_unscaling
from gradcomp.torch.modules import (
    DdpCheck,
    EndOfBackward,
    at_end,
    opaque,
    refuse_inside_backward,
    watch_backward,
)
from gradcomp.torch.optimizers import Listener, Momenta, StepWatch, UnexchangedSteps, scalars_of
from gradcomp.torch.streams import number_of

if TYPE_CHECKING:
    from gradcomp.torch.distributed_state import Arguments

logger = logging.getLogger("gradcomp")
#: A warning needs this many steps in a row that took the same number of exchanges, more than one.
_LIMIT = 3
_IS_SPARSE = attrgetter("is_sparse")
Finish = Literal["backward", "step", "forward"]
#: Exchanges whose window ends with the backward pass that is about to return.
_ending: list[GradientExchange] = []
_numbers = count()


class Windows:
    """Warns once if accumulation windows are exchanged pass by pass because their passes were not declared.

    ``kept`` counts exchanges since the last step whose means were added to.
    """

    def __init__(self) -> None:
        self.kept = 0
        self._before = 0
        self._alike = 0
        self._warned = False

    def stepped(self, passes: int, *, speaks: bool) -> None:
        """End the window with a step on means; ``speaks`` if this rank may warn."""
        exchanges, self.kept = self.kept + 1, 0
        self._alike = self._alike + 1 if exchanges == self._before else 1
        self._before = exchanges
        if exchanges == 1 or self._alike < _LIMIT or self._warned:
            return
        self._warned = True
        if speaks:
            logger.warning(
                "step() comes every %d exchanges, and the means of the others are only added up: "
                "backward_passes_per_step=%d, or no_sync() around all passes but the last, trains the same on 1/%d of "
                "the bytes",
                exchanges,
                exchanges * passes,
                exchanges,
            )


def _finish_together() -> None:
    """Wait for the exchanges that end with this backward pass, on all ranks in the same order.

    All of them are flushed before, so ranks whose first gradients came in different orders do not wait for
    each other.
    """
    ending = sorted(_ending, key=lambda exchange: exchange.number)
    _ending.clear()
    for exchange in ending:
        exchange.finish()


class GradientExchange(Listener, Exchange):
    """The state that wrapping adds to an optimizer: it hooks the parameters and turns their gradients into steps.

    It implements :class:`gradcomp.exchange.driver.Adapter`. A *window* is the accumulation between two exchanges. A
    layer is present if one of the window's backward passes touched it. At the end of the window the step is flushed and
    waited for; then every ``.grad`` that some rank touched is the mean. :meth:`attach` must be called first.
    """

    words = Words(
        "a step is open: there are gradients that neither step() nor zero_grad() has dealt with",
        '; with several backward passes over different parameters use finish="step"',
        SKIP_TOGETHER,
    )
    listener: settings.Listener | None = None

    def __init__(
        self, named: Named, frozen: Named, arguments: Arguments, optimizer: torch.optim.Optimizer
    ) -> None:
        self.number = next(_numbers)
        self.arguments = arguments
        self.named = named
        self.frozen = frozen
        #: True inside ``skip_synchronize()``, and after ``synchronize()`` until the next step.
        self.skip_synchronize = self.synchronized = False
        self._optimizer = optimizer
        self._gradients = Gradients(named, sparse_as_dense=arguments.sparse_as_dense)
        self._loss_scale = arguments.loss_scale
        #: With ``sparse_as_dense``: layers that all ranks know to be sparse or not; ``_sparse`` marks the sparse ones.
        self._known = None if not arguments.sparse_as_dense else np.zeros(len(named), np.bool_)
        self._sparse = np.zeros(len(named), np.bool_)
        self._scalars = lambda: scalars_of([optimizer])
        self.momenta = Momenta(named, lambda: [optimizer])
        self._ddp_check: DdpCheck | None = None
        self._touched: dict[int, int] = {}  # layer -> number of backward passes in this window
        self._submitted: set[int] = set()
        #: Gradients of the open step. While they are held, reading a ``.grad`` makes no new Python object.
        self._held: list[torch.Tensor] = []
        self._passes = 0
        self._in_backward = False
        self._suspended = False
        self._means: dict[int, torch.Tensor] = {}  # layer -> the .grad tensor that the finished step set
        #: The means as text if another rank was late: an edit is an error, because its script could not make it.
        self._before_edits = ""
        self._windows = Windows()
        self._hooks: list[Any] = []

    @property
    def parameter_names(self) -> dict[torch.Tensor, str]:
        """The names of all parameters, including frozen ones."""
        return {parameter: name for name, parameter in (*self.named, *self.frozen)}

    @property
    def exchanger(self) -> Exchanger:
        return self.driver.exchanger

    def attach(self, driver: StepDriver, before: GradientExchange | None = None) -> None:
        """Take the driver and hook the parameters, unless the world is one rank.

        :func:`take_over` describes ``before``.
        """
        self.driver = driver
        #: Saves and loads the compression state.
        self.checkpoint_manager = driver.checkpoint_manager
        if not driver.attached:
            return
        take_over(self, "DistributedOptimizer", before)
        means_before_unscaling()
        driver.before_end = partial(self._loss_scale.agree, driver.exchanger)
        self._gradients.attach(driver.exchanger.device)
        self._samples = ParameterSamples(self.named, driver.exchanger.device)
        self._ddp_check = DdpCheck(self._gradients.parameters)
        self._watch = StepWatch(self._gradients.parameters, self)
        self._unexchanged = UnexchangedSteps(driver, lambda: self._suspended)
        watch_backward()
        self._end = EndOfBackward(self._end_of_backward)
        self._behind_all = opaque(_finish_together)
        self._arrived = Arrived(opaque(self._first), opaque(self._bucket_complete))
        for layer, parameter in enumerate(self._gradients.parameters):
            hook = self._arrived.hook(layer)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Remove all hooks from the parameters and the optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self in _ending:  # a backward pass raised before its end
            _ending.remove(self)
        self._end_ddp_check()
        if self.driver.attached:
            self._watch.end()

    def retire(self, why: str) -> None:
        """Stop for good, because another exchange took over some of the parameters.

        Collective if a step has begun.
        """
        state = runtime.current()
        if self.exchanger in state.exchangers:  # else its job has ended
            self.drain()
            state.close(self.exchanger)
        self.detach()
        self.driver.retire(why)

    def _end_ddp_check(self) -> None:
        if self._ddp_check is not None:
            self._ddp_check.end()
            self._ddp_check = None

    # -- autograd -------------------------------------------------------------------------------------------------

    def _first(self, layer: int) -> None:
        """Take a layer whose gradient has come: the first one of a backward pass, or each that is not just noted."""
        if not self._touched and not self._submitted:
            self._leave_last_means(layer)
        self._touched[layer] = self._touched.get(layer, 0) + 1
        if self._suspended:
            self._unexchanged.signs += 1
            return
        if not self._in_backward:
            self._in_backward = True
            self._end.wait()
        last = (self._touched[layer] - 1 if self.arguments.finish == "step" else self._passes) + 1
        if last < self.arguments.backward_passes_per_step:
            return
        self._submit([layer])
        self._arrived.submitted(layer)
        # From here on every layer of this pass is submitted. Each layer has a device event of its own on a GPU.
        by_pass = self.arguments.finish != "step" or self.arguments.backward_passes_per_step == 1
        self._arrived.is_on = by_pass and self._gradients.are_ready and self.driver.phase is Phase.OPEN

    def _bucket_complete(self) -> None:
        """Submit the layers that were only noted; also called when the backward pass ends."""
        if layers := self._arrived.take():
            self._touched |= dict.fromkeys(layers, 1)
            self._submit(layers)

    def _leave_last_means(self, layer: int) -> None:
        """End the last step, because a new window begins although its means were neither stepped on nor zeroed.

        Means that are still in the gradients will be applied with the new ones, so what was sent counts as
        sent.
        """
        if self.driver.means is None:
            return
        kept = [i for i, mean in self._means.items() if self._gradients.parameters[i].grad is mean]
        if kept and layer not in self._means and layer not in self.exchanger.pipeline.ordering.sparse:
            raise self.driver.late(layer)
        if kept:
            self.driver.keep()
            self._windows.kept += 1
            # The means stay part of the sum on every rank, including ranks without a new gradient.
            self._touched.update(dict.fromkeys(kept, 0))
        else:
            self.driver.discard()
        self._means = {}

    def _submit(self, layers: list[int]) -> None:
        if len(set(layers)) < len(layers) or not self._submitted.isdisjoint(layers):
            raise self._second(layers)
        try:
            gradients = self._gradients.own(layers)
        except StateError as error:  # all ranks fail, and this one raises its own error
            self.driver.fail(error)
            raise
        is_sparse = list(map(_IS_SPARSE, gradients))
        if self.exchanger.pipeline.ordering.sparse:
            for layer, sparse in zip(layers, is_sparse, strict=True):
                if not sparse:
                    self.driver.refuse_dense(layer)
        if self.driver.phase is not Phase.OPEN:
            self._open()
        self._submitted.update(layers)
        self._held += gradients
        if any(is_sparse) or not self._gradients.are_ready:
            for layer, gradient in zip(layers, gradients, strict=True):
                self._submit_one(layer, gradient)
            return
        # The engine keeps the memory, which another thread could not free, even if a gradient is given another one.
        keep = list(map(torch.Tensor.untyped_storage, gradients))
        addresses = np.fromiter(map(torch.Tensor.data_ptr, gradients), np.uint64, len(layers))
        self.driver.submit_all(layers, addresses, keep)

    def _submit_one(self, layer: int, gradient: torch.Tensor) -> None:
        """Submit a gradient that may be sparse, or may still be computed on a device."""
        if gradient.is_sparse:
            rows = partial(rows_of, self._gradients.names[layer], gradient.detach())
            self.driver.submit_rows(layer, rows)
            return
        handed = self._gradients.hand_in(layer, gradient)
        address = handed.tensor.data_ptr()
        self.driver.submit(Submission(layer, address, address, handed, handed.event))

    def _second(self, layers: list[int]) -> StateError:
        """Return the error for the first of these layers that has a second gradient."""
        seen = set(self._submitted)
        layer = next(each for each in layers if each in seen or seen.add(each))  # type: ignore[func-returns-value]
        return StateError(
            f"layer {self._gradients.names[layer]!r} has a second gradient in one exchange; declare all passes with "
            "backward_passes_per_step, or accumulate under no_sync(); if several checkpoints of one backward pass "
            "share the layer, give them use_reentrant=False"
        )

    def _open(self) -> None:
        if self.driver.under_way:
            return
        if self._ddp_check is not None:
            self._ddp_check.first_gradient()
        pipeline = self.exchanger.pipeline
        with self.driver.telling():
            pipeline.lay_out()
            momenta = self.momenta.of_step(pipeline)
        self._gradients.open()
        self._held = []
        self._arrived.open(pipeline.layout)
        scale = self._loss_scale.of(pipeline, self.arguments.gradient_predivide_factor)
        # Adafactor with relative steps computes its own rate, which is not known here: it counts as 0.
        rate = self._optimizer.param_groups[0].get("lr")
        self.driver.open(scale, number_of(0.0 if rate is None else rate), momenta)

    def _end_of_backward(self) -> None:
        was_in_backward, self._in_backward = self._in_backward, False
        self._arrived.is_on = False
        if self._suspended or not was_in_backward:  # the callback may be that of a backward pass that failed
            return
        self._bucket_complete()
        self._passes += 1
        given = self.arguments
        if given.finish == "step" or self._passes < given.backward_passes_per_step:
            return
        self._flush()
        if given.finish == "backward":
            _ending.append(self)
            at_end(self._behind_all)

    # -- the end of a window --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start to exchange the gradients that the window has accumulated; :meth:`finish` waits for their means."""
        self.driver.check()
        self._flush()

    def finish(self, *, late: bool = False) -> None:
        """Exchange the gradients that the window has accumulated, and replace them by means. Free if none is new.

        ``late`` is set when ``step()`` calls: the means are applied before the user sees them, while other ranks
        may have seen theirs at the end of their backward pass. Those ranks then note whether they change them.
        """
        if self.has_result():
            return
        self.driver.check()
        late = late and self.arguments.finish == "backward"
        self._flush(late=late)
        means = self._wait()
        self._gradients.take_means()
        parameters = self._gradients.parameters
        for layer, rows in means.rows.items():
            if rows is not None:
                parameters[layer].grad = tensor_of(rows, parameters[layer])
        present = means.result.present.nonzero()[0].tolist()
        self._gradients.restore_sparse(np.flatnonzero(means.result.present & self._sparse).tolist())
        self._means = {i: mean for i in present if (mean := parameters[i].grad) is not None}
        self._held = []
        self._unexchanged.signs += bool(present or means.rows)
        if len(self._means) < len(present):
            error = self._gradients.taken_away(next(i for i in present if i not in self._means))
            self.driver.fail(error)
            raise error
        self._before_edits = ""
        if means.result.notices & LATE and not late:
            self._before_edits = self._gradients.described()

    def _wait(self) -> Means:
        """Wait for the step's means; ranks also tell each other which layers that are new in it are sparse.

        A rank without a gradient of its own would not know, and its optimizer would update it otherwise than
        other ranks' do.
        """
        means = self.driver.wait()
        if self._known is not None and (new := means.result.present & ~self._known).any():
            self._known |= new
            of_ranks = np.zeros(len(new), np.float32)
            of_ranks[list(self._gradients.made_dense)] = 1.0
            self.exchanger.allreduce(of_ranks)
            self._sparse |= new & (of_ranks != 0)
        return means

    def _flush(self, *, late: bool = False) -> None:
        """Submit the rest of the window and tell the driver that no more follows."""
        if self.driver.phase is Phase.FLUSHED:
            return
        self._open()
        self._arrived.is_on = False
        self._bucket_complete()
        rest = sorted(self._touched.keys() - self._submitted)
        rest = [layer for layer in rest if self._gradients.parameters[layer].grad is not None]
        if rest:
            self._submit(rest)
        self.driver.flush(late=late)

    def has_result(self) -> bool:
        """Return True if an exchange waits for ``step()`` and no gradient has accumulated since."""
        return self.driver.means is not None and not self._touched

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise StateError where the optimizer's ``step()`` is refused, see :class:`UnexchangedSteps`."""
        refuse_inside_backward()
        if self.driver.means is None and not self._touched:
            self.before_step(optimizer)

    def commit(self) -> bool:
        """Accept the means, which will be applied; return False if the ranks agreed to skip the step."""
        edited = bool(self._before_edits) and self._gradients.described() != self._before_edits
        self._means, self._before_edits = {}, ""
        self._windows.stepped(
            self.arguments.backward_passes_per_step, speaks=self.exchanger.pipeline.transport.rank == 0
        )
        return self.driver.commit(edited=edited)

    def stand_in(self) -> None:
        """Take part in one exchange without a gradient; this rank's gradients and parameters do not change."""
        self.in_join = True
        try:
            self._open()
            self.driver.flush()
            means = self._wait()
            self._gradients.made = {}  # the means of layers that only other ranks had
            self.driver.commit()
            if not means.result.finite:  # the others may step or not, and no state has changed
                self.driver.amend(0)
        finally:
            self.in_join = False

    def drain(self) -> None:
        """End an open step without applying it, because gradients are about to be zeroed."""
        driver = self.driver
        if not driver.attached or driver.error is not None:
            return
        # A backward pass that raised made no callback at its end.
        self._in_backward = self._arrived.is_on = False
        if self in _ending:
            _ending.remove(self)
        if driver.under_way:
            self.finish()
        if driver.means is not None:
            driver.discard()
        self._means, self._touched, self._passes, self._windows.kept = {}, {}, 0, 0

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Accumulate gradients without exchanging them, within a ``with`` block."""
        previous, self._suspended = self._suspended, True
        if self.driver.attached:
            self._arrived.is_on = False
        try:
            yield
        finally:
            self._suspended = previous

    # -- gradcomp.torch.optimizers.Listener -----------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise StateError inside a backward pass, and on gradients that were not exchanged."""
        self._unexchanged.check(optimizer, self._watch.held_by(optimizer))

    # -- gradcomp.exchange.driver.Adapter -----------------------------------------------------------------------------

    def allocate(self, layer: int) -> int:
        """Allocate memory for the mean of a layer that only other ranks had (on the engine's thread)."""
        return self._gradients.allocate(layer, apart=self.in_join)

    def means_complete(self) -> None:
        self._gradients.give_back()
        self._touched, self._submitted, self._passes = {}, set(), 0
        self._end_ddp_check()
        if self.driver.agrees:  # a rank that gives up its step only votes later, so scalers are compared here
            self._loss_scale.agree(self.exchanger)

    def finalise(self) -> bool:
        """Refuse a step with values that are not finite; return False if gradients wait for a step."""
        means = self.driver.means
        if means is not None and not self._touched and not means.result.finite:
            self._means = {}
            self.driver.refuse()
        return not self._touched
