"""``finish="forward"``: a parameter is updated when its mean is there, at the latest where forward uses it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from gradcomp.core.errors import ConfigError, GradcompError
from gradcomp.exchange.driver import Phase, StepDriver
from gradcomp.exchange.means_listener import MeansListener
from gradcomp.exchange.priorities import LAST_MEASURED
from gradcomp.kernels.devices import Device
from gradcomp.torch.awaited import COMPILED, refused, restore, wait_for_use
from gradcomp.torch.hooks import GradientExchange
from gradcomp.torch.layers import Named
from gradcomp.torch.loss_scale import LossScale
from gradcomp.torch.modules import before_backward

_SCALER = "a loss scaler looks at the means of all layers before step()"
#: Optimizers that update every parameter by itself, from its gradient, its state and its group's settings.
_BY_PARAMETER = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop")


def refuse(arguments: Any, optimizer: torch.optim.Optimizer, named: Named, device: Device) -> None:
    """Raise ConfigError where ``finish="forward"`` could not give what ``finish="backward"`` gives."""
    kind = type(optimizer).__bases__[1] if hasattr(optimizer, "_gradcomp") else type(optimizer)
    why = ""
    if kind not in [getattr(torch.optim, name) for name in _BY_PARAMETER]:
        why = f"{kind.__name__} is not known to update every parameter by itself, as {', '.join(_BY_PARAMETER)} do"
    elif any(group.get("differentiable") for group in optimizer.param_groups):
        why = "differentiable=True records the updates in a graph"
    elif arguments.loss_scale.scaler is not None:
        why = _SCALER
    elif arguments.on_skip == "agree":
        why = 'on_skip="agree" votes in step(), when all means are there'
    elif arguments.sensitivity is not None:
        why = "losses for a controller are measured in step(), with all updates made"
    elif arguments.sparse_as_dense:
        why = "means of sparse gradients are made sparse when all are there"
    elif device.is_late or any(parameter.device.type != "cpu" for _, parameter in named):
        why = "it was made for gradients on the CPU, and these are on a device"
    elif shared := _overlapping(named):
        why = (
            f"parameters {shared[0]!r} and {shared[1]!r} share memory, so that one is used through the other"
        )
    if why:
        raise refused(why)


def _overlapping(named: Named) -> tuple[str, str] | None:
    """Return the names of two parameters of which one begins inside the other's memory."""
    ranges = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in named if p.numel())
    for (_, end, one), (begin, _, other) in pairwise(ranges):
        if begin < end:
            return one, other
    return None


class ForwardExchange(GradientExchange):
    """A :class:`GradientExchange` whose accepted steps end where the next forward pass uses the parameters.

    ``step()`` calls :meth:`defer`: the parameters whose means have landed are stepped on, the others are *awaited*.
    :meth:`use` applies one layer's update, :meth:`complete` all that are left, and the step is committed. That happens
    before the next backward pass, before anything reads or replaces state, and at the end of the job. No rank calls a
    collective there, so ranks may do it at different times.
    """

    def __init__(self, named: Named, frozen: Named, arguments: Any, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(named, frozen, arguments, optimizer)
        self.listener: MeansListener = MeansListener()
        self._loss_scale = LossScale(False)
        self._lock = threading.RLock()
        # Layer -> gradient, and its version then. What is stepped on leaves it, so that its memory can be used again.
        self._handed_in: dict[int, tuple[torch.Tensor, int]] = {}
        #: True between ``step()`` and the end of its step.
        self.is_deferred = False
        #: True if ``zero_grad()`` was called since ``step()``.
        self.zeroed = False
        self._pending: dict[int, torch.Tensor] = {}  # layer -> the gradient that becomes its mean
        self._absent: set[int] = set()  # layers that this rank has handed in nothing of
        self._stale: dict[int, torch.Tensor] = {}  # the gradients that these have all the same
        self._groups: list[dict[str, Any]] = []  # settings of the optimizer's groups as of step()
        self._group_of: dict[int, int] = {}  # id of a parameter -> its group
        self._steps = 0
        self._order: list[int] = []
        self._uses: list[int] = []  # layers in the order of their use since the last step()
        self._mine: dict[int, torch.nn.Parameter] = {}  # awaited parameters by layer

    def uses(self) -> Sequence[int]:
        """Return the layers in the order in which the last forward pass used them."""
        return self._order

    def attach(self, driver: StepDriver, before: GradientExchange | None = None) -> None:
        super().attach(driver, before)
        if driver.attached:
            driver.before_end = lambda: None  # there is no scale to agree on
            driver.exchanger.before_end = self._end_of_job
            before_backward.add(self)

    def detach(self) -> None:
        before_backward.discard(self)
        self._disarm(list(self._mine))
        super().detach()

    def _end_of_job(self) -> None:
        with suppress(GradcompError):  # the exchanger has it, and so has the end of the job
            self.complete()

    # -- before step() --------------------------------------------------------------------------------------------

    def _open(self) -> None:
        was_open = self.driver.under_way
        super()._open()
        if not was_open:
            self._handed_in = {}
            self.listener.open(self.exchanger.pipeline.layout)

    def _submit(self, layers: list[int]) -> None:
        super()._submit(layers)
        for layer, gradient in zip(layers, self._held[-len(layers) :], strict=True):
            self._handed_in[layer] = gradient, gradient._version

    def _submit_one(self, layer: int, gradient: torch.Tensor) -> None:
        if gradient.is_sparse:
            raise self._failed(f"layer {self._gradients.names[layer]!r} has a sparse gradient")
        super()._submit_one(layer, gradient)

    def before_backward(self) -> None:
        """End the last step: gradients are about to be added to. An exchange that has failed raises when it is used."""
        if self.driver.error is not None:
            return
        if self.is_deferred:
            self.complete()
        elif self.driver.attached and self.driver.phase is Phase.FLUSHED:
            super().finish()

    def finish(self, *, late: bool = False) -> None:
        if self.is_deferred:
            self.complete()
        else:
            super().finish(late=late)

    def drain(self) -> None:
        if self.driver.error is None:
            self.complete()
        super().drain()

    def finalise(self) -> bool:
        self.complete()
        return super().finalise()

    def refuse_scaler(self) -> ConfigError:
        """Return the error for a loss scaler that looks at this optimizer's gradients."""
        return self._failed(_SCALER)

    def _failed(self, why: str) -> ConfigError:
        """Return the error, after telling the other ranks."""
        error = refused(why)
        if self.driver.attached:
            self.driver.fail(error)
        return error

    # -- step() ---------------------------------------------------------------------------------------------------

    def defer(self) -> list[dict[str, Any]] | None:
        """Accept the step, await its means, and return the groups of what can be stepped on now.

        Return None if the step is to be taken as a whole: all means are there already, as after ``synchronize()``, or
        it is the first step, in which optimizers make their state, or all means are recorded.
        """
        # An optimizer's constructor imports it anyway, which takes two seconds.
        from torch._dynamo.utils import counters

        self.driver.check()
        self._steps += 1
        if self.driver.means is not None:
            return None
        self._flush()
        parameters, handed_in = self._gradients.parameters, self._handed_in
        self._check_untouched(handed_in)
        if replaced := [i for i, (gradient, _) in handed_in.items() if parameters[i].grad is not gradient]:
            raise self._changed(replaced[0])
        if counters["frames"]["total"]:
            raise self._failed(COMPILED)
        if self._steps == 1 or self.exchanger.recorder is not None:
            return None
        self.exchanger.pipeline.outlast_digests()
        self.momenta.withhold(self._optimizer)
        groups = self._optimizer.param_groups
        self._groups = [{key: _copied(v) for key, v in group.items() if key != "params"} for group in groups]
        self._group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        now = set(filter(self.listener.landed, handed_in))
        self._pending = {layer: given[0] for layer, given in handed_in.items() if layer not in now}
        self._absent = set(range(len(parameters))) - handed_in.keys()
        self._stale = {i: gradient for i in self._absent if (gradient := parameters[i].grad) is not None}
        self._held = []
        self._unexchanged.signs += 1
        self.is_deferred, self.zeroed, self._uses = True, False, []
        later = [layer for layer in range(len(parameters)) if layer not in now]
        self._arm(later)
        left_out = {id(parameters[layer]) for layer in later}
        return [{**g, "params": [p for p in g["params"] if id(p) not in left_out]} for g in groups]

    def deferred(self) -> None:
        """End ``step()``, after the optimizer's own."""
        stepped_on = self._handed_in.keys() - self._pending.keys()
        if self.is_deferred:
            self._check_untouched(stepped_on)
        for layer in stepped_on:
            del self._handed_in[layer]
        if self._steps <= LAST_MEASURED + 1:
            self._arm(range(len(self._gradients.parameters)))  # to see in which order they are used

    def _check_untouched(self, layers: Collection[int]) -> None:
        """Raise ConfigError if a gradient was changed since it was handed in, as by a clip of the global norm."""
        for layer in layers:
            gradient, version = self._handed_in[layer]
            if gradient._version != version:
                raise self._changed(layer)

    def _changed(self, layer: int) -> ConfigError:
        return self._failed(
            f"the gradient of layer {self._gradients.names[layer]!r} was changed after backward(), for instance by "
            "clip_grad_norm_(), when it was not the mean yet; call synchronize() before such a change"
        )

    # -- after step() ---------------------------------------------------------------------------------------------

    def _arm(self, layers: Iterable[int]) -> None:
        for layer in layers:
            parameter: Any = self._gradients.parameters[layer]
            if layer not in self._mine:
                wait_for_use(parameter, self, layer)
                self._mine[layer] = parameter

    def _disarm(self, layers: Iterable[int]) -> None:
        for layer in layers:
            if (parameter := self._mine.pop(layer, None)) is not None:
                restore(parameter)

    def use(self, layer: int) -> None:
        """Apply the update of a layer that is about to be used, as soon as its mean is there."""
        with self._lock:
            if not torch.is_grad_enabled():
                self.complete()  # in an evaluation modules may look at the classes of all their parameters
            if layer not in self._mine:
                return
            self._disarm([layer])
            self._uses.append(layer)
            if layer not in self._pending:
                if self.is_deferred and layer in self._absent:
                    self.complete()  # only the end of the step shows whether another rank has a gradient of it
                return
            if not self.listener.landed(layer):
                try:
                    with self.exchanger.waited_for():
                        self.listener.wait([layer])
                except GradcompError:
                    self._forget()
                    raise
            self._apply([layer])

    def complete(self) -> None:
        """Wait for all means that are still awaited, apply them, and commit the step. Free if there is none."""
        with self._lock:
            self._disarm(list(self._mine))
            self._order, self._uses = self._uses or self._order, []
            if not self.is_deferred:
                return
            self.exchanger.pipeline.statistics.exposed_seconds += self.listener.waited_seconds
            try:
                means = self._wait()
            except GradcompError:
                self._forget()
                raise
            made = list(self._gradients.made)
            self._gradients.take_means()
            parameters = self._gradients.parameters
            self._stale |= {layer: mean for layer in made if (mean := parameters[layer].grad) is not None}
            self._pending |= self._stale
            super().commit()
            zeroed = self.zeroed or any(
                parameters[layer].grad is None for layer in np.flatnonzero(means.result.present)
            )
            self._apply(list(self._pending))
            for layer in made if zeroed else ():
                parameters[layer].grad = None
            self._forget()

    def _forget(self) -> None:
        """End the step without the updates that are left, if any: after a failure parameters are between two steps."""
        self._disarm(list(self._mine))
        self._pending, self._stale, self._handed_in, self._absent = {}, {}, {}, set()
        self._groups, self.is_deferred = [], False

    def _apply(self, layers: list[int]) -> None:
        """Step on the means of these layers, with the settings as of ``step()``, and leave gradients as they are."""
        parameters = self._gradients.parameters
        self._disarm(layers)
        groups = [{**group, "params": []} for group in self._groups]
        before: list[torch.Tensor | None] = []
        for layer in layers:
            parameter, gradient = parameters[layer], self._pending[layer]
            if layer in self._handed_in and gradient._version != self._handed_in.pop(layer)[1]:
                self._forget()
                raise self._changed(layer)
            before.append(parameter.grad)
            parameter.grad = gradient
            groups[self._group_of[id(parameter)]]["params"].append(parameter)
        for layer in layers:
            del self._pending[layer]
        # It shares the state of the user's optimizer, whose groups and hooks it leaves alone.
        kind: Any = type(self._optimizer).__bases__[1]
        stepping = kind.__new__(kind)
        stepping.__dict__.update(self._optimizer.__dict__, param_groups=[g for g in groups if g["params"]])
        try:
            with torch.inference_mode(False):
                getattr(kind.step, "__wrapped__", kind.step)(stepping)
        finally:
            for layer, kept in zip(layers, before, strict=True):
                parameters[layer].grad = kept


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
