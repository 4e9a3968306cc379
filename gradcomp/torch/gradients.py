"""Gradients of parameters, in memory that can be exchanged without a copy."""

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
    """The ``.grad`` of parameters, by layer number; :meth:`attach` must be called first.

    With ``sparse_as_dense`` sparse gradients travel as dense ones, see :meth:`restore_sparse`.
    """

    def __init__(self, named: Named, *, sparse_as_dense: bool) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._forms = [Form.of(parameter) for parameter in self.parameters]
        self._sparse_as_dense = sparse_as_dense
        #: Layers of which this rank has had a sparse gradient that travelled as a dense one.
        self.made_dense: set[int] = set()
        self._staging = untouched()
        self._handed: dict[int, Handed] = {}
        self._made: dict[int, Handed] = {}  # memory for means of layers without a gradient on this rank

    def attach(self, device: Device) -> None:
        """Choose how gradients reach the engine, whose kernels run on ``device``."""
        self._staging = staging_for(device, self.parameters[0].device)

    def open(self) -> None:
        self._staging.open()
        self._handed = {}

    def own(self, layer: int) -> torch.Tensor:
        """Return the layer's gradient, made dense in memory unless it travels as rows.

        Raises StateError if its shape, dtype or device differs from the parameter's at wrapping.
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
        """Return the memory on which the engine works in place of this gradient."""
        handed = self._handed[layer] = self._staging.hand_in(gradient)
        return handed

    def allocate(self, layer: int, *, apart: bool = False) -> int:
        """Allocate memory for the mean of a layer that only other ranks had (on the engine's thread).

        With ``apart`` it is never the gradient's own memory.
        """
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
        """End the step: the gradients that were submitted hold their means now."""
        handed, self._handed = self._handed, {}
        self._staging.give_back(handed.values())

    def take_means(self) -> None:
        """Set the gradients of layers that only other ranks had to their means."""
        made, self._made = self._made, {}
        for layer, mean in made.items():
            self.parameters[layer].grad = self._staging.finished(mean, self._forms[layer])

    def restore_sparse(self, layers: Iterable[int]) -> None:
        """Make the means of these layers sparse, because SparseAdam takes no dense gradients."""
        for layer in layers:
            mean = self.parameters[layer].grad
            assert mean is not None, "a layer that is present on some rank has a mean"
            self.parameters[layer].grad = mean.to_sparse(1)

    def forget_means(self) -> None:
        """Drop the means of layers that only other ranks had."""
        self._made = {}

    def described(self) -> str:
        """Return a text that changes with the gradients, except where every norm and sum stays the same."""
        gradients = [parameter.grad for parameter in self.parameters]
        return repr([(float(g.norm()), float(g.sum())) for g in gradients if g is not None])

    def taken_away(self, layer: int) -> StateError:
        """Return the error for a gradient that became None before its exchange ended."""
        return StateError(
            f"the gradient of layer {self.names[layer]!r} was set to None inside backward(), perhaps by a "
            "register_post_accumulate_grad_hook() that updates the parameter there. Until backward() returns, a "
            "gradient is this rank's alone and its mean is being exchanged: remove the hook, and call step() after "
            "backward()"
        )

    def _became_another(self, layer: int, tensor: torch.Tensor) -> StateError:
        kind = "" if has_memory(tensor) else f"a {type(tensor).__name__}, "
        return StateError(
            f"layer {self.names[layer]!r} was {self._forms[layer]} when the optimizer was wrapped; its gradient is "
            f"{kind}{form_of(tensor)}, {tensor.layout}, on {tensor.device} now: wrap the optimizer when the model has "
            "its final dtype, shapes and device, and let hooks keep dtype, shape and device of gradients"
        )
