"""The gradients of parameters, as memory that is exchanged as it lies."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradcomp.core.errors import StateError
from gradcomp.kernels.devices import Device
from gradcomp.torch.layers import Named
from gradcomp.torch.staging import Handed, staging_for, untouched
from gradcomp.torch.tensors import Form, has_memory
from gradcomp.torch.tensors import form as form_of


class Gradients:
    """The ``.grad`` of parameters, by number of their layer; :meth:`attach` comes first.

    ``sparse_as_dense``: sparse gradients travel as dense ones, see :meth:`restore_sparse`.
    """

    def __init__(self, named: Named, *, sparse_as_dense: bool) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._forms = [Form.of(parameter) for parameter in self.parameters]
        self._sparse_as_dense = sparse_as_dense
        #: Layers whose sparse gradients travel as dense ones: those that this rank has had.
        self.made_dense: set[int] = set()
        self._staging = untouched()
        self._handed: dict[int, Handed] = {}
        self._made: dict[int, Handed] = {}  # for means of layers that this rank did not have

    def attach(self, device: Device) -> None:
        """``device``: where they are exchanged."""
        self._staging = staging_for(device, self.parameters[0].device)

    def open(self) -> None:
        """A step begins."""
        self._staging.open()
        self._handed = {}

    def own(self, layer: int) -> torch.Tensor:
        """The layer's gradient, in a form whose memory can be exchanged as it lies unless it is sparse.

        StateError if it has another shape, dtype or device than the parameter had.
        """
        parameter, form = self.parameters[layer], self._forms[layer]
        gradient = parameter.grad
        if gradient is None:
            raise self.taken_away(layer)
        if not form.fits(gradient):
            raise self._became_another(layer, gradient)
        if gradient.is_sparse:
            if not self._sparse_as_dense:
                return gradient
            self.made_dense.add(layer)
            gradient = gradient.to_dense()
        if gradient.stride() != form.strides:
            gradient = form.dense(gradient)
        if gradient is not parameter.grad:
            parameter.grad = gradient
        return gradient.detach()

    def hand_in(self, layer: int, gradient: torch.Tensor) -> Handed:
        """What the engine works on."""
        handed = self._handed[layer] = self._staging.hand_in(gradient)
        return handed

    def allocate(self, layer: int, *, apart: bool = False) -> int:
        """Memory for the mean of a layer that only other ranks had (engine's thread); ``apart``: not the gradient's."""
        parameter, form = self.parameters[layer], self._forms[layer]
        gradient = parameter.grad
        if gradient is not None and (apart or gradient.is_sparse or gradient.stride() != form.strides):
            gradient = None
        if not (form.fits(parameter) and (gradient is None or form.fits(gradient))):
            raise self._became_another(layer, parameter)
        made = self._staging.allocate(form, None if gradient is None else gradient.detach())
        self._made[layer] = made
        return made.address

    def give_back(self) -> None:
        """The step is done: what was handed in holds means now."""
        handed, self._handed = self._handed, {}
        self._staging.give_back(handed.values())

    def take_means(self) -> None:
        """The means of layers that this rank did not have become their gradients."""
        made, self._made = self._made, {}
        for layer, mean in made.items():
            self.parameters[layer].grad = self._staging.finished(mean, self._forms[layer])

    def restore_sparse(self, layers: Iterable[int]) -> None:
        """The means of layers whose gradients travelled as dense ones are sparse again: SparseAdam takes no others."""
        for layer in layers:
            mean = self.parameters[layer].grad
            assert mean is not None, "what some rank has had has a mean"
            self.parameters[layer].grad = mean.to_sparse(1)

    def forget_means(self) -> None:
        """The means of layers that this rank did not have are of no use."""
        self._made = {}

    def described(self) -> str:
        """What gradients hold, so that any change shows but one that keeps every norm and sum."""
        gradients = [parameter.grad for parameter in self.parameters]
        return repr([(float(g.norm()), float(g.sum())) for g in gradients if g is not None])

    def taken_away(self, layer: int) -> StateError:
        """For a gradient that came, and is None before its exchange has ended."""
        return StateError(
            f"the gradient of layer {self.names[layer]!r} was set to None inside backward(), as by a hook by "
            "register_post_accumulate_grad_hook() that updates the parameter there: it is this rank's alone then, and "
            "its mean is exchanged until backward() returns. Take the hook away, and call step() behind backward()"
        )

    def _became_another(self, layer: int, tensor: torch.Tensor) -> StateError:
        kind = "" if has_memory(tensor) else f"a {type(tensor).__name__}, "
        return StateError(
            f"layer {self.names[layer]!r} was {self._forms[layer]} when the optimizer was wrapped; its gradient is "
            f"{kind}{form_of(tensor)}, {tensor.layout}, on {tensor.device} now: wrap the optimizer when the model has "
            "its final dtype, shapes and device, and let hooks keep the form of gradients"
        )
