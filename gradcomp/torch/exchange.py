"""Between autograd and the engine: hooks, windows of accumulation, and when a step begins and ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import torch
from torch.autograd import Variable

from gradcomp.core.errors import ConfigError, StateError
from gradcomp.engine import Exchanger
from gradcomp.pipeline import Number, StepResult
from gradcomp.reduce.header import DISCARDED, KEPT
from gradcomp.torch.ddp_check import DdpCheck
from gradcomp.torch.loss_scale import LossScale
from gradcomp.torch.sparse import mean_of_rows
from gradcomp.torch.staging import Handed, staging_for, untouched
from gradcomp.torch.tensors import Form, has_memory
from gradcomp.torch.tensors import form as form_of

logger = logging.getLogger("gradcomp")

Finish = Literal["backward", "step"]
OnSkip = Literal["raise", "agree"]


@dataclass(frozen=True)
class Timing:
    """When gradients are exchanged.

    ``passes``: backward passes per exchange. ``finish="backward"``: when the last of them returns, gradients are means;
    ``"step"``: when ``synchronize()`` or ``step()`` returns, for several backward passes over disjoint parameters.
    ``on_skip``: what follows when a rank does not step on means that others step on: an error on all ranks, or all ask
    each other before they step.
    """

    passes: int = 1
    finish: Finish = "backward"
    on_skip: OnSkip = "raise"

    def __post_init__(self) -> None:
        if not isinstance(self.passes, int) or self.passes < 1:
            raise ConfigError(
                f"backward_passes_per_step must be a whole number of at least 1, got {self.passes!r}"
            )
        if self.finish not in ("backward", "step"):
            raise ConfigError(f'finish must be "backward" or "step", got {self.finish!r}')
        if self.on_skip not in ("raise", "agree"):
            raise ConfigError(f'on_skip must be "raise" or "agree", got {self.on_skip!r}')


#: Exchanges at the end of their window, in the backward pass that is about to return.
_ending: list[GradientExchange] = []
_numbers = count()


def _finish_together() -> None:
    """Wait for the exchanges that end with this backward pass, on all ranks in the same order.

    All are flushed by then: ranks whose first gradients came in different orders do not wait for each other.
    """
    ending = sorted(_ending, key=lambda exchange: exchange.number)
    _ending.clear()
    for exchange in ending:
        exchange.finish()


class GradientExchange:
    """Hooks on parameters that feed an exchanger.

    A *window* is the accumulation between two exchanges. A layer is present if one of the window's backward passes
    touched it. At the end of the window the engine is flushed and waited for; then every ``.grad`` that some rank
    touched is the mean.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        timing: Timing,
        *,
        sparse_as_dense: bool,
        divisor: float,
        predivide: float,
        loss_scale: LossScale,
        rate: Callable[[], Number],
    ) -> None:
        self.number = next(_numbers)
        self.parameters = list(parameters)
        self.names = list(names)
        self._forms = [Form.of(parameter) for parameter in parameters]
        self.timing = timing
        self._loss_scale = loss_scale
        self._ddp_check: DdpCheck | None = None
        self._rate = rate
        self._exchanger: Exchanger | None = None
        self._sparse_as_dense = sparse_as_dense
        self._divisor = divisor
        self._predivide = predivide
        self._touched: dict[int, int] = {}  # layer -> backward passes in this window
        self._submitted: set[int] = set()
        self._passes = 0
        self._in_backward = False
        self._suspended = False
        self._result: StepResult | None = None  # exchanged, neither committed nor discarded
        self._means: dict[int, torch.Tensor] = {}  # gradients as the last exchange left them
        self._staging = untouched()
        self._handed: dict[int, Handed] = {}
        self._room: dict[int, Handed] = {}  # for means of layers that this rank did not have
        self._sparse_rows: dict[int, torch.Tensor] = {}
        self._hooks: list[Any] = []

    @property
    def exchanger(self) -> Exchanger:
        """The exchanger; set once by :meth:`attach`."""
        assert self._exchanger is not None, "attach() comes first"
        return self._exchanger

    @property
    def attached(self) -> bool:
        """Whether there is an exchanger: not in a world of one."""
        return self._exchanger is not None

    def attach(self, exchanger: Exchanger) -> None:
        """Start listening to autograd."""
        self._exchanger = exchanger
        self._staging = staging_for(exchanger.pipeline.device, self.parameters[0].device)
        self._ddp_check = DdpCheck(self.parameters)
        for layer, parameter in enumerate(self.parameters):
            hook = parameter.register_post_accumulate_grad_hook(self._hook(layer))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def detach(self) -> None:
        """Stop listening."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._end_ddp_check()

    def _end_ddp_check(self) -> None:
        if self._ddp_check is not None:
            self._ddp_check.end()
            self._ddp_check = None

    def allocate(self, layer: int) -> int:
        """Room for the mean of a layer that only other ranks had (engine's thread)."""
        parameter, form = self.parameters[layer], self._forms[layer]
        gradient = parameter.grad
        if gradient is not None and (gradient.is_sparse or gradient.stride() != form.strides):
            gradient = None
        if not (form.fits(parameter) and (gradient is None or form.fits(gradient))):
            raise self._became_another(layer, parameter)
        room = self._staging.room(form, None if gradient is None else gradient.detach())
        self._room[layer] = room
        return room.address

    # -- autograd -----------------------------------------------------------------------------------------------

    def _hook(self, layer: int) -> Any:
        def fire(_: torch.Tensor) -> None:
            self._arrived(layer)

        return fire

    def _arrived(self, layer: int) -> None:
        if not self._touched and not self._submitted:
            self._leave_last_result(layer)
        self._touched[layer] = self._touched.get(layer, 0) + 1
        if self._suspended:
            return
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._end_of_backward)
        last = (self._passes if self.timing.finish == "backward" else self._touched[layer] - 1) + 1
        if last >= self.timing.passes:
            self._submit(layer)

    def _leave_last_result(self, layer: int) -> None:
        """A new window begins although the last result was neither stepped on nor zeroed.

        If its means are still in the gradients, they will be applied: what was sent counts as sent.
        """
        if self._result is None:
            return
        kept = [i for i, mean in self._means.items() if self.parameters[i].grad is mean]
        if kept and layer not in self._means and layer not in self.exchanger.pipeline.sparse:
            raise StateError(
                f"layer {self.names[layer]!r} has a gradient after its step closed; with several backward passes over "
                'different parameters use finish="step"'
            )
        if self._agrees:
            self.exchanger.vote(False)
        if kept:
            self.exchanger.commit(KEPT)
            # The means stay part of the sum on every rank, on those without a new gradient too.
            self._touched.update(dict.fromkeys(kept, 0))
        else:
            self.exchanger.discard()
        self.forget()

    def _submit(self, layer: int) -> None:
        if layer in self._submitted:
            raise StateError(
                f"layer {self.names[layer]!r} has a second gradient in one exchange; declare all passes with "
                "backward_passes_per_step, or accumulate under no_sync()"
            )
        gradient = self._gradient(layer)  # a rank whose own is wrong says so, whatever the others have met
        self._open()
        self._submitted.add(layer)
        if gradient is None:
            self.exchanger.submit_absent(layer, sparse=True)
        else:
            handed = self._handed[layer] = self._staging.hand_in(gradient)
            self.exchanger.submit(layer, handed.address, handed.address, handed, handed.event)

    def _gradient(self, layer: int) -> torch.Tensor | None:
        """The layer's gradient in a form whose memory can be exchanged as it lies; None if it stays sparse."""
        parameter = self.parameters[layer]
        gradient = parameter.grad
        assert gradient is not None, "a hook fires after its gradient was accumulated"
        form = self._forms[layer]
        if not form.fits(gradient):
            error = self._became_another(layer, gradient)
            self.exchanger.abort(f"rank {self.exchanger.pipeline.transport.rank}: StateError: {error}")
            raise error
        if gradient.is_sparse:
            if not self._sparse_as_dense:
                self._sparse_rows[layer] = gradient
                return None
            gradient = gradient.to_dense()
        elif layer in self.exchanger.pipeline.sparse:
            raise StateError(
                f"layer {self.names[layer]!r} had sparse gradients before and has a dense one now"
            )
        if gradient.stride() != form.strides:
            gradient = form.dense(gradient)
        if gradient is not parameter.grad:
            parameter.grad = gradient
        return gradient.detach()

    def _became_another(self, layer: int, tensor: torch.Tensor) -> StateError:
        kind = "" if has_memory(tensor) else f"a {type(tensor).__name__}, "
        return StateError(
            f"layer {self.names[layer]!r} was {self._forms[layer]} when the optimizer was wrapped; its gradient is "
            f"{kind}{form_of(tensor)}, {tensor.layout}, on {tensor.device} now: wrap the optimizer when the model has "
            "its final dtype, shapes and device, and let hooks keep the form of gradients"
        )

    def _open(self) -> None:
        if self.exchanger.is_open:
            return
        if self._ddp_check is not None:
            self._ddp_check.first_gradient()
        self._staging.open()
        self._handed = {}
        self.exchanger.open(self._loss_scale.of(self.exchanger.pipeline, self._predivide), self._rate())

    def _end_of_backward(self) -> None:
        self._in_backward = False
        if self._suspended:
            return
        self._passes += 1
        if self.timing.finish == "backward" and self._passes >= self.timing.passes:
            self._flush()
            _ending.append(self)
            Variable._execution_engine.queue_callback(_finish_together)

    # -- the end of a window ------------------------------------------------------------------------------------

    def finish(self) -> StepResult:
        """Exchange what the window has accumulated; afterwards gradients are means. Free if there is nothing new."""
        if self._result is not None and not self._touched and not self.exchanger.is_open:
            return self._result
        self._flush()
        result = self.exchanger.wait()
        handed, self._handed = self._handed, {}
        room, self._room = self._room, {}
        self._staging.give_back(handed.values())
        self._touched, self._submitted, self._passes = {}, set(), 0
        self._end_ddp_check()
        self._loss_scale.agree(self.exchanger)
        mixed = (result.present & result.sparse).nonzero()[0].tolist()
        if mixed:
            raise StateError(
                f"layer {self.names[mixed[0]]!r} has a sparse gradient on one rank and a dense one on another"
            )
        for layer, mean in room.items():
            self.parameters[layer].grad = self._staging.settled(mean, self._forms[layer])
        self._exchange_sparse()
        self._means = {
            layer: gradient
            for layer in result.present.nonzero()[0].tolist()
            if (gradient := self.parameters[layer].grad) is not None
        }
        self._result = result
        self.exchanger.owes_vote = self._agrees
        return result

    def serve(self) -> bool:
        """Exchange a step of those who train, with nothing to add; False if they are done for now."""
        if not self.exchanger.listen():
            return False
        self.finish()
        return True

    def _flush(self) -> None:
        """Submit what is left of the window; nothing more will come."""
        self._open()
        for layer in sorted(self._touched.keys() - self._submitted):
            if self.parameters[layer].grad is not None:
                self._submit(layer)
        self.exchanger.flush()

    def _exchange_sparse(self) -> None:
        """Layers that some rank has sparse gradients of, now or earlier: all ranks know them."""
        pipeline = self.exchanger.pipeline
        for layer in sorted(pipeline.sparse):
            parameter = self.parameters[layer]
            mean = mean_of_rows(
                self.exchanger,
                self.names[layer],
                parameter,
                self._sparse_rows.pop(layer, None),
                self._divisor,
            )
            if mean is not None:
                parameter.grad = mean

    def has_result(self) -> bool:
        """Whether an exchange waits for ``step()``, with no gradient accumulated since."""
        return self._result is not None and not self._touched

    @property
    def _agrees(self) -> bool:
        return self.timing.on_skip == "agree"

    def commit(self) -> bool:
        """The means will be applied: residuals take their new values. False if the ranks agreed to skip the step."""
        applied = not self._agrees or self.exchanger.vote(True)
        if applied:
            self.exchanger.commit()
        else:
            self.exchanger.discard()
            self.exchanger.pipeline.statistics.skipped_steps += 1
        self.forget()
        return applied

    def refuse(self) -> None:
        """End an exchange that cannot be accepted, for a value was not finite."""
        if self._agrees:
            self.exchanger.vote(False)  # one vote per exchange: the others cast theirs, too
        self.exchanger.commit(DISCARDED)
        self.forget()

    def drain(self) -> None:
        """Gradients are about to be zeroed: end what is under way, and let it not count."""
        if self._exchanger is None or self._exchanger.error is not None:
            return
        self._in_backward = False  # a backward that raised never came to its end
        if self in _ending:
            _ending.remove(self)
        if self.exchanger.is_open:
            self.finish()
        if self._result is not None:
            if self._agrees:
                self.exchanger.vote(False)
            self.exchanger.discard()
        self.forget()
        self._touched, self._passes = {}, 0

    def forget(self) -> None:
        """The last result has been dealt with."""
        self._result = None
        self._means = {}

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Accumulate without exchanging."""
        previous, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = previous
