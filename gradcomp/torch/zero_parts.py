"""The parts of parameters that a rank owns under ZeRO-1, and which optimizers can step on parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.torch.layers import Named, spec


@dataclass(eq=False)
class Part:
    """This rank's part of one parameter: its elements from ``begin`` to ``end``, in memory order.

    ``by_difference``: what the replica lacks of the master is what travels. ``version`` is that of the parameter's
    values as the exchange left them. ``mean`` is the mean gradient, and memory for the difference after it.
    """

    name: str
    parameter: torch.Tensor
    layer: LayerSpec
    begin: int
    end: int
    master: torch.nn.Parameter
    by_difference: bool
    version: int = -1
    mean: torch.Tensor | None = None

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @property
    def replica(self) -> torch.Tensor:
        """Return a view of the parameter's own values."""
        return flat(self.parameter)[self.begin : self.end]

    @property
    def dtype_gathered(self) -> torch.dtype:
        return torch.float32 if self.by_difference else self.dtype

    @cached_property
    def gathered(self) -> LayerSpec:
        """Return the layer of the all-gather: differences are float32 whatever the parameter is."""
        return replace(self.layer, dtype="float32") if self.by_difference else self.layer

    def adopt(self) -> None:
        """Make the parameter's values the master's."""
        with torch.no_grad():
            self.master.copy_(self.replica)
        self.version = self.parameter._version

    def gradient(self) -> torch.Tensor | None:
        """Return the gradient of the whole parameter as a vector, in the parameter's memory order."""
        gradient = self.parameter.grad
        if gradient is None:
            return None
        if gradient.is_sparse:
            raise ConfigError(
                f"parameter {self.name!r} has a sparse gradient: ZeroOptimizer takes dense ones"
            )
        if gradient.stride() != self.parameter.stride():
            gradient = torch.empty_like(self.parameter).copy_(gradient)
        return flat(gradient)

    def memory_for_mean(self, gradient: torch.Tensor | None) -> torch.Tensor:
        """Return memory for the mean: this rank's part of its gradient, where that is float32."""
        if gradient is None or self.dtype != torch.float32 or not self.size:
            return torch.empty(self.size, dtype=self.dtype)
        # This tensor has a version of its own, so that changes of the mean do not count as changes of the gradient.
        return torch.from_numpy(gradient.numpy())[self.begin : self.end]

    def take(self, mean: torch.Tensor, *, present: bool) -> None:
        """Make the mean the master's gradient; if it is not ``present``, no rank had a gradient."""
        self.mean = mean.float()
        self.master.grad = self.mean if present else None

    def to_send(self) -> torch.Tensor:
        """Return the difference, which overwrites the mean, or else the master as the replicas round it."""
        if not self.by_difference:
            return self.master.detach().to(self.dtype)
        return torch.sub(self.master.detach(), self.replica, out=self.mean)

    def clear(self) -> None:
        """Free the gradients, of which this rank's part was overwritten."""
        self.mean = self.master.grad = self.parameter.grad = None


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a dense tensor as a vector, in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def layer_of(name: str, parameter: torch.Tensor) -> LayerSpec:
    """Return the layer of a parameter; ConfigError for one that cannot be cut into parts."""
    found = spec(name, parameter)
    if parameter.device.type != "cpu":
        raise ConfigError(
            f"parameter {name!r} is on {parameter.device}: ZeroOptimizer takes those in host memory"
        )
    strides = [(size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)]
    if found.size and (sum(strides) + 1 != found.size or 0 in parameter.stride()):
        raise ConfigError(
            f"parameter {name!r} has gaps in its memory, or values that share it: use contiguous()"
        )
    return found


def named_in(groups: Iterable[Mapping[str, Any]]) -> Named:
    """Return all parameters with the names that the user gave, or their positions."""
    named: Named = []
    for number, group in enumerate(groups):
        by_position = [f"group{number}.param{i}" for i in range(len(group["params"]))]
        named += zip(group.get("param_names", by_position), group["params"], strict=True)
    return named


def check_elementwise(
    kind: type[torch.optim.Optimizer], settings: Mapping[str, Any], defaults: Any
) -> set[str]:
    """Return the names of state that is one number, whatever the size of a parameter.

    Two steps on a matrix must be those on its parts. Raises ConfigError for an optimizer that needs whole matrices, the
    norms of layers, or a closure.
    """
    start, *gradients = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    ends, numbers = [], set()
    for size in (24, 7):

        def cut(matrix: torch.Tensor, size: int = size) -> list[torch.Tensor]:
            return [matrix.clone()] if size == 24 else list(torch.split(matrix.clone().flatten(), size))

        params = cut(start)
        try:
            optimizer = kind([{**settings, "params": params}], **defaults)
            optimizer.param_groups[0]["lr"] = 0.1
            for gradient in gradients:
                for param, own in zip(params, cut(gradient), strict=True):
                    param.grad = own
                optimizer.step()
        except Exception as error:
            raise ConfigError(f"{kind.__name__} cannot step on parts of parameters: {error}") from error
        ends.append(torch.cat([param.flatten() for param in params]))
        state = optimizer.state[params[0]].items()
        numbers |= {key for key, value in state if isinstance(value, torch.Tensor) and not value.dim()}
    if not torch.allclose(ends[0], ends[1], rtol=1e-3, atol=1e-5):
        raise ConfigError(
            f"{kind.__name__} steps otherwise on parts of a parameter than on the whole, as optimizers do that need "
            "matrices or norms of layers. ZeroOptimizer takes elementwise ones, such as SGD, Adam and AdamW"
        )
    return numbers
