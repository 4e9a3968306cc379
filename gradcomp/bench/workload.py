"""The work of the measured steps: the user's own model and loss, or work of a given length for given layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.estimate.models import call, layers_in, layers_of
from gradcomp.estimate.predict import work_of

_ELEMENTS = 1 << 14  # of the vectors that are added to pass the time: they fit into the cache


@dataclass(frozen=True)
class Workload:
    """A module, and the function that computes its loss."""

    module: nn.Module
    loss: Callable[[nn.Module], Tensor]
    layers: Sequence[LayerSpec]


def make_workload(model: str, backward: float | None, step: float | None, device: torch.device) -> Workload:
    """Returns the workload that ``--model`` names.

    A function that returns a tuple (module, inputs ...) is trained as it is: the loss is what ``module`` returns
    for the inputs, its ``.loss`` or its mean. Anything else gives shapes only, and needs the ``backward`` seconds.

    Raises ConfigError if they are missing, or if the output has no loss.
    """
    module_name, colon, function = model.partition(":")
    made = call(module_name, function) if colon else None
    if isinstance(made, tuple) and len(made) > 1 and isinstance(made[0], nn.Module):
        return _real(model, made[0].to(device), made[1:], device)
    if backward is None:
        raise ConfigError(
            f"{model} gives shapes only: add --backward-ms, or let package:function return (module, *inputs)"
        )
    layers = layers_in(model, made) if colon else layers_of(model)
    forward = 0.5 * backward if step is None else max(step - backward, 0.0)
    return _synthetic(layers, forward, backward, device)


def _real(model: str, module: nn.Module, inputs: Sequence[Any], device: torch.device) -> Workload:
    placed = [value.to(device) if isinstance(value, Tensor) else value for value in inputs]

    def loss(wrapped: nn.Module) -> Tensor:
        output = wrapped(*placed)
        found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if not isinstance(found, Tensor):
            raise ConfigError(
                f"{model}: module(*inputs) must return a tensor or have a loss, got {type(output).__name__}"
            )
        return found.float().mean()

    return Workload(module, loss, layers_in(model, module))


class _Layers(nn.Module):
    """Layers of given shapes; the loss passes through them in order, and each takes its share of backward."""

    def __init__(
        self, layers: Sequence[LayerSpec], forward: float, backward: float, device: torch.device
    ) -> None:
        super().__init__()
        self.values = nn.ParameterList(
            nn.Parameter(torch.zeros(layer.shape, dtype=getattr(torch, layer.dtype), device=device))
            for layer in layers
        )
        self.forward_seconds, self.shares = forward, (backward * work_of(layers)).tolist()
        self.noise = torch.randn(max(layer.size for layer in layers), device=device)

    def forward(self) -> Tensor:
        _pass(self.forward_seconds, self.noise.device)
        loss = torch.zeros((), requires_grad=True, device=self.noise.device)
        for value, seconds in zip(self.values, self.shares, strict=True):
            loss = _Late.apply(loss, value, seconds, self.noise)  # type: ignore[no-untyped-call]
        return loss


class _Late(torch.autograd.Function):
    """Passes the loss on; backward computes for some seconds, then gives the parameter a gradient of noise."""

    @staticmethod
    def forward(context: Any, loss: Tensor, value: Tensor, seconds: float, noise: Tensor) -> Tensor:
        context.given = value, seconds, noise
        return loss.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        value, seconds, noise = context.given
        _pass(seconds, noise.device)
        return gradients[0], noise[: value.numel()].to(value.dtype, copy=True).view_as(value), None, None


def _pass(seconds: float, device: torch.device) -> None:
    """Computes for so many seconds of this thread's processor, or of the GPU."""
    if device.type == "cuda":
        matrix = torch.ones(2048, 2048, device=device)
        for _ in range(max(round(seconds / _seconds_of_product(device)), 1) if seconds else 0):
            torch.mm(matrix, matrix)
        return
    vector, until = np.zeros(_ELEMENTS, dtype=np.float32), time.thread_time() + seconds
    while time.thread_time() < until:
        np.add(vector, vector, out=vector)


_products: dict[torch.device, float] = {}


def _seconds_of_product(device: torch.device) -> float:
    """Returns the seconds that this GPU takes for one product of the matrices of :func:`_pass`."""
    if device not in _products:
        matrix = torch.ones(2048, 2048, device=device)
        for repeats in (5, 20):  # the first time is for the library to start
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            for _ in range(repeats):
                torch.mm(matrix, matrix)
            torch.cuda.synchronize(device)
            _products[device] = (time.perf_counter() - begin) / repeats
    return _products[device]


def _synthetic(
    layers: Sequence[LayerSpec], forward: float, backward: float, device: torch.device
) -> Workload:
    return Workload(_Layers(layers, forward, backward, device), lambda module: module(), layers)
